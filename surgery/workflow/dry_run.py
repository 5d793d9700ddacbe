"""What a conversion would write, download and need, known before the first byte.

The time is a rough estimate: bytes by the speed at which the disk takes a few of them, FLOPs by a
rate that is typical of the device.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery import finetune as training
from surgery.analysis.weigh import weigh
from surgery.calibration.settings import Calibration
from surgery.checkpoint import Checkpoint, Plan, make_plan
from surgery.report import card
from surgery.storage.downloads import bytes_on_disk, bytes_streamed, bytes_to_fetch, is_streamed
from surgery.storage.writer import RECORD, sources
from surgery.workflow.checks import check_request, check_run
from surgery.workflow.convert import BASE_MEMORY
from surgery.workflow.record import make_record, notes_of
from surgery.workflow.request import Request
from surgery.workflow.verify import texts_of

PROBE = 32 << 20  # bytes written to measure the disk
USUAL_DISK = 5e8  # bytes a second, where the disk cannot be measured
CORE, GPU = 2e10, 5e13  # FLOPs a second: of a CPU core in fp32, and of a GPU in bf16
PASSES = 6  # of the calibration text through the model, as much work as two passes and the fits are
VERIFIED = 2048  # tokens whose logits are compared
MEASURED, LEAST = 512, 4096  # tokens of each domain, and of all, that quality is measured on


def describe(source: Checkpoint, output: Checkpoint, request: Request) -> dict[str, Any]:
    """Return what `--dry-run` shows, after the checks that a run makes before its first byte.

    That is every file with its size, the bytes in all, what is downloaded, the peak memory, the
    free space, a rough time in seconds, and the notes.

    Raises SurgeryError where the run would fail.
    """
    check_request(source, request)
    plan = make_plan(output, request.max_shard_size)
    check_run(source, output, plan, request)
    out, verify = request.out, request.verify
    existing = next(p for p in (out, *out.resolve().parents) if p.exists())
    record = make_record(output, plan, {}, "")
    written = [RECORD, card.RECIPE, card.NAME, *training.files(record, output.config)]
    works = [step.work for step in output.steps if step.work]
    return {
        "out": str(out),
        "model_type": output.config.get("model_type"),
        "parameters": plan.parameters,
        "bytes": plan.nbytes,
        "shards": [
            {"name": s.name, "bytes": s.nbytes, "tensors": len(s.tensors)} for s in plan.shards
        ],
        "files": sorted(plan.small),
        "record": sorted(written),
        **_downloads(source, output, plan, verify),
        "peak_memory": BASE_MEMORY + max([plan.peak_memory, *(w.peak_memory for w in works)]),
        "free_space": shutil.disk_usage(existing).free,
        "time": _time(source, output, plan, existing, verify),
        "exact": output.exact,
        "fingerprint": plan.fingerprint,
        "notes": [*notes_of(output), *(a for step in output.steps for a in step.advice)],
    }


def _downloads(source: Checkpoint, output: Checkpoint, plan: Plan, verify: bool) -> dict[str, int]:
    """Return the bytes still to be downloaded, and the most of them on the disk at a time.

    Streamed shards are downloaded anew by each pass: one of the writing, two of a calibration (the
    source and what becomes of it), two of the verification (values, logits), and a third where
    weights were fitted (the change without the fit).
    """
    written = [file for shard in plan.shards for file in sources(shard)]
    read = {e.file for t in source.tensors.values() for e in t.sources()}
    fitted = sum(1 for s in output.steps if s.work)
    again = 2 * fitted + (2 + bool(fitted)) * verify
    everything = {*written, *(read if again else ())}
    streamed = {f for f in everything if is_streamed(f)}
    once = bytes_streamed(f for f in written if f in streamed)
    nbytes = bytes_to_fetch(everything - streamed) + once
    return {
        "download": nbytes + again * bytes_to_fetch(read & streamed),
        "download_disk": bytes_on_disk(everything),
    }


def _time(
    source: Checkpoint, output: Checkpoint, plan: Plan, folder: Path, verify: bool
) -> dict[str, float]:
    """Return a rough time in seconds of each stage, and the rates that it was reckoned with."""
    disk, compute = _disk_rate(folder), _compute_rate()
    before = weigh(source, source.config).flops()
    after = weigh(output, output.config).flops()
    fitted = [step for step in output.steps if step.work]
    tokens = sum(_tokens(step.parameters) for step in fitted)
    if output.exact:
        verified = VERIFIED * (before + after)
    else:
        texts = len(texts_of(step.asked for step in output.steps))
        verified = max(LEAST, texts * MEASURED) * (before + after * (1 + bool(fitted)))
    return {
        "calibrating": tokens * PASSES * before / compute,
        "writing": plan.nbytes / disk,
        "verifying": verify * (verified / compute + (source.nbytes + plan.nbytes) / disk),
        "disk_rate": disk,
        "compute_rate": compute,
    }


def _tokens(parameters: Mapping[str, Any]) -> int:
    """Return how many tokens a step is calibrated on."""
    return Calibration.of(parameters.get("calibration")).tokens


def _disk_rate(folder: Path) -> float:
    """Return bytes a second, measured by a file that is deleted at once."""
    data = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            start = time.perf_counter()
            for _ in range(PROBE // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return PROBE / (time.perf_counter() - start)
    except OSError:  # a folder where nobody may write: the conversion itself will say so
        return USUAL_DISK


def _compute_rate() -> float:
    """Return FLOPs a second of the device that would compute, without importing torch."""
    on_gpu = shutil.which("nvidia-smi") is not None and Path("/proc/driver/nvidia").exists()
    return GPU if on_gpu else CORE * (os.cpu_count() or 1)
