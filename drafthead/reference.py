"""Reference of all settings: ``python -m drafthead.reference > docs/settings.md``."""

import sys
from importlib import import_module

from drafthead.cli import COMMANDS
from drafthead.commands.command import REGISTERED, Registered
from drafthead.data.text.sources import SourceConfig
from drafthead.data.utils.help import settings_table
from drafthead.models.heads.parts.loading import config_class, head_types
from drafthead.train.config import RunConfig

INTRODUCTION = """\
# Settings
All settings of all commands, generated from the code by `python -m drafthead.reference > docs/settings.md`. Every
command takes them as `key=value`. `drafthead COMMAND --help` prints them in short, and `drafthead COMMAND --cfg job`
prints the values that a command would use. A wrong key or value is an error that names the key and its limit.

- `[a,b]` is a list and `null` no value. `base=NAME` is short for `base.name=NAME` except in recipes, where it chooses
  a file of `recipes/base/`.
- In `phases.NAME.KEY`, NAME is a phase of the recipe, such as `distill`.
"""


def commands() -> dict[str, Registered]:
    """Return the settings of every command by its name; ``data`` takes those of ``train``."""
    own = [name for name in COMMANDS if name not in ("train", "data")]
    for name in own:
        import_module(COMMANDS[name][0])
    return {"train": Registered(RunConfig, {})} | {name: REGISTERED[name] for name in own}


def reference() -> str:
    """Return the page, in Markdown."""
    sections = [INTRODUCTION]
    for name, registered in commands().items():
        summary = COMMANDS[name][1]
        sections.append(f"## drafthead {name}\n{summary[0].upper()}{summary[1:]}.\n")
        sections.append(settings_table(registered.cls, spelled=registered.spelled))
    sections.append(
        "## Sources of text and prompts\nKeys of an item of `data.text.sources` and `data.answers.sources`.\n"
    )
    sections.append(settings_table(SourceConfig))
    for name in head_types():
        sections.append(f"## head={name}\n\n{settings_table(config_class(name), 'head.')}")
    return "\n".join(sections)


if __name__ == "__main__":
    sys.stdout.write(reference())
