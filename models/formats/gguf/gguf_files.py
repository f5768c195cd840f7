"""GGUF files for llama.cpp, written and read with PyPI's ``gguf``: code for all kinds of heads, and for the base.

A GGUF file is a header of typed keys, which begin with the architecture's name, then the tensors. A base is written as
llama.cpp's own converter writes it, for Llama-like targets with a byte-level BPE tokenizer.
"""

import json
import logging
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafthead.errors import UserError
from drafthead.files.local import require_space
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.gguf_config import checked_reader, llama3_factors
from drafthead.models.base.parts import BaseParts
from drafthead.models.formats.checkpoint import PublishedCheckpoint, from_offsets, to_offsets
from drafthead.models.formats.format import BASE_NAME, Fixed, Format, Unsupported, published_name
from drafthead.models.formats.llama_layer import layer_config
from drafthead.models.heads.parts.attention_layer import head_rope
from drafthead.models.heads.parts.draft_head import DraftHead

FILE, BASE_FILE = "head.gguf", "base.gguf"
KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
"""Types of weights that can be written. No Python library quantises to Q4_K."""
DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen3": "qwen3"}
"""Model types that ``write_base`` supports -> llama.cpp's architectures."""
RECORDED = ("llama", "mistral", "qwen3", "qwen3_moe", "gpt_oss")
"""Model types of bases for which llama.cpp keeps the inputs of layers, which heads read; with others it aborts."""
DRAFTERS = {"gguf": "eagle3", "gguf_dspark": "dflash"}  # formats of heads -> llama.cpp's architectures
OTHER_KEYS = ("tokenizer.", "drafthead.")  # beginnings of keys without the architecture's name
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
"""Keys of a file without the architecture's name -> keys of a Llama config."""
WINDOW = {"attention.sliding_window": "sliding_window"}
NO_WINDOW = Fixed(None, "its layers have a sliding window, which drafthead does not write as GGUF")
SCALED = "rope_freqs.weight"  # tensor of a scaled rotary embedding
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
"""Modules of a layer: transformers' names -> llama.cpp's."""
CONVERTER = "python convert_hf_to_gguf.py FOLDER --outfile base.gguf (llama.cpp's own)"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {_CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe", _CONTRACTIONS + r"\p{N}" + _REST: "qwen2"}
"""Regular expressions that split text into words before BPE -> llama.cpp's names for them."""


def to_pairs(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a query or key projection [heads x E, D] for llama.cpp's rotation. transformers rotates row i
    of a head together with row i + E / 2, llama.cpp's Llama rotates neighbouring rows. For ``E = 4`` the rows 0 1 2 3
    become 0 2 1 3."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def to_halves(weight: Tensor, heads: int) -> Tensor:
    """Invert :func:`to_pairs`."""
    return weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def rotated(name: str, tensor: Tensor, config: dict[str, Any], turn: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Apply ``turn`` (``to_pairs`` or ``to_halves``) if ``name`` is that of a query or key projection."""
    for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if name.endswith(f"{projection}.weight"):
            return turn(tensor, config[heads])
    return tensor


class GgufFile:
    """Writer of one GGUF file: add sizes and tensors, then :meth:`close`."""

    def __init__(self, path: Path, architecture: str, name: str, kind: str) -> None:
        """Start a file with matrices of type ``kind`` (one of ``KINDS``); vectors stay in float32."""
        logging.getLogger("gguf").setLevel(logging.WARNING)  # at INFO it logs every file and key
        self._kind = kind
        self.writer = gguf.GGUFWriter(path, architecture)
        self.writer.add_type("model")
        self.writer.add_name(name)
        self.writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if kind == 'f32' else 'MOSTLY'}_{kind.upper()}"])
        self.writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    def add_key(self, key: str, value: bool | int | float | list[int]) -> None:
        """Add a key, prefixed with the architecture unless it begins with one of ``OTHER_KEYS``."""
        writer = self.writer
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](key if key.startswith(OTHER_KEYS) else f"{writer.arch}.{key}", value)

    def add_sizes(self, config: dict[str, Any]) -> None:
        for key, name in SIZES.items():
            self.add_key(key, config[name])
        if (factors := rope_factors(config)) is not None:
            self.add(SCALED, factors)

    def add(self, name: str, tensor: Tensor, kind: str | None = None) -> None:
        """Add a tensor: integers as int64, vectors as float32, matrices as ``kind`` (None: the file's type)."""
        tensor = tensor.detach().cpu().contiguous()
        if not tensor.is_floating_point():
            self.writer.add_tensor(name, tensor.long().numpy())
            return
        target = gguf.GGMLQuantizationType["F32" if tensor.ndim == 1 else (kind or self._kind).upper()]
        block = gguf.GGML_QUANT_SIZES[target][0]
        if tensor.shape[-1] % block:
            what = f"{name} has rows of {tensor.shape[-1]} numbers, but {target.name} needs a multiple of {block}"
            raise UserError(f"{what}; set base_gguf=f16")
        self.writer.add_tensor(name, gguf.quants.quantize(tensor.float().numpy(), target), raw_dtype=target)

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a file's keys and its tensors, dequantised and in torch's order of dimensions."""
    try:
        reader = checked_reader(path)
        keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        tensors = {entry.name: torch.from_numpy(_values(entry)) for entry in reader.tensors}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"{path} cannot be read as a GGUF file ({error}); copy it again") from None
    return keys, tensors


def _values(entry: Any) -> npt.NDArray[Any]:
    integer = entry.tensor_type == gguf.GGMLQuantizationType.I64
    values: npt.NDArray[Any] = entry.data if integer else gguf.quants.dequantize(entry.data, entry.tensor_type)
    return np.array(values)  # a copy, because the file is memory-mapped


def rope_factors(config: dict[str, Any]) -> Tensor | None:
    """Return the divisors [E / 2] of the rotary frequencies for a Llama ``config``; None: no scaling. Only Llama-3's
    scaling is a tensor in GGUF; others raise a UserError."""
    scaling = config.get("rope_scaling")
    if not scaling:
        return None
    if (kind := scaling.get("rope_type")) != "llama3":
        raise UserError(f"drafthead cannot write rotary scaling of type {kind} as GGUF; use {CONVERTER}")
    return llama3_factors(scaling, config["rope_theta"], config["head_dim"])


# Heads ----------------------------------------------------------------------------------------------------------------


class GgufLayout(Format):
    """Mixin of the formats for llama.cpp: the head as ``head.gguf``, with ``base_gguf=`` the base as ``base.gguf``.
    Tensors and config are those of the other class, under llama.cpp's names."""

    weights_file = FILE
    base_file = BASE_FILE
    outer: ClassVar[Mapping[str, str]]  # names of tensors outside the decoder layers -> llama.cpp's
    layer: ClassVar[str] = "layers.{n}"  # template of the published name of layer n
    pairs: ClassVar[bool] = False  # llama.cpp rotates neighbouring rows of queries and keys (``to_pairs``)
    needed: ClassVar[frozenset[str]]  # keys that a file must have, with those of ``SIZES``
    accepted: ClassVar[frozenset[str]] = frozenset()  # further keys that an import reads; others are noted
    harmless: ClassVar[frozenset[str]] = frozenset({SCALED})
    engines_for = Format.engines_for  # the other class's llama.cpp is the converter

    @abstractmethod
    def keys(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return a file's keys and values from a head's config, except those of ``SIZES``."""

    @abstractmethod
    def config_of(self, keys: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return a head's config without ``SIZES``, from a file's keys and its tensors by published name."""

    def add_vocabulary(self, file: GgufFile, base: BaseParts) -> None:
        """Add a tokenizer; by default none, because llama.cpp uses the target's."""
        file.writer.add_tokenizer_model("no_vocab")

    def _names(self, layers: int) -> dict[str, str]:
        """Map published tensor names to llama.cpp's."""
        inner = {
            f"{self.layer.format(n=n)}.{name}.weight": f"blk.{n}.{theirs}.weight"
            for n in range(layers)
            for name, theirs in LAYER.items()
        }
        return {**self.outer, **inner}

    def matches(self, config: dict[str, Any]) -> bool:
        return False  # a GGUF file has no config.json

    def unsupported(self, head: Any) -> Unsupported:
        yield from super().unsupported(head)
        if (kind := head.base.model_config.model_type) not in RECORDED:
            what = f"llama.cpp's graph of {kind} does not keep the inputs of layers, and aborts"
            yield what, f"another base: one of type {', '.join(RECORDED)}"

    def write(self, checkpoint: PublishedCheckpoint, folder: Path, dtype: torch.dtype | None, base: BaseParts) -> None:
        config, tensors = checkpoint.config, checkpoint.tensors
        folder.mkdir(parents=True, exist_ok=True)
        require_space(folder, 4 * sum(t.numel() for t in tensors.values()), "the export")
        name = f"{config[BASE_NAME].split('/')[-1]} {self.title}"
        file = GgufFile(folder / FILE, DRAFTERS[self.name], name, DTYPES[dtype or tensors["fc.weight"].dtype])
        file.add_sizes(config)
        for key, value in self.keys(config).items():
            file.add_key(key, value)
        self.add_vocabulary(file, base)
        for name, theirs in self._names(config["num_hidden_layers"]).items():
            if name in tensors:
                file.add(theirs, rotated(name, tensors[name], config, to_pairs) if self.pairs else tensors[name])
        if "d2t" in tensors:
            file.add("d2t", from_offsets(tensors["d2t"]))  # llama.cpp stores target ids
        file.close()

    def read_files(self, folder: Path) -> PublishedCheckpoint:
        path, expected = folder / FILE, DRAFTERS[self.name]
        if not path.is_file():
            raise UserError(f"{folder} has no {FILE}; export with to={self.name} writes one")
        keys, stored = read_gguf(path)
        if (kind := keys.get("general.architecture")) != expected:
            hint = "".join(f" (format={name})" for name, architecture in DRAFTERS.items() if architecture == kind)
            raise UserError(f"{path} has the architecture {kind}, expected {expected}{hint}")
        unread = {name for name in keys if name.startswith(f"{expected}.")}
        keys = {name.removeprefix(f"{expected}."): value for name, value in keys.items()}
        if missing := sorted((self.needed | SIZES.keys()) - keys.keys()):
            what = f"{path} lacks the keys {', '.join(missing)}, which an export writes"
            raise UserError(f"{what}; export the head again")
        names = self._names(keys["block_count"])
        if unknown := sorted(stored.keys() - {*names.values(), "d2t", SCALED}):
            raise UserError(f"{path} has unknown tensors: {', '.join(unknown[:4])}; use a file that drafthead wrote")
        config = {name: keys[key] for key, name in {**SIZES, **WINDOW}.items() if key in keys}
        known = {*SIZES, *WINDOW, *self.needed, *self.accepted}
        config |= {name: True for name in unread - {f"{expected}.{key}" for key in known}}
        config[SCALED] = SCALED in stored
        tensors = {
            name: rotated(name, stored[theirs], config, to_halves) if self.pairs else stored[theirs]
            for name, theirs in names.items()
            if theirs in stored
        }
        config["draft_vocab_size"] = config["vocab_size"]
        if "d2t" in stored:
            tensors["d2t"] = to_offsets(stored["d2t"])
            config["draft_vocab_size"] = len(stored["d2t"])
        return PublishedCheckpoint(config | self.config_of(keys, tensors), tensors, source=str(path))

    def attach(self, checkpoint: PublishedCheckpoint, base: BaseParts) -> DraftHead:
        # A file stores only the tensor computed from the rotary scaling, so the scaling is taken from the base.
        scaling = head_rope(base) if checkpoint.config[SCALED] else {}
        return super().attach(checkpoint.updated(config={**checkpoint.config, "rope_scaling": scaling}), base)


# Base -----------------------------------------------------------------------------------------------------------------


def check_base(base: BaseParts, kind: str) -> None:
    """Reject a base, or a type ``kind`` of weights, that ``write_base`` cannot write."""
    if kind not in KINDS:
        hint = "; llama.cpp's llama-quantize makes one from f16" if kind.startswith("q") else ""
        raise UserError(f"base_gguf must be one of {', '.join(KINDS)}, got {kind!r}{hint}")
    if (model_type := base.model_config.model_type) not in ARCHITECTURES:
        raise UserError(f"drafthead cannot write a base of type {model_type} as GGUF; use {CONVERTER}")
    split_name(base.tokenizer)


def write_base(base: BaseModel, path: Path, kind: str) -> None:
    """Write ``base`` as a GGUF file that llama.cpp runs, with weights of type ``kind`` (one of ``KINDS``). In 4-bit
    files, embedding and output head have 8 bits, because they affect the logits directly."""
    check_base(base, kind)
    settings = base.model_config
    architecture = ARCHITECTURES[settings.model_type]
    rope = dict(settings.rope_parameters)
    config = layer_config(base) | {"num_hidden_layers": base.num_layers}
    config["intermediate_size"] = settings.intermediate_size
    config["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    weights = base.stock().state_dict()
    require_space(path.parent, 4 * sum(t.numel() for t in weights.values()), "the base as GGUF")
    file = GgufFile(path, architecture, published_name(base).split("/")[-1], kind)
    file.add_sizes(config)
    add_tokenizer(file.writer, base)
    number = next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    names = gguf.get_tensor_name_map(number, base.num_layers)
    for stock_name, tensor in weights.items():
        if settings.tie_word_embeddings and stock_name == "lm_head.weight":
            continue
        theirs = names.get_name(stock_name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise UserError(f"llama.cpp's {architecture} has no tensor for {stock_name}; use {CONVERTER}")
        if architecture == "llama":  # its Qwen3 rotates halves, as transformers does
            tensor = rotated(stock_name, tensor, config, to_pairs)
        outer = theirs in ("token_embd.weight", "output.weight")
        file.add(theirs, tensor, "q8_0" if outer and kind.startswith("q4") else None)
    file.close()


# Tokenizer ------------------------------------------------------------------------------------------------------------


def split_name(tokenizer: Any) -> str:
    """Return llama.cpp's name of the tokenizer's rule for splitting words before BPE; reject unknown rules."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    splitter = content.get("pre_tokenizer") or {}
    steps = splitter.get("pretokenizers", [splitter])
    kinds = [step.get("type") for step in steps]
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1]["use_regex"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and (name := SPLITS.get(steps[0]["pattern"].get("Regex"))):
        return name
    raise UserError(f"the tokenizer splits words in a way that llama.cpp is not known to support; use {CONVERTER}")


def add_tokenizer(writer: Any, base: BaseParts) -> None:
    tokenizer, types = base.tokenizer, gguf.TokenType
    added = {number: token.special for number, token in tokenizer.added_tokens_decoder.items()}
    known = {number: text for text, number in tokenizer.get_vocab().items()}
    # Ids of the embedding without a token get a placeholder: llama.cpp expects a name for every row.
    rows = [
        (known[n], (types.CONTROL if added[n] else types.USER_DEFINED) if n in added else types.NORMAL)
        if n in known
        else (f"[PAD{n}]", types.UNUSED)
        for n in range(base.vocab_size)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split_name(tokenizer))
    writer.add_token_list([text for text, _ in rows])
    writer.add_token_types([kind for _, kind in rows])
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        base.model_config.save_pretrained(folder)
        special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=base.vocab_size)
    if template := tokenizer.chat_template:
        special.chat_template = template
    special.add_special_token["bos"] = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    special.add_to_gguf(writer, quiet=True)
