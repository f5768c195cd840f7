"""Communication between the processes of a run on the CPU: stop flags, small objects, heartbeats. It uses gloo and the
rendezvous store, and never waits for a GPU, so it still works when a GPU hangs."""

import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from drafthead.errors import UserError
from drafthead.train.distributed.signals import Stopped

COLLECTIVE_TIMEOUT = timedelta(days=7)  # long, because processes wait for answers that another one generates
_BEAT_S = 1.0
_GRACE_S = 5 * _BEAT_S
Ending = tuple[int | str | None, str]  # exit code and last line of output


class Processes:
    """Communication of this process with the run's other processes. All processes must call its methods together."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        is_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.count = dist.get_world_size() if is_group else 1
        self.rank = dist.get_rank() if is_group else 0
        self._timeout_s = heartbeat_timeout_s
        self._group: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if is_group else None

    def all_reduce_max(self, value: int) -> int:
        if self._group is None:
            return value
        largest = torch.tensor([value])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return int(largest)

    def gather(self, value: Any) -> list[Any]:  # by rank
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._group)
        return values

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """End this process, a few seconds later, if another one fails or sends no heartbeat for the timeout."""
        if self._group is None:
            yield
            return
        heartbeat = _Heartbeat(self.rank, self.count, self._timeout_s)
        try:
            yield
        except (Stopped, UserError) as error:
            heartbeat.stop((error.code, error.line) if isinstance(error, Stopped) else (1, str(error)))
            raise
        except BaseException as error:
            # A collective raises RuntimeError when a peer has died, and so may our own code. Peers decide which it is.
            cause = heartbeat.find_culprit() if isinstance(error, RuntimeError) else None
            heartbeat.stop(cause or (1, "it failed; its own output has the error"))
            if cause is None:
                raise
            raise (UserError(cause[1]) if cause[0] < 128 else Stopped(cause[0] - 128)) from None
        heartbeat.stop((0, ""))


@dataclass
class _Peer:
    last_change: float
    message: bytes = b""
    name: str = "never seen"
    ending: Ending | None = None


class _Heartbeat:
    """A thread that tells the other processes every second that this one runs, and checks that they run too. The
    messages are in torch's rendezvous store. Neither torchrun nor torch's monitored barrier can replace them
    (docs/dev/log.md): a collective on a device never returns, and processes may wait for answers for hours."""

    def __init__(self, rank: int, count: int, timeout_s: float) -> None:
        self.rank, self.count, self.timeout_s = rank, count, timeout_s
        store = dist.distributed_c10d._get_default_store()
        connection = getattr(store, "clone", lambda: store)()  # calls over one connection wait for each other
        self._store: Any = dist.PrefixStore("drafthead/alive", connection)  # type: ignore[attr-defined]
        self._peers = {peer: _Peer(time.monotonic()) for peer in range(count) if peer != rank}
        self._beat = 0
        self._store_lost_at: float | None = None
        self._stopping, self._main_thread_ends = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self, ending: Ending) -> None:
        """Stop the thread, and tell the others this process's exit code and last line."""
        self._stopping.set()
        try:
            self._send(ending)
        except Exception:  # the store's host is gone
            return
        # If the interpreter ends while a thread is inside the store's code, the process aborts (SIGABRT).
        self._thread.join(_GRACE_S)
        if ending[0] and not self.rank:
            time.sleep(3 * _BEAT_S)  # rank 0 may host the store, from which the others read the reason

    def find_culprit(self) -> tuple[int, str] | None:
        """Wait some seconds for the cause of a failed collective; return an ending, or None if all others are alive."""
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
        while not self._stopping.wait(min(_BEAT_S, self.timeout_s / 5)):
            try:
                self._send(None)
                self._receive()
                self._store_lost_at = None
            except Exception:  # the store's host is gone
                self._store_lost_at = self._store_lost_at or time.monotonic()
            cause = self._cause(self.timeout_s)
            if cause is None or self._main_thread_ends.is_set():
                continue
            # A CPU collective now fails, and its process ends in order. A GPU collective would wait forever.
            if not self._stopping.wait(_GRACE_S) and not self._main_thread_ends.is_set():
                with suppress(OSError):  # the main thread owns the display and hangs
                    os.write(2, f"{'error: ' if cause[0] < 128 else ''}{cause[1]}\n".encode())
                os._exit(cause[0])

    def _send(self, ending: Ending | None) -> None:
        with self._lock:
            if ending is None and self._stopping.is_set():
                return  # the ending that ``stop`` sends must stay the last message
            self._beat += 1
            name = f"{platform.node()}, process {os.getpid()}"
            self._store.set(str(self.rank), json.dumps([self._beat, name, ending]))

    def _receive(self) -> None:
        for rank, peer in self._peers.items():
            if peer.ending is None and self._store.check([str(rank)]):
                message = self._store.get(str(rank))
                if message != peer.message:
                    peer.message, peer.last_change = message, time.monotonic()
                    _, peer.name, peer.ending = json.loads(message)

    def _cause(self, silence: float) -> tuple[int, str] | None:
        """Return an ending if another process has failed, or has sent nothing for ``silence`` seconds; else None."""
        now, reason = time.monotonic(), ""
        for rank, peer in self._peers.items():
            if peer.ending is not None and peer.ending[0]:
                code, line = int(peer.ending[0]), peer.ending[1]
                # 128 plus a signal's number: the line says that the run was stopped, which is true of this process too.
                return code, line if code >= 128 else f"process {rank} of {self.count} ended, so this one ends: {line}"
        for rank, peer in self._peers.items():
            silent = now - peer.last_change
            if peer.ending is None and silent > silence and not reason:
                reason = (
                    f"process {rank} of {self.count} ({peer.name}) has sent no heartbeat for {silent:.0f} s: it was "
                    "killed, or it hangs, or its machine is gone"
                )
        if self._store_lost_at is not None and now - self._store_lost_at > silence:
            reason = "process 0 (or the launcher, if it hosts the rendezvous) cannot be reached any more"
        resume = "this process ends, too. The same command resumes from the newest checkpoint"
        return (1, f"{reason}; {resume}") if reason else None
