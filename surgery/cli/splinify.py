"""`surgery splinify`."""

from __future__ import annotations

from typing import Any

import click

from surgery.checkpoint.parsing import is_number
from surgery.cli.options import CommonOptions, converting, execute


@click.command("splinify")
@click.option(
    "--kind",
    type=click.Choice(["spline", "rational", "linear"]),
    default="spline",
    show_default=True,
    help="spline: cubic B-splines; rational: a quotient of polynomials; linear: straight lines in "
    "the activation's place.",
)
@click.option(
    "--grid", type=int, metavar="CELLS", help="Cells of the grid. [default: 32, for linear 512]"
)
@click.option(
    "--range",
    "reach",
    type=float,
    default=8.0,
    show_default=True,
    metavar="R",
    help="The grid reaches from -R to R. Outside, the activation stays as it is; linear goes on "
    "straight.",
)
@click.option(
    "--groups",
    metavar="channel|layer|N",
    help="Functions of a layer: one for each channel, one for the layer, or N. "
    "[default: channel, for linear layer]",
)
@click.option("--layers", metavar="LIST", help="Layers to convert, like 0-7,12. [default: all]")
@converting
def splinify_command(
    common: CommonOptions,
    kind: str,
    grid: int | None,
    reach: float,
    groups: str | None,
    layers: str | None,
) -> int:
    """Make the activation of MODEL's MLPs learnable, as in a KAN.

    For each channel, a spline or rational function that begins at zero is added to it. The function
    of the model stays the same, bit for bit, and gains nothing until it is trained. Straight lines
    (linear) are near the activation, not exactly it: the verification shows the perplexity. Without
    MODEL, convert the checkpoint in this folder.

    \b
    Examples:
      surgery splinify meta-llama/Llama-2-7b-hf
      surgery splinify ./my-model --groups layer --grid 64
      surgery splinify ./my-model --kind rational --layers 8-15
      surgery splinify ./my-model --kind linear
    """
    from surgery.operations.splinify import splinify
    from surgery.workflow.recipe import parse_layers

    options: dict[str, Any] = {
        "kind": kind,
        "grid": grid,
        "range": reach,
        "layers": parse_layers(layers),
    }
    options["groups"] = int(groups) if groups and is_number(groups) else groups
    return execute(common, lambda checkpoint: splinify(checkpoint, **options))
