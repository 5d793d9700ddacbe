"""`surgery upcycle`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from surgery.checkpoint.parsing import is_number
from surgery.cli.options import CommonOptions, calibrated, converting, execute
from surgery.cli.paths import LOCATION
from surgery.errors import UsageError


@click.command("upcycle")
@click.option(
    "--experts",
    type=int,
    metavar="E",
    help="Routed experts. [default: as many as 8 copies of the MLP make]",
)
@click.option(
    "--top-k",
    type=int,
    metavar="K",
    help="Experts that each token passes. [default: as many as 2 copies make]",
)
@click.option(
    "--granularity",
    default=1,
    show_default=True,
    metavar="G",
    help="Cut each copy into G finer experts.",
)
@click.option(
    "--shared",
    "shared_parts",
    type=int,
    metavar="S",
    help="Parts of the MLP that every token passes. [default: the target's]",
)
@click.option("--layers", metavar="LIST", help="Layers to convert, like 0-7,12. [default: all]")
@click.option("--dense-first", default=0, metavar="N", help="Keep the first N layers dense.")
@click.option(
    "--target",
    default="auto",
    show_default=True,
    help="MoE architecture, see `surgery families`; surgery: a custom-code block.",
)
@click.option(
    "--drop",
    default=0.0,
    metavar="PART",
    help="Initialise this part of each expert's neurons anew, like 0.5.",
)
@click.option(
    "--noise",
    default=0.0,
    metavar="STD",
    help="Add noise of this standard deviation to the experts.",
)
@click.option(
    "--expert",
    "models",
    type=LOCATION,
    multiple=True,
    metavar="MODEL",
    help="Take experts from this model; repeat it.",
)
@click.option(
    "--attention",
    default="base",
    show_default=True,
    type=click.Choice(["base", "average"]),
    help="With --expert: take all else from MODEL, or the mean of the experts' models.",
)
@click.option(
    "--router",
    default="normal",
    show_default=True,
    type=click.Choice(["normal", "zero", "centroids", "class-means"]),
    help="How routers begin; see Routers above.",
)
@click.option(
    "--router-std",
    default=0.02,
    show_default=True,
    help="Standard deviation of a normal router's weights.",
)
@click.option(
    "--expert-text",
    "texts",
    type=LOCATION,
    multiple=True,
    metavar="FILE",
    help="With class-means: text for the expert at the same position; repeat it.",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    help="Seed of all random numbers.",
)
@calibrated
@converting
def upcycle_command(
    common: CommonOptions,
    calibration: dict[str, Any],
    layers: str | None,
    models: Sequence[str],
    texts: Sequence[str],
    shared_parts: int | None,
    **options: Any,
) -> int:
    """Turn each MLP of MODEL into a mixture of experts behind a new router.

    The output has a native architecture (Llama and Mistral become Mixtral, Qwen3 becomes Qwen3-MoE,
    …). Where none can hold the model (Gemma 2 and 3, GPT-2, Falcon, …), and with --target surgery,
    it has custom code that is saved with the checkpoint.

    Copies compute exactly what MODEL does, also where they are cut finer. With --drop, --noise and
    --expert the experts differ, and the function changes. Without MODEL, convert the checkpoint in
    this folder.

    \b
    Routers:
      normal       random rows
      zero         no preference
      centroids    balanced k-means of the router's inputs on text: a copy for each kind of token
      class-means  the mean of its inputs on each expert's text: a copy for each kind of text

    \b
    Examples:
      surgery upcycle --experts 8 Qwen/Qwen3-8B
      surgery upcycle ./llama --experts 4 --top-k 1 --out ./llama-moe
      surgery upcycle Qwen/Qwen3-8B --granularity 8 --shared 2 --dense-first 1
      surgery upcycle Qwen/Qwen3-8B --drop 0.5 --router centroids
      surgery upcycle ./base --expert ./code --expert ./maths --attention average
      surgery upcycle m --expert a --expert b --router class-means --expert-text x --expert-text y
      surgery upcycle google/gemma-3-270m --experts 4 --dry-run
    """
    from surgery.operations.upcycle import upcycle
    from surgery.storage import open_checkpoint
    from surgery.workflow.recipe import parse_layers

    _check(models, calibration, options["router"])
    options |= {"layers": parse_layers(layers), "shared": shared_parts}
    options |= {"expert_texts": texts, "calibration": calibration}
    experts = [open_checkpoint(m) for m in models]
    return execute(common, lambda c: upcycle(c, expert_models=experts, **options))


def _check(models: Sequence[str], calibration: dict[str, Any], router: str) -> None:
    """Raise UsageError for a number in the place of a model, and for text that no router reads."""
    for name in models:
        if is_number(name):
            raise UsageError(
                f"--expert {name} would be a model",
                "see `surgery upcycle --help`: --experts counts",
            )
    if calibration and router not in ("centroids", "class-means"):
        raise UsageError(f"text for a router that begins {router}", "give --router centroids")
