"""`surgery relufy`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surgery.blocks.rules import ACTIVATIONS
from surgery.cli.options import CommonOptions, calibrated, converting, execute, parse_rank

if TYPE_CHECKING:
    from surgery.checkpoint import Checkpoint


@click.command("relufy")
@click.option(
    "--activation",
    type=click.Choice(list(ACTIVATIONS)),
    default="relu",
    show_default=True,
    help="See below.",
)
@click.option(
    "--sparsity",
    type=float,
    metavar="FRACTION",
    help="Exact zeros that thresholds are chosen for. [default: 0.8 shifted and fatrelu, 0.65 cats, 0.7 teal]",
)
@click.option(
    "--threshold",
    type=float,
    metavar="T",
    help="One threshold for every layer, instead of --sparsity.",
)
@click.option(
    "--analysis",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Thresholds for --sparsity from what `surgery analyze --out DIR` saw; no walk where --repair is none.",
)
@click.option(
    "--per-neuron", is_flag=True, help="A threshold for each neuron, not one for each layer."
)
@click.option(
    "--allocation",
    type=click.Choice(["uniform", "greedy"]),
    default="uniform",
    show_default=True,
    help="greedy: more zeros in layers where they cost least, --sparsity on average.",
)
@click.option(
    "--stage",
    type=click.Choice(["1", "2"]),
    default="1",
    show_default=True,
    help="2: a ReLU after the norms that attention and the MLP read, too.",
)
@click.option(
    "--repair",
    type=click.Choice(["none", "ridge", "reconstruct"]),
    default="ridge",
    show_default=True,
    help="none: the weights stay; ridge: refit down_proj; reconstruct: optimise gate, up and down too.",
)
@click.option(
    "--bypass",
    metavar="RANK",
    default="0",
    help="A linear map beside the MLP that the repair fits too: its rank, or full. Costs bytes, saves much; with code.",
)
@click.option("--layers", metavar="LIST", help="Layers to convert, like 0-7,12. [default: all]")
@click.option(
    "--hardlink",
    is_flag=True,
    help="With --repair none: link to MODEL's weight files instead of copying them.",
)
@calibrated
@converting
def relufy_command(
    common: CommonOptions,
    calibration: dict[str, Any],
    activation: str,
    sparsity: float | None,
    threshold: float | None,
    analysis: Path | None,
    per_neuron: bool,
    allocation: str,
    stage: str,
    repair: str,
    bypass: str,
    layers: str | None,
    hardlink: bool,
) -> int:
    """Give the MLPs of MODEL an activation that leaves most products at exactly zero, and repair
    them on calibration text, one layer in memory at a time. The verification shows what that costs:
    perplexity on two domains of text, of the source, of the swap without repair and of the result.
    Without MODEL, the checkpoint in this folder.

    \b
    Activations:
      relu     stock        ReLU of the gate
      relu2    stock        its square
      shifted  llama stock  ReLU of the gate less a threshold
      fatrelu  with code    the gate where it reaches a threshold
      drelu    with code    ReLU of gate and up (TurboSparse)
      cats     with code    the source's activation where it is large
      teal     with code    the product where it is large
    Stock ones load in transformers as they are, the others with trust_remote_code.

    \b
    Examples:
      surgery relufy meta-llama/Llama-2-7b-hf
      surgery relufy ./my-model --activation shifted --sparsity 0.9
      surgery relufy ./my-model --activation fatrelu --bypass full --generated 0.5
      surgery relufy ./my-model --text corpus/ --tokens 131072
      surgery relufy ./my-model --repair none --hardlink
      surgery relufy ./my-model --activation teal --sparsity 0.6 --analysis ./report --repair none
    """
    from surgery.errors import UsageError
    from surgery.families import locate
    from surgery.operations.relufy import relufy
    from surgery.workflow.recipe import parse_layers

    chosen = parse_layers(layers)
    options: dict[str, Any] = {
        "activation": activation,
        "stage": int(stage),
        "per_neuron": per_neuron,
        "allocation": allocation,
        "repair": repair,
        "bypass": parse_rank(bypass),
        "layers": chosen,
        "calibration": calibration,
    }

    def operation(checkpoint: Checkpoint) -> Checkpoint:
        if analysis is None:
            return relufy(checkpoint, **options, sparsity=sparsity, threshold=threshold)
        if threshold is not None or per_neuron or allocation != "uniform":
            raise UsageError(
                "--analysis with --threshold, --per-neuron or --allocation",
                "it gives one threshold to each layer: leave them out",
            )
        from surgery.analysis import saved_thresholds  # torch

        found = saved_thresholds.thresholds(
            analysis,
            checkpoint,
            activation,
            sparsity or ACTIVATIONS[activation].sparsity or 0.0,
            sorted(chosen or range(locate(checkpoint).count)),
        )
        return relufy(checkpoint, **options, threshold=found)

    return execute(common, operation, hardlink=hardlink)
