"""`surgery push`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from surgery.workflow.publish import Pushed


@click.command("push")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("repo")
@click.option("--private", is_flag=True, help="Create it as a private one.")
@click.option("--pr", is_flag=True, help="Leave a pull request open instead of merging it.")
@click.option("--dry-run", is_flag=True, help="List the files and their sizes. Send nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bars and no table.")
def push_command(
    folder: Path, repo: str, private: bool, pr: bool, dry_run: bool, as_json: bool, quiet: bool
) -> None:
    """Publish DIR, an output that passed its verification, on the Hub as REPO, OWNER/NAME. The
    files go to a pull request that is merged when all of them are there, so that main is never half
    a model. Run it again where it was interrupted: what the Hub has already is not sent again.
    Needs `hf auth login` or HF_TOKEN.

    \b
    Examples:
      surgery push ./Qwen3-8B-qwen3-moe-8x-top2 me/Qwen3-8B-moe
      surgery push ./my-model-relu me/my-model-relu --private --dry-run
      surgery push ./my-model-relu team/my-model-relu --pr
    """
    from surgery.cli import screen
    from surgery.workflow import publish

    if quiet or as_json or not sys.stderr.isatty():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    done = publish.push(
        folder,
        repo,
        private=private,
        pr=pr,
        dry_run=dry_run,
        observer=screen.Bars(quiet=quiet or as_json),
    )
    if as_json:
        screen.echo_json(done.as_dict())
    elif not quiet:
        show(done, dry_run)


def show(done: Pushed, dry_run: bool = False) -> None:
    """What was pushed, or would be."""
    from rich.table import Table

    from surgery.cli import screen

    if dry_run:
        screen.show(
            f"Would send {screen.gigabytes(done.nbytes)} in {len(done.send)} files to {done.url}"
        )
        table = Table(box=None, show_header=False)
        for name, size in done.files.items():
            table.add_row(name, screen.gigabytes(size), "" if name in done.send else "is there")
        for name in done.delete:
            table.add_row(name, "", "deleted: of another model")
        screen.show(table)
    elif done.pull_request is None:
        screen.show(f"{done.url} has all of it already")
    else:
        merged = "merged" if done.merged else "open for you to look at"
        screen.show(
            f"sent {screen.gigabytes(done.nbytes)} in {len(done.send)} files to {done.url}, pull request {done.pull_request} {merged}"
        )
    screen.show_notes(list(done.notes))
