"""`surgery carve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from surgery.cli.options import CommonOptions, calibrated, converting, execute, parse_rank
from surgery.cli.paths import UserPath
from surgery.cli.presets import preset, quality
from surgery.errors import UsageError
from surgery.operations.carve import ALLOCATIONS, METHODS, ROUTERS, carve


@click.command("carve")
@click.option(
    "--experts",
    default=16,
    show_default=True,
    metavar="E",
    help="Parts that each MLP is cut into, shared ones included.",
)
@click.option(
    "--active",
    metavar="A",
    help="Parts that a token passes, shared ones included: one number, or one for each layer. "
    "[default: three quarters]",
)
@quality("carve")
@click.option(
    "--allocation",
    type=click.Choice(ALLOCATIONS),
    default="uniform",
    show_default=True,
    help="greedy: more active parts in layers where they matter most, A on average.",
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
    help="Which neurons are grouped together; see Methods above.",
)
@click.option(
    "--router",
    type=click.Choice(ROUTERS),
    default="trained",
    show_default=True,
    help="What chooses the parts of a token; see Routers above.",
)
@click.option(
    "--repair",
    type=click.Choice(["none", "ridge"]),
    default="ridge",
    show_default=True,
    help="none: keep the weights; ridge: refit down_proj.",
)
@click.option(
    "--bypass",
    metavar="RANK",
    default="none",
    show_default=True,
    help="Fit a linear map beside the MLP too, of this rank or `full`. A token reads all of it: "
    "where most parts are active, more of them repair more for the same bytes.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of all random numbers.")
@click.option("--layers", metavar="LIST", help="Layers to convert, like 0-7,12. [default: all]")
@click.option(
    "--sweep",
    metavar="LIST",
    help="Write nothing. Show the quality with these percentages active, like 25,50,75,100.",
)
@click.option(
    "--plot",
    type=UserPath(),
    metavar="FILE",
    help="With --sweep: draw it to a .png, .svg or .pdf.",
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
    """Cut each MLP of MODEL into experts of its own neurons, of which a token passes only some.

    The neurons are put in another order behind a new router, without training. With all parts
    active it is the same function, which is verified. --sweep shows what fewer parts cost, beside a
    random split and an ideal router. A relufied model keeps its thresholds and its bypass. Without
    MODEL, convert the checkpoint in this folder.

    \b
    Methods:
      random        for comparison
      kmeans        balanced k-means of the rows of gate and up (LLaMA-MoE)
      coactivation  balanced cut of the graph of neurons that fire together (MoEfication)
      cmoe          balanced assignment of activation markers (CMoE)
      mass          groups that hold as much as possible of what the active neurons add
    Routers:
      centroids     the mean direction of an expert's rows of gate
      trained       a small MLP, trained within seconds per layer to find the experts with most mass
      analytic      one neuron of each expert represents it (CMoE)

    \b
    Quality:
      fast     8,192 tokens of text: an eighth of the calibration time of default
      default  65,536 tokens, no bypass
      best     131,072 tokens, --bypass full: two to three times the time, and one more [H, H]
               matrix to read in each layer

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
    options |= {"shared": shared_parts, "layers": parse_layers(layers), "calibration": calibration}
    options = _with_preset(options | {"bypass": bypass})
    if sweep:
        _require_no_output(common, active)
        _sweep(common, _fractions(sweep), plot, options)
        return 0
    options["active"] = _active(active)
    return execute(common, lambda source: carve(source, **options))


def _require_no_output(common: CommonOptions, active: str | None) -> None:
    """Raise UsageError for options that a sweep has no use for."""
    if common.out or common.dry_run or active is not None:
        raise UsageError(
            "--sweep writes nothing, and --out, --dry-run and --active are of an output",
            "leave them out",
        )


def _with_preset(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `carve`, with what --quality sets where nothing else was given."""
    found = preset("carve", options.pop("quality"))
    if options["repair"] == "none":
        found.pop("bypass", None)  # no repair would fit it
    tokens = {"tokens": found.pop("tokens")} if "tokens" in found else {}
    made = options | found | {"calibration": tokens | options["calibration"]}
    return made | {"bypass": parse_rank(made["bypass"], "none")}


def _active(text: str | None) -> int | list[int] | None:
    """Parse "12" or "16,15,12". Raises UsageError for anything else."""
    try:
        numbers = [int(part) for part in text.split(",")] if text is not None else None
    except ValueError:
        raise UsageError(
            f"{text!r} are no numbers of active parts", "write 12, or one for each layer: 16,15,12"
        ) from None
    return numbers[0] if numbers and len(numbers) == 1 else numbers


def _fractions(text: str) -> list[float]:
    """Parse "25,50" into fractions. Raises UsageError for anything else."""
    try:
        return [float(part) / 100 for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r} are no percentages", "write them like 25,50,75,100") from None


def _sweep(
    common: CommonOptions, fractions: list[float], plot: Path | None, options: dict[str, Any]
) -> None:
    from surgery.calibration.settings import Calibration
    from surgery.cli import screen
    from surgery.report import carve_sweep as report
    from surgery.workflow.carve_sweep import sweep
    from surgery.workflow.trust import require_trust

    if plot:
        report.require_plot(plot)
    options["calibration"] = Calibration.of(options["calibration"])
    if common.silent:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    source = common.open()
    require_trust(source, common.trust_remote_code)
    with screen.Bars(quiet=common.silent).stage("carving", 0, "layer") as progress:
        found = sweep(source, fractions=fractions, progress=progress, **options)
    if plot:
        report.plot(found, plot)
    if common.as_json:
        screen.echo_json(found.as_dict())
    elif not common.quiet:
        for part in report.tables(found):
            screen.show(part)
        if plot:
            screen.show(f"wrote {plot}")
