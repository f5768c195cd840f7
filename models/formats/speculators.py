"""EAGLE-3 in the layout of vLLM's ``speculators`` library: one folder that ``vllm serve FOLDER`` serves by itself.

The tensors are those of to=eagle3. The config names the base ("verifier") and the number of drafts, so that vLLM needs
no other argument. There is no ``model_type``, because vLLM 0.32.0 would look for a model of that name. Layer ids,
``norm_before_fc`` and ``norm_output`` are at the top level, where vLLM reads them. ``norm_before_residual`` is always
written, because the library's default is true.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from drafthead.models.formats.checkpoint import PublishedCheckpoint
from drafthead.models.formats.eagle3 import LAYER_IDS, Eagle3Format
from drafthead.models.formats.format import BASE_NAME
from drafthead.models.heads.eagle3 import Eagle3Head
from drafthead.models.heads.parts.draft_head import DraftHead

TYPE = "speculators_model_type"
LAYER = "transformer_layer_config"
METHODS = "speculators_config"


class SpeculatorsFormat(Eagle3Format):
    """Format of EAGLE-3 heads for the ``speculators`` library: ``config.json`` and ``model.safetensors``."""

    name = "speculators"
    title = "EAGLE-3 (speculators, for vLLM)"
    other_keys = Eagle3Format.other_keys | {TYPE, LAYER, METHODS}
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {**Eagle3Format.only, "model_type": ("llama", "qwen3")}
    sections: ClassVar[Mapping[str, str]] = {LAYER: ".*", **Eagle3Format.sections}

    def config(self, head: Eagle3Head) -> dict[str, Any]:
        config = super().config(head)
        outer = ["architectures", "draft_vocab_size", "target_hidden_size", "norm_before_residual"]
        outer += ["norm_before_fc", "fc_norm", "norm_output", "num_tokens", "ttt_steps", LAYER_IDS]
        layer = {key: value for key, value in config.items() if key not in outer and key != "eagle_config"}
        return {
            **{key: config[key] for key in outer},
            "architectures": ["Eagle3Speculator"],
            TYPE: "eagle3",
            LAYER: layer,
            METHODS: {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": head.config.trained_positions,
                        "verifier_accept_k": 1,
                    }
                ],
                "verifier": {"name_or_path": "", "architectures": list(head.base.model_config.architectures or [])},
            },
        }

    def checkpoint(self, head: DraftHead, dtype: torch.dtype | None, base_name: str | None) -> PublishedCheckpoint:
        checkpoint = super().checkpoint(head, dtype, base_name)
        checkpoint.config[METHODS]["verifier"]["name_or_path"] = checkpoint.config[BASE_NAME]
        return checkpoint

    def matches(self, config: dict[str, Any]) -> bool:
        return config.get(TYPE) == "eagle3"

    def normalize(self, checkpoint: PublishedCheckpoint) -> PublishedCheckpoint:
        """Take the base's name and the number of drafts from ``speculators_config``, and fill in vLLM's default."""
        config, methods = dict(checkpoint.config), checkpoint.config.get(METHODS) or {}
        given = {
            "num_tokens": (methods.get("proposal_methods") or [{}])[0].get("speculative_tokens"),
            BASE_NAME: (methods.get("verifier") or {}).get("name_or_path"),
        }
        config = {key: value for key, value in given.items() if value is not None} | config
        notes = []
        if "norm_before_residual" not in config:
            config["norm_before_residual"] = True
            notes = ["its config.json has no norm_before_residual; true is assumed, as vLLM does"]
        if config.get("fc_norm") and "norm_output" not in config:  # speculators trains both together, as EAGLE-3.1
            notes.append("its config.json has no norm_output; false is assumed, as vLLM does")
        return super().normalize(checkpoint.updated(*notes, config=config))

    def settings(self, checkpoint: PublishedCheckpoint) -> dict[str, Any]:
        return {**super().settings(checkpoint), "qk_norm": checkpoint.config.get("model_type") == "qwen3"}
