"""Valid files with contents that no honest writer would produce are rejected with one line."""

import json
import os
import struct
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from drafthead.errors import UserError
from drafthead.files.local import MAX_HEADER, read_json, safe_join, write_json
from drafthead.models.heads.mlp_speculator import MLPSpeculatorConfig
from drafthead.models.heads.parts.head_folder import read_weights
from drafthead.models.heads.parts.loading import load_base, load_head
from drafthead.models.token_tree import TokenTree
from support import TINY, TinyBase, cases, fuzz, random_base, refuses, small_head

VALUES = (
    st.none() | st.integers() | st.text(max_size=8) | st.dictionaries(st.text(max_size=5), st.integers(), max_size=3)
)


@pytest.fixture
def head(tiny_base: TinyBase, tmp_path: Path) -> Path:
    return small_head(tiny_base(), tmp_path / "head", TokenTree.chain(2))


@given(
    header=st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
    length=st.integers(-3, 3),
    body=st.binary(max_size=40),
)
@example(header={"t": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}, length=0, body=b"")
@example(header={"t": {"dtype": "F32", "shape": [2, -1], "data_offsets": [0, 8]}}, length=0, body=b"\x00" * 8)
@example(header={"t": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, length=0, body=b"\x00" * 8)
@example(header={"t": {"dtype": "I64", "shape": [], "data_offsets": [0, 4]}}, length=0, body=b"\x00" * 8)
@fuzz(100)
def test_safetensors_headers(tmp_path: Path, header: dict[str, Any], length: int, body: bytes) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", max(0, len(text) + length)) + text + body)
    try:
        assert all(isinstance(tensor, torch.Tensor) for tensor in read_weights(tmp_path).values())
    except UserError as error:
        assert "model.safetensors" in str(error) and "\n" not in str(error)


# One at a time -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/etc/passwd", "a/../../x", "", "a\0b"])
def test_names_that_lead_out_of_a_folder(tmp_path: Path, name: str) -> None:
    refuses("names the file", safe_join, tmp_path, name)


def test_links_that_lead_out_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").symlink_to("b")
    assert safe_join(folder, "a") == folder / "a"
    (folder / "out").symlink_to("../secret")
    (folder / "up").symlink_to("..")
    for name in ("out", "up/secret"):
        refuses("link to .*secret", safe_join, folder, name)
    (folder / "circle").symlink_to("circle")
    refuses("circle", safe_join, folder, "circle")
    refuses("too long", safe_join, folder, "9" * 1000)


def test_a_pipe_is_not_a_file(tmp_path: Path) -> None:
    """Reading a pipe would block forever."""
    os.mkfifo(tmp_path / "config.json")
    refuses("pipe", safe_join, tmp_path, "config.json")


def test_the_hubs_cache_links_to_its_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--user--name" / "snapshots" / "0f1e"
    snapshot.mkdir(parents=True)
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    (blobs / "abc").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    assert read_json(safe_join(snapshot, "config.json")) == {}
    shared = tmp_path / "blobs" / "de"
    shared.mkdir(parents=True)
    (shared / "def").write_text("{}")
    (blobs / "ghi").symlink_to("../../blobs/de/def")
    (snapshot / "generation_config.json").symlink_to("../../blobs/ghi")
    assert read_json(safe_join(snapshot, "generation_config.json")) == {}
    for name in ("models--user--other/blobs/abc", "secret"):
        (snapshot / "tree.json").unlink(missing_ok=True)
        (snapshot / "tree.json").symlink_to(f"../../../{name}")
        refuses("outside its folder", safe_join, snapshot, "tree.json")


@cases(
    "change, says",
    ({"head_type": "os.system"}, "head_type.*'os.system'"),
    ({"format": 99}, "format 99"),
    ({"settings": {"wings": 2}}, "wings"),
    ({"settings": {"num_draft_tokens": 10**9}}, "bad settings|its settings name"),
    ({"settings": [3]}, "settings of type list"),
    ({"base": "smollm2"}, "base of type str"),
    ({"draft_vocab": None}, "model.safetensors.*size mismatch"),
    ({"draft_vocab": 19}, "d2t.*19"),
    ({"weights_sha256": "0" * 64}, "checksum"),
)
def test_a_config_that_asks_too_much(head: Path, tiny_base: TinyBase, change: dict[str, Any], says: str) -> None:
    config = read_json(head / "config.json")
    if isinstance(change.get("settings"), dict):
        change = {"settings": {**config["settings"], **change["settings"]}}
    write_json(head / "config.json", {**config, **change})
    refuses(says, load_head, head, tiny_base())


def test_weights_without_a_tensor(head: Path, tiny_base: TinyBase) -> None:
    weights, config = load_file(head / "model.safetensors"), read_json(head / "config.json")
    del weights["projections.weights.1"], config["weights_sha256"]
    save_file(weights, head / "model.safetensors")
    write_json(head / "config.json", config)
    refuses("missing.*projections.weights.1", load_head, head, tiny_base())


def test_settings_without_limits_are_compared_with_the_weights(tiny_base: TinyBase, tmp_path: Path) -> None:
    MLPSpeculatorConfig(num_draft_tokens=2, inner_dim=8).build(tiny_base()).save_pretrained(tmp_path)
    config = read_json(tmp_path / "config.json")
    config["settings"]["inner_dim"] = 10**9
    write_json(tmp_path / "config.json", config)
    refuses("more than 10,020,504 parameters, the file has 10,252", load_head, tmp_path, tiny_base())


SMALL_LAYERS = dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"), 2)


@cases(
    "change, says",
    ("a text", "base.recipe of type str"),
    ({"shape": {"vocab_size": 10**9}}, "a random base of more than 20,000,000 parameters"),
    ({"shape": {"num_hidden_layers": 10**13}}, "'num_hidden_layers': 10000000000000, but at most 10,000 is read"),
    ({"shape": {"num_hidden_layers": 9999, "head_dim": 2, **SMALL_LAYERS}}, "a random base of more than"),
    (
        {"shape": {"model_type": "gpt_neo", "num_hidden_layers": 4, "attention_types": [[["global"], 10**10]]}},
        "'attention_types': 10000000000",
    ),
    ({"shape": {"pad_token_id": 10**9}}, "bad settings"),
    ({"dtype": "int4"}, "dtype must be one of"),
)
def test_a_random_base_that_asks_too_much(head: Path, change: Any, says: str) -> None:
    """Nothing that a head's config names takes memory before it is counted."""
    config = read_json(head / "config.json")
    recipe = config["base"]["recipe"]
    if isinstance(change, dict):
        change = recipe | change | {"shape": recipe["shape"] | change.get("shape", {})}
    config["base"]["recipe"] = change
    write_json(head / "config.json", config)
    refuses(f"config.json.*{says}.*; copy the head again", load_head, head)


def test_a_base_larger_than_its_file(tmp_path: Path) -> None:
    """transformers would initialise the missing weights at random."""
    base = random_base(TINY, prepack=False)
    base.model.save_pretrained(tmp_path)
    load = partial(load_base, str(tmp_path), tokenizer="builtin:tiny", prepack=False)
    assert load().hidden_size == base.hidden_size
    for change in ({"intermediate_size": 10**9}, {"num_hidden_layers": 9999}, {"num_labels": 10**11}):
        write_json(tmp_path / "config.json", base.model.config.to_dict() | change)
        refuses("describes a far larger model|'num_labels': 100000000000", load)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    write_json(tmp_path / "config.json", base.model.config.to_dict())
    refuses("only has pytorch_model.bin: pickles", load)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.int8])
def test_weights_of_other_dtypes(head: Path, tiny_base: TinyBase, dtype: torch.dtype) -> None:
    path, config = head / "model.safetensors", read_json(head / "config.json")
    save_file({k: v.to(dtype) if v.ndim > 1 else v for k, v in load_file(path).items()}, path)
    write_json(head / "config.json", {k: v for k, v in config.items() if k != "weights_sha256"})
    refuses("quantised", load_head, head, tiny_base())


def test_a_long_header_is_not_parsed(head: Path, tiny_base: TinyBase) -> None:
    path = head / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER + 1))
        file.truncate(2 * MAX_HEADER)
    refuses("model.safetensors has a header of 8 MiB", load_head, head, tiny_base())


@pytest.mark.parametrize("array", [(gguf.GGUFValueType.UINT8, 1 << 60), (gguf.GGUFValueType.STRING, 1 << 60)])
def test_the_header_of_a_gguf_file_ends_with_the_file(tmp_path: Path, array: tuple[int, int]) -> None:
    """gguf reads on behind the end, up to the lengths that the file states."""
    key = b"general.architecture"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    for content in (header[:30], header + struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, *array)):
        (tmp_path / "base.gguf").write_bytes(content)
        refuses("ends within its header", load_base, str(tmp_path), gguf_file="base.gguf")


@cases(
    "content, says",
    ({"paths": []}, r"is not a tree.json \('choices'\)"),
    ({"choices": [[0, 0]]}, "is not a tree.json .*has no parent"),
    ({"choices": [[0] * d for d in range(1, 5)]}, "is 4 deep, but the head drafts 2 positions"),
    ({"choices": [[0], [1 << 20]]}, "is not a tree.json .*whole numbers below 65536"),
    ({"choices": [[0]], "batches": {"9" * 5000: [[0]]}}, "is not a tree.json: batches must map numbers of rows"),
    ({"choices": [[True]]}, "is not a tree.json .*whole numbers"),
    ({"choices": [[n] for n in range(5000)]}, "has 5000 nodes, at most 4096 are allowed; give a smaller tree$"),
    ({"choices": [[0]], "by_cost": True}, "has by_cost=true, which must be false, or true beside costs"),
    ({"choices": [[0]], "by_cost": []}, r"has by_cost=\[\], which must be false"),
)
def test_a_tree_that_asks_too_much(head: Path, tiny_base: TinyBase, content: Any, says: str) -> None:
    write_json(head / "tree.json", content)
    refuses(f"tree.json {says}", load_head, head, tiny_base())
