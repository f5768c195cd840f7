"""EAGLE-3 as a GGUF file that llama.cpp loads (``llama-server -md head.gguf --spec-type draft-eagle3``).

Names, shapes and meanings are those of llama.cpp's ``eagle3`` architecture and of its converter (build 11434)::

    fc.weight [D, 3 D]   enc.output_norm.weight [3 D]: norm_before_fc   output_norm.weight [D]   output.weight [W, D]
    blk.0.attn_norm (embedding), attn_norm_2 (feature), ffn_norm   attn_q, attn_k, attn_v, attn_output   ffn_*   d2t [W]

Here ``d2t`` holds target ids, whereas to=eagle3 writes offsets. Rows of queries and keys are in rotated pairs
(``to_pairs``). llama.cpp silently ignores ``norm_output`` and then drafts badly, so heads with it are refused.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafthead.models.formats.checkpoint import PublishedCheckpoint, from_offsets, to_offsets
from drafthead.models.formats.eagle3 import LAYER_IDS, Eagle3Format
from drafthead.models.formats.format import Engine, Unsupported
from drafthead.models.formats.gguf.gguf_files import (
    FILE,
    LAYER,
    SIZES,
    GgufLayout,
    read_drafter,
    to_halves,
    to_pairs,
    unsupported_graph,
    with_scaling_of,
)
from drafthead.models.heads.eagle3 import Eagle3Head

NAMES = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    **{f"midlayer.{name}.weight": f"blk.0.{theirs}.weight" for name, theirs in LAYER.items()},
}
"""Published tensor names -> llama.cpp's."""
OWN_KEYS = {"drafthead.num_draft_tokens": "num_tokens", "drafthead.ttt_steps": "ttt_steps"}
"""Keys that only drafthead reads -> keys of ``config.json``."""
LLAMACPP = Engine(
    "llama.cpp",
    "build 11549 serves it, accepting what drafthead's engine accepts (run on a CPU, 22 November 2026)",
    current=True,
    serve="llama-server -m {base_file} -md {folder}/head.gguf --spec-type draft-eagle3 --spec-draft-n-max {drafts}",
)


class GgufFormat(GgufLayout, Eagle3Format):
    """EAGLE-3 as ``head.gguf``."""

    name = "gguf"
    title = "EAGLE-3 (GGUF for llama.cpp)"
    engines = (LLAMACPP, Engine("vLLM", "no, it reads to=eagle3"), Engine("SGLang", "no, it reads to=eagle3"))

    def unsupported(self, head: Eagle3Head) -> Unsupported:
        yield from super().unsupported(head)
        if head.config.norm_output:
            what = "its steps read the normed output, and llama.cpp silently feeds them the state before the norm"
            yield what, "head.norm_output=false"
        if head.config.fc_norm:
            yield "it norms every layer's state, and llama.cpp does not", "head.fc_norm=false"
        if len(head.spec.layers) != 3:
            yield f"it reads {len(head.spec.layers)} layers, and llama.cpp reads exactly 3", "head.layers=null"
        yield from unsupported_graph(head)

    def engines_for(self, head: Eagle3Head) -> tuple[Engine, ...]:
        return self.engines

    def write(self, checkpoint: PublishedCheckpoint, folder: Path, dtype: torch.dtype | None) -> None:
        config, tensors = checkpoint.config, checkpoint.tensors
        file = self.new_file(checkpoint, folder, dtype)
        writer = file.writer
        writer.add_array("eagle3.target_layers", config[LAYER_IDS])
        writer.add_uint32("eagle3.target_hidden_size", config["target_hidden_size"])
        writer.add_bool("eagle3.norm_before_fc", config["norm_before_fc"])
        writer.add_bool("eagle3.norm_before_residual", config["norm_before_residual"])
        for key, name in OWN_KEYS.items():
            writer.add_uint32(key, config[name])
        writer.add_tokenizer_model("no_vocab")  # llama.cpp uses the target's
        for name, theirs in NAMES.items():
            if name in tensors:
                file.add(theirs, _rotated(name, tensors[name], config, to_pairs))
        file.add("d2t", from_offsets(tensors["d2t"]))
        file.close()

    def read_files(self, folder: Path) -> PublishedCheckpoint:
        sizes = {"target_hidden_size", "norm_before_fc", "norm_before_residual"}
        keys, stored = read_drafter(folder / FILE, self.name, sizes | {"target_layers"})
        tensors = {name: stored[theirs] for name, theirs in NAMES.items() if theirs in stored}
        tensors["d2t"] = to_offsets(stored["d2t"])
        config: dict[str, Any] = {
            **{name: keys[key] for key, name in SIZES.items()},
            **{key: keys[key] for key in sizes},
            "draft_vocab_size": len(tensors["d2t"]),
            LAYER_IDS: list(keys["target_layers"]),
            **{name: keys[key] for key, name in OWN_KEYS.items() if key in keys},
        }
        tensors = {name: _rotated(name, tensor, config, to_halves) for name, tensor in tensors.items()}
        return PublishedCheckpoint(config, tensors, source=str(folder / FILE))

    def require_same(self, checkpoint: PublishedCheckpoint, head: Eagle3Head) -> None:
        super().require_same(with_scaling_of(checkpoint, head.base), head)


def _rotated(name: str, tensor: Tensor, config: dict[str, Any], turn: Any) -> Tensor:
    """Apply ``turn`` (``to_pairs`` or ``to_halves``) to the weights of queries and keys, and return others as is."""
    for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if name.endswith(f"{projection}.weight"):
            turned: Tensor = turn(tensor, config[heads])
            return turned
    return tensor
