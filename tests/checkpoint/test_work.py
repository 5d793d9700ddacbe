"""Work that tensors wait for: it is planned without data, runs once, and leaves nothing behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from surgery.checkpoint import Checkpoint, Step, Work, make_plan
from surgery.demo import MODEL
from surgery.storage import open_checkpoint
from surgery.workflow.convert import convert_alone

NAME = "model.norm.weight"


def doubled(
    ran: list[str], *, fail: bool = False, identity: str = "double"
) -> Callable[[], tuple[Checkpoint, Checkpoint]]:
    """Return a function that gives the demo model, and the same with its last norm doubled.

    The doubling is work that appends to `ran` when it begins.
    """
    source = open_checkpoint(MODEL)

    def work(work: Work, progress: Callable[[int], None]) -> None:
        ran.append("began")
        work.put("norm", source.tensors[NAME].read() * 2)
        if fail:
            raise KeyboardInterrupt
        work.report["factor"] = 2
        progress(1)

    promised = Work(identity, work, total=1)
    norm = source.tensors[NAME]
    tensors = {**source.tensors, NAME: promised.promise("norm", norm.dtype, norm.shape)}
    step = Step(
        operation="cast", parameters={"dtype": "doubled"}, exact=False, layers=(), work=promised
    )
    return lambda: (source, source.replace(step=step, tensors=tensors))


def test_a_plan_needs_no_data() -> None:
    ran: list[str] = []
    _, output = doubled(ran)()
    plan = make_plan(output)
    assert not ran and plan.fingerprint == make_plan(doubled(ran)()[1]).fingerprint
    assert plan.fingerprint != make_plan(doubled(ran, identity="other")()[1]).fingerprint


def test_conversion_runs_it_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    ran: list[str] = []
    source, output = doubled(ran)()
    result = convert_alone(source, output, tmp_path / "out", verify=False)
    written = open_checkpoint(tmp_path / "out")
    assert torch.equal(written.tensors[NAME].read(), source.tensors[NAME].read() * 2)
    assert ran == ["began"] and result.record["calibration"] == [{"factor": 2}]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    # The output is recognised by its plan, so nothing runs.
    again = convert_alone(*doubled(ran)(), tmp_path / "out", verify=False)
    assert again.already and ran == ["began"]


def test_an_interrupted_one_writes_nothing_and_is_run_again(tmp_path: Path) -> None:
    ran: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        convert_alone(*doubled(ran, fail=True)(), tmp_path / "out", verify=False)
    assert not (tmp_path / "out").exists()
    convert_alone(*doubled(ran)(), tmp_path / "out", verify=False)
    assert ran == ["began", "began"] and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_reader_who_did_not_prepare_it_gets_it_all_the_same() -> None:
    ran: list[str] = []
    source, output = doubled(ran)()
    assert torch.equal(output.tensors[NAME].read(), source.tensors[NAME].read() * 2)
    output.tensors[NAME].read()
    assert ran == ["began"]


def test_a_broken_promise_is_a_bug() -> None:
    promised = Work("nothing", lambda work, progress: None, total=1)
    tensor = promised.promise("never", "F32", (2,))
    with pytest.raises(AssertionError, match="never made never"):
        tensor.read()


def test_a_thread_that_reads_waits_for_the_one_that_prepares() -> None:
    """A loader reads many tensors at once: none may look for its file before it has been made."""

    def run(work: Work, progress: Any) -> None:
        time.sleep(0.05)
        for name in "abcd":
            work.put(name, torch.ones(3))

    work = Work("threads", run, total=1)
    promised = [work.promise(name, "F32", (3,)) for name in "abcd"]
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(t, torch.ones(3)) for t in pool.map(lambda t: t.read(), promised))
