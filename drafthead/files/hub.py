"""Draft heads on the Hugging Face Hub: uploads with retries, downloads of safetensors and JSON only. huggingface_hub
reads ``HF_TOKEN`` (or the token of ``hf auth login``) and ``HF_ENDPOINT``."""

import re
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported lazily

from drafthead.errors import UserError, one_line
from drafthead.files.local import safe_join, write_atomic
from drafthead.settings.schema import SettingError, settings

# Files that can run code when they are loaded; never downloaded or read.
PICKLES = (".pt", ".bin", ".pth", ".ckpt", ".pkl", ".pickle")
DOWNLOADED = ("*.json", "*.safetensors", "*.md")
UPLOADED = (  # patterns; only these are uploaded, and those that the folder lacks are deleted on the Hub
    "config.json", "model.safetensors", "tree.json", "adapter/*.json", "adapter/*.safetensors",
    "README.md", "eval.json", "training_loss.png", "custom_generate/generate.py", "custom_generate/requirements.txt",
)  # fmt: skip
REPOSITORY = "<this repository or folder>"  # placeholder for the repository's name in a model card
RETRY_WAITS = (2.0, 10.0, 60.0)  # seconds before further attempts; within one, the client retries single requests
TEMPORARY_STATUS = (408, 429)  # below 500, after which an upload is tried again, as after all server errors


@settings(kw_only=True)
class HubConfig:
    """Settings of the Hub repository of a head."""

    repo: str | None = None
    """Repository on the Hub, ``user/name``. A ``name`` without user belongs to the token's account. With null, the
    repository has the run's name."""
    private: bool = False
    """Create a private repository. If the repository exists and is public, nothing is uploaded."""

    def __post_init__(self) -> None:
        if self.repo is not None:
            try:
                validate_repo_id(self.repo)
            except HFValidationError as error:
                raise SettingError("repo", f"like user/name ({one_line(error)})", self.repo) from None


def require_login(purpose: str) -> None:
    """Reject a missing token, or one that may not write; the Hub may be unreachable until the upload."""
    remedy = "set HF_TOKEN to a token that may write, or run `hf auth login`"
    if get_token() is None:
        raise UserError(f"{purpose} needs a login to the Hub, but there is none: {remedy}")
    try:
        account = HfApi().whoami()
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise UserError(f"{purpose}: the Hub rejects the token; {remedy}") from None
        return
    except Exception:  # errors of the client's HTTP library, which differs between versions
        return
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(f"{purpose}: the token of {account.get('name')} may only read; {remedy}")


def push(
    folder: Path,
    repo: str,
    *,
    private: bool = False,
    log: Callable[[str], None] = lambda line: None,
    waits: Sequence[float] = RETRY_WAITS,
) -> str:
    """Upload the saved head in ``folder``, with the repository's name in its README.md; return its address. After
    temporary failures the upload is repeated. If no attempt succeeds, a ``UserError`` gives the command for later."""
    for wait in (*waits, None):
        try:
            return _upload(folder, repo, private)
        except UserError:
            raise
        except Exception as error:  # includes errors of the client's HTTP library and storage
            reason = one_line(error)
            cause = error if isinstance(error, HfHubHTTPError) else error.__cause__  # storage errors are wrapped
            final = isinstance(error, ValueError)  # the client rejects the content
            if isinstance(cause, HfHubHTTPError):
                final = 400 <= (status := cause.response.status_code) < 500 and status not in TEMPORARY_STATUS
            if wait is None or final:
                later = ["drafthead", "push", f"head={folder}", f"repo={repo}", *["private=true"] * private]
                what = f"pushing {folder} to {repo} failed ({reason}); the head is complete on disk"
                raise UserError(f"{what}, push it later with: {shlex.join(later)}") from None
            log(f"warning: pushing to {repo} failed ({reason}); next attempt in {wait:g} s")
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _upload(folder: Path, repo: str, private: bool) -> str:
    for path in (path for pattern in UPLOADED for path in folder.glob(pattern)):
        safe_join(folder, path.relative_to(folder).as_posix())  # refuses links that lead out of the folder
    api = HfApi()
    url = api.create_repo(repo, private=private, exist_ok=True)
    if private and not api.model_info(url.repo_id).private:
        raise UserError(f"{url.repo_id} is public, but private=true was requested; make it private on the Hub")
    card = folder / "README.md"
    if card.exists():
        named = re.sub(r'(drafthead\.load_head\(|custom_generate=)"[^"]*"', rf'\1"{url.repo_id}"', card.read_text())
        write_atomic(card, named)
    # One commit, so that a download meanwhile gets either the old head or the new one. Stale files are deleted.
    api.upload_folder(
        folder_path=folder,
        repo_id=url.repo_id,
        allow_patterns=list(UPLOADED),
        delete_patterns=list(UPLOADED),
        commit_message="Upload a draft head with drafthead",
    )
    return str(url)


def fetch(repo: str, revision: str | None = None) -> Path:
    """Return the folder of a head's repository, downloaded unless the Hub client's cache has it."""
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=list(DOWNLOADED)))
        if any(folder.rglob("*.safetensors")):
            return folder
        names = HfApi().list_repo_files(repo, revision=revision)
    except Exception as error:  # includes errors of the client's HTTP library
        at = "" if revision is None else f" at revision {revision}"
        reason = f"there is no such local folder, and the Hub said: {one_line(error)}"
        raise UserError(f"no draft head at {repo}{at}: {reason}; check the name and the network") from None
    refuse_pickles(repo, names)
    return folder


def refuse_pickles(where: Any, names: Sequence[str]) -> None:
    """Reject ``names``, the files of ``where`` (which has no safetensors), if they include pickles."""
    pickles = sorted(name for name in names if Path(name).suffix in PICKLES)
    if pickles:
        into = Path(pickles[0]).stem.removeprefix("pytorch_") + ".safetensors"
        raise UserError(
            f"{where} only has {', '.join(pickles)}: pickles can run code and are never loaded. Convert a file that "
            f'you trust, once: python -c "import torch, safetensors.torch as s; s.save_file({{k: v.clone() for k, v in '
            f"torch.load('{pickles[0]}', weights_only=True).items()}}, '{into}')\""
        )
