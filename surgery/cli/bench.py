"""`surgery bench`."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import click

from surgery.cli.options import strip_prefix
from surgery.cli.paths import LOCATION

if TYPE_CHECKING:
    from rich.table import Table

    from surgery.analysis.bench import Bench
    from surgery.analysis.generation import Generation


@click.command("bench")
@click.argument("model", type=LOCATION, default=".")
@click.option(
    "--tokens",
    default=2048,
    show_default=True,
    type=click.IntRange(min=1),
    help="Tokens of text to run.",
)
@click.option(
    "--new-tokens",
    default=32,
    show_default=True,
    type=click.IntRange(min=0),
    help="Tokens that the whole model, loaded into memory, generates; 0 for the MLPs alone.",
)
@click.option(
    "--source",
    type=LOCATION,
    metavar="MODEL",
    help="What MODEL was made from, to compare generation with.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads on a CPU. [default: as many as torch takes]",
)
@click.option(
    "--device", metavar="NAME", help="Where to compute: cuda, cpu. [default: the fastest there is]"
)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    help="Precision to compute in. [default: bf16 where that is fast]",
)
@click.option("--revision", help="Branch, tag or commit of a Hub id.")
@strip_prefix
@click.option(
    "--trust-remote-code", is_flag=True, help="Let code that comes with the checkpoint run."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
def bench_command(
    model: str,
    tokens: int,
    new_tokens: int,
    source: str | None,
    threads: int | None,
    device: str | None,
    dtype: str | None,
    revision: str | None,
    strip_prefix: str | None,
    trust_remote_code: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Time the MLPs of MODEL as it decodes one sequence, dense and with zeros skipped.

    Zeros are skipped by the custom code of a sparse checkpoint, at the sparsity that the model has
    on the built-in text. MODEL is such a checkpoint, or one with ReLU. Then time the whole model as
    it generates. Let nothing else run on the machine meanwhile.

    \b
    Examples:
      surgery bench ./my-model-relu --source ./my-model
      surgery bench ./my-model-relu --threads 8 --dtype fp32 --json
    """
    from surgery.analysis.bench import bench, torch_threads
    from surgery.analysis.generation import Setting, measure
    from surgery.calibration.data import sample_ids
    from surgery.calibration.walk import choose_device, choose_dtype
    from surgery.cli import screen
    from surgery.errors import UsageError
    from surgery.storage import open_checkpoint
    from surgery.workflow.trust import require_trust

    if quiet or as_json:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    computing = choose_device(device)
    if computing == "mps" and device:
        raise UsageError("neurons are skipped on cuda and cpu only", "give --device cpu")
    computing = computing if computing != "mps" else "cpu"
    checkpoint = open_checkpoint(model, revision=revision, strip_prefix=strip_prefix)
    require_trust(checkpoint, trust_remote_code)
    before = None if source is None else open_checkpoint(source)
    if before is not None:
        require_trust(before, trust_remote_code)
    sample = sample_ids(checkpoint, tokens=tokens, sequence_length=min(tokens, 512))
    bars, wanted = screen.Bars(quiet=quiet or as_json), choose_dtype(dtype, computing)
    with bars.stage("timing", 0, "layer") as progress:
        found = bench(
            checkpoint,
            sample,
            dtype=wanted,
            device=computing,
            threads=threads,
            progress=progress,
        )
    if new_tokens:
        with bars.stage("generating", 0, "run") as progress, torch_threads(threads):
            setting = Setting(
                prompt=sample.input_ids,
                new_tokens=new_tokens,
                dtype=wanted,
                device=computing,
                progress=progress,
            )
            left = [layer.left for layer in found.layers]
            generated = measure(checkpoint, before, setting, left)
        found = dataclasses.replace(found, generation=generated)
    if as_json:
        screen.echo_json(found.as_dict())
    else:
        _show(found)


def _show(found: Bench) -> None:
    from surgery.analysis.bench import TIMED
    from surgery.cli import screen

    where = found.device + (f", {found.threads} threads" if found.threads else "")
    screen.show(found.verdict)
    if found.generation:
        screen.show(found.generation.verdict)
    screen.show(f"{found.source} · {found.model_type} · {found.dtype} on {where} · one sequence")
    screen.show(f"medians of {TIMED} tokens, with their quartiles\n")
    screen.show(_table(found))
    screen.show("\nideal: the speedup if time were proportional to the bytes read")
    screen.show("left: the part of the MLP's bytes that skipping reads")
    screen.show("error: of the MLP's output against dense, the largest of a token")
    if found.generation:
        _show_generation(found.generation)
    if found.always_open:
        screen.show(
            f"note: the last {found.always_open} neurons of each MLP are always open; with them, "
            f"{found.sparsity_of_all:.1%} of the products are zeros"
        )
    if not found.sample.text:
        screen.show("note: the tokens are random, and real text has another sparsity")
    for warning in found.warnings:
        screen.show(f"warning: {warning}")


def _show_generation(found: Generation) -> None:
    from surgery.analysis.generation import ALL_ROWS
    from surgery.cli import screen

    table = screen.columns("the whole model", "tokens/s")
    for way, rate in found.rates.items():
        table.add_row(way, f"{rate:.2f}")
    screen.show(f"\ngenerate() of {found.new_tokens} tokens\n")
    screen.show(table)
    screen.show(f"\n{ALL_ROWS}: with every gate open, which is what a faster kernel alone gains")
    if not found.same_tokens:
        screen.show("note: skipping and dense generate other tokens, by rounding")


def _table(found: Bench) -> Table:
    from surgery.cli import screen
    from surgery.proof.verdict import figure

    names = ("sparsity", "dense ms", "quartiles", "skipping ms", "quartiles", "speedup", "ideal")
    table = screen.columns("layer", *names, "left", "error")
    for layer in found.layers:
        dense = (figure(layer.dense), _range(layer.dense_quartiles))
        skipping = (figure(layer.skipping), _range(layer.skipping_quartiles))
        speeds = (f"{layer.dense / layer.skipping:.2f}x", f"{1 / layer.left:.2f}x")
        cells = (*skipping, *speeds, f"{layer.left:.0%}", f"{layer.error:.0e}")
        table.add_row(
            str(layer.index), f"{layer.sparsity:.1%}", *dense, *(cells if layer.skips else ())
        )
    table.add_section()
    dense = (figure(found.dense), _range(found.quartiles("dense")))
    skipping = (figure(found.skipping), _range(found.quartiles("skipping")))
    speeds = (f"{found.speedup:.2f}x", f"{found.ideal:.2f}x")
    table.add_row("all", f"{found.sparsity:.1%}", *dense, *skipping, *speeds, style="bold")
    return table


def _range(quartiles: tuple[float, float]) -> str:
    from surgery.proof.verdict import figure

    return "–".join(map(figure, quartiles))
