"""DSpark and DFlash as a GGUF file that llama.cpp loads (``--spec-type draft-dspark``, ``draft-dflash``).

Names, shapes and meanings are those of llama.cpp's ``dflash`` architecture (build 11434)::

    fc.weight [D, n D]   enc.output_norm.weight [D]: after fc   output_norm.weight [D]   blk.{i}.*: Qwen3's
    DSpark besides: markov_w1.weight [V, r]   markov_w2.weight [W, r]   conf_proj.weight [1, D + r], conf_proj.bias
    a draft vocabulary: output.weight [W, D]   d2t [W], target ids

``target_layers`` counts what goes into a layer, so one more than ``target_layer_ids``. The file has the base's
tokenizer, which says the mask token.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import require_space
from drafthead.models.formats.checkpoint import PublishedCheckpoint, from_offsets, to_offsets
from drafthead.models.formats.dspark import CONFIDENCE, NAMES, DFlashFormat, DSparkFormat
from drafthead.models.formats.format import BASE_NAME, Engine, Unsupported
from drafthead.models.formats.gguf.eagle3_gguf import DTYPES, FILE, LLAMACPP, RECORDED
from drafthead.models.formats.gguf.gguf_files import (
    DRAFTERS,
    LAYER,
    SIZES,
    GgufFile,
    add_tokenizer,
    read_drafter,
    rope_factors,
    split_name,
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
SERVE = "llama-server -m {folder}/base.gguf -md {folder}/head.gguf --spec-draft-n-max {drafts}"


class DSparkGgufFormat(DSparkFormat):
    """``head.gguf``, of a DSpark head or a DFlash one; a base beside it is ``base.gguf`` (``base_gguf=``)."""

    name = "gguf_dspark"
    title = "DSpark or DFlash (GGUF for llama.cpp)"
    weights_file = FILE
    engines = (replace(LLAMACPP, serve=SERVE), Engine("vLLM", "no, it reads to=dspark and to=dflash"))

    def unsupported(self, head: DSparkHead) -> Unsupported:
        yield from _layout(head.config.markov_rank).unsupported(head)
        if (kind := head.base.model.config.model_type) not in RECORDED:
            what = f"llama.cpp's graph of {kind} does not keep what goes into a layer, and aborts"
            yield what, f"another base: one of type {', '.join(RECORDED)}"

    def config(self, head: DSparkHead) -> dict[str, Any]:
        return _layout(head.config.markov_rank).config(head)

    def matches(self, config: dict[str, Any]) -> bool:
        return False

    def export(
        self, head: DraftHead, folder: Path, dtype: torch.dtype | None = None, base_name: str | None = None
    ) -> None:
        checkpoint = self.checkpoint(head, dtype, base_name)
        assert isinstance(head, DSparkHead)  # checked above
        layout = _layout(head.config.markov_rank)
        try:  # before a file is there
            split_name(head.base.tokenizer)
            rope_factors(checkpoint.config)
        except UserError as error:
            how = f"export to={layout.name}, and convert that with convert_hf_to_gguf.py --target-model-dir BASE"
            raise UserError(f"{str(error).split('; use')[0]}; {how}") from None
        config, tensors, inner = checkpoint.config, checkpoint.tensors, checkpoint.config["dflash_config"]
        kind = DTYPES[dtype or tensors["fc.weight"].dtype]
        folder.mkdir(parents=True, exist_ok=True)
        require_space(folder, 4 * sum(t.numel() for t in tensors.values()), "the export")
        file = GgufFile(folder / FILE, ARCHITECTURE, f"{config[BASE_NAME].split('/')[-1]} {self.title}", kind)
        file.add_sizes(config)
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
        get, found = read_drafter(folder / FILE, self.name, {"block_size", "target_layers"})
        names = _names(get["block_count"])
        if unknown := sorted(found.keys() - {*names.values(), "d2t", "rope_freqs.weight"}):
            raise UserError(f"{folder / FILE} has tensors that heads here do not have: {', '.join(unknown[:4])}")
        own = {name: found[theirs] for name, theirs in names.items() if theirs in found}
        if "d2t" in found:
            own["d2t"] = to_offsets(found["d2t"])
        confident = CONFIDENCE[0] in own
        config: dict[str, Any] = {
            **{name: get[key] for key, name in SIZES.items()},
            "draft_vocab_size": len(own["d2t"]) if "d2t" in own else get["vocab_size"],
            "block_size": get["block_size"],
            "is_causal": get.get("attention.causal", False),
            "mask_token_id": get.get(MASK),
            "target_layer_ids": [layer - 1 for layer in get["target_layers"]],
            "sample_from_anchor": get.get("sample_from_anchor", True),
            **{key: confident for key in ("enable_confidence_head", "confidence_head_with_markov")},
        }
        if (w2 := own.get(NAMES["markov_out.weight"])) is not None:
            config["markov_rank"] = w2.shape[1]
        if (scale := get.get("logit_scale")) is not None:
            config["logit_scale"] = scale
        return PublishedCheckpoint(config, own, source=str(folder / FILE))

    def normalize(self, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
        return _layout(checkpoint.config.get("markov_rank", 0)).normalize(checkpoint)

    def settings(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        return _layout(checkpoint.config.get("markov_rank", 0)).settings(checkpoint)

    def require_same(self, checkpoint: PublishedCheckpoint, head: DSparkHead) -> None:
        super().require_same(with_scaling_of(checkpoint, head.base), head)


def _layout(markov_rank: int) -> DSparkFormat | DFlashFormat:
    """The layout whose rules hold for a head: llama.cpp, too, tells them apart by the Markov head."""
    return DSparkFormat() if markov_rank else DFlashFormat()


def _names(layers: int) -> dict[str, str]:
    """Published names -> llama.cpp's."""
    inner = {
        f"layers.{n}.{name}.weight": f"blk.{n}.{theirs}.weight" for n in range(layers) for name, theirs in LAYER.items()
    }
    return {**OUTER, **inner}
