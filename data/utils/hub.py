"""Draft heads on the Hugging Face Hub: uploads that are repeated, downloads of safetensors and JSON alone.

``HF_TOKEN`` (or ``hf auth login``) says who uploads, ``HF_ENDPOINT`` where to; both are huggingface_hub's own.
"""

import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported lazily

from drafthead.data.utils.errors import UserError, one_line
from drafthead.data.utils.files import safe_join, write_atomic

PICKLES = (".pt", ".bin", ".pth", ".ckpt", ".pkl", ".pickle")
"""Files that can run code when they are loaded; none is ever downloaded or read."""
DOWNLOADED = ("*.json", "*.safetensors", "*.md")
UPLOADED = (
    "config.json", "model.safetensors", "tree.json", "adapter/*.json", "adapter/*.safetensors",
    "README.md", "eval.json", "training_loss.png",
)  # fmt: skip
"""What a head consists of. Nothing else of its folder is uploaded; what a new head lacks of it is removed there."""
REPOSITORY = "<this repository or folder>"
"""Stands in a model card for the repository's name until that is known."""
RETRY_WAITS = (2.0, 10.0, 60.0)
"""Seconds before each further attempt at an upload; within one, the client repeats single requests itself."""
TEMPORARY_STATUS = (408, 429)
"""Client errors that pass by themselves, as all server errors do."""


@dataclass(kw_only=True)
class HubConfig:
    """The repository of a run's head."""

    repo: str | None = None
    """``user/name``, or ``name`` under the token's own account; None takes the run's name."""
    private: bool = False
    """Make the repository private; one that is public already is then refused."""

    def __post_init__(self) -> None:
        if self.repo is not None:
            try:
                validate_repo_id(self.repo)
            except HFValidationError as error:
                raise ValueError(f"hub.repo must be like user/name, got {self.repo!r} ({one_line(error)})") from None


def require_login(purpose: str) -> None:
    """Check that there is a token, and where the Hub can be reached, that it may write.

    A Hub that cannot be reached now is no error: it may be up again by the time of the upload. ``purpose`` is for the
    message.
    """
    how = "set HF_TOKEN to a token that may write, or run `hf auth login`"
    if get_token() is None:
        raise UserError(f"{purpose} needs a login to the Hub, and there is none: {how}")
    try:
        account = HfApi().whoami()
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise UserError(f"{purpose}: the Hub does not accept the token it was given; {how}") from None
        return
    except Exception:  # of the HTTP library below the client, which is another one in other versions
        return
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(f"{purpose}: the token of {account.get('name')} may only read; {how}")


def push(
    folder: Path,
    repo: str,
    *,
    private: bool = False,
    log: Callable[[str], None] = lambda line: None,
    waits: Sequence[float] = RETRY_WAITS,
) -> str:
    """Upload a saved head and return the repository's address; only what is missing there is sent.

    ``repo`` and ``private`` are those of ``HubConfig``; ``waits``: seconds before each further attempt. After the last
    one a ``UserError`` has the command that pushes later.
    """
    for wait in (*waits, None):
        try:
            return _upload(folder, repo, private)
        except UserError:
            raise
        except Exception as error:  # the client also raises errors of its HTTP library and of its storage
            reason = one_line(error)
            if wait is None or _is_final(error):
                later = ["drafthead", "push", f"head={folder}", f"repo={repo}", *["private=true"] * private]
                raise UserError(
                    f"pushing {folder} to {repo} failed ({reason}); the head is whole on disk, push it later with: "
                    f"{shlex.join(later)}"
                ) from None
            log(f"warning: pushing to {repo} failed ({reason}); next attempt in {wait:g} s")
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _upload(folder: Path, repo: str, private: bool) -> str:
    for path in (path for pattern in UPLOADED for path in folder.glob(pattern)):
        safe_join(folder, path.relative_to(folder).as_posix())  # refuses links that lead out of the folder
    api = HfApi()
    url = api.create_repo(repo, private=private, exist_ok=True)
    if private and not api.model_info(url.repo_id).private:
        raise UserError(
            f"{url.repo_id} exists and is public, but private=true was requested; make it private in its settings on "
            "the Hub, or name another repository"
        )
    card = folder / "README.md"
    if card.exists():
        named = re.sub(
            r'drafthead\.load_head\("[^"]*"\)', f'drafthead.load_head("{url.repo_id}")', card.read_text(), count=1
        )
        write_atomic(card, named)
    # One commit, so that whoever downloads meanwhile gets one head or the other; stale files of the old one go.
    api.upload_folder(
        folder_path=folder,
        repo_id=url.repo_id,
        allow_patterns=list(UPLOADED),
        delete_patterns=list(UPLOADED),
        commit_message="Upload a draft head with drafthead",
    )
    return str(url)


def _is_final(error: BaseException) -> bool:
    """Whether another attempt would end in the same way: the Hub refuses, or the client finds the content wrong."""
    cause = error if isinstance(error, HfHubHTTPError) else error.__cause__  # storage errors are wrapped
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        return 400 <= status < 500 and status not in TEMPORARY_STATUS
    return isinstance(error, ValueError)


def fetch(repo: str, revision: str | None = None) -> Path:
    """The files of a head's repository, downloaded (or from the client's cache); pickles are refused by name."""
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=list(DOWNLOADED)))
        if any(folder.rglob("*.safetensors")):
            return folder
        names = HfApi().list_repo_files(repo, revision=revision)
    except Exception as error:  # the client also raises errors of its HTTP library
        at = "" if revision is None else f" at revision {revision}"
        raise UserError(
            f"no draft head at {repo}{at}: it is no local folder, and the Hub said: {one_line(error)}"
        ) from None
    refuse_pickles(repo, names)
    return folder


def refuse_pickles(where: Any, names: Sequence[str]) -> None:
    """Raise a ``UserError`` that names the pickles among ``names``, files of a place that has no safetensors."""
    pickles = sorted(name for name in names if Path(name).suffix in PICKLES)
    if pickles:
        into = Path(pickles[0]).stem.removeprefix("pytorch_") + ".safetensors"
        raise UserError(
            f"{where} only has {', '.join(pickles)}: pickles can run code and are never loaded. Convert a file that "
            f'you trust, once: python -c "import torch, safetensors.torch as s; s.save_file({{k: v.clone() for k, v in '
            f"torch.load('{pickles[0]}', weights_only=True).items()}}, '{into}')\""
        )
