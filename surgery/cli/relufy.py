"""`surgery relufy`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surgery.blocks.rules import ACTIVATIONS
from surgery.cli.options import CommonOptions, calibrated, converting, execute, parse_rank
from surgery.cli.paths import UserPath
from surgery.cli.presets import preset, quality

if TYPE_CHECKING:
    from surgery.checkpoint import Checkpoint


@click.command("relufy")
@click.option(
    "--activation",
    type=click.Choice(["auto", *ACTIVATIONS]),
    default="auto",
    show_default=True,
    help="The new activation; see Activations above.",
)
@quality("relufy")
@click.option(
    "--sparsity",
    type=float,
    metavar="FRACTION",
    help="The fraction of exact zeros that thresholds are chosen for. "
    "[default: 0.8 shifted and fatrelu, 0.65 cats, 0.7 teal]",
)
@click.option(
    "--threshold",
    type=float,
    metavar="T",
    help="One threshold for every layer, instead of --sparsity.",
)
@click.option(
    "--analysis",
    type=UserPath(file_okay=False),
    metavar="DIR",
    help="Take thresholds for --sparsity from what `surgery analyze --out DIR` measured. "
    "With --repair none, no text is run.",
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
    help="2: also a ReLU after the norms that attention and the MLP read.",
)
@click.option(
    "--repair",
    type=click.Choice(["none", "ridge", "reconstruct"]),
    default="ridge",
    show_default=True,
    help="none: keep the weights; ridge: refit down_proj; reconstruct: optimise gate and up too.",
)
@click.option(
    "--bypass",
    metavar="RANK",
    default="auto",
    show_default=True,
    help="Fit a linear map beside the MLP too: of this rank, `full`, `none`, or `auto`, about an "
    "eighth of the MLP's bytes. It repairs much.",
)
@click.option(
    "--form",
    type=click.Choice(["auto", "stock", "biases", "code"]),
    default="auto",
    show_default=True,
    help="stock: thresholds and bypass become plain neurons of a wider MLP; biases: with those of "
    "the family's MLP; code: a custom-code block; auto: stock where that is close enough.",
)
@click.option("--layers", metavar="LIST", help="Layers to convert, like 0-7,12. [default: all]")
@click.option(
    "--hardlink",
    is_flag=True,
    help="With --repair none: link to MODEL's weight files instead of copying them.",
)
@calibrated
@converting
def relufy_command(common: CommonOptions, hardlink: bool, **options: Any) -> int:
    """Give the MLPs of MODEL an activation that leaves most products at exactly zero.

    They are repaired on calibration text, with one layer in memory at a time. The verification
    shows what it costs: the perplexity of the source, of the change without repair and of the
    result, on held-out text of every domain. Without MODEL, convert the checkpoint in this folder.

    \b
    Activations:
      auto     stock        shifted at 62% zeros where a bypass is fitted, else relu
      relu     stock        ReLU of the gate
      relu2    stock        its square
      shifted  stock        ReLU of the gate less a threshold
      fatrelu  with code    the gate where it reaches a threshold
      drelu    with code    ReLU of gate and up (TurboSparse)
      cats     with code    the source's activation where it is large
      teal     with code    the product where it is large
    Stock ones load in transformers as they are, the others with trust_remote_code.

    \b
    Quality:
      fast     8,192 tokens of text: an eighth of the calibration time of default
      default  65,536 tokens, --repair ridge, --bypass auto
      best     131,072 tokens, --bypass full, --repair reconstruct where there are thresholds:
               two to three times the time (more with reconstruct), and H more neurons to read
               in each layer, or an [H, H] matrix with code

    \b
    Examples:
      surgery relufy meta-llama/Llama-2-7b-hf
      surgery relufy ./my-model --quality best
      surgery relufy ./my-model --activation shifted --sparsity 0.9
      surgery relufy ./my-model --activation fatrelu --bypass full --generated 0.5
      surgery relufy ./my-model --text corpus/ --tokens 131072
      surgery relufy ./my-model --repair none --hardlink
      surgery relufy ./my-model --activation teal --sparsity 0.6 --analysis ./report --repair none
    """
    from surgery.workflow.recipe import parse_layers

    options["layers"] = parse_layers(options["layers"])
    options["stage"] = int(options["stage"])
    analysis = options.pop("analysis")
    chosen = _with_preset(options)
    return execute(common, lambda c: _relufied(c, analysis, chosen), hardlink=hardlink)


def _with_preset(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `relufy`, with what --quality sets where nothing else was given."""
    found = preset("relufy", options["quality"])
    known = ACTIVATIONS.get(options["activation"])
    if known is None or not known.how.thresholds:
        found.pop("repair", None)  # beside a full bypass it gains too little, or has no thresholds
    if found.get("repair", options["repair"]) == "none":
        found.pop("bypass", None)  # no repair would fit it
    tokens = {"tokens": found.pop("tokens")} if "tokens" in found else {}
    made = options | found | {"calibration": tokens | options["calibration"]}
    made["bypass"] = parse_rank(made["bypass"], "auto", "none")
    return {name: value for name, value in made.items() if name != "quality"}


def _relufied(
    checkpoint: Checkpoint, analysis: Path | None, options: Mapping[str, Any]
) -> Checkpoint:
    """Return the relufied checkpoint, its thresholds from an analysis where one is given."""
    from surgery.blocks.preconditions import chosen_layers
    from surgery.errors import UsageError
    from surgery.families import locate
    from surgery.operations.relufy import relufy

    if analysis is None:
        return relufy(checkpoint, **options)
    given = options["threshold"] is not None or options["per_neuron"]
    if given or options["allocation"] != "uniform":
        raise UsageError(
            "--analysis with --threshold, --per-neuron or --allocation",
            "it gives one threshold to each layer: leave them out",
        )
    from surgery.analysis import saved_thresholds  # imports torch

    activation = {"auto": "relu"}.get(options["activation"], options["activation"])
    found = saved_thresholds.thresholds(
        analysis,
        checkpoint,
        activation,
        options["sparsity"] or ACTIVATIONS[activation].sparsity or 0.0,
        chosen_layers(locate(checkpoint), options["layers"]),
    )
    chosen = {"activation": activation, "sparsity": None, "threshold": found}
    return relufy(checkpoint, **{**options, **chosen})
