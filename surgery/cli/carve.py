"""`surgery carve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surgery.cli.options import CommonOptions, calibrated, converting, execute, parse_rank
from surgery.errors import UsageError
from surgery.operations.carve import ALLOCATIONS, METHODS, ROUTERS, carve

if TYPE_CHECKING:
    pass


@click.command("carve")
@click.option(
    "--experts",
    default=16,
    show_default=True,
    metavar="E",
    help="Parts that each MLP is cut into, shared ones among them.",
)
@click.option(
    "--active",
    metavar="A",
    help="Parts that a token passes, shared ones among them, or a list, one number a layer. [default: three quarters]",
)
@click.option(
    "--allocation",
    type=click.Choice(ALLOCATIONS),
    default="uniform",
    show_default=True,
    help="greedy: more active parts in layers where they matter most, A in the mean.",
)
@click.option(
    "--shared",
    "shared_parts",
    default=0,
    show_default=True,
    metavar="S",
    help="Parts that every token passes.",
)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default="mass",
    show_default=True,
    help="Which neurons stand together, see below.",
)
@click.option(
    "--router",
    type=click.Choice(ROUTERS),
    default="trained",
    show_default=True,
    help="What chooses among them, see below.",
)
@click.option(
    "--repair",
    type=click.Choice(["none", "ridge"]),
    default="ridge",
    show_default=True,
    help="none: the weights stay; ridge: refit down_proj.",
)
@click.option(
    "--bypass",
    metavar="RANK",
    default="0",
    help="A linear map beside the MLP that the repair fits too: its rank, or full. Costs bytes; for few active parts.",
)
@click.option("--seed", default=0, show_default=True, help="Decides what is drawn at random.")
@click.option("--layers", metavar="LIST", help="Layers to convert, like 0-7,12. [default: all]")
@click.option(
    "--sweep",
    metavar="LIST",
    help="Write nothing; show the quality with these percentages active, like 25,50,75,100.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --sweep: draw it, as .png, .svg or .pdf.",
)
@calibrated
@converting
def carve_command(
    common: CommonOptions,
    calibration: dict[str, Any],
    sweep: str | None,
    plot: Path | None,
    layers: str | None,
    active: str | None,
    shared_parts: int,
    bypass: str,
    **options: Any,
) -> int:
    """ExpertSplit each MLP of MODEL into experts, of which a token passes some: its own neurons in another
    order behind a new router, and no training. With all parts active it is the same function, which
    is verified. --sweep shows what fewer cost, beside a random split and a router that knows. A
    relufied model keeps its thresholds and its bypass. Without MODEL, the checkpoint in this
    folder.

    \b
    Methods:
      random        for comparison
      kmeans        balanced k-means of the rows of gate and up (LLaMA-MoE)
      coactivation  balanced cut of the graph of neurons that fire together (MoEfication)
      cmoe          balanced assignment of activation markers (CMoE)
      mass          groups that hold as much as can be of what the active ones add
    Routers:
      centroids     the mean direction of an expert's rows of gate
      trained       a small MLP, trained in seconds a layer for the experts with most mass
      analytic      one neuron of each expert stands for it (CMoE)

    \b
    Examples:
      surgery carve meta-llama/Llama-3.2-1B --active 12
      surgery carve ./my-model --experts 32 --active 8 --shared 2 --dry-run
      surgery carve ./my-model --active 12 --allocation greedy --bypass full --tokens 32768
      surgery carve ./my-model --sweep 25,50,75,100 --plot sweep.png
      surgery carve ./my-model --method cmoe --router analytic --shared 3 --repair none
    """
    from surgery.workflow.recipe import parse_layers

    if plot and not sweep:
        raise UsageError("--plot draws a sweep", "give --sweep 25,50,75,100 with it")
    options |= {
        "shared": shared_parts,
        "bypass": parse_rank(bypass),
        "layers": parse_layers(layers),
    }
    if sweep and (common.out or common.dry_run or active is not None):
        raise UsageError(
            "--sweep writes nothing, and --out, --dry-run and --active are of an output",
            "leave them out",
        )
    if sweep:
        _sweep(common, calibration, _fractions(sweep), plot, options)
        return 0
    options |= {"active": _active(active), "calibration": calibration}
    return execute(common, lambda source: carve(source, **options))


def _active(text: str | None) -> int | list[int] | None:
    """From "12" or "16,15,12". Raises UsageError for anything else."""
    try:
        numbers = [int(part) for part in text.split(",")] if text is not None else None
    except ValueError:
        raise UsageError(
            f"{text!r} are no numbers of active parts", "write 12, or one for each layer: 16,15,12"
        ) from None
    return numbers[0] if numbers and len(numbers) == 1 else numbers


def _fractions(text: str) -> list[float]:
    """From "25,50". Raises UsageError for anything else."""
    try:
        return [float(part) / 100 for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r} are no percentages", "write them like 25,50,75,100") from None


def _sweep(
    common: CommonOptions,
    calibration: dict[str, Any],
    fractions: list[float],
    plot: Path | None,
    options: dict[str, Any],
) -> None:
    from surgery.calibration.settings import Calibration
    from surgery.cli import screen
    from surgery.report import carve_sweep as report
    from surgery.storage import open_checkpoint
    from surgery.workflow.carve_sweep import sweep
    from surgery.workflow.trust import require_trust

    if plot:
        report.require_plot(plot)
    silent = common.quiet or common.as_json
    if silent:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    source = open_checkpoint(common.model, revision=common.revision, stream=common.stream)
    require_trust(source, common.trust_remote_code)
    with screen.Bars(quiet=silent).stage("carving", 0, "layer") as progress:
        found = sweep(
            source,
            fractions=fractions,
            calibration=Calibration.of(calibration),
            progress=progress,
            **options,
        )
    if plot:
        report.plot(found, plot)
    if common.as_json:
        screen.echo_json(found.as_dict())
    elif not common.quiet:
        for part in report.tables(found):
            screen.show(part)
        if plot:
            screen.show(f"wrote {plot}")
