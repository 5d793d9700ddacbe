"""The plan that `--dry-run` prints."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from surgery.checkpoint import Checkpoint
from surgery.cli import screen
from surgery.cli.screen import gigabytes
from surgery.quoting import command


def show_plan(plan: Mapping[str, Any], source: Checkpoint) -> None:
    """Print what a conversion would write, download and need."""
    # Not the title of the table, which would be cut to the table's width.
    screen.show(f"Would write {gigabytes(plan['bytes'])} to {plan['out']}")
    same, another = "the same function, exactly", "another function: perplexity is measured"
    becomes = f"{plan['model_type']}, {plan['parameters']:,} parameters"
    rows = [
        ("source", _name(source)),
        ("becomes", f"{becomes} ({same if plan['exact'] else another})"),
        ("shards", "\n".join(map(_shard, plan["shards"]))),
        ("other files", ", ".join(_top_level(*plan["files"], *plan["record"]))),
        ("downloads", _downloads(plan)),
        ("peak memory", f"about {gigabytes(plan['peak_memory'])}"),
        ("free space", gigabytes(plan["free_space"])),
        ("time", _time(plan["time"])),
    ]
    rows += [("staged in", plan["staged"])] if "staged" in plan else []
    screen.show(screen.pairs(rows))
    for note in plan["notes"]:
        screen.show(f"try: {note}" if note.startswith("--") else f"note: {note}")
    screen.show("\nNext:")
    screen.show(f"  {_without_dry_run()}")


def _name(source: Checkpoint) -> str:
    location, revision = source.source.location, source.source.revision
    return f"{location}@{revision[:12]}" if revision else location


def _shard(shard: Mapping[str, Any]) -> str:
    return f"{shard['name']}  {gigabytes(shard['bytes'])}  {shard['tensors']} tensors"


def _top_level(*names: str) -> list[str]:
    """Return files and folders of the output's top level."""
    return list(dict.fromkeys(name.partition("/")[0] for name in names))


def _downloads(plan: Mapping[str, Any]) -> str:
    if not plan["download"]:
        return "nothing"
    total, at_once = gigabytes(plan["download"]), gigabytes(plan["download_disk"])
    if plan["download_disk"] == plan["download"]:
        return total
    return f"about {total} in several passes, {at_once} on the disk at a time"


def _time(time: Mapping[str, float]) -> str:
    """Return the estimate with what it is made of."""
    parts = [
        f"{what} {screen.duration(time[what])}"
        for what in ("calibrating", "writing", "verifying")
        if time[what]
    ]
    total = screen.duration(sum(time[w] for w in ("calibrating", "writing", "verifying")))
    rates = f"{gigabytes(time['disk_rate'])}/s and {time['compute_rate'] / 1e9:,.0f} GFLOP/s"
    return f"roughly {total} ({', '.join(parts)}; at {rates}, without downloads)"


def _without_dry_run() -> str:
    arguments = [a for a in sys.argv[1:] if a != "--dry-run"]
    return command("surgery", *arguments)
