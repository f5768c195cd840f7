"""Damaged files give a ``UserError`` of one line, or exactly the saved values.

Never another exception, a crash, a hang or other values.
"""

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from drafthead.data.answers.store import Answer, AnswerStore, ProcessGroup
from drafthead.data.embedded.tiny import tiny_tokenizer
from drafthead.data.prompts.prompt import EvalPrompt
from drafthead.data.prompts.prompt_files import read_jsonl
from drafthead.data.states.stored import StoredStates
from drafthead.data.text.documents import Documents
from drafthead.data.text.sources import SourceConfig, iter_documents, iter_prompts
from drafthead.data.text.streaming import WINDOW, StreamedRows
from drafthead.errors import UserError
from drafthead.eval.timing.result_log import ResultLog
from drafthead.eval.trees.finished_answers import read_texts
from drafthead.files.local import (
    read_checksummed_json,
    read_json,
    read_json_lines,
    read_manifest,
    write_checksummed_json,
    write_json,
    write_manifest,
)
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.step import DecodeResult, StepRecord
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.heads.parts.head_folder import read_trees
from drafthead.models.heads.parts.loading import load_head
from drafthead.models.token_tree import TokenTree
from drafthead.train.config import RunConfig
from drafthead.train.corpora.answers import AnswerGenerator
from drafthead.train.corpora.corpus_config import AnswersConfig
from drafthead.train.original_base import OriginalBase
from drafthead.train.run_folder import SETTINGS, check_settings, training_settings
from drafthead.train.tracking.tracker import wandb_run_id
from drafthead.train.trainer.checkpoint import load_latest
from support import TINY, Said, cases, composed, fuzz, join_threads, random_base, small_head, tiny_checkpoint

SHAPE = TINY | {"hidden_size": 16, "num_hidden_layers": 1}
MADE_BY = {"base": {"name": "tiny", "fingerprint": "0f"}, "rows": [1, 2.5, None]}


@cache
def base() -> BaseModel:
    return random_base(SHAPE, prepack=False)


def tensors(values: dict[str, torch.Tensor]) -> dict[str, tuple[str, bytes]]:
    raw = {k: v.reshape(-1).view(torch.uint8).numpy().tobytes() for k, v in values.items()}
    return {k: (f"{v.dtype}{list(v.shape)}", raw[k]) for k, v in values.items()}


# Readers -------------------------------------------------------------------------------------------------------


def read_checkpoint(folder: Path) -> Any:
    checkpoint = load_latest(folder)
    states = (checkpoint.head, checkpoint.optimizer, *checkpoint.rng)
    return *map(tensors, states), checkpoint.state, checkpoint.manifests


def read_head(folder: Path) -> Any:
    return tensors(load_head(folder, base()).state_dict())


def make_store(folder: Path) -> None:
    store, draw = AnswerStore(folder, MADE_BY), np.random.default_rng(0)
    for numbers in ((0, 1), (2,)):
        rows = [(n, draw.integers(0, 50, 5).astype(np.int32), draw.normal(size=(4, 3))) for n in numbers]
        store.append_shard([Answer(n, ids, 2, True, values.astype(np.float16)) for n, ids, values in rows])


def read_store(folder: Path) -> Any:
    store = AnswerStore(folder, MADE_BY)
    if store.done != {0, 1, 2}:  # a missing shard is not damage: its prompts are answered again
        raise UserError("prompts to be answered again")
    answers = [(g.prompt_number, g.input_ids.tolist(), g.boundary, g.finished, g.hidden_states) for g in store.read()]
    stats = store.stats(), store.token_counts(60).tolist()
    return [(*facts, None if f is None else f.tobytes()) for *facts, f in answers], stats


def open_states(folder: Path) -> StoredStates:
    return StoredStates(folder, np.array([3, 4]), 5, "float16", MADE_BY)


def read_states(folder: Path) -> Any:
    states = open_states(folder)
    if states.missing([0, 1]):
        raise UserError("documents to be filled again")
    return tensors({str(number): values for number, values in enumerate(states.read([0, 1]))})


def read_documents(folder: Path) -> Any:
    return [ids.tolist() for ids in Documents.open(folder)]


def make_adapter(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(BaseModel.load(base().config).model, config).save_pretrained(str(folder))
    (folder / "README.md").unlink()


def read_adapter(folder: Path) -> Any:
    return BaseModel.load(replace(base().config, adapter=str(folder))).fingerprint


def read_base(folder: Path) -> Any:
    config = BaseConfig(name=str(folder), tokenizer="builtin:tiny", dtype="float32", prepack=False)
    return BaseModel.load(config).vocab_size


def make_published(folder: Path) -> None:
    from safetensors.torch import save_file

    for number in (1, 2):
        save_file({f"t{number}": torch.arange(4.0)}, folder / f"part{number}.safetensors")
    write_json(folder / "config.json", {"model_type": "mlp_speculator", "n_predict": 2})
    index = {"weight_map": {"t1": "part1.safetensors", "t2": "part2.safetensors"}}
    write_json(folder / "model.safetensors.index.json", index)


def read_stream(folder: Path) -> Any:
    texts = [SourceConfig(kind="builtin", name="stdlib_tiny")]
    stream = StreamedRows(texts, tiny_tokenizer(), 32, seed=0, shards=1, micro_batch_size=1, folder=folder, workers=1)
    batch = stream.batch([2 * WINDOW])
    del stream
    join_threads("rows")  # they write positions
    return tensors({k: v for k, v in vars(batch).items() if v is not None})


def read_prompts(folder: Path) -> Any:
    config = AnswersConfig(sources=[SourceConfig(kind="builtin", name="tiny")], prompts=5, max_prompt_tokens=400)
    return AnswerGenerator(OriginalBase.of(base()), config, 0, folder, ProcessGroup(), Said()).prompts.conversations


@cache
def run_config() -> RunConfig:
    return composed(Path("run"), "recipe=medusa_smollm2")[0]


def make_run(folder: Path) -> None:
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    write_json(folder / SETTINGS, training_settings(run_config()))


def make_tracked(folder: Path) -> None:
    wandb_run_id(folder)
    (folder / "metrics.jsonl").touch()


def read_run_id(folder: Path) -> Any:
    if not ((folder / "wandb-run-id").exists() and (folder / "metrics.jsonl").exists()):
        raise UserError("a new run begins")
    return wandb_run_id(folder)


def written(name: str, content: str | bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


PROMPTS = """{"prompt": "Why?", "task": "a"}
{"messages": [{"role": "user", "content": "\\u00e9"}]}
{"turns": ["one", "two"]}
{"input_ids": [1, 2, 3]}
"""
STEP = dict.fromkeys(("position", "proposed", "depth", "accepted", "committed"), 1)
SECONDS = dict.fromkeys(("draft_s", "verify_s", "total_s"), 0.1)
ROWS = '{"text": "one two"}\n{"text": "three"}\n'


def make_log(folder: Path) -> None:
    for tokens in ([1], [2]):
        decoded = DecodeResult(tokens=tokens, steps=[StepRecord(**STEP, **SECONDS)], prefill_s=0.1, total_s=0.2)
        ResultLog(folder / "log").add("k", "d", EvalPrompt("chat", 3, []), decoded)


def read_log(folder: Path) -> Any:
    """Return the last line's result. A missing or cut line is not damage: its prompt is answered again."""
    log = ResultLog(folder / "log")
    if ("k", "d") not in log or log["k", "d"].tokens == [1]:
        raise UserError("a prompt to be answered again")
    return repr(log["k", "d"])


def source(kind: str, name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        config = SourceConfig(kind=kind, name=str(folder / name))
        content = list(iter_documents(config)), list(iter_prompts(config))
        json.dumps(content, ensure_ascii=False).encode()  # a tokenizer encodes first, too
        return content

    return read


READERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "checkpoint": (tiny_checkpoint, read_checkpoint),
    "head": (lambda folder: small_head(base(), folder, TokenTree.chain(2)), read_head),
    "answers": (make_store, read_store),
    "hidden states": (
        lambda folder: open_states(folder).write([0, 1], [torch.rand(3, 5), torch.rand(4, 5)]),
        read_states,
    ),
    "tokenised text": (lambda folder: Documents.of(np.split(np.arange(9), [4])).save(folder), read_documents),
    "checksummed json": (
        lambda folder: write_checksummed_json(folder / "calibration.json", MADE_BY),
        lambda folder: read_checksummed_json(folder / "calibration.json"),
    ),
    "evaluation log": (make_log, read_log),
    "stream positions": (read_stream, read_stream),
    "prompts": (read_prompts, read_prompts),
    "training settings": (make_run, lambda folder: check_settings(folder / SETTINGS, run_config())),
    "wandb run": (make_tracked, read_run_id),
    "manifest": (lambda folder: write_manifest(folder, MADE_BY), read_manifest),
    "tree": (
        written(
            "tree.json",
            '{"choices": [[0], [0, 0], [1]], "confidence_threshold": 0.25, "costs": {"costs": {"1": {"verify": '
            '{"1": 0.5}, "draft": 0.1, "overhead": 0.1, "context": 9}}, "acceptance": {"bias": [[-1]]}}, '
            '"by_cost": true}',
        ),
        lambda folder: read_trees(folder, PromptLookup(3)),
    ),
    "adapter": (make_adapter, read_adapter),
    "base": (lambda folder: base().model.save_pretrained(folder), read_base),
    "published head": (make_published, lambda folder: PublishedCheckpoint.read(folder, "model.safetensors")),
    "metrics": (written("m.jsonl", '{"a": 1}\n{"a": 2}\n'), lambda folder: read_json_lines(folder / "m.jsonl")),
    "suite": (written("s.jsonl", PROMPTS), lambda folder: read_jsonl(folder / "s.jsonl")),
    "texts": (written("t.jsonl", '{"ids": [1, 2, 3], "boundary": 1}\n'), lambda folder: read_texts(folder / "t.jsonl")),
    "jsonl source": (written("a.jsonl", ROWS), source("jsonl", "a.jsonl")),
    "gzip source": (written("a.jsonl.gz", gzip.compress(ROWS.encode())), source("jsonl", "a.jsonl.gz")),
    "text source": (written("a.txt", "one\ntwo é\n"), source("text", "a.txt")),
}  # kind of file: how to write it, and how to read it
# Checksums detect all damage of these; others are edited by people.
EXACT = list(READERS)[: list(READERS).index("manifest")]


# Damage ---------------------------------------------------------------------------------------------------------


Change = tuple[int, str, int, bytes]  # file, kind, offset and content


def damage(folder: Path, file: int, kind: str, offset: int, content: bytes) -> None:
    """Change one of the files in ``folder``; numbers are taken modulo the number of files and bytes."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink() and p.name != ".lock")
    if not files:
        return
    path = files[file % len(files)]
    old = path.read_bytes()
    at = offset % (len(old) + 1)
    start, rest = old[:at], old[at:]
    if kind == "remove":
        path.unlink()
    elif kind == "link out":
        path.rename(folder.parent / "elsewhere")
        path.symlink_to(folder.parent / "elsewhere")
    else:
        changed = {
            "flip": start + bytes(b ^ 1 << (offset % 8) for b in rest[:1]) + rest[1:],
            "cut": start,
            "insert": start + content + rest,
            "overwrite": start + content + rest[len(content) :],
            "delete": start + rest[len(content) :],
            "replace": content,
            "double": old + old,
        }
        path.write_bytes(changed[kind])


NASTY = (b"9" * 5000, b"[" * 100_000, b'"\\ud800"', b"\x00" * 8, b"-1", b"1e999", b"NaN", b"null", b"true", b'"', b"{}")
KINDS = ["flip", "flip", "overwrite", "insert", "delete", "cut", "replace", "remove", "double", "link out"]
damages = st.tuples(
    st.integers(0, 20),
    st.sampled_from(KINDS),
    st.integers(0, 1 << 20),
    st.binary(min_size=1, max_size=40) | st.sampled_from(NASTY),
)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def put(content: Any, path: list[int], value: Any) -> Any:
    """Return ``content`` with the value at ``path`` replaced; indices are taken modulo the lengths."""
    if not path or not isinstance(content, dict | list) or not content:
        return value
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    key = keys[path[0] % len(keys)]
    changed = dict(content) if isinstance(content, dict) else list(content)
    changed[key] = put(content[key], path[1:], value)
    return changed


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    @cache
    def make(name: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("intact") / "folder"
        folder.mkdir()
        write, read = READERS[name]
        write(folder)
        return folder, read(folder)

    return make


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


def check(name: str, made: Any, scratch: Path, change: Any, read: Any, exact: bool) -> None:
    intact, expected = made(name)
    shutil.rmtree(scratch)
    folder = scratch / "folder"
    shutil.copytree(intact, folder, symlinks=True)
    change(folder)
    try:
        value = read(folder)
    except UserError as error:
        assert str(error).strip() and "\n" not in str(error), error
        assert len(str(error)) < 3000, "a line for people"
        return
    assert not exact or value == expected, "other values than were saved"


def apply(changes: list[Change]) -> Callable[[Path], None]:
    return lambda folder: [damage(folder, *change) for change in changes]  # type: ignore[return-value]


@pytest.mark.parametrize("name", READERS)
@example(changes=[])
@given(changes=st.lists(damages, min_size=1, max_size=2))
@fuzz(4)
def test_damage(name: str, made: Any, scratch: Path, changes: list[Change]) -> None:
    check(name, made, scratch, apply(changes), READERS[name][1], exact=name in EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
@given(changes=st.lists(damages, min_size=1, max_size=3))
@fuzz(1500)
def test_much_damage(name: str, made: Any, scratch: Path, changes: list[Change]) -> None:
    check(name, made, scratch, apply(changes), READERS[name][1], exact=name in EXACT)


@cases(
    "name, file, read",
    ("checkpoint", "step-*/state.json", load_latest),
    ("head", "config.json", read_head),
    ("head", "tree.json", read_head),
)
@given(path=st.lists(st.integers(0, 30), min_size=1, max_size=6), value=values)
@fuzz(60)
def test_bad_values(name: str, file: str, read: Any, made: Any, scratch: Path, path: list[int], value: Any) -> None:
    """Check the content although the checksum is right: who can write a file can write its checksum."""

    def change(folder: Path) -> None:
        (target,) = folder.glob(file)
        if name == "checkpoint":
            write_checksummed_json(target, put(read_checksummed_json(target), path, value))
        else:
            write_json(target, put(read_json(target), path, value))

    check(name, made, scratch, change, read, exact=name == "head")
