"""EAGLE-3 as a GGUF file that llama.cpp loads (``llama-server -md head.gguf --spec-type draft-eagle3``).

Names, shapes and meanings are those of llama.cpp's ``eagle3`` architecture and of its converter (build 11434)::

    fc.weight [D, 3 D]   enc.output_norm.weight [3 D]: norm_before_fc   output_norm.weight [D]   output.weight [W, D]
    blk.0.attn_norm (embedding), attn_norm_2 (feature), ffn_norm   attn_q, attn_k, attn_v, attn_output   ffn_*   d2t [W]

``d2t`` holds target ids in GGUF files, whereas to=eagle3 writes offsets. The rows of query and key weights are
reordered for llama.cpp's rotation (``to_pairs``). llama.cpp silently ignores ``norm_output`` and then drafts badly, so
heads with this setting are refused.
"""

from typing import Any

from torch import Tensor

from drafthead.models.formats.eagle3 import LAYER_IDS, Eagle3Format
from drafthead.models.formats.format import Fixed, Unsupported
from drafthead.models.formats.gguf.gguf_files import NO_WINDOW, GgufLayout
from drafthead.models.formats.llama_layer import NO_WINDOW_ONLY
from drafthead.models.heads.eagle3 import Eagle3Head

KEYS = {
    "target_layers": LAYER_IDS,
    **{key: key for key in ("target_hidden_size", "norm_before_fc", "norm_before_residual")},
}  # keys of a GGUF file -> keys of ``config.json``
OWN_KEYS = {"drafthead.num_draft_tokens": "num_tokens", "drafthead.ttt_steps": "ttt_steps"}
"""Keys that only drafthead reads -> keys of ``config.json``. A file may lack them."""


class GgufFormat(GgufLayout, Eagle3Format):
    """EAGLE-3 as ``head.gguf``."""

    name = "gguf"
    title = "EAGLE-3 (GGUF for llama.cpp)"

    outer = {
        "fc.weight": "fc.weight",
        "input_norm.weight": "enc.output_norm.weight",
        "norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    }
    layer = "midlayer"
    pairs = True
    needed = frozenset(KEYS)
    only = {**Eagle3Format.only, **NO_WINDOW_ONLY}
    fixed = {
        **Eagle3Format.fixed,
        "norm_output": Fixed(
            False, "its steps continue from the normed output, and llama.cpp silently uses the state before the norm"
        ),
        "fc_norm": Fixed(False, "it normalises every layer's state, and llama.cpp does not"),
        "window": NO_WINDOW,
    }

    def unsupported(self, head: Eagle3Head) -> Unsupported:
        yield from super().unsupported(head)
        if len(head.spec.layers) != 3:
            yield f"it reads {len(head.spec.layers)} layers, and llama.cpp reads exactly 3", "head.layers=null"

    def keys(self, config: dict[str, Any]) -> dict[str, Any]:
        return {key: config[name] for key, name in {**KEYS, **OWN_KEYS}.items()}

    def config_of(self, keys: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        return {name: keys[key] for key, name in {**KEYS, **OWN_KEYS}.items() if key in keys}
