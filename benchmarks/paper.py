"""Show what operations on models that nobody has at hand would write and need.

It is their --dry-run, on a checkpoint of headers alone.

  python benchmarks/paper.py tests/configs/llama-2-70b.json tests/configs/gpt2.json --work DIR

The shards have the names, shapes and sizes of the real ones, and holes in the place of weights (a
sparse file takes no room on the disk). Peak memory is --dry-run's bound, interpreter and torch
included; seconds are those of the dry run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

from surgery.checkpoint import Checkpoint, LazyTensor, Source, make_plan

COMMANDS = (
    ["upcycle", "--experts", "8"],
    ["upcycle", "--experts", "56", "--granularity", "8", "--shared", "1", "--top-k", "14"],
    ["relufy", "--repair", "none"],
    ["relufy", "--tokens", "16384"],
    ["relufy", "--activation", "drelu", "--bypass", "full", "--tokens", "16384"],
    ["carve", "--experts", "64", "--active", "16", "--tokens", "16384"],
    ["memory", "--layers", "20,40,60", "--slots", "1M"],
)


def holes(config: Path, folder: Path) -> None:
    """Return a checkpoint of this config in bf16, weights left out."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    data = json.loads(config.read_text())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**data)
        )
    tensors = {name: LazyTensor("BF16", tuple(p.shape)) for name, p in model.named_parameters()}
    plan = make_plan(Checkpoint(config=data, tensors=tensors, source=Source(location=config.stem)))
    for shard in plan.shards:
        with (folder / shard.name).open("wb") as f:
            f.write(shard.header)
            f.truncate(shard.nbytes)
    for name, content in plan.small.items():
        (folder / name).write_bytes(content)


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("configs", nargs="+", type=Path)
    p.add_argument("--work", type=Path, required=True)
    a = p.parse_args()
    print("| | parameters | output | peak memory | planned in |\n|---|---|---|---|---|")
    for config in a.configs:
        folder = a.work / config.stem
        holes(config, folder)
        for command in COMMANDS:
            start = time.perf_counter()
            run = subprocess.run(
                [sys.executable, "-m", "surgery", *command, str(folder), "--dry-run", "--json"],
                capture_output=True,
                text=True,
            )
            took, shown = time.perf_counter() - start, f"| {config.stem}: `{' '.join(command)}`"
            if run.returncode:
                print(f"{shown} | {run.stderr.strip().splitlines()[0]} | | | |", flush=True)
                continue
            plan = json.loads(run.stdout)
            print(
                f"{shown} | {plan['parameters'] / 1e9:,.1f} B | {plan['bytes'] / 1e9:,.0f} GB, "
                f"{len(plan['shards'])} shards "
                f"| {plan['peak_memory'] / 1e9:.2f} GB | {took:.1f} s |",
                flush=True,
            )
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
