"""What the processes of a run tell each other besides tensors: requests to stop, small values, signs of life.

All of it goes over the CPU (gloo, and the store of the rendezvous): it waits for no GPU, and works when one hangs.
"""

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from drafthead.data.utils.errors import UserError
from drafthead.train.distributed.signals import Stopped

PATIENT = timedelta(days=7)
"""Collectives may wait this long, for the process that generates; what ends the wait for a dead one is ``watched``."""
_BEAT_S = 1.0


class Processes:
    """The processes of this run, seen from one of them. Make it on all of them at once."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        """``heartbeat_timeout_s``: seconds without a sign of life after which a process counts as dead."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.count = dist.get_world_size() if several else 1
        self.rank = dist.get_rank() if several else 0
        self._dead_after = heartbeat_timeout_s
        self._group: Any = dist.new_group(backend="gloo", timeout=PATIENT) if several else None

    def most(self, value: int) -> int:
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
    def watched(self) -> Iterator[None]:
        """Inside, this process ends within ``heartbeat_timeout_s`` (and a few seconds) when another one dies or fails.

        Raises:
            UserError: another process failed or is not heard of any more; the line names it.
            Stopped: another process was told to stop.
        """
        if self._group is None:
            yield
            return
        watch = _Watch(self.rank, self.count, self._dead_after)
        watch.start()
        try:
            yield
        except Stopped as stopped:
            watch.leave(stopped.code, stopped.line)
            raise
        except UserError as error:
            watch.leave(1, str(error))
            raise
        except RuntimeError:  # a collective whose peer is gone; or a fault of our own
            cause = watch.find_culprit()
            if cause is None:
                watch.leave(1, "it failed; its own output says how")
                raise
            watch.leave(*cause)
            raise _as_exception(*cause) from None
        except BaseException:
            watch.leave(1, "it failed; its own output says how")
            raise
        else:
            watch.leave(0, "")


def _as_exception(code: int, line: str) -> BaseException:
    return UserError(line) if code < 128 else Stopped(code - 128)


class _Watch:
    """A thread that gives signs of life and looks for those of the others."""

    def __init__(self, rank: int, count: int, dead_after: float) -> None:
        self.rank, self.count, self.dead_after = rank, count, dead_after
        store = dist.distributed_c10d._get_default_store()
        own = getattr(store, "clone", lambda: store)()  # another connection: calls over one wait for each other
        self._store: Any = torch._C._distributed_c10d.PrefixStore("drafthead/alive", own)
        self._names: dict[int, str] = {}
        self._beats: dict[int, bytes] = {}
        self._heard = dict.fromkeys(range(count), time.monotonic())
        self._ended: dict[int, tuple[int, str]] = {}
        self._lost_store: float | None = None
        self._left = threading.Event()
        self._failing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="signs of life", daemon=True)

    def start(self) -> None:
        host = f"{platform.node()}, process {os.getpid()}"
        self._store.set(f"who/{self.rank}", host)
        self._thread.start()

    def leave(self, code: int | str | None, line: str) -> None:
        """Say how this process ends; the others need not wait for its silence."""
        self._left.set()
        try:
            with self._lock:
                self._store.set(f"end/{self.rank}", json.dumps([code, line]))
        except Exception:  # the store went with its host
            return
        # A thread that is in the store's code when the interpreter ends takes the process down (SIGABRT).
        self._thread.join(5 * _BEAT_S)
        if code and not self.rank:
            time.sleep(3 * _BEAT_S)  # this process may host the store that tells the others why

    def find_culprit(self) -> tuple[int, str] | None:
        """After a collective has failed: exit code and line of the process that is to blame; None when all live."""
        self._failing.set()
        deadline = time.monotonic() + min(self.dead_after, 5 * _BEAT_S) + 2 * _BEAT_S
        while time.monotonic() < deadline:
            cause = self._cause(min(self.dead_after, 5 * _BEAT_S))
            if cause is not None:
                return cause
            time.sleep(_BEAT_S / 10)
        return None

    def _run(self) -> None:
        beat = 0
        while not self._left.wait(min(_BEAT_S, self.dead_after / 5)):
            beat += 1
            try:
                with self._lock:
                    self._exchange(str(beat))
                self._lost_store = None
            except Exception:  # the store went with its host
                self._lost_store = self._lost_store or time.monotonic()
            cause = self._cause(self.dead_after)
            if cause is None or self._failing.is_set():
                continue
            # A collective over the CPU fails by itself now, and its process ends in order; one on a GPU only waits.
            if not self._left.wait(5 * _BEAT_S) and not self._failing.is_set():
                # The display is the main thread's, which hangs; and this process ends here: nobody else can say why.
                sys.stderr.write(f"{'error: ' if cause[0] < 128 else ''}{cause[1]}\n")
                sys.stderr.flush()
                os._exit(cause[0])

    def _exchange(self, beat: str) -> None:
        self._store.set(f"beat/{self.rank}", beat)
        for other in range(self.count):
            if other == self.rank or other in self._ended:
                continue
            if self._store.check([f"end/{other}"]):
                self._ended[other] = tuple(json.loads(self._store.get(f"end/{other}")))
            if self._store.check([f"beat/{other}"]):
                if other not in self._names and self._store.check([f"who/{other}"]):
                    self._names[other] = self._store.get(f"who/{other}").decode()
                found = self._store.get(f"beat/{other}")
                if found != self._beats.get(other):
                    self._beats[other], self._heard[other] = found, time.monotonic()

    def _cause(self, silence: float) -> tuple[int, str] | None:
        now = time.monotonic()
        for other, (code, line) in sorted(self._ended.items()):
            if code:
                return (
                    code,
                    line if code >= 128 else f"process {other} of {self.count} ended, and so does this one: {line}",
                )
        if self._lost_store is not None and now - self._lost_store > silence:
            return 1, (
                "process 0 (or the launcher, where that hosts the rendezvous) cannot be reached any more; this process "
                "ends, too. The same command goes on from the newest checkpoint"
            )
        for other in range(self.count):
            silent = now - self._heard[other]
            if other != self.rank and other not in self._ended and silent > silence:
                who = self._names.get(other, "never heard of")
                return 1, (
                    f"process {other} of {self.count} ({who}) has not been heard of for {silent:.0f} s: it was killed, "
                    "or its machine is gone; this process ends, too. The same command goes on from the last checkpoint"
                )
        return None
