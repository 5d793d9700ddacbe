"""What a default conversion costs on every domain: a Markdown table of perplexities and ratios.

  python benchmarks/domains.py MODEL relufy
  python benchmarks/domains.py MODEL carve --active 12
  python benchmarks/domains.py MODEL memory --place replace --layers auto --count 3
  python benchmarks/domains.py MODEL relufy --measure ./made-earlier --each 2048
  python benchmarks/domains.py MODEL relufy --outside speech.txt --outside /usr/lib/python3.11/json

Options that are not this script's go to `surgery OPERATION MODEL`, which is run without them
otherwise. Measured in fp32 on the held-out part of each built-in domain, and on the texts given
with --outside, which nothing is fitted on: files and folders of .txt and .md, or of any files of
text given one by one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from surgery import __version__
from surgery.proof import verdict
from surgery.storage import open_checkpoint
from surgery.workflow.record import read_record
from surgery.workflow.request import Demands
from surgery.workflow.verify import recorded_texts, verify_folder


def convert(model: str, operation: str, options: list[str], out: Path) -> str:
    """Run the command, and return how long it took."""
    words = [sys.executable, "-m", "surgery", operation, model, *options, "--out", str(out)]
    before, started = os.times(), time.time()
    subprocess.run([*words, "--no-verify", "--quiet"], check=True)
    after = os.times()
    cpu = sum(after[2:4]) - sum(before[2:4])  # of children
    return f"{cpu / 60:.1f} CPU-minutes, {(time.time() - started) / 60:.1f} minutes"


def table(model: str, out: Path, outside: list[str], each: int) -> str:
    """Return the table of an output."""
    texts = recorded_texts(read_record(out), out, outside)
    demands = Demands(texts=texts, tokens=each)
    found = verify_folder(open_checkpoint(model), out, demands).as_dict()
    lines = ["| domain | source | output | ratio |", "|---|---|---|---|"]
    for change in verdict.changes(found):
        lines.append(
            f"| {change.domain} | {change.before:.2f} | {change.after:.2f} | {change.ratio:.3f} |"
        )
    rows = verdict.rows_by_key(found)
    mean, worst = rows[verdict.MEAN], rows[verdict.WORST]
    of = [mean["models"][name]["perplexity"] for name in ("source", "output")]
    lines.append(
        f"| **geometric mean** | {of[0]:.2f} | {of[1]:.2f} | **{float(mean['value']):.3f}** |"
    )
    lines.append(f"| **worst**: {worst['detail'][0]} | | | **{float(worst['value']):.3f}** |")
    if zeros := rows.get("zeros.output"):
        lines.append(f"\nExact zeros: {zeros['value']:.1%}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("operation")
    parser.add_argument("--outside", action="append", default=[], help="a text to measure on too")
    parser.add_argument("--each", type=int, default=2048, help="tokens of each domain")
    parser.add_argument("--measure", type=Path, metavar="DIR", help="measure this output instead")
    known, options = parser.parse_known_args()
    command = " ".join(["surgery", known.operation, Path(known.model).name, *options])
    with tempfile.TemporaryDirectory() as folder:
        out, took = known.measure, ""
        if out is None:
            out = Path(folder) / "output"
            took = f", {convert(known.model, known.operation, options, out)}"
        print(f"`{command}`, surgery {__version__}{took}\n")
        print(table(known.model, out, known.outside, known.each))


if __name__ == "__main__":
    main()
