"""Hidden states that speculators wrote train a head as the base's own do, and every planted fault is named."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.data.batch import HiddenStatesSpec, TrainBatch
from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.train.corpora.corpora import Corpora
from drafthead.train.corpora.corpus_config import DataConfig, OfflineConfig
from drafthead.train.original_base import OriginalBase
from drafthead.train.pipeline import run_pipeline
from drafthead.train.preflight import preflight
from support import Said, TinyBase, composed, random_ids, refuses

ROWS, LAYERS = 24, [1, 3]  # of a base of three layers
PROMPT, LONGEST = 5, 17  # tokens
SPEC = HiddenStatesSpec(layers=(1,))


def stored_layers(base: BaseModel, ids: list[int], layers: Sequence[int]) -> Tensor:
    """Return the outputs [T, n, D] of layers, of which the last one is before the final norm."""
    states = base.hidden_states(TrainBatch.of([ids]), HiddenStatesSpec(layers=tuple(layers))).layers
    assert states is not None
    return torch.stack(states[0].chunk(len(layers), -1), 1)


def greedy_texts(base: BaseModel) -> list[list[int]]:
    """Return texts that the base finds likely: each continues a prompt of its own by its likeliest tokens."""
    texts = [random_ids(PROMPT, seed=number) for number in range(ROWS)]
    for _ in range(LONGEST - PROMPT):
        final = base.hidden_states(TrainBatch.of(texts), HiddenStatesSpec()).final[0].unflatten(0, (ROWS, -1))[:, -1]
        for ids, token in zip(texts, base.lm_head.logits(final).argmax(-1).tolist(), strict=True):
            ids.append(token)
    return [ids[: LONGEST - number % 5] for number, ids in enumerate(texts)]


def write(folder: Path, base: BaseModel, dtype: torch.dtype = torch.float32, layers: Sequence[int] = LAYERS) -> Path:
    """Write texts and states as speculators 0.9.0 does: two trained spans per text, and float8 with scales."""
    texts = greedy_texts(base)
    masks = [[0] * PROMPT + [1] * 2 + [0] + [1] * (len(ids) - PROMPT - 3) for ids in texts]
    columns = {"input_ids": texts, "loss_mask": masks, "seq_len": [*map(len, texts)]}
    Dataset.from_dict(columns).save_to_disk(folder)
    (folder / "hidden_states").mkdir()
    for number, ids in enumerate(texts):
        values = {"token_ids": torch.tensor(ids)}
        states = stored_layers(base, ids, layers)
        if dtype == torch.float8_e4m3fn:
            scales = (states.abs().amax((1, 2), keepdim=True) / torch.finfo(dtype).max).clamp(min=1e-12)
            values |= {"hidden_states_scales": scales}
            states = states / scales
        save_file(values | {"hidden_states": states.to(dtype)}, file_of(folder, number))
    return folder


def file_of(folder: Path, number: int) -> Path:
    return folder / "hidden_states" / f"hs_{number}.safetensors"


def corpora(base: BaseModel, folder: Path, offline: Path, lines: list[str] | None = None, **settings: Any) -> Corpora:
    config = OfflineConfig(folder=str(offline), **{"layers": LAYERS, **settings})
    original = OriginalBase(lambda: base.parts(), lambda sharded: pytest.fail("the base was loaded"))
    return Corpora(original, DataConfig(folder=str(folder), offline=config), 0, Said(lines), longest=64)


def states_of(made: Corpora, spec: HiddenStatesSpec = SPEC) -> tuple[Any, list[Tensor]]:
    """Return the documents to train on, and their states."""
    rows = made.answer_rows(64, held_out=False)
    numbers = sorted(rows.documents_of(range(len(rows))))
    source = made.states("answers", rows.documents, spec)
    source.prepare(numbers)
    return [rows.documents[number] for number in numbers], source.read(numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_states_are_those_of_the_base(tiny_base: TinyBase, tmp_path: Path, dtype: torch.dtype) -> None:
    base, lines = tiny_base(), list[str]()
    made = corpora(base, tmp_path, write(tmp_path / "given", base, dtype), lines)
    spec = HiddenStatesSpec(layers=(0, 1))  # layer 0 is not in the files
    documents, states = states_of(made, spec)
    near = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float8_e4m3fn: 0.2}[dtype]
    assert len(documents) == ROWS - 1, "one in twenty is held out"
    for ids, actual in zip(documents, states, strict=True):
        own = base.hidden_states(TrainBatch.of([ids.tolist()]), spec)
        expected = torch.cat([own.final, own.layers], -1)[0]
        assert actual.dtype == (dtype if dtype.itemsize > 1 else torch.bfloat16)
        assert float((actual.float() - expected).norm() / expected.norm()) < near
    assert "% of the transcripts' tokens" in lines[0] and "layer 1 of the given states is the base's" in lines[1]


def test_the_loss_mask_chooses_the_trained_tokens(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    rows = corpora(base, tmp_path, write(tmp_path / "given", base)).answer_rows(64, held_out=False)
    batch = rows.batch(range(len(rows)))
    per_text = np.array([len(ids) - PROMPT - 1 for number, ids in enumerate(greedy_texts(base)) if number != 19])
    assert int(batch.loss_mask.sum()) == per_text.sum()


def at(place: tuple[int, ...] | int, value: float) -> Callable[[Tensor, list[int]], Tensor]:
    def change(states: Tensor, ids: list[int]) -> Tensor:
        states = states.clone()
        states[place] = value
        return states

    return change


FAULTS: dict[str, tuple[Callable[[Tensor, list[int]], Tensor], str]] = {
    "a layer less": (lambda states, ids: states[:, 1:], r"shape \[\d+, 1, 32\], expected \[\d+, 2, 32\]"),
    "another width": (lambda states, ids: states[:, :, 1:], r"shape \[\d+, 2, 31\], expected"),
    "a token less": (lambda states, ids: states[1:], r"shape \[\d+, 2, 32\], expected"),
    "not finite": (at((3, 0, 0), torch.nan), "hs_0.* has states that are not finite"),
    "zeros": (at((2, 1), 0.0), "only zeros at token 2 of layer number 1"),
    "a layer twice": (lambda states, ids: states[:, [1, 1]], "equal states in the layers number 0 and 1"),
    "after the norm": (lambda states, ids: states * torch.tensor([1, -1])[:, None], "of another base or layer"),
    "integers": (lambda states, ids: states.to(torch.int8), "states in I8 without hidden_states_scales"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_named(tiny_base: TinyBase, tmp_path: Path, fault: str) -> None:
    base, (change, message) = tiny_base(), FAULTS[fault]
    folder = write(tmp_path / "given", base)
    for number in range(ROWS):
        content = load_file(file_of(folder, number))
        content["hidden_states"] = change(content["hidden_states"], content["token_ids"].tolist()).contiguous()
        save_file(content, file_of(folder, number))
    refuses(message, states_of, corpora(base, tmp_path, folder))


def test_states_that_change_after_the_first_run_are_compared_again(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    folder = write(tmp_path / "given", base)
    corpora(base, tmp_path, folder).answers()
    for number, ids in enumerate(greedy_texts(base)):
        states = {"token_ids": torch.tensor(ids), "hidden_states": -stored_layers(base, ids, LAYERS)}
        save_file(states, file_of(folder, number))
    refuses("of another base or layer", states_of, corpora(base, tmp_path, folder))


@pytest.mark.slow
def test_layers_off_by_one_and_another_base_are_noticed(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    folder = write(tmp_path / "given", base)
    for number, ids in enumerate(greedy_texts(base)):
        save_file(
            {"token_ids": torch.tensor(ids), "hidden_states": stored_layers(base, ids, [0, 3])}, file_of(folder, number)
        )
    refuses("layer 1 in .* is not the base's .* error is", states_of, corpora(base, tmp_path, folder))
    for number, ids in enumerate(greedy_texts(base)):
        states = {"token_ids": torch.tensor(ids), "hidden_states": stored_layers(base, ids, [2, 3])}
        states["hidden_states"][:, 0] = stored_layers(base, ids, [1])[:, 0]
        states["hidden_states"][:, 1] *= 1.1  # keeps the likeliest token
        save_file(states, file_of(folder, number))
    refuses("layer 3 in .* is not the base's after layer 1", states_of, corpora(base, tmp_path, folder))
    refuses("of another base or layer", states_of, corpora(tiny_base(seed=1), tmp_path / "other", folder))


def test_damaged_and_missing_files(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    folder = write(tmp_path / "given", base)
    whole = file_of(folder, 7).read_bytes()
    file_of(folder, 7).write_bytes(whole[:-40])
    refuses("hs_7.* is not readable", states_of, corpora(base, tmp_path, folder))
    save_file({**load_file(file_of(folder, 2)), "token_ids": torch.arange(LONGEST - 2)}, file_of(folder, 7))
    refuses("hs_7.* has states of", states_of, corpora(base, tmp_path, folder))
    file_of(folder, 7).unlink()
    refuses("1 of 24 rows have no states, such as .*hs_7", states_of, corpora(base, tmp_path / "2", folder))
    lines = list[str]()
    documents, _ = states_of(corpora(base, tmp_path / "3", folder, lines, missing="skip"))
    assert len(documents) == ROWS - 2 and "1 of 24 rows without states are left out" in lines[0]


def test_layers_that_the_folder_lacks(tiny_base: TinyBase, tmp_path: Path) -> None:
    base = tiny_base()
    folder = write(tmp_path / "given", base)
    two = HiddenStatesSpec(layers=(1, 2))
    made = corpora(base, tmp_path, folder, layers=[0, 3])
    message = r"reads the layers \[1, 2\], but .* has \[0, 3\]; set head.layers to some of these, or write layer 1"
    rows = corpora(base, tmp_path, folder).answer_rows(64, held_out=False)
    refuses(message, made.states, "answers", rows.documents, two)
    refuses("must end with the base's last layer, 3", states_of, corpora(base, tmp_path, folder, layers=[0, 1]))
    refuses("ascending", OfflineConfig, layers=[2, 1])


@pytest.mark.slow
def test_a_run_needs_only_the_folder(tmp_path: Path) -> None:
    """The folder trains a head and measures it on held-out texts; a folder of something else is refused."""
    settings = ["debug=tiny", "recipe=eagle3_smollm2", "~phases.pretrain", "phases.distill.store_hidden_states=false"]
    settings += ["stages=[corpora,train]", "head.layers=[1]", "data.offline.layers=[1,4]"]
    folder = write(tmp_path / "given", BaseModel.load(composed(tmp_path, *settings)[0].base), layers=(1, 4))
    run_pipeline(*composed(tmp_path, *settings, f"data.offline.folder={folder}"))
    assert (tmp_path / "run" / "head" / "config.json").exists()
    refuses("no state.json", preflight, composed(tmp_path, *settings, f"data.offline.folder={tmp_path}")[0])
    with pytest.raises(UserError, match="unset with data.transcripts"):
        composed(tmp_path, *settings, f"data.offline.folder={folder}", "data.transcripts=chats.jsonl")
