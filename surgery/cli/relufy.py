"""`surgery relufy`."""

from __future__ import annotations

import click

from surgery.cli.options import Converting, converting, execute


@click.command("relufy")
@click.option("--activation", type=click.Choice(["relu", "relu2"]), default="relu", show_default=True)
@click.option("--hardlink", is_flag=True, help="Link to MODEL's weight files instead of copying them (same disk only).")
@converting
def relufy_command(shared: Converting, activation: str, hardlink: bool) -> int:
    """Put ReLU (or ReLU²) in every MLP of MODEL: stage 1 of ReLU Strikes Back. The weights stay byte for byte, so the
    model is worse until it is trained; the verification shows the perplexity of both. Without MODEL, the checkpoint in
    this folder.

    \b
    Examples:
      surgery relufy meta-llama/Llama-2-7b-hf
      surgery relufy ./my-model --activation relu2 --hardlink
      surgery relufy ./my-model --dry-run --json
    """
    from surgery.operations.relufy import relufy

    return execute(shared, lambda checkpoint: relufy(checkpoint, activation=activation), hardlink=hardlink)
