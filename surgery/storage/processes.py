"""Let several processes share the work on one output.

torchrun, accelerate launch, or anything else that sets RANK and WORLD_SIZE starts them. They talk
through the launcher's key-value store alone (torch's TCPStore). There is no process group unless
`share_tensors` makes one, so what rank 0 computes by itself, such as a calibration or the
verification, needs no other rank.

Each process counts its heartbeats in the store, so that nobody waits for one that is gone. A
process that fails stores its error before it ends, and rank 0 prints it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from surgery.checkpoint import Progress
from surgery.errors import ReportedElsewhere, SurgeryError

BEAT = 2.0  # seconds between two heartbeats
SILENCE = 120.0  # seconds without a heartbeat after which a process counts as gone
ARRIVAL = 300  # seconds in which all processes must have started
HEARD = 15.0  # seconds that a failed process waits for rank 0 to read its error
GLANCE = 0.2  # seconds between two looks at the store
TOLD = 3.0  # seconds that rank 0 waits for the others to find out that it prints an error
CLOSING = 5.0  # seconds that the end of a run waits for its last heartbeat

T = TypeVar("T")


class Group:
    """The processes of a run, as one of them sees them.

    This class is the group of a process that runs alone; `Together` is one of several.
    """

    rank, size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes by rank on rank 0, and [] on the others.

        Values must be JSON.
        """
        return [value]

    def broadcast(self, value: T) -> T:
        """Return the value that rank 0 passes."""
        return value

    def first(self, function: Callable[[], T]) -> T:
        """Run `function` on rank 0 alone, and return its value on every rank."""
        return self.broadcast(function()) if not self.rank else self.broadcast(cast(T, None))

    def counting(self, progress: Progress) -> Progress:
        """Return a callback for the units of this process.

        On rank 0 it reports the units of all processes to `progress`.
        """
        return progress

    def share_tensors(self) -> None:
        """Start a process group, by which `torch.distributed` merges tensors of the processes."""

    def fail(self, error: Exception) -> bool:
        """Store why this process ends, and return whether rank 0 prints it."""
        return False

    def close(self) -> None:
        """Stop the heartbeat. Called at the end of a run."""


class Elsewhere(SurgeryError):  # noqa: N818
    """Raised where another process of the run has failed or is gone."""


class Together(Group):
    """One of several processes that share a store of `torch.distributed`."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size, self._store, self._step = rank, size, store, 0
        self._over = threading.Event()
        self._heart = threading.Thread(target=self._live, daemon=True)
        self._heart.start()

    def gather(self, value: Any) -> list[Any]:
        self._step += 1
        self._call("set", f"{self._step}/{self.rank}", json.dumps(value))
        return [] if self.rank else [self._wait(f"{self._step}/{r}", r) for r in range(self.size)]

    def broadcast(self, value: T) -> T:
        self._step += 1
        if self.rank:
            return self._wait(str(self._step), 0)
        self._call("set", str(self._step), json.dumps(value))
        return value

    def counting(self, progress: Progress) -> Progress:
        own = shown = 0
        looked = time.monotonic()

        def count(n: int) -> None:
            nonlocal own, shown, looked
            own += n
            if time.monotonic() - looked < GLANCE:
                return
            self._look()
            everyones = self._call("add", "units", own)
            if not self.rank:
                progress(everyones - shown)
            own, shown, looked = 0, everyones, time.monotonic()

        return count

    def share_tensors(self) -> None:
        from torch.distributed import PrefixStore, init_process_group, is_initialized

        if not is_initialized():
            store = PrefixStore("tensors", self._store)
            init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)

    def fail(self, error: Exception) -> bool:
        try:
            if not isinstance(error, Elsewhere):
                self._store_failure(error)
            if not self.rank:
                self._store.add("heard", 1)
                self._await_others()
                return False
            until = time.monotonic() + HEARD
            while not self._store.add("heard", 0) and time.monotonic() < until:
                time.sleep(GLANCE)
            heard = bool(self._store.add("heard", 0))
            self._store.add("told", 1)
        except RuntimeError:  # The store is gone, and rank 0 with it.
            return isinstance(error, Elsewhere) and self.rank > 0
        if heard:  # Rank 0 prints now. The launcher would end it as soon as this process ends.
            time.sleep(1.0)
        return heard or isinstance(error, Elsewhere)

    def _store_failure(self, error: Exception) -> None:
        known = (error.message, error.hint) if isinstance(error, SurgeryError) else (str(error), "")
        self._store.set(f"failed/{self.rank}", json.dumps([socket.gethostname(), *known]))
        self._store.add("failures", 1)

    def _await_others(self) -> None:
        """Let the others find out that rank 0 prints an error.

        The store may end with rank 0, and each of them would then print it for itself.
        """
        until = time.monotonic() + TOLD
        while self._store.add("told", 0) < self.size - 1 and time.monotonic() < until:
            time.sleep(GLANCE)

    def close(self) -> None:
        """Stop the heartbeat.

        A thread that is still inside the C++ store while the interpreter exits aborts the process
        (SIGABRT), so the run waits for it here.
        """
        self._over.set()
        self._heart.join(CLOSING)

    def _wait(self, key: str, rank: int) -> Any:
        """Return the value that a process sets; raise Elsewhere if it fails or is gone."""
        beats, seen = -1, time.monotonic()
        while not self._call("check", [key]):
            self._look()
            if (now := self._call("add", f"beats/{rank}", 0)) != beats:
                beats, seen = now, time.monotonic()
            elif time.monotonic() - seen > SILENCE:
                raise Elsewhere(
                    f"process {rank} of {self.size} has been silent for {SILENCE:.0f} s", _AGAIN
                )
            time.sleep(GLANCE)
        return json.loads(self._call("get", key))

    def _look(self) -> None:
        """Raise Elsewhere if a process has failed."""
        if not self._call("add", "failures", 0):
            return
        rank = next(r for r in range(self.size) if self._call("check", [f"failed/{r}"]))
        host, message, hint = json.loads(self._call("get", f"failed/{rank}"))
        if not self.rank:
            self._call("add", "heard", 1)
        raise Elsewhere(f"process {rank} of {self.size} on {host}: {message}", hint or _AGAIN)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as e:
            raise Elsewhere(
                f"process {self.rank} of {self.size} has lost the others", _AGAIN
            ) from e

    def _live(self) -> None:
        """Count heartbeats until the run is over."""
        try:
            while not self._over.is_set():
                self._store.add(f"beats/{self.rank}", 1)
                self._over.wait(BEAT)
        except RuntimeError:  # The store is gone; whoever waits for this process finds out.
            return


_AGAIN = "run the same command again: it goes on from the finished shards"


@contextmanager
def together() -> Iterator[Group]:
    """Yield the group of this run, and tell the other processes of an error in the context.

    Raises:
        ReportedElsewhere: instead of an error that rank 0 prints for this process.
    """
    group = _join()
    try:
        yield group
        # The store ends with rank 0, which waits here until the others have read all it told them.
        group.gather(None)
    except Exception as e:
        if group.fail(e):
            raise ReportedElsewhere from e
        raise
    finally:
        group.close()


def _join() -> Group:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Group()
    from datetime import timedelta

    from torch.distributed import PrefixStore, rendezvous

    try:
        store, number, size = next(rendezvous("env://", timeout=timedelta(seconds=ARRIVAL)))
    except (RuntimeError, ValueError) as e:
        cause = str(e).splitlines()[0]
        raise SurgeryError(
            f"WORLD_SIZE is {size} and the processes do not find each other: {cause}",
            "start all of them with torchrun or accelerate launch; alone, unset WORLD_SIZE",
        ) from e
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    return Together(PrefixStore(f"surgery/{attempt}", store), number, size)


def divide(sizes: Sequence[int], group: Group) -> list[int]:
    """Return the indices of the shards that this process writes: neighbours, balanced by bytes."""
    total, before, own = sum(sizes), 0, []
    for i, size in enumerate(sizes):
        if total and (2 * before + size) * group.size // (2 * total) == group.rank:
            own.append(i)
        before += size
    return own
