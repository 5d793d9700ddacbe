"""Measure what a model larger than the memory asks of a machine.

That is seconds, processor time and peak memory of each command, as a whole process.

  python benchmarks/synthetic.py /data/7b --hidden 4096 --ff 11008 --layers 32 --heads 32
  python benchmarks/large.py /data/7b --work /data/bench
  python benchmarks/large.py /data/7b --work /data/bench --only analyze "relufy, ridge"

Conversions are to stay below 400 MB; what walks, below two decoder layers as they are computed
(fp32 in verify and in fits, bf16 in analyze), 1 GB and the activations: the hidden states of its
tokens in two streams, what a fit keeps of them as rows, and the products of the rows that are
multiplied together. The weights are random: times and bytes count, no perplexity does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from convert import SURGERY, run

from surgery.families import locate
from surgery.fitting.rows import CHUNK
from surgery.storage import open_checkpoint

COMMANDS: dict[str, list[str]] = {  # in this order: a verify checks what the one before it wrote
    "relufy, plain": [
        "relufy",
        "{source}",
        "--repair",
        "none",
        "--no-verify",
        "-q",
        "--out",
        "{out}",
    ],
    "verify, perplexity": ["verify", "{source}", "{out}", "-q"],
    "upcycle --experts 4 --layers 0-7": [
        "upcycle",
        "{source}",
        "--experts",
        "4",
        "--layers",
        "0-7",
        "--no-verify",
        "-q",
        "--out",
        "{out}",
    ],
    "verify, parity": ["verify", "{source}", "{out}", "-q"],
    "analyze": ["analyze", "{source}", "--tokens", "2048", "-q"],
    "relufy, ridge": [
        "relufy",
        "{source}",
        "--layers",
        "0-1",
        "--tokens",
        "4096",
        "--no-verify",
        "-q",
        "--out",
        "{out}",
    ],
    "carve": [
        "carve",
        "{source}",
        "--layers",
        "0",
        "--tokens",
        "4096",
        "--no-verify",
        "-q",
        "--out",
        "{out}",
    ],
}


def bound(name: str, *checkpoints: str | Path) -> float:
    """Megabytes that the command is to stay below; of the largest first layer that it walks
    through.
    """
    if "plain" in name or "upcycle" in name:
        return 400.0
    opened = [open_checkpoint(str(c)) for c in checkpoints]
    layer = max(sum(c.tensors[n].nbytes for n in locate(c).names(0)) for c in opened)
    hidden, width = locate(opened[0]).mlp(0).down.shape
    tokens, together, item = {
        "analyze": (2048, 2048, 2),
        "verify, parity": (2048, 2 * 2048, 4),
        "verify, perplexity": (4096, 2048, 4),
        "relufy, ridge": (4096, CHUNK, 4),
        "carve": (4096, CHUNK, 4),
    }[name]
    streams = 2 if item == 2 or "verify" in name else 4
    activations = (
        streams * tokens * hidden * 2 + (3 if streams == 2 else 6) * together * width * item
    )
    return (2 * layer * item / 2 + 1e9 + activations) / 1e6


def measure(a: argparse.Namespace, say: Callable[[str], None]) -> None:
    out = a.work / "out"
    for name, command in COMMANDS.items():
        if a.only and name not in a.only:
            continue
        if "--out" in command:
            shutil.rmtree(out, ignore_errors=True)
        filled = [c.format(source=a.source, out=out) for c in command]
        m = run([*SURGERY, *filled])
        limit = bound(name, a.source, *([out] if "verify" in name else []))
        shown = " ".join(
            c for c in command if c[0] != "{" and c not in ("-q", "--out", "--no-verify")
        )
        say(
            f"| `{shown}` | {m['wall s']:.0f} s | {m['cpu s']:.0f} s | {m['peak MB']:.0f} MB | "
            f"{limit:.0f} MB |"
        )
    shutil.rmtree(out, ignore_errors=True)


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("source")
    p.add_argument(
        "--work",
        type=Path,
        required=True,
        help="a folder with room for the largest output, 20 GB of the 7 B model",
    )
    p.add_argument("--only", nargs="+", choices=list(COMMANDS))
    a = p.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}")
    print("| command | time | CPU | peak memory | bound |\n|---|---|---|---|---|")
    measure(a, lambda row: print(row, flush=True))


if __name__ == "__main__":
    main()
