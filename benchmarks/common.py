"""What the benchmarks share: recipes, comma lists, records, a figure of lines, and how bad input ends a script."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import write_json
from drafthead.data.utils.machine import hardware, versions
from drafthead.data.utils.settings import update_overrides
from drafthead.eval.report.plots import new_axes, save_png, short_name, styled
from drafthead.train.config import RunConfig, parse_run


def composed(overrides: Sequence[str]) -> RunConfig:
    """The checked settings that `drafthead train` would run with."""
    try:
        with initialize_config_module("drafthead.recipes", version_base="1.3"):
            return parse_run(compose("train", overrides=update_overrides(list(overrides))))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"{overrides[0]}: {str(error).splitlines()[0]}") from None


def parser(doc: str | None) -> ArgumentParser:
    """For a benchmark that writes a record."""
    found = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    found.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    return found


def at_least(arguments: Namespace, least: int, *names: str) -> None:
    """Refuse numbers below ``least``."""
    for name in names:
        if getattr(arguments, name) < least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(arguments, name)}")


def listed(option: str, text: str, known: Sequence[str]) -> list[str]:
    """A comma list of known names, each once."""
    found = list(dict.fromkeys(part for part in text.split(",") if part))
    unknown = [part for part in found if part not in known]
    if unknown or not found:
        raise UserError(f"--{option} knows {', '.join(known)}, got {', '.join(unknown) or 'nothing'}")
    return found


def numbers(text: str) -> list[int]:
    """The whole numbers above 0 of a comma list."""
    return [int(part) for part in text.split(",") if part.isdigit() and int(part)]


def save_record(arguments: Namespace, benchmark: str, found: dict[str, Any]) -> None:
    """Write the record where ``--json`` says: what was run, when (UTC), how and on what, and then ``found``."""
    if arguments.json:
        given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
        date = datetime.now(UTC).isoformat(timespec="seconds")
        run = {"benchmark": benchmark, "date": date, "arguments": given, "hardware": hardware(), "versions": versions()}
        write_json(arguments.json, run | found)


def trained_steps(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int]]:
    """The rows of metrics.jsonl that are means over training steps, with the number of these steps."""
    done = 0
    for row in rows:
        if "step_ms" in row:
            yield row, row["total_step"] - done
            done = row["total_step"]


@torch.inference_mode()
def generated(model: Any, prompts: Sequence[list[int]], new: int, eos: int | None = None) -> list[list[int]]:
    """transformers' batched greedy ``generate``, padded on the left; without ``eos`` answers have ``new`` tokens."""
    pad, width = eos or 0, max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    least = {"min_new_tokens": new} if eos is None else {}
    ends = {"eos_token_id": eos, "pad_token_id": pad, **least}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **ends)
    answers: list[list[int]] = out[:, width:].tolist()
    return answers


@styled
def draw_lines(
    rows: Sequence[dict[str, Any]],
    line: str,
    x: str,
    y: str,
    xlabel: str,
    ylabel: str,
    path: Path,
    interval: str = "",
    tick: Callable[[int], str] = str,
) -> None:
    """``y``, with an ``interval`` around it, over ``x``, which grows by factors; a line for every value of ``line``."""
    figure, axes = new_axes(height=3.4)
    names = list(dict.fromkeys(row[line] for row in rows))
    for name in names:
        own = [row for row in rows if row[line] == name]
        places = [row[x] for row in own]
        (drawn,) = axes.plot(places, [row[y] for row in own], marker="o", label=short_name(name))
        if interval:
            low, high = zip(*(row[interval] for row in own), strict=True)
            axes.fill_between(places, low, high, color=drawn.get_color(), alpha=0.12, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.margins(x=0.08)  # a wide label of the last place stays inside
    ticks = list(dict.fromkeys(row[x] for row in rows))
    axes.set_xticks(ticks, [tick(place) for place in ticks])
    axes.set(xlabel=xlabel, ylabel=ylabel)
    columns = 2 if max(len(short_name(name)) for name in names) <= 22 else 1  # longer ones do not fit side by side
    axes.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns)
    save_png(figure, path)


def entry_point(main: Callable[[], object]) -> None:
    """Run ``main``; bad input becomes one line on stderr and exit code 2, an interruption 130."""
    try:
        code = main()
    except UserError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None  # as argparse's own
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(code)
