"""GGUF files for llama.cpp, written and read with PyPI's ``gguf``: what all files share, and the base.

A base is written as llama.cpp's own converter writes it, for Llama-like targets with a byte-level BPE tokenizer. Other
bases need that converter, which the message names.
"""

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import require_space
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.gguf_config import llama3_factors
from drafthead.models.base.layers import attention_sizes
from drafthead.models.formats.checkpoint import PublishedCheckpoint

KINDS = {
    "f32": ("F32", "ALL_F32"),
    "f16": ("F16", "MOSTLY_F16"),
    "bf16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
    "q4_0": ("Q4_0", "MOSTLY_Q4_0"),
    "q4_1": ("Q4_1", "MOSTLY_Q4_1"),
}
"""Name -> type of the matrices and of the file, as ``gguf`` calls them. No Python library quantises to Q4_K."""
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen3": "qwen3"}
"""transformers' model type -> llama.cpp's architecture, of the bases that are written here."""
DRAFTERS = {"gguf": "eagle3", "gguf_dspark": "dflash"}
"""Format -> llama.cpp's architecture, of the heads."""
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
"""Keys of a file, after its architecture -> of a Llama config."""
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
"""Parts of a layer: transformers' names -> llama.cpp's."""
CONVERTER = "python convert_hf_to_gguf.py FOLDER --outfile base.gguf (llama.cpp's own)"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {_CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe", _CONTRACTIONS + r"\p{N}" + _REST: "qwen2"}
"""The regular expression that splits a text into words -> llama.cpp's name of it."""


def to_pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection from transformers' halves to the pairs that llama.cpp's Llama rotates."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def to_halves(weight: Tensor, heads: int) -> Tensor:
    """The inverse of :func:`to_pairs`."""
    return weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


class GgufFile:
    """A GGUF file under way: sizes of a Llama layer, tensors, then :meth:`close`."""

    def __init__(self, path: Path, architecture: str, name: str, kind: str) -> None:
        """``kind``: of the matrices, one of ``KINDS``; vectors stay in float32."""
        logging.getLogger("gguf").setLevel(logging.WARNING)  # at INFO it has a line for every file and key
        self._kind = gguf.GGMLQuantizationType[KINDS[kind][0]]
        self.writer = gguf.GGUFWriter(path, architecture)
        self.writer.add_type("model")
        self.writer.add_name(name)
        self.writer.add_file_type(gguf.LlamaFileType[KINDS[kind][1]])
        self.writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    def add_sizes(self, config: dict[str, Any]) -> None:
        """The sizes, epsilon and rotation of a Llama config, of a base or of a head's own layer."""
        for key, name in SIZES.items():
            add = self.writer.add_float32 if name in ("rope_theta", "rms_norm_eps") else self.writer.add_uint32
            add(f"{self.writer.arch}.{key}", config[name])
        if (factors := rope_factors(config)) is not None:
            self.add("rope_freqs.weight", factors)

    def add(self, name: str, tensor: Tensor, kind: str | None = None) -> None:
        """A tensor: integers as int64, vectors as float32, matrices as ``kind`` (None: the file's)."""
        wanted = self._kind if kind is None else gguf.GGMLQuantizationType[KINDS[kind][0]]
        tensor = tensor.detach().cpu().contiguous()
        if not tensor.is_floating_point():
            self.writer.add_tensor(name, tensor.long().numpy())
        elif tensor.ndim == 1 or wanted == gguf.GGMLQuantizationType.F32:
            self.writer.add_tensor(name, tensor.float().numpy())
        elif wanted == gguf.GGMLQuantizationType.F16:
            self.writer.add_tensor(name, tensor.half().numpy())
        else:
            block = gguf.GGML_QUANT_SIZES[wanted][0]
            if tensor.shape[-1] % block:
                raise UserError(f"{name} has rows of {tensor.shape[-1]}, and {wanted.name} needs multiples of {block}")
            self.writer.add_tensor(name, gguf.quants.quantize(tensor.float().numpy(), wanted), raw_dtype=wanted)

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The keys and the tensors (dequantised, in torch's order of dimensions) of a file."""
    try:
        reader = gguf.GGUFReader(path)
        keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        tensors = {found.name: torch.from_numpy(_values(found)) for found in reader.tensors}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"{path} is no GGUF file that can be read ({error}); copy it again") from None
    return keys, tensors


def read_drafter(path: Path, to: str, needed: set[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Keys, without the architecture that they begin with, and tensors of a head's file that ``to`` writes."""
    if not path.is_file():
        raise UserError(f"{path.parent} has no {path.name}; export with to={to} writes one")
    keys, tensors = read_gguf(path)
    wanted, kind = DRAFTERS[to], keys.get("general.architecture")
    if kind != wanted:
        hint = "".join(f" (format={name})" for name, architecture in DRAFTERS.items() if architecture == kind)
        raise UserError(f"{path} is of the architecture {kind}, expected {wanted}{hint}")
    keys = {name.removeprefix(f"{wanted}."): value for name, value in keys.items()}
    if missing := sorted((needed | SIZES.keys()) - keys.keys()):
        raise UserError(f"{path} lacks the keys {', '.join(missing)}, which an export writes")
    return keys, tensors


def with_scaling_of(checkpoint: PublishedCheckpoint, base: BaseModel) -> PublishedCheckpoint:
    """A head's file with its base's rotary scaling: there it is a tensor, written from the same config."""
    scaling = getattr(base.model.config, "rope_parameters", None) or {}
    return checkpoint.updated(config={**checkpoint.config, "rope_scaling": scaling, "rope_parameters": None})


def _values(found: Any) -> npt.NDArray[Any]:
    integer = found.tensor_type == gguf.GGMLQuantizationType.I64
    values: npt.NDArray[Any] = found.data if integer else gguf.quants.dequantize(found.data, found.tensor_type)
    return np.array(values)  # a copy: the file is mapped


def rope_factors(config: dict[str, Any]) -> Tensor | None:
    """What llama.cpp divides the rotary frequencies by, [E / 2]; None without scaling.

    Llama-3's scaling as in llama.cpp's converter; others, which take metadata instead, are refused.
    """
    scaling = config.get("rope_scaling")
    if not scaling:
        return None
    if (kind := scaling.get("rope_type")) != "llama3":
        raise UserError(f"a rotary scaling of type {kind} is not written as GGUF here; use {CONVERTER}")
    return llama3_factors(scaling, config["rope_theta"], config["head_dim"])


# A base ---------------------------------------------------------------------------------------------------------------


def check_base(base: BaseModel, kind: str) -> None:
    """Refuse a base, or a kind of matrices, that is not written here."""
    if kind not in KINDS:
        hint = "; llama.cpp's llama-quantize makes one from f16" if kind.startswith("q") else ""
        raise UserError(f"base_gguf must be one of {', '.join(KINDS)}, got {kind!r}{hint}")
    if (model_type := base.model.config.model_type) not in ARCHITECTURES:
        raise UserError(f"a base of type {model_type} is not written as GGUF here; use {CONVERTER}")
    split_name(base.tokenizer)


def write_base(base: BaseModel, path: Path, kind: str, name: str) -> None:
    """``base`` as a GGUF that llama.cpp runs: ``kind`` is one of ``KINDS``, ``name`` what the file says it is.

    In the files of 4 bits the embedding and the output head have 8, as they decide the logits.
    """
    check_base(base, kind)
    settings = base.model.config
    architecture = ARCHITECTURES[settings.model_type]
    kv_heads, head_dim = attention_sizes(settings)
    rope = dict(settings.rope_parameters)
    scaled = None if rope.get("rope_type", "default") == "default" else rope
    sizes = {k: getattr(settings, k) for k in ("hidden_size", "intermediate_size", "num_attention_heads")}
    sizes |= {"num_hidden_layers": base.num_layers, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    sizes |= {"max_position_embeddings": base.max_context, "vocab_size": base.vocab_size}
    sizes |= {"rope_theta": float(rope["rope_theta"]), "rope_scaling": scaled, "rms_norm_eps": settings.rms_norm_eps}
    weights = base.stock().state_dict()
    require_space(path.parent, 4 * sum(t.numel() for t in weights.values()), "the base as GGUF")
    file = GgufFile(path, architecture, name, kind)
    file.add_sizes(sizes)
    add_tokenizer(file.writer, base)
    permuted = {"q_proj": settings.num_attention_heads, "k_proj": kv_heads} if architecture == "llama" else {}
    number = next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    names = gguf.get_tensor_name_map(number, base.num_layers)
    for own, tensor in weights.items():
        if settings.tie_word_embeddings and own == "lm_head.weight":
            continue
        theirs = names.get_name(own, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise UserError(f"llama.cpp's {architecture} has no tensor for {own}; use {CONVERTER}")
        heads = next((heads for part, heads in permuted.items() if own.endswith(f"{part}.weight")), None)
        outer = theirs in ("token_embd.weight", "output.weight")
        tensor = tensor if heads is None else to_pairs(tensor, heads)
        file.add(theirs, tensor, "q8_0" if outer and kind.startswith("q4") else None)
    file.close()


def split_name(tokenizer: Any) -> str:
    """llama.cpp's name of how ``tokenizer`` splits a text into words before BPE."""
    found = json.loads(tokenizer.backend_tokenizer.to_str())
    splitter = found.get("pre_tokenizer") or {}
    parts = splitter.get("pretokenizers", [splitter])
    kinds = [part.get("type") for part in parts]
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"] and parts[1]["use_regex"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and (name := SPLITS.get(parts[0]["pattern"].get("Regex"))):
        return name
    raise UserError(f"how the tokenizer splits words is not known to be one of llama.cpp's ways; use {CONVERTER}")


def add_tokenizer(writer: Any, base: BaseModel) -> None:
    """The base's tokenizer, as llama.cpp reads it."""
    tokenizer, types = base.tokenizer, gguf.TokenType
    added = {number: token.special for number, token in tokenizer.added_tokens_decoder.items()}
    known = {number: text for text, number in tokenizer.get_vocab().items()}
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
        base.model.config.save_pretrained(folder)
        special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=base.vocab_size)
    if template := tokenizer.chat_template:
        special.chat_template = template
    special.add_special_token["bos"] = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    special.add_to_gguf(writer, quiet=True)
