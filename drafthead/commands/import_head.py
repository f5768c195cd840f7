"""Convert a published head to a head folder of drafthead, for the base for which it drafts.

usage: drafthead import from=DIR base=NAME out=DIR [key=value ...]

drafthead import from=user/medusa-vicuna-7b base=lmsys/vicuna-7b-v1.3 out=outputs/medusa_vicuna/head
drafthead eval head=outputs/medusa_vicuna/head suite=mt_bench

formats: {formats}
"""

import textwrap
from dataclasses import field
from pathlib import Path
from typing import Any

from drafthead.commands.command import command, new_folder
from drafthead.data.utils.display import Display
from drafthead.data.utils.errors import UserError
from drafthead.data.utils.settings import settings
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.formats import all_formats, format_named, recognise
from drafthead.models.formats.checkpoint import CONFIG, contents, read_config
from drafthead.models.formats.format import BASE_NAME, published_name
from drafthead.models.heads.parts.head_folder import read_trees, resolve_folder

OURS = ("format", "settings", "base", "draft_vocab")
"""Keys by which a ``config.json`` of drafthead itself is recognised."""


@settings(kw_only=True)
class ImportConfig:
    """Settings of ``drafthead import``."""

    from_: str
    """Published head: a folder or Hub repository (``user/name``) with safetensors. Pickle files are never loaded."""
    out: str
    """Folder to write; it must be empty or not exist yet."""
    base: BaseConfig = field(default_factory=BaseConfig)
    format: str = "auto"
    """Format of the published head; ``drafthead import --help`` lists all formats. ``auto`` recognises it from
    config.json."""
    config: dict[str, Any] = field(default_factory=dict)
    """Values for keys that are missing or wrong in the published config.json. For example ``config.exit_layer=2`` for
    Kangaroo."""
    revision: str | None = None
    """Commit, tag or branch of the Hub repository. With null, the newest commit of its main branch."""

    def __post_init__(self) -> None:
        if not self.base.name and not self.base.random:
            raise ValueError("base is missing: name the base model that the head drafts for, base=NAME")
        if self.format != "auto":
            format_named(self.format)


@command(
    "import",
    ImportConfig,
    __doc__.format(formats=textwrap.fill(", ".join(all_formats()), 111, subsequent_indent=" " * 9)),
)
def main(config: ImportConfig) -> None:
    """Read the published head, attach it to the base, and save it as a drafthead head."""
    folder, published_config = _open_published(config.from_, config.revision)
    content = {**published_config, **config.config}
    file_format = recognise(content, str(folder)) if config.format == "auto" else format_named(config.format)
    checkpoint = file_format.read(folder, config.config)
    display = Display()
    with new_folder(Path(config.out)) as tmp_path:
        with display.stage(f"base {config.base.name or 'random'}"):
            base = BaseModel.load(config.base, progress=display.line)
        with display.stage(f"{file_format.title} from {config.from_}"):
            head = file_format.attach(checkpoint, base)
            read_trees(folder, head)
            head.save_pretrained(tmp_path)
    for note in checkpoint.notes:
        display.line(f"   note: {note}")
    named = content.get(BASE_NAME)
    if named and named != base.name and not (base.config.adapter is None and named == published_name(base)):
        note = f"it was published for {named} and is attached to {base.name}"
        display.line(f"   note: {note}; if the two bases differ, acceptance will be low")
    parameters = sum(p.numel() for p in head.parameters()) / 1e6
    display.line(f"{head.depth} draft positions, {parameters:.2f} M parameters, drafting for {base.name}: {config.out}")


def _open_published(source: str, revision: str | None) -> tuple[Path, dict[str, Any]]:
    """Return a published head's folder (downloaded if it is on the Hub) and its config; reject drafthead heads."""
    path = Path(source)
    if not path.is_dir() and (path.exists() or path.is_absolute() or source.count("/") != 1):
        what = "that is a file" if path.exists() else "there is no such folder"
        raise UserError(
            f"no published head at {source}: {what}; from= takes a folder with config.json and safetensors, or a Hub "
            "repository (user/name)"
        )
    folder = resolve_folder(source, revision)
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"{folder} holds no published head: it has no {CONFIG} ({contents(folder)}); name the folder that has it"
        )
    content = read_config(folder)
    if set(OURS) <= set(content):
        raise UserError(
            f"{folder} is a drafthead head already; use it directly, as in `drafthead eval head={folder}`, or publish "
            f"it with `drafthead export head={folder} to=FORMAT out=DIR`"
        )
    return folder, content
