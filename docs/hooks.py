"""What the documentation site takes from elsewhere: mkdocs calls these functions as it builds.

1. README.md is the home page and CONTRIBUTING.md a page; links between them and docs/ are
   rewritten.
2. A line `<!-- surgery COMMAND -->` in a page is replaced by what that command prints: help texts,
   and the tables of families and recipes. So they never differ from the code.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)#]+)(#[^)]*)?\)")
MARK = re.compile(r"^<!-- surgery (.+) -->$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages whose text lies outside docs/."""
    for source, page in PAGES.items():
        text = LINK.sub(_relinked, (ROOT / source).read_text("utf-8"))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put in what the commands print."""
    return MARK.sub(lambda match: _printed(match[1].split()), markdown)


def _relinked(match: re.Match[str]) -> str:
    """Return a link of a page at the root as it must be in docs/. Of other files the text is kept:
    the site does not have them.
    """
    image, text, path, anchor = match[1], match[2], match[3], match[4] or ""
    if path in PAGES:
        return f"[{text}]({PAGES[path]}{anchor})"
    if path.startswith("docs/"):
        return f"{image}[{text}]({path.removeprefix('docs/')}{anchor})"
    return text


def _printed(command: list[str]) -> str:
    if command == ["families"]:
        return _families(json.loads(_run("families", "--json")))
    if command == ["recipes"]:
        return _recipes(json.loads(_run("recipes", "--json")))
    return f"```text\n{_run(*command).rstrip()}\n```"


def _run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "surgery", *arguments],
        cwd=ROOT,  # `python -m` looks there first: this checkout, not another that is installed
        env=os.environ | {"COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def _families(found: dict[str, Any]) -> str:
    """The counts and the table of `surgery families --json`, with a footnote for each reason."""
    types, counts = found["types"], found["counts"]
    operations = list(next(iter(counts.values())))
    sizes = {kind: sum(t["kind"] == words for t in types) for kind, words in _KINDS.items()}
    head = [f"| | {' | '.join(operations)} |", "|---" * (len(operations) + 1) + "|"]
    shown = [
        f"| {words} | {' | '.join(str(n) for n in row.values())} |"
        for kind in counts
        for words, row in (
            (f"{_KINDS[kind]}, of {sizes[kind]}", counts[kind]),
            (f"those with dense MLPs, of {found['sorts'][kind]['dense']}", found["dense"][kind]),
        )
    ]
    sorted_out = [
        f"- {_KINDS[kind]}: " + ", ".join(f"{n} {_SORTS[sort]}" for sort, n in row.items())
        for kind, row in found["sorts"].items()
    ]
    reasons: dict[str, int] = {}
    rows = [f"| `model_type` | | {' | '.join(operations)} |", "|---" * (len(operations) + 2) + "|"]
    for t in types:
        cells = [_cell(t, operation, reasons) for operation in operations]
        rows.append(f"| `{t['model_type']}` | {t['kind']} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([*head, *shown, "", *sorted_out, "", *rows, "", "Reasons:", "", *notes])


_KINDS = {"causal": "text", "image": "image and text"}
_SORTS = {
    "dense": "with dense MLPs",
    "mixture": "mixtures of experts",
    "none": "without an MLP",
    "unmeasured": "of which no tiny model could be made",
}


def _cell(t: dict[str, Any], operation: str, reasons: dict[str, int]) -> str:
    """What a cell says: how it works, or the number of the reason why it does not."""
    cell = t[operation]
    if " " not in cell:
        return ", ".join(t["native"]) if operation == "upcycle" and t["native"] else str(cell)
    reason = cell.replace(t["model_type"], "it").replace("|", "\\|")
    return f"[{reasons.setdefault(reason, len(reasons) + 1)}]"


def _recipes(recipes: dict[str, str]) -> str:
    """Each shipped recipe with its text, whose first line says what it does."""
    texts = {name: _run("recipes", "show", name).rstrip() for name in recipes}
    return "\n\n".join(f"### `{name}`\n\n```yaml\n{text}\n```" for name, text in texts.items())
