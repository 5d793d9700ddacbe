"""`surgery analyze`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from torch import Tensor

    from surgery.analysis.analyze import Analysis
    from surgery.analysis.devices import Device


@click.command("analyze")
@click.argument("model", default=".")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write analysis.json, analysis.safetensors and report.html with its figures to this folder.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Text to measure on: a file, a .jsonl or a folder. [default: built-in]",
)
@click.option(
    "--dataset",
    metavar="ID",
    help="A data set of the Hub, OWNER/NAME or OWNER/NAME:CONFIGURATION, streamed.",
)
@click.option(
    "--tokens",
    default=16384,
    show_default=True,
    type=click.IntRange(min=1),
    help="Tokens to measure on.",
)
@click.option(
    "--sequence-length",
    default=512,
    show_default=True,
    type=click.IntRange(min=2),
    help="Tokens of a sequence.",
)
@click.option(
    "--coactivation",
    is_flag=True,
    help="Also count which neurons are active together; needs --out.",
)
@click.option(
    "--device",
    metavar="NAME",
    help="Where to compute: cuda, mps, cpu. [default: the fastest there is]",
)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    help="Compute in. [default: bf16 where that is fast]",
)
@click.option(
    "--memory-budget",
    metavar="SIZE",
    help="Hidden states held in memory, like 2GB; the rest goes to TMPDIR. [default: all]",
)
@click.option(
    "--on",
    default="h100",
    show_default=True,
    metavar="NAME|RATES",
    help="The device that savings are timed on, as in inspect.",
)
@click.option(
    "--seed", default=0, show_default=True, help="Chooses the tokens that are kept whole, for CETT."
)
@click.option("--revision", help="Branch, tag or commit of a Hub id.")
@click.option(
    "--trust-remote-code", is_flag=True, help="Let code that comes with the checkpoint run."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar and no tables.")
def analyze_command(
    model: str,
    out: Path | None,
    text: Path | None,
    dataset: str | None,
    tokens: int,
    sequence_length: int,
    coactivation: bool,
    device: str | None,
    dtype: str | None,
    memory_budget: str | None,
    on: str,
    seed: int,
    revision: str | None,
    trust_remote_code: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure what the MLPs of MODEL really do on text, one layer in memory at a time: exact zeros,
    sparsity at a given error (CETT), firing rates, dead and hot neurons, reuse between tokens,
    thresholds, outlier channels, expert load, and the bytes and FLOPs that sparsity would save.
    Processes that torchrun or accelerate launch started share the text.

    \b
    Examples:
      surgery analyze Qwen/Qwen3-8B
      surgery analyze ./my-model --text ./texts --tokens 65536 --out analysis
      surgery analyze ./my-model --dataset wikitext:wikitext-2-raw-v1 --json
      surgery analyze ./my-model --coactivation --out analysis --device cuda
    """
    from surgery.analysis.analyze import analyze
    from surgery.analysis.devices import parse_device
    from surgery.calibration.data import sample_ids
    from surgery.calibration.walk import choose_device, choose_dtype, join_processes, processes
    from surgery.checkpoint import parse_size
    from surgery.cli import screen
    from surgery.errors import UsageError
    from surgery.storage import open_checkpoint
    from surgery.workflow.trust import require_trust

    if coactivation and out is None:
        raise UsageError(
            "--coactivation needs --out", "its matrices go to a folder, one file a layer"
        )
    if text is not None and dataset is not None:
        raise UsageError("--text and --dataset exclude each other", "give one of them")
    if quiet or as_json:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    timed_on, computing = parse_device(on), choose_device(device)
    checkpoint = open_checkpoint(model, revision=revision)
    require_trust(checkpoint, trust_remote_code)
    sample = sample_ids(
        checkpoint,
        tokens=tokens,
        sequence_length=sequence_length,
        split="calibration",
        file=text,
        dataset=dataset,
        seed=seed,
    )
    join_processes()
    first = processes()[0] == 0
    with screen.Bars(quiet=quiet or as_json or not first).stage(
        "analyzing", 0, "layer"
    ) as progress:
        found = analyze(
            checkpoint,
            sample,
            dtype=choose_dtype(dtype, computing),
            device=computing,
            seed=seed,
            memory_budget=parse_size(memory_budget) if memory_budget else None,
            coactivation=_sink(out) if coactivation and out else None,
            progress=progress,
        )
    if first and out is not None:
        _write(found, timed_on, out)
    if first and as_json:
        screen.echo_json(found.as_dict(timed_on))
    elif first and not quiet:
        _show(found, timed_on, out)


def _write(found: Analysis, timed_on: Device, out: Path) -> None:
    from surgery.report.html import write_report

    found.save(out, timed_on)
    write_report(found, timed_on, out)


def _show(found: Analysis, timed_on: Device, out: Path | None) -> None:
    from surgery.cli import screen
    from surgery.report import analysis as report
    from surgery.report.png import draws_png

    for part in report.tables(found, timed_on):
        screen.show(part)
    if out is not None:
        screen.show(
            f"wrote {out / 'analysis.json'}, {out / 'analysis.safetensors'} and {out / 'report.html'}"
        )
        if not draws_png():
            screen.show("note: no PNGs without matplotlib: pip install 'model-surgery[plot]'")


def _sink(out: Path) -> Callable[[int, Tensor], None]:
    """Writes the co-activation of a layer as it comes: coactivation/layer-3.safetensors."""
    from surgery.analysis.analyze import save_tensors

    folder = out / "coactivation"
    folder.mkdir(parents=True, exist_ok=True)
    return lambda layer, pairs: save_tensors(
        {"pairs": pairs}, folder / f"layer-{layer}.safetensors"
    )
