"""The contract of every draft head, with saving and loading.

A head is one file under ``models/heads/`` with a ``DraftHeadConfig`` and a ``DraftHead`` subclass, plus one YAML under
``recipes/head/``. Its type is the name of that file. Training, decoding and evaluation use only this contract.

Shape legend: B batch, T time, N tree nodes, D base width, V target vocabulary, W draft vocabulary.
"""

import hashlib
import json
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from drafthead.data.batch import HiddenStates, LossOutput, TrainBatch
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import disk_errors, file_digest, new_file, write_json
from drafthead.data.utils.settings import check, settings
from drafthead.models.base import adapter
from drafthead.models.base.base_config import ADAPTER
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.lm_head import LMHead
from drafthead.models.base.lora import LoraSettings
from drafthead.models.base.meta import meta_base
from drafthead.models.decoding.growth import StepwiseDrafter
from drafthead.models.heads.parts.head_folder import (
    FORMAT,
    check_base,
    check_parameters,
    draft_ids,
    read_head_config,
    read_trees,
    read_weights,
    resolve_folder,
    write_trees,
)
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.models.kernels.linear import DRAFT_DTYPES, InferenceWeights, inference_copy
from drafthead.models.token_tree import TokenTree

PACKAGE = "drafthead.models.heads"
DraftPositions = Annotated[int, Field(ge=1, le=16)]
"""Draft positions K: the most drafts on a path."""


@settings(kw_only=True)
class DraftHeadConfig(ABC):
    """Settings of a head. A module of ``models/heads/`` has one subclass, and recipes name it by ``head_type``."""

    num_draft_tokens: DraftPositions = 5
    """Draft positions: the largest number of drafts on a path."""
    draft_vocab_size: Annotated[int, Field(ge=16)] | None = None
    """Number of tokens that the head can draft, the most frequent of the answers. With null, the whole vocabulary."""
    draft_dtype: Literal["auto", "bfloat16", "int8"] | None = "auto"
    """Type of the weights for drafting. With ``bfloat16`` or ``int8``, drafting uses copies that are read in half or a
    quarter of the time. Verification does not use them, so exact rules stay exact; near-ties may be drafted
    differently. ``auto`` takes what was faster when the base was loaded. Null drafts with the trained weights, in
    float32."""

    @property
    def head_type(self) -> str:
        """Name of the module under ``models/heads/``."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def depth(self) -> int:
        """Draft positions K."""
        return self.num_draft_tokens

    def inference_dtype(self, base: BaseModel) -> torch.dtype | None:
        """Return the dtype of the weights to draft with for ``base``, or None to draft with the trained weights."""
        if self.draft_dtype == "auto":
            return None if base.kernels is None else base.kernels.drafts_in
        return None if self.draft_dtype is None else DRAFT_DTYPES[self.draft_dtype]

    @property
    def trained_positions(self) -> int:
        """Draft positions that have a term in the loss; ``loss.depth_weights`` has one weight for each."""
        return self.depth

    def drafted_ids(self, vocab_size: int) -> int:
        """Return the size W of the draft vocabulary for a base of ``vocab_size`` ids."""
        return min(self.draft_vocab_size or vocab_size, vocab_size)

    def check_layers(self, num_layers: int) -> None:
        """Raise a UserError if the settings name a layer that a base of ``num_layers`` layers does not have."""
        return

    def lora(self) -> LoraSettings | None:
        """Return the adapters through which the head trains its base, or None if it cannot."""
        return None

    @abstractmethod
    def build(self, base: BaseModel, d2t: Tensor | None = None) -> "DraftHead":
        """Return the untrained head for ``base``; ``d2t`` ([W] int64) lists the draft vocabulary's target ids."""

    def without_weights(self, base: BaseModel) -> "DraftHead":
        """Return the head for a base without weights (``meta_base``), to count parameters and memory."""
        d2t = None if self.draft_vocab_size is None else torch.arange(self.drafted_ids(base.vocab_size))
        with torch.device("meta"):
            return self.build(base, d2t)


class DraftHead(InferenceWeights, StepwiseDrafter):
    """A draft head, attached to the frozen base that it drafts for."""

    reads_base = True

    def __init__(self, config: DraftHeadConfig, base: BaseModel, d2t: Tensor | None) -> None:
        super().__init__()
        self.config = config
        self.base = base
        self.base_identity = base.identity()
        self.tree: TokenTree | None = None
        """Tree calibrated for this head; None before calibration."""
        self.batch_trees: Mapping[int, TokenTree] = {}
        self.progress = 0.0
        """Share of the phase that is done after the current step, in (0, 1]; set by the trainer."""
        self._inference: tuple[Self] | None = None  # in a tuple, so that it is not a submodule
        self._copied_dtype: torch.dtype | None = None
        ids = torch.arange(base.vocab_size, device="cpu") if d2t is None else d2t.to(torch.int64)
        if len(ids) == 0 or int(ids.max()) >= base.vocab_size or int(ids.min()) < 0:
            raise UserError(f"the draft vocabulary must hold ids in [0, {base.vocab_size}), got {ids.tolist()[:4]}...")
        if (repeated := len(ids) - len(set(ids.tolist()))) > 0:
            raise UserError(f"the draft vocabulary must hold different ids, but {repeated} of {len(ids)} are repeated")
        self.d2t: Tensor
        self.register_buffer("d2t", ids.to(base.device))
        t2d = torch.full((base.vocab_size,), -1, dtype=torch.int64, device="cpu")
        t2d[ids] = torch.arange(len(ids), device="cpu")
        self.t2d: Tensor
        self.register_buffer("t2d", t2d.to(base.device), persistent=False)
        self.target_lm_head = base.lm_head if d2t is None else base.lm_head.rows(self.d2t)

    @property
    def depth(self) -> int:
        return self.config.depth

    @property
    def base_fingerprint(self) -> str:
        return self.base.fingerprint

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size

    def identity(self) -> tuple[object, ...]:
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            # Compared as bytes, because NumPy has no bfloat16.
            digest.update(name.encode() + tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return (type(self).__name__, self.config, self.config.inference_dtype(self.base), digest.hexdigest())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the head's weights; for an inference copy, that of the weights it was made from."""
        return self._copied_dtype or next(self.parameters()).dtype

    def inference(self) -> Self:
        """Return a copy with packed weights to draft with; the copy is renewed after training."""
        if self._inference is None:
            twin = inference_copy(self, self.config.inference_dtype(self.base))
            twin._copied_dtype = self.dtype
            self._inference = (twin,)
        return self._inference[0]

    def invalidate(self) -> None:
        self._inference = None

    @abstractmethod
    def output_head(self, k: int) -> LMHead:
        """Return the vocabulary projection of draft position k (0-based)."""

    @abstractmethod
    def loss(self, batch: TrainBatch, base_hidden: HiddenStates, config: LossConfig) -> LossOutput:
        """Return the summed loss and metrics over the batch's trained tokens."""

    @abstractmethod
    def candidate_ranks(self, batch: TrainBatch, base_hidden: HiddenStates, top: int) -> Tensor:
        """Return the rank of the true token among the candidates of every draft position, for tree calibration.

        Returns:
            [B, T, K] int64: 0 if the most likely candidate for ``x_{t+1+k}`` is right, ``top`` if the true token is
            not among the first ``top`` candidates, -1 if position k has no target.
        """

    def checkpointable(self) -> list[tuple[nn.Module, str]]:
        """Return (module, method) pairs whose activations training may recompute; attention itself is left out."""
        return []

    def num_parameters(self) -> int:
        """Return the number of the head's own parameters; those shared with the base are not counted."""
        return sum(parameter.numel() for parameter in self.parameters())

    # Heads that can train their base ---------------------------------------------------------------------------

    def train_base(self, now: bool) -> None:
        """Prepare to train the base; ``now``: in the next phase. The first call creates the adapters."""
        raise NotImplementedError

    def tuned_decoders(self) -> list[nn.Module]:
        """Return the base's layer stacks that have adapters, none before the adapters exist."""
        return []

    def lr_mult(self, parameter: nn.Parameter) -> float:
        """Return the factor on the phase's learning rate for a parameter."""
        return 1.0

    # Saving and loading --------------------------------------------------------------------------------------

    def saved_weights(self) -> dict[str, Tensor]:
        """Return the tensors of ``model.safetensors``: the head's weights, without adapters of the base."""
        return self.state_dict()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json``, ``model.safetensors`` and, once a tree is calibrated, ``tree.json``."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = self.saved_weights()
        config = {
            "format": FORMAT,
            "head_type": self.config.head_type,
            "settings": asdict(self.config),
            "base": self.save_base(folder),
            "draft_vocab": None if len(self.d2t) == len(self.t2d) else len(self.d2t),
        }
        with disk_errors("the head", folder):
            with new_file(folder / "model.safetensors") as tmp_path:
                save_file({k: v.detach().contiguous().cpu() for k, v in weights.items()}, tmp_path)
                config["weights_sha256"] = file_digest(tmp_path)
            write_json(folder / "config.json", config)
        write_trees(folder, self)

    def save_base(self, folder: Path) -> dict[str, Any]:
        """Copy the base's adapter, if any, into the head's folder; return the identity of the base to save."""
        identity = self.base_identity
        if self.base.config.adapter is None:
            return identity
        adapter.copy(Path(self.base.config.adapter), folder / ADAPTER)
        return {**identity, "recipe": {**identity["recipe"], "adapter": ADAPTER}}

    @classmethod
    def from_pretrained(cls, name: str | Path, base: BaseModel, revision: str | None = None) -> Self:
        """Load a head from a folder or a Hub repository and attach it to ``base``.

        Raises:
            UserError: a file is missing, damaged or unsafe, or the head belongs to another base or class.
        """
        folder = resolve_folder(name, revision)
        config = read_head_config(folder)
        check_base(folder, config["base"], base)
        weights = read_weights(folder, config.get("weights_sha256"))
        d2t = draft_ids(folder, config, weights, base.vocab_size)
        settings = _settings(folder, config)
        check_parameters(
            folder, lambda: settings.without_weights(meta_base(base.model.config)).num_parameters(), weights
        )
        head = settings.build(base, d2t)
        try:
            missing, unexpected = head.load_state_dict(weights, strict=False)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise UserError(f"{folder}/model.safetensors does not fit its config: {reason}; copy both again") from None
        if missing or unexpected:
            raise UserError(
                f"{folder}/model.safetensors does not fit its config: missing {missing}, unknown {unexpected}. The two "
                "files are of different heads, or a setting was changed; copy both again"
            )
        read_trees(folder, head)
        if not isinstance(head, cls):
            raise UserError(f"{folder} holds a {type(head).__name__}, not a {cls.__name__}")
        return head.eval()


def head_types() -> list[str]:
    """Return the names of the modules under ``models/heads/``."""
    return [module.name for module in pkgutil.iter_modules(import_module(PACKAGE).__path__) if not module.ispkg]


def config_class(head_type: str) -> type[DraftHeadConfig]:
    """Return the settings class of a head type; only modules under ``models/heads/`` can be named."""
    if head_type not in head_types():
        raise UserError(f"head_type must be one of {', '.join(head_types())}, got {head_type!r}")
    module = import_module(f"{PACKAGE}.{head_type}")
    classes = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, DraftHeadConfig)]
    (config,) = (kind for kind in classes if kind.__module__ == module.__name__)
    return config


def parse_head(node: dict[str, Any]) -> DraftHeadConfig:
    """Return the checked settings of a head from ``{head_type: medusa, num_draft_tokens: 3, ...}``."""
    settings = {**node}
    kind = config_class(str(settings.pop("head_type", "")))
    known = [field.name for field in fields(kind)]
    if unknown := [name for name in settings if name not in known]:
        # A recipe's keys belong to the recipe's head, also if the command line chooses another head.
        raise UserError(
            f"head: {kind.__name__} has no {', '.join(unknown)}; the recipe sets them for another head, or they are "
            f"misspelt (it has {', '.join(known)}). Choose a recipe of this head, or leave them out: "
            f"{' '.join(f'~head.{name}' for name in unknown)}"
        )
    return check(settings, kind, prefix="head")


def _settings(folder: Path, config: dict[str, Any]) -> DraftHeadConfig:
    """Return the settings of a saved head after checking their names, types and limits."""
    if "${" in json.dumps(config["settings"]):
        raise UserError(f"{folder}/config.json has settings that refer to others (${{...}}); copy the head again")
    try:
        return parse_head({**config["settings"], "head_type": config["head_type"]})
    except UserError as error:
        raise UserError(f"{folder}/config.json has bad settings ({error}); copy the head again") from None
