"""`surgery export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from surgery.cli.options import strip_prefix
from surgery.cli.paths import LOCATION, UserPath
from surgery.engines.quantise import TYPES

if TYPE_CHECKING:
    from surgery.workflow.export import Exported

FORMATS = ("gguf",)


@click.command("export")
@click.argument("model", metavar="DIR", type=LOCATION)
@click.option(
    "--format",
    type=click.Choice(FORMATS),
    default="gguf",
    show_default=True,
    help="gguf is a file for llama.cpp and whatever is built on it.",
)
@click.option(
    "--type",
    "kind",
    type=click.Choice(list(TYPES)),
    default="bf16",
    show_default=True,
    help="How matrices are stored. q8_0 and q4_0 round them to 8 and 4 bits, with a scale for "
    "every 32 values; norms and biases stay in f32.",
)
@click.option(
    "--out",
    type=UserPath(),
    metavar="FILE",
    help="The file. [default: beside DIR, named after it and the type]",
)
@click.option("--revision", help="Branch, tag or commit of a Hub id.")
@strip_prefix
@click.option("--dry-run", is_flag=True, help="Check everything and print the plan. Write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--quiet", "-q", is_flag=True, help="No progress and no table.")
def export_command(
    model: str,
    format: str,
    kind: str,
    out: Path | None,
    revision: str | None,
    strip_prefix: str | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write DIR, a relufied Llama, Mistral or Qwen2, as a file that llama.cpp runs.

    llama.cpp computes SiLU in these families whatever the config says, so a relufied model is
    written as its SmallThinker with one expert, which computes the same. The tokenizer and the
    chat template go with it. What llama.cpp cannot hold is refused, with the reason: biases in
    MLPs, other activations, code of its own (`surgery fold` removes that of a relufied model).

    \b
    Examples:
      surgery export ./my-model-relu
      surgery export ./my-model-relu --type q8_0 --out my-model.gguf
      surgery export ./my-model-relu --type q4_0 --dry-run
    """
    from surgery.cli import screen
    from surgery.storage import open_checkpoint
    from surgery.workflow.export import export
    from surgery.workflow.record import default_out

    checkpoint = open_checkpoint(model, revision=revision, strip_prefix=strip_prefix)
    done = export(
        checkpoint,
        out or default_out(checkpoint, f"{kind}.{format}"),
        format=format,
        type=kind,
        dry_run=dry_run,
        observer=screen.Bars(quiet=quiet or as_json or dry_run),
    )
    if as_json:
        screen.echo_json(done.as_dict())
    elif not quiet:
        _show(done, dry_run)


def _show(done: Exported, dry_run: bool) -> None:
    """Print what was written or would be, and how to run it."""
    from surgery.cli import screen
    from surgery.quoting import command

    size = screen.gigabytes(done.nbytes)
    how = "was there already" if done.already else "would write" if dry_run else "wrote"
    screen.show(f"{how}: {done.file}, {size}")
    rows = [
        ("architecture", f"{done.architecture}, {done.tensors} tensors, {done.type}"),
        ("peak memory", f"about {screen.gigabytes(done.peak_memory)}"),
    ]
    screen.show(screen.pairs(rows))
    screen.show_notes(done.notes)
    if not dry_run:
        screen.show("\nNext:")
        screen.show(f"  {command('llama-cli', '-m', done.file, '-p', 'The people of')}")
