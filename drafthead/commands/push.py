"""Upload a head to the Hugging Face Hub: config, weights, tree, card, evaluation and figure.

usage: drafthead push head=DIR repo=user/name [private=true]

drafthead push head=outputs/medusa_smollm2/head repo=user/medusa-smollm2

Log in with HF_TOKEN or `hf auth login`. The repository is created if it does not exist. Files that it already has are
not sent again.
"""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from drafthead.commands.command import command
from drafthead.errors import UserError
from drafthead.files.hub import HubConfig, push, require_login
from drafthead.models.heads.parts.head_folder import read_head_config, write_custom_generate
from drafthead.settings.schema import settings
from drafthead.system.display import Display
from drafthead.train.publish.card import minimal_card


@settings(kw_only=True)
class PushConfig(HubConfig):
    """Settings of ``drafthead push``."""

    head: str
    """Head folder to upload (``outputs/NAME/head``): config, weights, tree, card, evaluation and figure."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repo is None:
            raise ValueError("repo is missing; name the repository on the Hub, repo=user/name")


@command("push", PushConfig, __doc__)
def main(config: PushConfig) -> None:
    folder, display = Path(config.head), Display()
    if not folder.is_dir():
        raise UserError(f"no head folder at {folder}; give a folder on this machine (outputs/NAME/head)")
    if not (folder / "config.json").exists() and (folder / "head" / "config.json").exists():
        raise UserError(f"{folder} is a run folder, not a head folder; give head={folder / 'head'}")
    read_head_config(folder)
    try:
        with safe_open(folder / "model.safetensors", "pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / 'model.safetensors'} cannot be read ({error}); copy the head again") from None
    require_login("drafthead push")
    if not (folder / "README.md").exists():  # of an imported head, or of a run that did not get to its end
        minimal_card(folder)
    write_custom_generate(folder)  # of a head of an earlier version
    with display.stage(f"upload {folder} to the Hub"):
        address = push(folder, str(config.repo), private=config.private, log=display.line)
    display.line(f"pushed: {address}")
