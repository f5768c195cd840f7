"""DSpark and DFlash as a GGUF file that llama.cpp loads (``--spec-type draft-dspark``, ``draft-dflash``).

Names, shapes and meanings are those of llama.cpp's ``dflash`` architecture (build 11434)::

    fc.weight [D, n D]   enc.output_norm.weight [D]: after fc   output_norm.weight [D]   blk.{i}.*: Qwen3's
    DSpark also: markov_w1.weight [V, r]   markov_w2.weight [W, r]   conf_proj.weight [1, D + r], conf_proj.bias
    with a draft vocabulary: output.weight [W, D]   d2t [W], target ids

``target_layers`` counts the inputs of layers, so its ids are one more than those of ``target_layer_ids``. The file
contains the base's tokenizer, which defines the mask token.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from drafthead.data.utils.errors import UserError
from drafthead.models.formats.checkpoint import PublishedCheckpoint, from_offsets, to_offsets
from drafthead.models.formats.dspark import CONFIDENCE, NAMES, DFlashFormat, DSparkFormat
from drafthead.models.formats.format import Engine, Unsupported
from drafthead.models.formats.gguf.eagle3_gguf import LLAMACPP
from drafthead.models.formats.gguf.gguf_files import (
    DRAFTERS,
    FILE,
    LAYER,
    SIZES,
    GgufLayout,
    add_tokenizer,
    read_drafter,
    rope_factors,
    split_name,
    unsupported_graph,
    with_scaling_of,
)
from drafthead.models.heads.dspark import DSparkHead
from drafthead.models.heads.parts.draft_head import DraftHead

ARCHITECTURE = DRAFTERS["gguf_dspark"]
OUTER = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    NAMES["markov_in.weight"]: "markov_w1.weight",
    NAMES["markov_out.weight"]: "markov_w2.weight",
    CONFIDENCE[0]: "conf_proj.weight",
    CONFIDENCE[1]: "conf_proj.bias",
}
MASK = "tokenizer.ggml.mask_token_id"
SERVE = "llama-server -m {base_file} -md {folder}/head.gguf --spec-draft-n-max {drafts}"


class DSparkGgufFormat(GgufLayout, DSparkFormat):
    """DSpark or DFlash as ``head.gguf``."""

    name = "gguf_dspark"
    title = "DSpark or DFlash (GGUF for llama.cpp)"
    engines = (replace(LLAMACPP, serve=SERVE), Engine("vLLM", "no, it reads to=dspark and to=dflash"))

    def unsupported(self, head: DSparkHead) -> Unsupported:
        yield from _layout(head.config.markov_rank).unsupported(head)
        yield from unsupported_graph(head)

    def config(self, head: DSparkHead) -> dict[str, Any]:
        return _layout(head.config.markov_rank).config(head)

    def export(
        self, head: DraftHead, folder: Path, dtype: torch.dtype | None = None, base_name: str | None = None
    ) -> None:
        checkpoint = self.checkpoint(head, dtype, base_name)
        assert isinstance(head, DSparkHead)  # checkpoint() refuses others
        layout = _layout(head.config.markov_rank)
        try:  # refuse before a file is created
            split_name(head.base.tokenizer)
            rope_factors(checkpoint.config)
        except UserError as error:
            how = f"export to={layout.name}, and convert that with convert_hf_to_gguf.py --target-model-dir BASE"
            raise UserError(f"{str(error).split('; use')[0]}; {how}") from None
        config, tensors, inner = checkpoint.config, checkpoint.tensors, checkpoint.config["dflash_config"]
        file = self.new_file(checkpoint, folder, dtype)
        writer = file.writer
        writer.add_array(f"{ARCHITECTURE}.target_layers", [layer + 1 for layer in inner["target_layer_ids"]])
        writer.add_uint32(f"{ARCHITECTURE}.block_size", config["block_size"])
        writer.add_bool(f"{ARCHITECTURE}.attention.causal", inner["causal"])
        if "markov_rank" in config:
            writer.add_bool(f"{ARCHITECTURE}.sample_from_anchor", config["sample_from_anchor"])
            writer.add_bool(f"{ARCHITECTURE}.has_confidence_head", config["enable_confidence_head"])
        if (scale := config.get("logit_scale")) is not None:
            writer.add_float32(f"{ARCHITECTURE}.logit_scale", scale)
        add_tokenizer(writer, head.base)
        writer.add_uint32(MASK, inner["mask_token_id"])
        for name, theirs in _names(config["num_hidden_layers"]).items():
            if name in tensors:
                file.add(theirs, tensors[name])
        if "d2t" in tensors:
            file.add("d2t", from_offsets(tensors["d2t"]))
        file.close()

    def read_files(self, folder: Path) -> PublishedCheckpoint:
        keys, stored = read_drafter(folder / FILE, self.name, {"block_size", "target_layers"})
        names = _names(keys["block_count"])
        if unknown := sorted(stored.keys() - {*names.values(), "d2t", "rope_freqs.weight"}):
            raise UserError(f"{folder / FILE} has tensors that heads here do not use: {', '.join(unknown[:4])}")
        tensors = {name: stored[theirs] for name, theirs in names.items() if theirs in stored}
        if "d2t" in stored:
            tensors["d2t"] = to_offsets(stored["d2t"])
        confident = CONFIDENCE[0] in tensors
        config: dict[str, Any] = {
            **{name: keys[key] for key, name in SIZES.items()},
            "draft_vocab_size": len(tensors["d2t"]) if "d2t" in tensors else keys["vocab_size"],
            "block_size": keys["block_size"],
            "is_causal": keys.get("attention.causal", False),
            "mask_token_id": keys.get(MASK),
            "target_layer_ids": [layer - 1 for layer in keys["target_layers"]],
            "sample_from_anchor": keys.get("sample_from_anchor", True),
            **{key: confident for key in ("enable_confidence_head", "confidence_head_with_markov")},
        }
        if (w2 := tensors.get(NAMES["markov_out.weight"])) is not None:
            config["markov_rank"] = w2.shape[1]
        if (scale := keys.get("logit_scale")) is not None:
            config["logit_scale"] = scale
        return PublishedCheckpoint(config, tensors, source=str(folder / FILE))

    def normalize(self, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
        return _layout(checkpoint.config.get("markov_rank", 0)).normalize(checkpoint)

    def settings(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        return _layout(checkpoint.config.get("markov_rank", 0)).settings(checkpoint)

    def require_same(self, checkpoint: PublishedCheckpoint, head: DSparkHead) -> None:
        super().require_same(with_scaling_of(checkpoint, head.base), head)


def _layout(markov_rank: int) -> DSparkFormat | DFlashFormat:
    """Return the layout whose rules apply: like llama.cpp, tell them apart by the Markov head."""
    return DSparkFormat() if markov_rank else DFlashFormat()


def _names(layers: int) -> dict[str, str]:
    """Return published names -> llama.cpp's, for a head of this many layers."""
    inner = {
        f"layers.{n}.{name}.weight": f"blk.{n}.{theirs}.weight" for n in range(layers) for name, theirs in LAYER.items()
    }
    return {**OUTER, **inner}
