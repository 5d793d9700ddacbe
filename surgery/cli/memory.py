"""`surgery memory`."""

from __future__ import annotations

import re
from typing import Any

import click

from surgery.cli.options import CommonOptions, calibrated, converting, execute


@click.command("memory")
@click.option(
    "--layers",
    metavar="LIST|auto",
    help="Layers, like 8,16; auto: those whose MLPs are cheapest to replace. "
    "[default: three layers, where memory goes beside the MLP]",
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many layers --layers auto chooses.",
)
@click.option(
    "--place",
    type=click.Choice(["beside", "replace"]),
    default="beside",
    show_default=True,
    help="beside: keep the MLP, and add zero to it at first; replace: take its place.",
)
@click.option(
    "--init",
    type=click.Choice(["slots", "fit", "zero", "random"]),
    help="How a memory in the MLP's place begins; see Inits above. [default: slots]",
)
@click.option(
    "--kind",
    type=click.Choice(["pkm", "peer"]),
    default="pkm",
    show_default=True,
    help="pkm: a slot is a value; peer: an MLP of one neuron.",
)
@click.option(
    "--slots",
    metavar="N",
    help="Slots of the table, a square number, like 1M. "
    "[default: 1M beside, 4k in place, as many as there are neurons to find]",
)
@click.option("--heads", type=int, help="Lookups per token. [default: 4 beside, 1 in place]")
@click.option(
    "--knn",
    type=int,
    help="Slots that a head reads. [default: 32 beside, 16 in place, or what --reads allows]",
)
@click.option(
    "--key-dim", type=int, help="Dimensions of a head's query. [default: 512 beside, 32 in place]"
)
@click.option("--value-dim", type=int, help="Dimensions of a value. [default: the hidden size]")
@click.option(
    "--own-tables/--shared",
    default=False,
    help="A table for each layer, or one for all. [default: shared beside]",
)
@click.option(
    "--sparse-gradients",
    is_flag=True,
    help="Store gradients of the table only for the rows that were read.",
)
@click.option(
    "--reads",
    type=float,
    default=0.5,
    show_default=True,
    metavar="FRACTION",
    help="What a token reads in the MLP's place, as a fraction of the MLP's bytes.",
)
@click.option(
    "--find",
    type=click.Choice(["always", "product-keys"]),
    default="always",
    show_default=True,
    help="The neurons of --init slots: always the same ones, or those that a token's query finds.",
)
@click.option(
    "--distill",
    type=click.IntRange(min=0),
    default=0,
    metavar="STEPS",
    help="Optimise the neurons that --init slots keeps, like 80. [default: 0]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all random numbers.")
@calibrated
@converting
def memory_command(
    common: CommonOptions,
    calibration: dict[str, Any],
    layers: str | None,
    slots: str | None,
    **options: Any,
) -> int:
    """Give layers of MODEL a memory, a large table in which a token looks up few values.

    It finds them by product keys. Beside the MLP, the function of the model stays the same until
    the memory is trained. In the MLP's place, the memory is fitted on calibration text, and the
    verification shows what that costs. Without MODEL, convert the checkpoint in this folder.

    \b
    Inits in the MLP's place:
      slots   the MLP's own neurons that matter most, and a memory fitted to the rest
      fit     an affine map, and a memory fitted to the rest
      zero    a memory of zeros: the model without that MLP
      random  random values, as for training from scratch

    \b
    Examples:
      surgery memory meta-llama/Llama-2-7b-hf --layers 8,16 --dry-run
      surgery memory ./my-model --slots 65536 --kind peer
      surgery memory ./my-model --place replace --layers auto --count 2
      surgery memory ./my-model --place replace --layers 8 --find product-keys
    """
    from surgery.operations.memory import memory
    from surgery.workflow.recipe import parse_layers

    chosen = layers if layers == "auto" else parse_layers(layers)
    size = None if slots is None else parse_slots(slots)
    return execute(
        common,
        lambda checkpoint: memory(
            checkpoint, layers=chosen, slots=size, calibration=calibration, **options
        ),
    )


def parse_slots(text: str) -> int:
    """Parse a number like "4096", "4k" or "1M". Raises click.UsageError for anything else."""
    match = re.fullmatch(r"([0-9]{1,12})([kKmM]?)", text)
    if not match:
        raise click.UsageError(
            f"--slots {text} is no number of slots: write it like 4096, 64k or 1M"
        )
    return int(match[1]) << {"": 0, "k": 10, "m": 20}[match[2].lower()]
