"""Write the reference pages that are generated from the code into docs/reference.

python benchmarks/reference.py
"""

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

import drafthead
from drafthead.cli import COMMANDS
from drafthead.commands.command import REGISTERED
from drafthead.data.text.sources import SourceConfig
from drafthead.eval.engines.served import READS
from drafthead.models.formats import all_formats
from drafthead.models.heads.parts.loading import config_class
from drafthead.settings.help import describe, first_sentence, sections
from drafthead.train.config import RunConfig

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
RECIPES = ROOT / "recipes"
GENERATED = "<!-- Generated from the code by `python benchmarks/reference.py`. Do not edit. -->"
GROUPS = ("base", "head", "data", "phases", "shard", "tracker", "machine", "budget", "debug")
ENGINES = ("vLLM", "SGLang", "llama.cpp")


def commands_page() -> str:
    lines = [
        "# Commands",
        "Settings are given as `key=value`: [settings](settings.md).",
        "`drafthead COMMAND --help` prints the text below and the settings. `--cfg job` prints the settings that a "
        "command would use.",
        "",
        *_table("command | purpose", ((f"[`{name}`](#drafthead-{name})", COMMANDS[name][1]) for name in COMMANDS)),
    ]
    for name, module in _modules().items():
        usage = REGISTERED[name][1] if name in REGISTERED else str(module.__doc__)
        lines += ["", f"## drafthead {name}", "```", usage.strip("\n"), "```"]
    return "\n".join(lines)


def settings_page() -> str:
    parts = [
        "# Settings\n"
        "All settings of all commands. Every command takes them as `key=value`. `drafthead COMMAND --help` prints them "
        "in short, and `drafthead COMMAND --cfg job` prints the values that a command would use. A wrong key or value "
        "is an error that names the key and its limit.\n\n"
        "- `[a,b]` is a list and `null` no value.\n"
        "- `base=NAME` is short for `base.name=NAME`, except in `train`, where it chooses a file of `recipes/base/`.\n"
        "- In `phases.NAME.KEY`, NAME is a phase of the recipe, such as `distill`.\n"
    ]
    for name, settings_class in commands().items():
        summary = COMMANDS[name][1]
        parts.append(f"## drafthead {name}\n{summary[0].upper()}{summary[1:]}.\n")
        parts.append(_settings_table(settings_class))
    parts.append("## Sources of text and prompts\nKeys of an item of `data.text.sources` and `data.answers.sources`.\n")
    parts.append(_settings_table(SourceConfig))
    parts += [f"## head={name}\n\n{_settings_table(config_class(name), 'head.')}" for name in _heads()]
    return "\n".join(parts).rstrip("\n")


def recipes_page() -> str:
    lines = [
        "# Recipes",
        "`drafthead train recipe=NAME` runs a recipe; `mode=estimate` prints its memory, tokens and disk first. "
        "`recipe=NAME --cfg job` prints all of its settings.",
        "A recipe for another base of the same size takes `base=custom base.name=YOUR_MODEL`. "
        "*Expected* results on SmolLM2 were measured. Those on larger bases are the published ones of the authors.",
    ]
    by_base: dict[str, list[tuple[str, ...]]] = {}
    for path in sorted(RECIPES.glob("recipe/*.yaml")):
        recipe = yaml.safe_load(path.read_text())
        about = recipe["about"]
        row = (f"`{path.stem}`", about["head"], about["machine"], about["expected"])
        by_base.setdefault(_base_of(recipe), []).append(row)
    for base, rows in sorted(by_base.items(), key=lambda item: (item[0] != "smollm2", item[0])):
        lines += ["", f"## base={base}", *_table("recipe | head | machine and time | expected", rows)]
    for group in GROUPS:
        paths = sorted(RECIPES.glob(f"{group}/*.yaml"))
        rows = [(f"`{group}={path.stem}`", _first_comment(path)) for path in paths]
        lines += ["", f"## Choices of {group}", *_table("choice | content", rows)]
    return "\n".join(lines)


def engines_page() -> str:
    lines = [
        "# Engines, heads and formats",
        "Engines that load each head, with the value of `to=` for `drafthead export`. They refer to the newest version "
        "examined, with the settings that [formats](formats.md) lists.",
        "",
    ]
    by_head: dict[str, list[str]] = {name: [] for name in _heads()}
    for name, form in all_formats().items():
        by_head[form.head_config.__module__.rpartition(".")[2]].append(name)
    rows = []
    for head, names in by_head.items():
        if head == "medusa":
            by_head["medusa2"] += names
        loading = [(engine.name, name) for name in names for engine in all_formats()[name].engines if engine.current]
        ways = [", ".join(f"`to={name}`" for at, name in loading if at == engine) or "no" for engine in ENGINES]
        rows.append((f"`{head}`", *ways, ", ".join(f"`{name}`" for name in names) or "none"))
    lines += _table(f"head | {' | '.join(f'{engine} loads' for engine in ENGINES)} | all formats", rows)
    lines += [
        "",
        "`drafthead eval engines=[...]` exports the head, starts the engine, and compares its acceptance:",
        "",
    ]
    lines += _table("engine | formats", ((f"`{k}`", ", ".join(f"`{n}`" for n in v)) for k, v in READS.items()))
    lines += ["", "## Versions that were run", "SGLang, TensorRT-LLM, TGI, and vLLM on a GPU were not run."]
    for month, runs in engine_runs().items():
        rows = [(engine, run, f"`{call}`", ", ".join(map(_record, records))) for engine, run, call, *records in runs]
        lines += ["", f"### {month}", "", *_table("engine | what was run, on a CPU | command | record", rows)]
    for name, form in all_formats().items():
        files = ", ".join(f"`{file}`" for file in ("config.json", form.weights_file, form.base_file) if file)
        lines += ["", f"## to={name}", f"{form.title}. Files: {files}.", ""]
        lines += _table("engine | support", ((engine.name, engine.support) for engine in form.engines))
        values = {"base": "BASE", "folder": "FOLDER", "drafts": "N", "nodes": "N_PLUS_1", "base_file": "BASE.gguf"}
        values["dtype"] = "DTYPE"
        served = [engine.serve.format(**values) for engine in form.engines if engine.current and engine.serve]
        lines += ["", "```", *served, "```"] if served else []
    return "\n".join(lines)


def api_page() -> str:
    names = sorted((name for name in drafthead.__all__ if name != "__version__"), key=lambda name: name[0].isupper())
    members = {name: getattr(drafthead, name) for name in names}
    lines = ["# Python", "Names of `import drafthead`. [Generate](../guides/generate.md) has examples.", ""]
    lines += _table("name | what", ((_call(name, member), _summary(member)) for name, member in members.items()))
    for name, member in members.items():
        lines += ["", f"## drafthead.{name}", f"::: {member.__module__}.{member.__name__}"]
    return "\n".join(lines)


PAGES = {
    "commands": commands_page,
    "settings": settings_page,
    "recipes": recipes_page,
    "engines": engines_page,
    "api": api_page,
}


def pages() -> Iterator[tuple[Path, str]]:
    for name, make in PAGES.items():
        lines = [_wrapped(line) for line in make().split("\n")]
        yield FOLDER / f"{name}.md", "\n".join([GENERATED, *lines, ""])


def commands() -> dict[str, type[Any]]:
    """Return the settings class of every command by name. ``data`` has those of ``train``."""
    return {"train": RunConfig} | {name: REGISTERED[name][0] for name in _modules() if name not in ("train", "data")}


def _call(name: str, member: Any) -> str:
    return f"`{name}({', '.join(inspect.signature(member).parameters)})`"


def _summary(member: Any) -> str:
    return f"{first_sentence(' '.join((inspect.getdoc(member) or '').split()))}."


def _modules() -> dict[str, ModuleType]:
    return {name: import_module(module) for name, (module, _) in COMMANDS.items()}


def _heads() -> list[str]:
    """Return the head types of this checkout, by its files: imported modules could include heads that tests add."""
    return sorted(path.stem for path in (ROOT / "models" / "heads").glob("[a-z]*.py"))


def _base_of(recipe: dict[str, Any]) -> str:
    """Return the ``base`` that a recipe, or the recipe on which it builds, chooses."""
    for entry in recipe["defaults"]:
        if isinstance(entry, dict) and "override /base" in entry:
            return str(entry["override /base"])
    built_on = next(entry for entry in recipe["defaults"] if entry != "_self_")
    return _base_of(yaml.safe_load((RECIPES / "recipe" / f"{built_on}.yaml").read_text()))


def _first_comment(path: Path) -> str:
    """Return the first sentence of the comment at the head of a YAML file; without a comment, the file's settings."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    text = " ".join(line.removeprefix("#").strip() for line in lines if not line.startswith("# @package"))
    settings = ", ".join(f"{key}: {value}" for key, value in yaml.safe_load(path.read_text()).items())
    return (text or settings).split(". ")[0].rstrip(".")


def engine_runs() -> dict[str, list[list[str]]]:
    """Return the rows of ``engine_runs.yaml`` by month."""
    months: dict[str, list[list[str]]] = yaml.safe_load((ROOT / "benchmarks" / "engine_runs.yaml").read_text())
    return months


def _record(name: str) -> str:
    """Return a link to a page or a JSON file of docs/, and the path of any other file."""
    path = name.removeprefix("docs/")
    return f"`{name}`" if path == name else f"[{path.rpartition('/')[2]}](../{path})"


def _settings_table(cls: Any, prefix: str = "") -> str:
    """Return the settings of a class as Markdown tables, one per nested class, with their whole docstrings."""
    tables: list[str] = []
    for section, group in sections(describe(cls, prefix)).items():
        rows = [f"**{section}**", ""] if section and f"{section}." != prefix else []
        rows += ["| setting | default | limit | meaning |", "|---|---|---|---|"]
        for setting in group:
            default = "required" if setting.default is None else f"`{setting.default}`" if setting.default else ""
            cells = (f"`{setting.key}`", default, setting.limit, setting.help.replace("``", "`"))
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        tables += ["\n".join(rows) + "\n"] if group else []
    return "\n".join(tables)


def _wrapped(line: str) -> str:
    """Wrap a line of prose at 120 characters; return tables, headings and code unchanged."""
    is_prose = len(line) > 120 and re.match(r"[A-Z`*]", line)
    return textwrap.fill(line, 120, break_long_words=False, break_on_hyphens=False) if is_prose else line


def _table(header: str, rows: Iterable[tuple[str, ...]]) -> list[str]:
    rule = "|".join("---" for _ in header.split(" | "))
    cells = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows)
    return [f"| {header} |", f"|{rule}|", *(f"| {row} |" for row in cells)]


if __name__ == "__main__":
    for path, text in pages():
        path.write_text(text, encoding="utf-8")
