"""``drafthead export head=DIR to=FORMAT out=DIR``: write and check a head in a published format.

The checkpoint is written next to ``out``, read back, and compared with the head on fixed prompts. It is renamed to
``out`` only if it drafts like the head (``eval/lossless/export_check.py``).
"""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from rich.table import Table

from drafthead.commands.command import command, new_folder
from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import write_json
from drafthead.data.utils.settings import PositiveShare, settings
from drafthead.eval.lossless.export_check import ExportCheck, check_export, training_estimate
from drafthead.eval.prompts.suites import load_suite
from drafthead.eval.trees.answers import base_answers, read_texts
from drafthead.models.base.base_config import BaseConfig, Dtype
from drafthead.models.formats import FORMATS, format_for, format_named, listed
from drafthead.models.formats.format import Format, published_name
from drafthead.models.heads.parts.draft_head import DraftHead, config_class
from drafthead.models.heads.parts.head_folder import read_head_config, resolve_folder, write_trees
from drafthead.models.heads.parts.loading import load_base_and_head

USAGE = """\
usage: drafthead export head=DIR to=FORMAT out=DIR [setting=value ...]

  head=DIR          head folder (outputs/NAME/head) or Hub repository (user/name)
  to=FORMAT         {formats}
  out=DIR           a folder that does not exist yet
  dtype=auto        of the weights: auto (the head's own), float32, bfloat16, float16
  base=NAME         base model; by default the one that the head was trained for (base.dtype=..., and so on, too)
  vocabulary=own    of a Medusa head on the base's output head: own, or full, which vLLM needs (to=vllm_medusa)
  base_gguf=TYPE    with a GGUF the base beside it, as base.gguf: f32, f16, bf16, q8_0, q4_0, q4_1
  base_name=NAME    what engines download the base by; by default its name here. Bases with an adapter need one
  suite=builtin     prompts to check the export on; limit=N takes fewer, max_new_tokens=64 is the length of an answer
  texts=FILE        answers to check it on instead, a .jsonl file that `drafthead replay save=FILE` wrote
  estimate_tolerance=0.2   how far accuracy may fall below the estimate of training, which saw other prompts
"""
CHECK_FILE = "export_check.json"


@settings(kw_only=True)
class ExportConfig:
    """Settings of the command."""

    head: str
    to: str
    out: str
    dtype: Dtype = "auto"
    base: BaseConfig = field(default_factory=BaseConfig)
    base_name: str | None = None
    vocabulary: Literal["own", "full"] = "own"
    base_gguf: str | None = None
    suite: str = "builtin"
    limit: int | None = None
    max_new_tokens: Annotated[int, Field(ge=8)] = 64
    texts: str | None = None
    seed: int = 0
    estimate_tolerance: PositiveShare = 0.2

    def __post_init__(self) -> None:
        if self.base_gguf is not None and not format_named(self.to).base_file:
            fitting = " or ".join(f"to={name}" for name, target in FORMATS.items() if target.base_file)
            raise ValueError(f"base_gguf needs {fitting}, got to={self.to}")


@command("export", ExportConfig, USAGE.format(formats=listed(20)))
def main(config: ExportConfig) -> None:
    """Write the head, read it back, and keep it only if it drafts like the head."""
    target = format_named(config.to)
    if not config.texts:
        load_suite(config.suite, config.limit, config.seed)  # a wrong name fails before the model loads
    texts = read_texts(Path(config.texts)) if config.texts else []
    display = Display()
    with new_folder(Path(config.out)) as folder:
        format_for(config.to, config_class(read_head_config(resolve_folder(config.head))["head_type"]))
        with display.stage(f"head {config.head}"):
            base, head = load_base_and_head(config.head, config.base)
        if config.base_gguf is not None:
            target.check_base(base, config.base_gguf)
        if config.vocabulary == "full":
            head = target.with_full_vocabulary(head)
        dtype = next(head.parameters()).dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        with display.stage(f"write {target.title}"):
            target.export(head, folder, dtype, config.base_name)
            write_trees(folder, head)  # engines ignore it; an import takes it
        with display.stage("check: read back and compare"):
            length = min(config.max_new_tokens, base.max_context // 2)
            texts = texts or base_answers(
                base, suite=config.suite, limit=config.limit, max_new_tokens=length, seed=config.seed
            )
            reloaded, estimate = target.load(folder, base), training_estimate(config.head)
            check = check_export(base, head, reloaded, texts, dtype, estimate, config.estimate_tolerance)
        display.console.print(_table(target, head, check))
        if failures := check.failures():
            raise UserError(f"the export to {target.name} failed its check and was removed: {'; '.join(failures)}")
        write_json(folder / CHECK_FILE, {"format": config.to, "texts": config.texts or config.suite, **check.record()})
        if config.base_gguf is not None:
            with display.stage(f"the base as {target.base_file} ({config.base_gguf})"):
                target.write_base(base, folder / target.base_file, config.base_gguf)
    display.line(f"written: {config.out}")
    named = config.base_name or published_name(base)
    for engine in target.engines_for(head):
        display.line(f"   {engine.name}: {engine.support}")
        drafts, base_file = min(head.depth, head.config.trained_positions), f"{config.out}/{target.base_file}"
        if line := engine.command(named, str(config.out), drafts, None if config.base_gguf is None else base_file):
            display.line(f"      {line}")


def _table(target: Format, head: DraftHead, check: ExportCheck) -> Table:
    trained = "" if check.estimate is None else f" (training {check.estimate:.0%})"
    cells = {
        "format": target.name,
        "loaded by": ", ".join(target.loaded_by(head)) or "no current engine",
        "parameters": f"{sum(p.numel() for p in head.parameters()) / 1e6:.2f} M",
        "dtype": str(check.dtype).removeprefix("torch."),
        "mean accepted length": f"{check.before.mean_accepted_length:.3f}",
        "exported": f"{check.after.mean_accepted_length:.3f}",
        "logit error": f"{check.logit_error:.1e}",
        "accuracy": f"{check.after.accuracy:.0%}{trained}",
    }
    table = Table(*cells)
    table.add_row(*cells.values())
    return table
