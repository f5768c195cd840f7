"""CPU side channel between the processes of a run: stop flags, small objects, heartbeats.

It uses gloo and the store of the rendezvous, so it waits for no GPU and works when one hangs.
"""

import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from drafthead.data.utils.errors import UserError
from drafthead.train.distributed.signals import Stopped

COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Collectives wait for the process that generates answers; the heartbeat ends the wait for a dead process."""
_BEAT_S = 1.0
_GRACE_S = 5 * _BEAT_S


class Processes:
    """The processes of this run, seen from one of them. Make it on all of them at once."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        """A process without a heartbeat for ``heartbeat_timeout_s`` counts as dead."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.count = dist.get_world_size() if several else 1
        self.rank = dist.get_rank() if several else 0
        self._timeout_s = heartbeat_timeout_s
        self._group: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if several else None

    def all_reduce_max(self, value: int) -> int:
        """The largest ``value`` of all processes, on all of them: how they agree to stop."""
        if self._group is None:
            return value
        found = torch.tensor([value])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return int(found)

    def gather(self, value: Any) -> list[Any]:
        """Every process's ``value`` in the order of their ranks, on all of them."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self._group)
        return found

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Inside, this process ends within the timeout (and a few seconds) when another one dies or fails."""
        if self._group is None:
            yield
            return
        heartbeat = _Heartbeat(self.rank, self.count, self._timeout_s)
        heartbeat.start()
        try:
            yield
        except (Stopped, UserError) as ended:
            heartbeat.end(*((ended.code, ended.line) if isinstance(ended, Stopped) else (1, str(ended))))
            raise
        except BaseException as fault:
            # A collective whose peer is gone raises RuntimeError, as a fault of our own may.
            cause = heartbeat.find_culprit() if isinstance(fault, RuntimeError) else None
            heartbeat.end(*(cause or (1, "it failed; its own output says how")))
            if cause is None:
                raise
            raise (UserError(cause[1]) if cause[0] < 128 else Stopped(cause[0] - 128)) from None
        heartbeat.end(0, "")


class _Heartbeat:
    """A thread that writes this process's heartbeat to the store and reads those of the others."""

    def __init__(self, rank: int, count: int, timeout_s: float) -> None:
        self.rank, self.count, self.timeout_s = rank, count, timeout_s
        store = dist.distributed_c10d._get_default_store()
        own = getattr(store, "clone", lambda: store)()  # another connection: calls over one wait for each other
        self._store: Any = torch._C._distributed_c10d.PrefixStore("drafthead/alive", own)
        self._names: dict[int, str] = {}
        self._beats: dict[int, bytes] = {}
        self._last_seen = dict.fromkeys(range(count), time.monotonic())
        self._ended: dict[int, tuple[int, str]] = {}
        self._lost_store: float | None = None
        self._stopping = threading.Event()
        self._main_thread_ends = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._store.set(f"who/{self.rank}", f"{platform.node()}, process {os.getpid()}")
        self._thread.start()

    def end(self, code: int | str | None, line: str) -> None:
        """Say how this process ends, so that the others need not wait for the timeout."""
        self._stopping.set()
        try:
            with self._lock:
                self._store.set(f"end/{self.rank}", json.dumps([code, line]))
        except Exception:  # the store went with its host
            return
        # A thread that is in the store's code when the interpreter ends takes the process down (SIGABRT).
        self._thread.join(_GRACE_S)
        if code and not self.rank:
            time.sleep(3 * _BEAT_S)  # this process may host the store that tells the others why

    def find_culprit(self) -> tuple[int, str] | None:
        """After a collective has failed: exit code and line of the process that caused it; None when all live."""
        self._main_thread_ends.set()
        silence = min(self.timeout_s, _GRACE_S)
        deadline = time.monotonic() + silence + 2 * _BEAT_S
        while time.monotonic() < deadline:
            cause = self._cause(silence)
            if cause is not None:
                return cause
            time.sleep(_BEAT_S / 10)
        return None

    def _run(self) -> None:
        beat = 0
        while not self._stopping.wait(min(_BEAT_S, self.timeout_s / 5)):
            beat += 1
            try:
                with self._lock:
                    self._exchange(str(beat))
                self._lost_store = None
            except Exception:  # the store went with its host
                self._lost_store = self._lost_store or time.monotonic()
            cause = self._cause(self.timeout_s)
            if cause is None or self._main_thread_ends.is_set():
                continue
            # A collective over the CPU fails by itself now, and its process ends in order; one on a GPU only waits.
            if not self._stopping.wait(_GRACE_S) and not self._main_thread_ends.is_set():
                with suppress(OSError):  # the main thread, which owns the display, hangs
                    os.write(2, f"{'error: ' if cause[0] < 128 else ''}{cause[1]}\n".encode())
                os._exit(cause[0])

    def _exchange(self, beat: str) -> None:
        self._store.set(f"beat/{self.rank}", beat)
        for other in range(self.count):
            if other == self.rank or other in self._ended:
                continue
            if self._store.check([f"end/{other}"]):
                self._ended[other] = tuple(json.loads(self._store.get(f"end/{other}")))
            if self._store.check([f"beat/{other}", f"who/{other}"]):
                self._names[other] = self._store.get(f"who/{other}").decode()
                found = self._store.get(f"beat/{other}")
                if found != self._beats.get(other):
                    self._beats[other], self._last_seen[other] = found, time.monotonic()

    def _cause(self, silence: float) -> tuple[int, str] | None:
        """Exit code and line of the first process that failed, or was silent for ``silence`` seconds."""
        now = time.monotonic()
        for other, (code, line) in sorted(self._ended.items()):
            if code:
                failed = f"process {other} of {self.count} ended, and so does this one: {line}"
                return code, line if code >= 128 else failed
        if self._lost_store is not None and now - self._lost_store > silence:
            return 1, (
                "process 0 (or the launcher, where that hosts the rendezvous) cannot be reached any more; this process "
                "ends, too. The same command resumes from the newest checkpoint"
            )
        for other in range(self.count):
            silent = now - self._last_seen[other]
            if other != self.rank and other not in self._ended and silent > silence:
                return 1, (
                    f"process {other} of {self.count} ({self._names.get(other, 'never seen')}) has sent no heartbeat "
                    f"for {silent:.0f} s: it was killed, or its machine is gone; this process ends, too. The same "
                    "command resumes from the newest checkpoint"
                )
        return None
