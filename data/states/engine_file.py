"""Files of hidden states that an engine writes, and what is checked of each: vLLM's ``extract_hidden_states``.

A file has ``hidden_states`` [T, n, D] in the engine's dtype and ``token_ids`` [T] int64. Layers are in ascending order:
0 is the embedding, i the output of layer i; the number of layers is the last layer's output before the final norm.
While a file is written, its writer holds a lock on ``<file>.lock``.
"""

import fcntl
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

POLL_S = 0.02


class BadStatesError(Exception):
    """A file that does not hold the states that were asked for. Another request may help."""


def read_engine_file(path: Path, ids: Sequence[int], layers: int, width: int, timeout_s: float) -> Tensor:
    """Return the states [T, n, D] of the tokens ``ids`` for n = ``layers`` layers of ``width`` D, and remove the file.
    Raises a ``BadStatesError`` if it is not there or not unlocked after ``timeout_s`` seconds, or if it holds something
    else."""
    _wait(path, timeout_s)
    try:
        with safe_open(path, "pt") as file:
            states: Tensor = file.get_tensor("hidden_states")
            tokens: Tensor = file.get_tensor("token_ids")
    except (OSError, SafetensorError) as error:
        raise BadStatesError(f"{path} is not readable ({error})") from None
    finally:
        _remove(path)
    check_states(states, tokens, ids, layers, width)
    return states


def check_states(states: Tensor, tokens: Tensor, ids: Sequence[int], layers: int, width: int) -> None:
    """Raise a ``BadStatesError`` unless ``states`` are n = ``layers`` different layers of ``width`` D at the tokens
    ``ids``, without a layer that is all zero at a token. ``tokens`` are the ids that the file states."""
    if tokens.tolist() != list(ids):
        raise BadStatesError(_other_tokens(tokens.tolist(), list(ids)))
    if states.shape != (len(ids), layers, width):
        raise BadStatesError(f"states of shape {list(states.shape)}, expected {[len(ids), layers, width]}")
    if not bool(torch.isfinite(states).all()):
        raise BadStatesError("states that are not finite")
    zero = (states == 0).all(-1)
    if bool(zero.any()):
        token, layer = zero.nonzero()[0].tolist()
        raise BadStatesError(f"only zeros at token {token} of layer number {layer} of {layers}")
    for first in range(layers):
        for second in range(first + 1, layers):
            if torch.equal(states[:, first], states[:, second]):
                raise BadStatesError(f"equal states in the layers number {first} and {second} of {layers}")


def move_engine_file(path: Path, target: Path, timeout_s: float) -> None:
    """Move a file to ``target`` once it is written, unread. Raises a ``BadStatesError`` as ``read_engine_file``."""
    _wait(path, timeout_s)
    target.parent.mkdir(exist_ok=True)
    path.replace(target)
    _lock_of(path).unlink(missing_ok=True)


def remove_engine_file(path: Path, timeout_s: float) -> None:
    """Remove a file that nobody reads, once it is written."""
    with suppress(BadStatesError):
        _wait(path, timeout_s)
    _remove(path)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    _lock_of(path).unlink(missing_ok=True)


def _wait(path: Path, timeout_s: float) -> None:
    """Wait until ``path`` is there and nobody holds its lock. The lock may be on another machine, or never released."""
    deadline = time.monotonic() + timeout_s
    while True:
        held = _is_locked(_lock_of(path))
        if path.exists() and not held:
            return
        if time.monotonic() > deadline:
            what = "its lock is held" if held else "it does not exist"
            raise BadStatesError(f"{path} is not written after {timeout_s:g} s: {what}")
        time.sleep(POLL_S)


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _is_locked(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _other_tokens(found: list[int], ids: list[int]) -> str:
    if len(found) != len(ids):
        return f"states of {len(found)} tokens, expected {len(ids)} (is prefix caching on?)"
    first = next(i for i, (a, b) in enumerate(zip(found, ids, strict=True)) if a != b)
    return f"states of other tokens: token {first} is {found[first]}, expected {ids[first]}"
