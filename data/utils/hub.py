"""Draft heads on the Hugging Face Hub: uploads that are retried, downloads of safetensors and JSON alone.

``HF_TOKEN`` (or ``hf auth login``) says who uploads, ``HF_ENDPOINT`` where to; both are huggingface_hub's own.
"""

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported lazily
    filter_repo_objects,
    validate_repo_id,
)

from drafthead.data.utils.errors import UserError
from drafthead.data.utils.files import safe_join

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
WAITS = (2.0, 10.0, 60.0)
"""Seconds before each further attempt at an upload; within one, the client repeats single requests itself."""
TEMPORARY = (408, 429)
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
                raise ValueError(f"hub.repo must be like user/name, got {self.repo!r} ({_line(error)})") from None


def require_login(purpose: str) -> None:
    """Check that there is a token, and where the Hub can be reached, that it takes it.

    A Hub that cannot be reached now is no error: it may be up again by the time of the upload.

    Args:
        purpose: what needs it, for the message.

    Raises:
        UserError: no token, one that the Hub does not know, or one that may only read.
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
    say: Callable[[str], None] = lambda line: None,
    waits: Sequence[float] = WAITS,
) -> str:
    """Upload a saved head; an attempt that fails is repeated, and only what is missing is sent again.

    Args:
        folder: of the head; :data:`UPLOADED` says what is taken of it.
        repo: ``user/name``, or ``name`` under the token's account; made where it does not exist.
        private: see ``HubConfig``.
        say: receives a line for every attempt that failed.
        waits: seconds before each further attempt.

    Returns:
        The repository's address.

    Raises:
        UserError: refused, or still failing after the last attempt. The folder is as it was, and the message has the
            command that pushes later.
    """
    later = shlex.join(["drafthead", "push", f"head={folder}", f"repo={repo}", *["private=true"] * private])
    for wait in (*waits, None):
        try:
            return _upload(folder, repo, private)
        except UserError:
            raise
        except Exception as error:  # the client also raises errors of its HTTP library and of its storage
            reason = _line(error)
            if wait is None or _is_final(error):
                raise UserError(
                    f"pushing {folder} to {repo} failed ({reason}); the head is whole on disk, push it later with: "
                    f"{later}"
                ) from None
            say(f"warning: pushing to {repo} failed ({reason}); next attempt in {wait:g} s")
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _upload(folder: Path, repo: str, private: bool) -> str:
    api = HfApi()
    url = api.create_repo(repo, private=private, exist_ok=True)
    if private and not api.model_info(url.repo_id).private:
        raise UserError(
            f"{url.repo_id} exists and is public, but private=true was asked for; make it private in its settings on "
            "the Hub, or name another repository"
        )
    found = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    names = list(filter_repo_objects(found, allow_patterns=list(UPLOADED)))
    there = filter_repo_objects(api.list_repo_files(url.repo_id), allow_patterns=list(UPLOADED))
    # One commit, so that whoever downloads meanwhile gets one head or the other.
    api.create_commit(
        url.repo_id,
        [CommitOperationAdd(name, _content(safe_join(folder, name), url.repo_id)) for name in names]
        + [CommitOperationDelete(name) for name in sorted(set(there) - set(names))],
        commit_message="Upload a draft head with drafthead",
    )
    return str(url)


def _content(path: Path, repo: str) -> str | bytes:
    """What is uploaded of a file: a card names the repository, which it cannot know on disk."""
    if path.name != "README.md":
        return str(path)
    return path.read_text().replace(REPOSITORY, repo).encode()


def _is_final(error: BaseException) -> bool:
    """Whether another attempt would end in the same way: the Hub refuses, or the client finds the content wrong."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, HfHubHTTPError):
            status = cause.response.status_code
            return 400 <= status < 500 and status not in TEMPORARY
        cause = cause.__cause__
    return isinstance(error, ValueError)


def fetch(repo: str, revision: str | None = None) -> Path:
    """The files of a head's repository, downloaded (or from the client's cache).

    Raises:
        UserError: the Hub has no such repository or revision or cannot be reached, or holds weights only as pickles.
    """
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=list(DOWNLOADED)))
        if any(folder.rglob("*.safetensors")):
            return folder
        names = HfApi().list_repo_files(repo, revision=revision)
    except Exception as error:  # the client also raises errors of its HTTP library
        at = "" if revision is None else f" at revision {revision}"
        raise UserError(
            f"no draft head at {repo}{at}: it is no local folder, and the Hub said: {_line(error)}"
        ) from None
    refuse_pickles(repo, names)
    return folder


def refuse_pickles(where: Any, names: Sequence[str]) -> None:
    """Name the pickles among the files of a place that has no safetensors.

    Raises:
        UserError: there are pickles.
    """
    pickles = sorted(name for name in names if Path(name).suffix in PICKLES)
    if pickles:
        into = Path(pickles[0]).stem.removeprefix("pytorch_") + ".safetensors"
        raise UserError(
            f"{where} only has {', '.join(pickles)}: pickles can run code and are never loaded. Convert a file that "
            f'you trust, once: python -c "import torch, safetensors.torch as s; s.save_file({{k: v.clone() for k, v in '
            f"torch.load('{pickles[0]}', weights_only=True).items()}}, '{into}')\""
        )


def _line(error: BaseException) -> str:
    """The first line of an error, or its name where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
