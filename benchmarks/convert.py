"""Compare conversions with `cp -r`: time and memory of whole processes in turn, medians.

  python benchmarks/synthetic.py /data/synthetic-1b
  python benchmarks/convert.py /data/synthetic-1b --work /data/bench    # to 8 experts, 10.6 GB
  python benchmarks/convert.py /data/synthetic-7b --work /data/bench --only relufy

Each round runs the conversion, then copies what it wrote with `cp -r`. Where this may (root), the
page cache is dropped before every run, so that both read from the disk; `surgery` syncs its files
before it ends and `cp` does not, so `cp` followed by `sync` is timed too. CPU is user + system
time; memory is the largest resident set of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

SURGERY = [sys.executable, "-c", "from surgery.cli import main; main()"]
CONVERSIONS = {
    "upcycle": ["upcycle", "--experts", "8", "--no-verify", "-q"],
    "relufy": ["relufy", "--repair", "none", "--no-verify", "-q"],
    "relufy --hardlink": ["relufy", "--repair", "none", "--hardlink", "--no-verify", "-q"],
}


def run(command: list[str], *, sync: bool = False) -> dict[str, float]:
    """Wall and CPU seconds and peak resident megabytes of a process."""
    settle()
    start = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} exited {process.returncode}")
    if sync:
        os.sync()
    return {
        "wall s": time.perf_counter() - start,
        "cpu s": usage.ru_utime + usage.ru_stime,
        "peak MB": usage.ru_maxrss / 1024 * 1.048576,
    }


def settle() -> bool:
    """Write what is dirty and drop the page cache; whether that was allowed."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def compare(
    source: Path, work: Path, arguments: list[str], rounds: int
) -> dict[str, list[dict[str, float]]]:
    out, copy = work / "out", work / "copy"
    results: dict[str, list[dict[str, float]]] = {"surgery": [], "cp -r": [], "cp -r, sync": []}
    for _ in range(rounds):
        for name in results:
            target = out if name == "surgery" else copy
            shutil.rmtree(target, ignore_errors=True)
            command = (
                [*SURGERY, *arguments, str(source), "--out", str(out)]
                if name == "surgery"
                else ["cp", "-r", str(out), str(copy)]
            )
            results[name].append(run(command, sync=name.endswith("sync")))
        shutil.rmtree(copy, ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    return results


def medians(results: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(r[key] for r in results) for key in results[0]}


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("source", type=Path)
    p.add_argument(
        "--work",
        type=Path,
        required=True,
        help="a folder on the same disk, with room for twice the output",
    )
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--only", choices=list(CONVERSIONS), action="append")
    a = p.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    print(f"page cache dropped before each run: {settle()}; medians of {a.rounds} rounds")
    for name in a.only or ["upcycle", "relufy", "relufy --hardlink"]:
        found = {
            who: medians(r)
            for who, r in compare(a.source, a.work, CONVERSIONS[name], a.rounds).items()
        }
        ours, cp = found["surgery"], found["cp -r"]
        for who, m in found.items():
            print(
                f"{name:18} {who:12} "
                + "  ".join(f"{key} {value:8.2f}" for key, value in m.items())
            )
        print(
            f"{name:18} surgery / cp: wall {ours['wall s'] / cp['wall s']:.2f}, CPU "
            f"{ours['cpu s'] / cp['cpu s']:.2f}"
        )
        print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    main()
