"""Heads without an export: drafthead's own code drafts with them inside vLLM (``drafthead/engines/in_vllm``)."""

import shlex

from drafthead.engines.environment import engine_python
from drafthead.engines.vllm import proposer_arguments
from drafthead.models.base.parts import BaseParts
from drafthead.models.formats.format import dtype_name, published_name, without_gpu
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.system.devices import accelerator_name


def drafts_in_vllm(head: DraftHead) -> bool:
    """Return True if drafthead's code drafts with ``head`` inside vLLM: the head needs none of the base's layers, and
    vLLM loads the base as we do."""
    return not head.config.needs_layers and head.base.config.has_whole_tensors


def proposer_lines(head: DraftHead, folder: str) -> list[str]:
    """Return commands that serve ``head``, saved in ``folder``, in vLLM without an export; [] if vLLM cannot."""
    if not drafts_in_vllm(head):
        return []
    base: BaseParts = head.base
    arguments, variables = proposer_arguments(folder, min(head.depth, head.config.trained_positions))
    command = f"vllm serve {shlex.join([published_name(base), '--dtype', dtype_name(base), *arguments])}"
    command = (without_gpu(command, base, engine_python()) if accelerator_name() is None else "") or command
    words = " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items())
    return [f"   drafthead serve {shlex.quote(f'head={folder}')}", f"   {words} {command}"]
