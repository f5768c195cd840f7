"""EAGLE-3 as a GGUF file that llama.cpp loads (``llama-server -md head.gguf --spec-type draft-eagle3``).

Names, shapes and meanings are those of llama.cpp's ``eagle3`` architecture and of its converter (build 11434)::

    fc.weight [D, 3 D]   enc.output_norm.weight [3 D]: norm_before_fc   output_norm.weight [D]   output.weight [W, D]
    blk.0.attn_norm (embedding), attn_norm_2 (feature), ffn_norm   attn_q, attn_k, attn_v, attn_output   ffn_*   d2t [W]

``d2t`` holds target ids here, where to=eagle3 holds offsets; rows of queries and keys are in rotated pairs. llama.cpp
loads a head that feeds the normed state on (``norm_output``) without a word and drafts badly, so it is refused.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafthead.data.utils.files import require_space
from drafthead.models.formats.checkpoint import PublishedCheckpoint, from_offsets, to_offsets
from drafthead.models.formats.eagle3 import LAYER_IDS, Eagle3Format
from drafthead.models.formats.format import BASE_NAME, Engine, Unsupported
from drafthead.models.formats.gguf.gguf_files import (
    LAYER,
    SIZES,
    GgufFile,
    read_drafter,
    to_halves,
    to_pairs,
    with_scaling_of,
)
from drafthead.models.heads.eagle3 import Eagle3Head

FILE = "head.gguf"
BASE_FILE = "base.gguf"
RECORDED = ("llama", "mistral", "qwen3", "qwen3_moe", "gpt_oss")
"""Model types of transformers whose graphs in llama.cpp keep what goes into a layer; with others it aborts."""
NAMES = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    **{f"midlayer.{name}.weight": f"blk.0.{theirs}.weight" for name, theirs in LAYER.items()},
}
DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
OWN_KEYS = {"drafthead.num_draft_tokens": "num_tokens", "drafthead.ttt_steps": "ttt_steps"}
LLAMACPP = Engine(
    "llama.cpp",
    "build 11549 serves it, accepting what drafthead's engine accepts (run on a CPU, 22 November 2026)",
    current=True,
    serve="llama-server -m {folder}/base.gguf -md {folder}/head.gguf --spec-type draft-eagle3 "
    "--spec-draft-n-max {drafts}",
)


class GgufFormat(Eagle3Format):
    """``head.gguf``; a base beside it is ``base.gguf`` (``base_gguf=``)."""

    name = "gguf"
    title = "EAGLE-3 (GGUF for llama.cpp)"
    weights_file = FILE
    engines = (LLAMACPP, Engine("vLLM", "no, it reads to=eagle3"), Engine("SGLang", "no, it reads to=eagle3"))

    def unsupported(self, head: Eagle3Head) -> Unsupported:
        yield from super().unsupported(head)
        if head.config.norm_output:
            what = "its steps read the normed output, and llama.cpp feeds the state before the norm on, without a word"
            yield what, "head.norm_output=false"
        if head.config.fc_norm:
            yield "it norms every layer's state, and llama.cpp does not", "head.fc_norm=false"
        if len(head.spec.layers) != 3:
            yield f"it reads {len(head.spec.layers)} layers, and llama.cpp reads exactly 3", "head.layers=null"
        if (kind := head.base.model.config.model_type) not in RECORDED:
            what = f"llama.cpp's graph of {kind} does not keep what goes into a layer, and aborts"
            yield what, f"another base: one of type {', '.join(RECORDED)}"

    def engines_for(self, head: Eagle3Head) -> tuple[Engine, ...]:
        return self.engines

    def matches(self, config: dict[str, Any]) -> bool:
        return False

    def write(self, checkpoint: PublishedCheckpoint, folder: Path, dtype: torch.dtype | None) -> None:
        config, tensors = checkpoint.config, dict(checkpoint.tensors)
        kind = DTYPES[dtype or tensors["fc.weight"].dtype]
        folder.mkdir(parents=True, exist_ok=True)
        require_space(folder, 4 * sum(t.numel() for t in tensors.values()), "the export")
        file = GgufFile(folder / FILE, "eagle3", f"{config[BASE_NAME].split('/')[-1]} EAGLE-3", kind)
        file.add_sizes(config)
        writer = file.writer
        writer.add_array("eagle3.target_layers", config[LAYER_IDS])
        writer.add_uint32("eagle3.target_hidden_size", config["target_hidden_size"])
        writer.add_bool("eagle3.norm_before_fc", config["norm_before_fc"])
        writer.add_bool("eagle3.norm_before_residual", config["norm_before_residual"])
        for key, name in OWN_KEYS.items():
            writer.add_uint32(key, config[name])
        writer.add_tokenizer_model("no_vocab")  # the target's is used
        for name, theirs in NAMES.items():
            if name in tensors:
                file.add(theirs, _rotated(name, tensors[name], config, to_pairs))
        file.add("d2t", from_offsets(tensors["d2t"]))
        file.close()

    def read_files(self, folder: Path) -> PublishedCheckpoint:
        sizes = {"target_hidden_size", "norm_before_fc", "norm_before_residual"}
        keys, found = read_drafter(folder / FILE, self.name, sizes | {"target_layers"})
        own = {name: found[theirs] for name, theirs in NAMES.items() if theirs in found}
        own["d2t"] = to_offsets(found["d2t"])
        config: dict[str, Any] = {
            **{name: keys[key] for key, name in SIZES.items()},
            **{key: keys[key] for key in sizes},
            "draft_vocab_size": len(own["d2t"]),
            LAYER_IDS: list(keys["target_layers"]),
            **{name: keys[key] for key, name in OWN_KEYS.items() if key in keys},
        }
        tensors = {name: _rotated(name, tensor, config, to_halves) for name, tensor in own.items()}
        return PublishedCheckpoint(config, tensors, source=str(folder / FILE))

    def require_same(self, checkpoint: PublishedCheckpoint, head: Eagle3Head) -> None:
        super().require_same(with_scaling_of(checkpoint, head.base), head)


def _rotated(name: str, tensor: Tensor, config: dict[str, Any], turn: Any) -> Tensor:
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if name.endswith(f"{part}.weight"):
            turned: Tensor = turn(tensor, config[heads])
            return turned
    return tensor
