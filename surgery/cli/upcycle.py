"""`surgery upcycle`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from surgery.cli.options import Converting, converting, execute
from surgery.errors import UsageError


@click.command("upcycle")
@click.option("--experts", type=int, metavar="E", help="Routed experts. [default: those of 8 copies of the MLP]")
@click.option("--top-k", type=int, metavar="K", help="Experts that each token passes. [default: those of 2 copies]")
@click.option("--granularity", default=1, show_default=True, metavar="G", help="Cut each copy in G experts.")
@click.option("--shared", "shared_parts", type=int, metavar="S",
              help="Parts of the MLP that every token passes. [default: the target's]")  # fmt: skip
@click.option("--layers", metavar="LIST", help="Layers to convert, like 0-7,12. [default: all]")
@click.option("--dense-first", default=0, metavar="N", help="Keep the first N layers dense.")
@click.option("--target", default="auto", show_default=True, help="MoE architecture, see `surgery families`.")
@click.option("--drop", default=0.0, metavar="PART", help="Draw this part of each expert's neurons anew, like 0.5.")
@click.option("--noise", default=0.0, metavar="STD", help="Add noise of this standard deviation to the experts.")
@click.option("--expert", "models", multiple=True, metavar="MODEL", help="Take experts from this model; repeat it.")
@click.option("--attention", default="base", show_default=True, type=click.Choice(["base", "average"]),
              help="With --expert: take all else from MODEL, or the mean of the experts' models.")  # fmt: skip
@click.option("--router", default="normal", show_default=True, type=click.Choice(["normal", "zero"]),
              help="How routers begin.")  # fmt: skip
@click.option("--router-std", default=0.02, show_default=True, help="Standard deviation of the router's weights.")
@click.option("--seed", default=0, show_default=True, help="Decides every random value, with the tensor's name.")
@converting
def upcycle_command(shared: Converting, layers: str | None, models: Sequence[str], shared_parts: int | None,
                    **options: Any) -> int:  # fmt: skip
    """Turn each MLP of MODEL into a mixture of experts behind a new router, in a native architecture (Llama and
    Mistral become Mixtral, Qwen3 becomes Qwen3-MoE, ...). Copies, whole or cut in finer experts, compute exactly what
    MODEL does, which is verified; --drop, --noise and --expert make them differ from the start. Both are where training
    starts from. Without MODEL, the checkpoint in this folder.

    \b
    Examples:
      surgery upcycle --experts 8 Qwen/Qwen3-8B
      surgery upcycle ./llama --experts 4 --top-k 1 --out ./llama-moe
      surgery upcycle Qwen/Qwen3-8B --granularity 8 --shared 2 --dense-first 1
      surgery upcycle Qwen/Qwen3-8B --drop 0.5
      surgery upcycle ./base --expert ./code --expert ./maths --attention average
      surgery upcycle Qwen/Qwen3-8B --layers 12-35 --dry-run
    """
    from surgery.operations.upcycle import upcycle
    from surgery.run import parse_layers

    for name in models:
        if name.isdigit():
            raise UsageError(f"--expert {name} would be a model", "see `surgery upcycle --help`: --experts counts")
    chosen = parse_layers(layers)
    return execute(shared, lambda c: upcycle(c, layers=chosen, shared=shared_parts, expert_models=models, **options))
