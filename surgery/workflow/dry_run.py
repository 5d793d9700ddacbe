"""What a conversion would write, download and need, known before the first byte."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from surgery import finetune
from surgery.checkpoint import Checkpoint, Plan, make_plan
from surgery.report import card
from surgery.storage.downloads import bytes_on_disk, bytes_streamed, bytes_to_fetch, is_streamed
from surgery.storage.writer import RECORD, sources
from surgery.workflow.convert import BASE_MEMORY, RECIPE
from surgery.workflow.record import make_record


def describe(
    source: Checkpoint,
    output: Checkpoint,
    out: Path,
    *,
    max_shard_size: int | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """What `--dry-run` shows: every file with its size, bytes in all, what is downloaded, peak
    memory, free space, notes.
    """
    plan = make_plan(output, max_shard_size)
    existing = next(p for p in (out, *out.resolve().parents) if p.exists())
    return {
        "out": str(out),
        "model_type": output.config.get("model_type"),
        "parameters": plan.parameters,
        "bytes": plan.nbytes,
        "shards": [
            {"name": s.name, "bytes": s.nbytes, "tensors": len(s.tensors)} for s in plan.shards
        ],
        "files": sorted(plan.small),
        "record": sorted(
            [
                RECORD,
                RECIPE,
                card.NAME,
                *finetune.files(make_record(output, plan, {}, ""), output.config),
            ]
        ),
        **_downloads(source, output, plan, verify),
        "peak_memory": BASE_MEMORY
        + max([plan.peak_memory, *(s.work.peak_memory for s in output.steps if s.work)]),
        "free_space": shutil.disk_usage(existing).free,
        "exact": output.exact,
        "fingerprint": plan.fingerprint,
        "notes": [n for step in output.steps for n in (*step.notes, *step.advice)],
    }


def _downloads(source: Checkpoint, output: Checkpoint, plan: Plan, verify: bool) -> dict[str, int]:
    """Bytes still to be downloaded, and the most of them on the disk at a time. Streamed shards are
    downloaded anew by each
    pass: the writing, two of a calibration (the source and what becomes of it), two of the
    verification (values, logits) and a third where weights were fitted (the swap without that)."""
    written = [file for shard in plan.shards for file in sources(shard)]
    read = {e.file for t in source.tensors.values() for e in t.sources()}
    fitted = sum(1 for s in output.steps if s.work)
    again = 2 * fitted + (2 + bool(fitted)) * verify
    everything = {*written, *(read if again else ())}
    streamed = {f for f in everything if is_streamed(f)}
    nbytes = bytes_to_fetch(everything - streamed) + bytes_streamed(
        f for f in written if f in streamed
    )
    return {
        "download": nbytes + again * bytes_to_fetch(read & streamed),
        "download_disk": bytes_on_disk(everything),
    }
