"""`surgery upcycle`."""

from __future__ import annotations

import click

from surgery.cli.options import Converting, converting, execute


@click.command("upcycle")
@click.option("--experts", default=8, show_default=True, help="Copies of each MLP.")
@click.option("--top-k", default=2, show_default=True, help="Experts that each token passes.")
@click.option("--layers", metavar="LIST", help="Layers to convert, like 0-7,12. [default: all]")
@click.option("--target", default="auto", show_default=True, help="MoE architecture, see `surgery families`.")
@click.option("--router-std", default=0.02, show_default=True, help="Standard deviation of the router's weights.")
@click.option("--seed", default=0, show_default=True, help="Decides every random value, with the tensor's name.")
@converting
def upcycle_command(shared: Converting, experts: int, top_k: int, layers: str | None, target: str, router_std: float,
                    seed: int) -> int:  # fmt: skip
    """Turn each MLP of MODEL into a mixture of copies of itself behind a new router, in a native architecture (Llama and
    Mistral become Mixtral, Qwen3 becomes Qwen3-MoE, ...). The result computes exactly what MODEL does, which is
    verified, and is where training starts from. Without MODEL, the checkpoint in this folder.

    \b
    Examples:
      surgery upcycle --experts 8 Qwen/Qwen3-8B
      surgery upcycle ./llama --experts 4 --top-k 1 --out ./llama-moe
      surgery upcycle Qwen/Qwen3-8B --layers 12-35 --dry-run
    """
    from surgery.operations.upcycle import upcycle
    from surgery.run import parse_layers

    chosen = parse_layers(layers)
    return execute(shared, lambda checkpoint: upcycle(checkpoint, experts=experts, top_k=top_k, layers=chosen,
                                                      target=target, router_std=router_std, seed=seed))  # fmt: skip
