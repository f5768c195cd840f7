"""``drafthead export head=DIR to=FORMAT out=DIR``: a head as engines and other projects publish them, proven to work.

The artefact is written beside ``out``, read back, and replayed on fixed prompts; it takes its name only when it drafts
like the head (``eval/export_gate.py``).
"""

import shutil
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING
from rich.table import Table

from drafthead.commands.settings import claim, read_settings
from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import write_json
from drafthead.eval.lossless.export_check import GateResult, run_gate, training_estimate
from drafthead.eval.prompts.suites import load_suite
from drafthead.eval.trees.texts import Text, plain_answers, read_texts
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.config import DTYPES, BaseConfig
from drafthead.models.formats import FORMATS, format_named
from drafthead.models.formats.contract import Format
from drafthead.models.heads.common.contract import DraftHead
from drafthead.models.heads.common.loading import load_base_and_head

USAGE = """\
usage: drafthead export head=DIR to=FORMAT out=DIR [setting=value ...]

  head=DIR          head folder (outputs/NAME/head) or Hub repository (user/name)
  to=FORMAT         {formats}
  out=DIR           a folder that does not exist yet
  dtype=auto        of the weights: auto (the head's own), float32, bfloat16, float16
  base=NAME         base model; by default the one that the head was trained for (base.dtype=..., and so on, too)
  base_name=NAME    what engines download the base by; by default its name here. Bases with an adapter need one
  suite=builtin     prompts that the gate replays; limit=N takes fewer, max_new_tokens=64 is the length of an answer
  texts=FILE        answers to replay instead, a .jsonl file that `drafthead replay --save` wrote
  estimate_tolerance=0.2   how far accuracy may fall below the estimate of training, which saw other prompts
"""
GATE_FILE = "drafthead_gate.json"


@dataclass(kw_only=True)
class ExportConfig:
    """Settings of the command."""

    head: str = MISSING
    to: str = MISSING
    out: str = MISSING
    dtype: str = "auto"
    base: BaseConfig = field(default_factory=BaseConfig)
    base_name: str | None = None
    suite: str = "builtin"
    limit: int | None = None
    max_new_tokens: int = 64
    texts: str | None = None
    seed: int = 0
    estimate_tolerance: float = 0.2

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {list(DTYPES)}, got {self.dtype!r}")
        if self.max_new_tokens < 8:
            raise ValueError(f"max_new_tokens must be at least 8, got {self.max_new_tokens}")
        if not 0 < self.estimate_tolerance <= 1:
            raise ValueError(f"estimate_tolerance must be in (0, 1], got {self.estimate_tolerance}")


def main() -> None:
    """Entry point."""
    usage = USAGE.format(formats=", ".join(FORMATS))
    try:
        _export(read_settings(sys.argv[1:], ExportConfig, usage))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    except OSError as error:  # a full disk, say: the message names the file
        raise SystemExit(f"error: {error}; choose another folder (out=...)") from None


def _export(config: ExportConfig) -> None:
    wanted = format_named(config.to)
    out = Path(config.out)
    if not config.texts:
        load_suite(config.suite, config.limit, config.seed)  # a wrong name fails before the model loads
    texts = read_texts(Path(config.texts)) if config.texts else []
    aside = claim(out)
    display = Display()
    try:
        with display.stage(f"head {config.head}"):
            base, head = load_base_and_head(config.head, config.base)
        dtype = next(head.parameters()).dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        with display.stage(f"write {wanted.title}"):
            wanted.export(head, aside, dtype, config.base_name)
            if head.tree is not None:  # engines ignore it; an import takes it
                choices = [list(path) for path in head.tree.paths[1:]]
                write_json(aside / "tree.json", {"choices": choices, "confidence_threshold": head.confidence_threshold})
        with display.stage("gate: read back and replay"):
            texts = texts or _plain_answers(base, config)
            estimate = training_estimate(config.head)
            reloaded = wanted.load(aside, base)
            result = run_gate(base, head, reloaded, texts, dtype, estimate, config.estimate_tolerance)
        display.console.print(gate_table(wanted, head, result))
        if failures := result.failures():
            raise UserError(f"the export to {wanted.name} failed its gate and was removed: {'; '.join(failures)}")
        write_json(aside / GATE_FILE, gate_record(config, result))
        if out.exists():
            out.rmdir()
        aside.replace(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    display.line(f"written: {out}")
    for engine in wanted.engines_for(head):
        display.line(f"   {engine.name}: {engine.support}")


def gate_table(wanted: Format, head: DraftHead, result: GateResult) -> Table:
    """What was compared, as printed."""
    shown = Table("format", "loaded by", "parameters", "dtype", "tokens a step", "exported", "logit error", "accuracy")
    loaded = ", ".join(wanted.loaded_by(head)) or "no current engine"
    parameters = sum(p.numel() for p in head.parameters())
    trained = "" if result.estimate is None else f" (training {result.estimate:.0%})"
    shown.add_row(
        wanted.name,
        loaded,
        f"{parameters / 1e6:.2f} M",
        str(result.dtype).removeprefix("torch."),
        f"{result.before.mean_accepted_tokens:.3f}",
        f"{result.after.mean_accepted_tokens:.3f}",
        f"{result.logit_error:.1e}",
        f"{result.after.accuracy:.0%}{trained}",
    )
    return shown


def gate_record(config: ExportConfig, result: GateResult) -> dict[str, Any]:
    """The same for the artefact's folder."""
    return {
        "format": config.to,
        "dtype": str(result.dtype).removeprefix("torch."),
        "texts": config.texts or config.suite,
        "mean_accepted_tokens": {
            "head": result.before.mean_accepted_tokens,
            "exported": result.after.mean_accepted_tokens,
        },
        "logit_error": result.logit_error,
        "first_position_accuracy": {
            "head": result.before.accuracy,
            "exported": result.after.accuracy,
            "training": result.estimate,
        },
    }


def _plain_answers(base: BaseModel, config: ExportConfig) -> list[Text]:
    """The base's greedy answers to the gate's prompts."""
    wanted = Namespace(
        suite=config.suite,
        limit=config.limit,
        seed=config.seed,
        temperature=0.0,
        max_new_tokens=min(config.max_new_tokens, base.max_context // 2),
    )
    return plain_answers(base, wanted)


if __name__ == "__main__":
    main()
