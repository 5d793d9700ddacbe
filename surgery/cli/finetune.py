"""The command `surgery finetune-script`."""

from __future__ import annotations

from pathlib import Path

import click

from surgery.cli.paths import UserPath


@click.command("finetune-script")
@click.argument("folder", metavar="DIR", type=UserPath(), default=".")
@click.option("--dry-run", is_flag=True, help="Print the files and their sizes. Write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing.")
def finetune_script_command(folder: Path, dry_run: bool, as_json: bool, quiet: bool) -> int:
    """Write DIR/finetune again, in a checkpoint that surgery wrote.

    It holds finetune.py, a self-contained script that trains what the conversion changed;
    fsdp2.yaml, zero3.yaml and axolotl.yaml to launch it with; requirements.txt; and smoke.txt, a
    little text to try it on. Every conversion writes these files. This command replaces whatever
    was edited there.

    \b
    Examples:
      surgery finetune-script ./llama-relu
      surgery finetune-script ./llama-mixtral-8x-top2 --dry-run
    """
    from surgery import finetune
    from surgery.cli import screen
    from surgery.workflow.record import read_record

    files = finetune.of_folder(folder, read_record(folder))
    if not dry_run:
        finetune.write(folder, files)
    if as_json:
        screen.echo_json({str(folder / name): len(data) for name, data in files.items()})
    elif not quiet:
        for name, data in files.items():
            screen.show(f"{len(data):8,}  {folder / name}")
    return 0
