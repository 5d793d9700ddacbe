"""Compare `surgery analyze` with the bare forward pass of the same walk: time and memory.

  python benchmarks/analyze.py ~/models/qwen2.5-coder-1.5b --tokens 16384 --rounds 3

Whole processes, in turn, medians: both open the checkpoint, tokenize the same text and load each
layer once; one counts, the other has no collectors and only computes. "walk s" and "walk cpu s" are
what the walk alone takes in each, without imports and start. On a busy machine trust the ratio of
the processor times, and OMP_NUM_THREADS=1: threads that wait for each other wait for the other
programs too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

CHILD = """
import json, sys, time, torch
from surgery.analysis.analyze import analyze
from surgery.calibration.data import sample_ids
from surgery.calibration.walk import Walk, choose_device, choose_dtype
from surgery.storage import open_checkpoint
model, tokens, collect = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "analyze"
checkpoint = open_checkpoint(model)
sample = sample_ids(checkpoint, tokens=tokens, sequence_length=512, part="fit")
device = choose_device(None)
dtype = choose_dtype(None, device)
start, cpu = time.perf_counter(), time.process_time()
if collect:
    analyze(checkpoint, sample, dtype=dtype, device=device)
else:
    for layer in Walk(checkpoint, sample.input_ids, dtype=dtype, device=device):
        layer.run()
took = {"walk s": time.perf_counter() - start, "walk cpu s": time.process_time() - cpu}
on = {"threads": torch.get_num_threads(), "on": f"{device}, {dtype}"}
print(json.dumps({**took, **on, "tokens": sample.input_ids.numel()}))
"""


def run(model: str, tokens: int, what: str) -> dict[str, Any]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, model, str(tokens), what], stdout=subprocess.PIPE
    )
    assert process.stdout
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{what} exited {process.returncode}")
    return {
        **json.loads(printed),
        "cpu s": usage.ru_utime + usage.ru_stime,
        "peak MB": usage.ru_maxrss * 1024 / 1e6,
    }


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("model")
    p.add_argument("--tokens", type=int, default=16384)
    p.add_argument("--rounds", type=int, default=3)
    a = p.parse_args()
    results: dict[str, list[dict[str, Any]]] = {"bare": [], "analyze": []}
    for _ in range(a.rounds):
        for what, found in results.items():
            found.append(run(a.model, a.tokens, what))
    middle = {
        what: {
            k: statistics.median(r[k] for r in found)
            for k in ("walk s", "walk cpu s", "cpu s", "peak MB")
        }
        for what, found in results.items()
    }
    first = results["bare"][0]
    print(
        f"{first['tokens']} tokens on {first['on']}, {first['threads']} threads, medians of "
        f"{a.rounds}"
    )
    for what, m in middle.items():
        print(
            f"{what:8} "
            + "  ".join(f"{k} {v:8.1f}" for k, v in m.items())
            + f"  {first['tokens'] / m['walk s']:.0f} tokens/s"
        )
    for what in ("walk s", "walk cpu s"):
        pairs = [
            a[what] / b[what] for a, b in zip(results["analyze"], results["bare"], strict=True)
        ]
        print(
            f"analyze / bare, {what}: {statistics.median(pairs):.2f} ({min(pairs):.2f} to "
            f"{max(pairs):.2f})"
        )


if __name__ == "__main__":
    main()
