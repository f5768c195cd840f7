"""MTP layers inside the checkpoint of their base, as vLLM and SGLang load them: ``method=mtp``, NEXTN.

The names of L = ``num_hidden_layers`` layers continue with those of the MTP layer, or it has a prefix of its own::

    model.layers.L.{enorm, hnorm, eh_proj, shared_head.norm}  and the block, such as model.layers.L.self_attn.q_proj
    mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}  and the block, such as mtp.layers.0.self_attn.q_proj

Some families store norms as offsets from one, as their stock class shows. Experts are stored one by one;
transformers' own rules stack them for the stock layer, and separate them again. Copies of the base's embedding and
output head (``embed_tokens``, ``shared_head.head``) are compared with the base's. With several layers, only the first
is read.

An export is a copy of the whole checkpoint. Every file that has one of the names is written again, not only the one
that the index names: vLLM chooses files by the index, but reads all tensors in them, so an old copy could win.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from drafthead.errors import UserError
from drafthead.files.local import make_readable, require_space
from drafthead.models.base.base_config import meta_model
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.checkpoint_tensors import FLOATS, CheckpointTensors, weight_files
from drafthead.models.base.parts import BaseParts
from drafthead.models.formats.checkpoint import PublishedCheckpoint, read_config
from drafthead.models.formats.format import Format
from drafthead.models.heads.mtp import MtpConfig, MtpHead
from drafthead.models.heads.parts.attention_layer import norm_scale
from drafthead.models.heads.parts.draft_head import DraftHead

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")  # keys of the number of MTP layers
OWN = {
    **{"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj"},
    **{"shared_head.norm": "norm", "final_layernorm": "norm"},
}
"""Names after ``model.layers.L.`` -> names in the head."""
OWN_OF_MTP = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "norm"}
"""Names after ``mtp.`` -> names in the head."""
COPIES = ("embed_tokens", "shared_head.head")
NORMS = ("enorm", "hnorm", "norm")


@dataclass(frozen=True)
class Layout:
    """The names of an MTP layer in a checkpoint."""

    own: dict[str, str]  # the head's parameter -> name in the checkpoint
    block: frozenset[str]  # names of the decoder layer's tensors
    prefix: str  # of these
    copies: tuple[str, ...]  # copies of the base's embedding and output head

    @classmethod
    def of(cls, names: set[str], count: int, source: str) -> "Layout":
        """Find the first MTP layer among the ``names`` of a checkpoint whose base has ``count`` layers."""
        numbered = re.compile(rf"(.*\blayers\.{count}\.)enorm\.weight")
        if found := next((match[1] for name in sorted(names) if (match := numbered.fullmatch(name))), None):
            first, prefix, table = found, found, OWN
        else:
            first, prefix, table = "mtp.", "mtp.layers.0.", OWN_OF_MTP
        given = {f"{first}{name}.weight": f"{ours}.weight" for name, ours in table.items()}
        own = {ours: name for name, ours in given.items() if name in names}
        copies = tuple({f"{first}{name}.weight" for name in COPIES} & names)
        block = frozenset(name for name in names if name.startswith(prefix)) - {*own.values(), *copies}
        if missing := set(given.values()) - own.keys():
            what = f"{source} has no MTP layer that drafthead can read (no tensors for {', '.join(sorted(missing))})"
            raise UserError(f"{what}; its names must be those of DeepSeek-V3, GLM-4.5 or Qwen3-Next")
        return cls(own, block, prefix, copies)


class MtpFormat(Format):
    """Format of MTP layers, which are tensors in the checkpoint of their base."""

    name = "mtp"
    title = "MTP layers in the base's checkpoint"
    head_config = MtpConfig
    names_base = False
    vocabulary_advice = "vocabulary=full, or head.draft_vocab_size=null in the training"

    def matches(self, config: dict[str, Any]) -> bool:
        # A head of speculators may have the config of its base.
        return _count(config) > 0 and "speculators_model_type" not in config

    def read(self, folder: Path, config: dict[str, Any] | None = None) -> PublishedCheckpoint:
        """Return the checkpoint's config; :meth:`attach` reads the tensors, with the base's rules."""
        if config:
            raise UserError(f"the format {self.name} uses no config.{next(iter(config))}; leave it out")
        content = read_config(folder)
        several = (f"it has {count} MTP layers, and only the first is read",) if (count := _count(content)) > 1 else ()
        return PublishedCheckpoint(content, {}, str(folder), several)

    def attach(self, checkpoint: PublishedCheckpoint, base: BaseParts) -> DraftHead:
        return self._read(Path(checkpoint.source), MtpConfig(), base)

    def reload(self, folder: Path, head: DraftHead) -> DraftHead:
        assert isinstance(head, MtpHead)
        return self._read(folder, head.config, head.base)

    def _read(self, folder: Path, config: MtpConfig, base: BaseParts) -> DraftHead:
        head = config.build(base, start=False)
        assert isinstance(head, MtpHead)
        _read(_Stored(folder, head.base), head)
        return head.eval()

    def dtype(self, head: DraftHead) -> torch.dtype:
        assert isinstance(head, MtpHead)
        stored = _Stored(_folder(head.base), head.base)
        return stored.get(stored.layout.own["eh_proj.weight"]).dtype

    def variants(self, head: DraftHead) -> Mapping[str, DraftHead]:
        assert isinstance(head, MtpHead)
        return {
            f"it reads states {'before' if before else 'after'} the base's final norm, and its own output "
            f"{'after' if after else 'before'} its last norm": head.reading(before, after)
            for before in (False, True)
            for after in (True, False)
        }

    def export(
        self, head: DraftHead, folder: Path, dtype: torch.dtype | None = None, base_name: str | None = None
    ) -> None:
        self.checkpoint(head, dtype, base_name)  # rejects heads that the format cannot express
        assert isinstance(head, MtpHead)
        source = _folder(head.base)
        stored = _Stored(source, head.base)
        if dtype is not None and dtype != (own := self.dtype(head)):
            raise UserError(f"to={self.name} keeps the checkpoint's dtype {own}; leave out dtype")
        changed = stored.with_dtypes(_native(stored, head))
        files = [path for path in sorted(source.rglob("*")) if path.is_file()]
        require_space(folder, sum(path.stat().st_size for path in files), "the export")
        folder.mkdir(parents=True, exist_ok=True)
        for path in files:
            target = folder / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".safetensors" and (names := changed.keys() & _names(path)):
                with safe_open(path, "pt") as file:
                    metadata = file.metadata()
                save_file({**load_file(path), **{name: changed[name] for name in names}}, target, metadata)
                make_readable(target)
            else:
                shutil.copyfile(path, target)

    def tensors(self, head: Any) -> dict[str, Tensor]:
        return dict(head.named_parameters())


class _Stored:
    """The MTP layer in the files of a checkpoint, for a base of which they are a checkpoint."""

    def __init__(self, folder: Path, base: BaseModel) -> None:
        self.base, self.source = base, str(folder)
        self.files = [path for path in weight_files(str(folder)) if path.suffix == ".safetensors"]
        self.file_of = {name: path for path in self.files for name in _names(path)}
        self.layout = Layout.of(set(self.file_of), base.num_layers, self.source)
        scale = norm_scale(base)
        weight = getattr(base.final_norm, "weight", None)
        # The norms of a family have one class, so the final norm shows if weights are stored as offsets from one.
        self.offset = 0.0 if weight is None else round(float((scale - weight.float()).mean()))

    def get(self, name: str) -> Tensor:
        with safe_open(self.file_of[name], "pt") as file:
            if (dtype := file.get_slice(name).get_dtype()) not in FLOATS:
                raise UserError(f"{self.source} stores {name} as {dtype}; use one without quantised weights")
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def with_dtypes(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``tensors`` in the dtypes in which the checkpoint has them; refuse other names and shapes."""
        expected = {*self.layout.own.values(), *self.layout.block}
        if wrong := sorted(tensors.keys() ^ expected):
            raise UserError(f"{self.source} and the head differ in {', '.join(wrong[:4])}; export it for its own base")
        result = {}
        for name, tensor in tensors.items():
            stored = self.get(name)
            if stored.shape != tensor.shape:
                what = f"{self.source} has {name} {list(stored.shape)}, the head {list(tensor.shape)}"
                raise UserError(f"{what}; export it for its own base")
            offset = self.offset if name in (self.layout.own[f"{norm}.weight"] for norm in NORMS) else 0.0
            # Adding an offset rounds, so a weight that was not trained keeps its stored value.
            same = stored.float() + offset == tensor
            result[name] = torch.where(same, stored, (tensor - offset).to(stored.dtype)).contiguous()
        return result


def _count(config: dict[str, Any]) -> int:
    """Return the number of MTP layers that the config of a checkpoint states, or 0."""
    text = config.get("text_config")
    counts = [(text if isinstance(text, dict) else config).get(key) for key in COUNTS]
    return max((count for count in counts if isinstance(count, int)), default=0)


@torch.no_grad()
def _read(stored: _Stored, head: MtpHead) -> None:
    """Copy the tensors of an MTP layer into ``head``; refuse missing and unknown names, and other shapes."""
    base, layout = stored.base, stored.layout
    for name, native in layout.own.items():
        tensor, parameter = stored.get(native), head.get_parameter(name)
        if tensor.shape != parameter.shape:
            what = f"{stored.source} has {native} {list(tensor.shape)}, expected {list(parameter.shape)}"
            raise UserError(f"{what}; name the base that it belongs to")
        parameter.copy_(tensor.float() + (stored.offset if name.removesuffix(".weight") in NORMS else 0.0))
    for native in layout.copies:
        weight = base.embedding if native.endswith("embed_tokens.weight") else base.lm_head.weight
        PublishedCheckpoint({}, {native: stored.get(native)}, stored.source).require_base_tensor(base, native, weight)
    (block,) = head.layers
    target = f"model.layers.{head.source}."
    renamed = {f"^{re.escape(layout.prefix)}": target}
    tensors = CheckpointTensors(stored.files, meta_model(base.config, base.model_config), renamed, layout.block)
    state = block.state_dict()
    if unknown := sorted(tensors.unused):
        what = f"{stored.source} has MTP tensors that a {type(block).__name__} has not: {', '.join(unknown[:4])}"
        raise UserError(f"{what}; drafthead reads MTP layers of the class of the base's last layer")
    for name, value in state.items():
        value.copy_(tensors.read(target + name))
    tensors.close()


def _native(stored: _Stored, head: MtpHead) -> dict[str, Tensor]:
    """Return the tensors of ``head`` under the names of the checkpoint."""
    base, layout = stored.base, stored.layout
    (block,) = head.layers
    target = f"model.layers.{head.source}."
    model = meta_model(base.config, base.model_config)
    with_model_names = {target + name: tensor.detach().cpu() for name, tensor in block.state_dict().items()}
    reverted = revert_weight_conversion(model, with_model_names)
    blocks = {layout.prefix + name.removeprefix(target): tensor for name, tensor in reverted.items()}
    return {**blocks, **{name: head.get_parameter(ours).detach().cpu() for ours, name in layout.own.items()}}


def _folder(base: BaseParts) -> Path:
    if not base.config.has_whole_tensors:
        what = f"{base.name} is not a checkpoint in safetensors without an adapter"
        raise UserError(f"{what}, so it holds no MTP layer; name one that does with base.name=...")
    return weight_files(base.config.folder(), base.config.revision)[0].parent


def _names(path: Path) -> set[str]:
    with safe_open(path, "pt") as file:
        return set(file.keys())
