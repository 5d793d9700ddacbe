"""The command `surgery analyze`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surgery.cli.options import dequantize, strip_prefix
from surgery.cli.paths import LOCATION, UserPath
from surgery.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from surgery.analysis.analyze import Analysis
    from surgery.analysis.devices import Device
    from surgery.calibration.data import Sample
    from surgery.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The options that say what to measure, and how."""

    model: str
    out: Path | None
    text: tuple[str, ...]
    dataset: tuple[str, ...]
    mix: float | None
    tokens: int
    sequence_length: int
    coactivation: bool
    device: str | None
    dtype: str | None
    memory_budget: str | None
    seed: int
    revision: str | None
    strip_prefix: str | None
    dequantize: bool
    trust_remote_code: bool


class Sink:
    """Writes the co-activation of a layer as soon as it is counted, and notes the file's name.

    Layer 3 goes to coactivation/layer-3.safetensors.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self.names: list[str] = []

    def __call__(self, layer: int, pairs: Tensor) -> None:
        from surgery.analysis.analyze import save_tensors

        name = f"coactivation/layer-{layer}.safetensors"
        save_tensors({"pairs": pairs}, self._out, name)
        self.names.append(name)


@click.command("analyze")
@click.argument("model", type=LOCATION, default=".")
@click.option(
    "--out",
    type=UserPath(file_okay=False),
    metavar="DIR",
    help="Write analysis.json, analysis.safetensors, report.html and its figures to this folder.",
)
@click.option(
    "--text",
    type=LOCATION,
    multiple=True,
    metavar="PATH[=WEIGHT]",
    help="Text to measure on: a file, a .jsonl, a folder, or a built-in domain like "
    "builtin:german; again for more. [default: the built-in text of all domains]",
)
@click.option(
    "--dataset",
    multiple=True,
    metavar="ID[=WEIGHT]",
    help="A data set of the Hub to measure on, OWNER/NAME or OWNER/NAME:CONFIGURATION, streamed; "
    "again for more.",
)
@click.option(
    "--mix",
    type=float,
    metavar="SHARE",
    help="The share of the built-in text beside --text and --dataset. [default: 0]",
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
    help="Tokens in a sequence.",
)
@click.option(
    "--coactivation",
    is_flag=True,
    help="Also count which neurons are active together; needs --out.",
)
@click.option(
    "--device",
    metavar="NAME",
    help="Where to compute: cuda, mps or cpu. [default: the fastest available]",
)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    help="Precision to compute in. [default: bf16 where that is fast]",
)
@click.option(
    "--memory-budget",
    metavar="SIZE",
    help="Memory for hidden states, like 2GB; the rest goes to TMPDIR. [default: no limit]",
)
@click.option(
    "--on",
    default="h100",
    show_default=True,
    metavar="NAME|RATES",
    help="The device to time the savings on, as in `surgery inspect`.",
)
@click.option(
    "--seed", default=0, show_default=True, help="Choose other tokens to compute CETT from."
)
@click.option("--revision", help="Branch, tag or commit of a Hub id.")
@strip_prefix
@dequantize
@click.option(
    "--trust-remote-code", is_flag=True, help="Allow code that comes with the checkpoint to run."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar and no tables.")
def analyze_command(on: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Measure what the MLPs of MODEL really do on text, one layer in memory at a time.

    Shows exact zeros, sparsity at a given error (CETT), firing rates, dead and hot neurons, reuse
    between tokens, thresholds, outlier channels, the load of experts, and the bytes and FLOPs that
    sparsity would save. Processes started by torchrun or accelerate launch share the text.

    \b
    Examples:
      surgery analyze Qwen/Qwen3-8B
      surgery analyze ./my-model --text ./texts --tokens 65536 --out analysis
      surgery analyze ./my-model --dataset wikitext:wikitext-2-raw-v1 --json
      surgery analyze ./my-model --coactivation --out analysis --device cuda
    """
    from surgery.analysis.devices import parse_device
    from surgery.calibration.walk import choose_device
    from surgery.cli import screen
    from surgery.report.html import check_place
    from surgery.storage.processes import together

    run = Run(**options)
    if run.coactivation and run.out is None:
        raise UsageError("--coactivation needs --out", "name a folder for the files of the layers")
    if quiet or as_json:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    timed_on, device = parse_device(on), choose_device(run.device)
    if run.out is not None:
        check_place(run.out)
    sink = Sink(run.out) if run.coactivation and run.out else None
    with together() as group:
        checkpoint, sample = _open(run)
        group.share_tensors()
        bars = screen.Bars(quiet=quiet or as_json or group.rank > 0)
        with bars.stage("analyzing", 0, "layer") as progress:
            found = _analyze(run, checkpoint, sample, device, sink, progress)
        if group.rank:
            return
        if run.out is not None:
            _write(found, timed_on, run.out, sink.names if sink else [])
        if as_json:
            screen.echo_json(found.as_dict(timed_on))
        elif not quiet:
            _show(found, timed_on, run.out)


def _open(run: Run) -> tuple[Checkpoint, Sample]:
    """Return the checkpoint, and the text to measure on."""
    from surgery.calibration.data import sample_ids
    from surgery.calibration.texts import choose
    from surgery.storage import open_checkpoint
    from surgery.workflow.trust import require_trust

    checkpoint = open_checkpoint(
        run.model,
        revision=run.revision,
        strip_prefix=run.strip_prefix,
        dequantize=run.dequantize,
    )
    require_trust(checkpoint, run.trust_remote_code)
    given = bool(run.text or run.dataset)
    sample = sample_ids(
        checkpoint,
        tokens=run.tokens,
        sequence_length=run.sequence_length,
        part="all" if given else "fit",
        texts=choose(run.text, run.dataset, 0.0 if given and run.mix is None else run.mix),
        seed=run.seed,
    )
    return checkpoint, sample


def _analyze(
    run: Run,
    checkpoint: Checkpoint,
    sample: Sample,
    device: str,
    sink: Sink | None,
    progress: Callable[[int], None],
) -> Analysis:
    from surgery.analysis.analyze import Settings, analyze
    from surgery.calibration.walk import choose_dtype
    from surgery.checkpoint import parse_size

    return analyze(
        checkpoint,
        sample,
        dtype=choose_dtype(run.dtype, device),
        device=device,
        settings=Settings(
            seed=run.seed,
            memory_budget=parse_size(run.memory_budget) if run.memory_budget else None,
            coactivation=sink,
        ),
        progress=progress,
    )


def _write(found: Analysis, timed_on: Device, out: Path, more: Iterable[str]) -> None:
    from surgery.analysis.analyze import REPORT, TENSORS
    from surgery.report.html import write_report
    from surgery.storage import enter

    found.save(out, timed_on)
    written = write_report(found, timed_on, out)
    enter(out, [REPORT, TENSORS, *(path.name for path in written), *more])


def _show(found: Analysis, timed_on: Device, out: Path | None) -> None:
    from surgery.analysis.analyze import REPORT, TENSORS
    from surgery.cli.screen import show
    from surgery.report import analysis as report
    from surgery.report.html import PAGE
    from surgery.report.png import draws_png

    for part in report.tables(found, timed_on):
        show(part)
    if out is not None:
        names = [str(out / name) for name in (REPORT, TENSORS, PAGE)]
        show(f"wrote {names[0]}, {names[1]} and {names[2]}")
        if not draws_png():
            show("note: no PNGs without matplotlib: pip install 'model-surgery[plot]'")
