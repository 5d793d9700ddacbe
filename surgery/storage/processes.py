"""Several processes at one output: those that torchrun, accelerate launch or whatever sets RANK and
WORLD_SIZE started.

They talk through the launcher's key-value store alone (torch's TCPStore). There is no process
group: what the first computes by itself, a calibration or the verification, stays its own. Each
counts on while it lives, so that nobody waits
for one that is gone, and one that fails says why before it ends: the first prints it.
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

BEAT = 2.0  # seconds between two signs of life
SILENCE = 120.0  # without one: gone
ARRIVAL = 300  # for all of them to come
HEARD = 15.0  # for the first to print another's failure
GLANCE = 0.2  # between two looks at the store

T = TypeVar("T")


class Group:
    """The processes of a run, seen from one of them; this class is one alone. `rank` 0 is the
    first.
    """

    rank, size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        """To the first, the value of each, by rank; elsewhere nothing. Values are JSON."""
        return [value]

    def broadcast(self, value: T) -> T:
        """The value of the first."""
        return value

    def first(self, function: Callable[[], T]) -> T:
        """Run `function` in the first process alone, and return its value in all of them."""
        return self.broadcast(function()) if not self.rank else self.broadcast(cast(T, None))

    def counting(self, progress: Progress) -> Progress:
        """A `progress` for this process's units; in the first `progress` is told those of all."""
        return progress

    def share_tensors(self) -> None:
        """Let `torch.distributed` merge tensors among the processes, over the same store."""

    def fail(self, error: Exception) -> bool:
        """Say why this process ends; whether the first prints it."""
        return False


class Elsewhere(SurgeryError):  # noqa: N818
    """Another process of the run has failed, or is gone."""


class Together(Group):
    """One of several, around a store as `torch.distributed` has them."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size, self._store, self._step = rank, size, store, 0
        threading.Thread(target=self._live, daemon=True).start()

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
        if isinstance(error, Elsewhere):
            return self.rank > 0
        known = (error.message, error.hint) if isinstance(error, SurgeryError) else (str(error), "")
        try:
            self._store.set(f"failed/{self.rank}", json.dumps([socket.gethostname(), *known]))
            self._store.add("failures", 1)
            if not self.rank:
                self._store.add("heard", 1)
                return False
            until = time.monotonic() + HEARD
            while not self._store.add("heard", 0) and time.monotonic() < until:
                time.sleep(GLANCE)
            heard = bool(self._store.add("heard", 0))
        except RuntimeError:  # the store is gone, and the first with it
            return False
        time.sleep(
            1.0 if heard else 0.0
        )  # it prints now, and the launcher ends it when this one ends
        return heard

    def _wait(self, key: str, rank: int) -> Any:
        """The value that a process sets. Raises Elsewhere where it will not."""
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
        """Raises Elsewhere where a process has failed."""
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
        try:
            while True:
                self._store.add(f"beats/{self.rank}", 1)
                time.sleep(BEAT)
        except RuntimeError:  # whoever waits finds out
            return


_AGAIN = "run the same command again: it goes on from the finished shards"


@contextmanager
def together() -> Iterator[Group]:
    """The group of this run, which hears of an error that leaves the context."""
    group = _join()
    try:
        yield group
    except Exception as e:
        if group.fail(e):
            raise ReportedElsewhere from e
        raise


def _join() -> Group:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Group()
    from datetime import timedelta

    from torch.distributed import PrefixStore, rendezvous

    try:
        store, number, size = next(rendezvous("env://", timeout=timedelta(seconds=ARRIVAL)))
    except (RuntimeError, ValueError) as e:
        raise SurgeryError(
            f"WORLD_SIZE is {size} and the processes do not find each other: {str(e).splitlines()[0]}",
            "start all of them with torchrun or accelerate launch; alone, unset WORLD_SIZE",
        ) from e
    return Together(
        PrefixStore(f"surgery/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store),
        number,
        size,
    )


def divide(sizes: Sequence[int], group: Group) -> list[int]:
    """Which of these, in their order, are this process's: runs of neighbours, alike in bytes."""
    total, before, own = sum(sizes), 0, []
    for i, size in enumerate(sizes):
        if total and (2 * before + size) * group.size // (2 * total) == group.rank:
            own.append(i)
        before += size
    return own
