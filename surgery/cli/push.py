"""`surgery push`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from surgery.cli.paths import UserPath

if TYPE_CHECKING:
    from surgery.workflow.publish import Pushed


@click.command("push")
@click.argument("folder", metavar="DIR", type=UserPath())
@click.argument("repo")
@click.option("--private", is_flag=True, help="Create a private repository.")
@click.option("--pr", is_flag=True, help="Leave a pull request open instead of merging it.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="List the files, their sizes and the checks. Send nothing; works without a network.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--quiet", "-q", is_flag=True, help="No progress and no table.")
def push_command(
    folder: Path, repo: str, private: bool, pr: bool, dry_run: bool, as_json: bool, quiet: bool
) -> None:
    """Publish DIR, an output that passed its verification, on the Hub as REPO (OWNER/NAME).

    The files go to a pull request, which is merged when all of them are there, so that main is
    never half a model. If it is interrupted, run it again: what the Hub has already is not sent
    again. Needs `hf auth login` or HF_TOKEN.

    \b
    Examples:
      surgery push ./Qwen3-8B-qwen3-moe-8x-top2 me/Qwen3-8B-moe
      surgery push ./my-model-relu me/my-model-relu --private --dry-run
      surgery push ./my-model-relu team/my-model-relu --pr
    """
    from surgery.cli import outcome, screen
    from surgery.workflow import publish
    from surgery.workflow.record import read_record

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
    elif not quiet and dry_run:
        _show_plan(done)
    elif not quiet:
        show(done)
        outcome.show_next(folder, read_record(folder), pushed=repo)


def _show_plan(plan: Pushed) -> None:
    """Print what a push would send."""
    from rich.table import Table

    from surgery.cli import screen

    size = screen.gigabytes(plan.nbytes)
    screen.show(f"Would send {size} in {len(plan.send)} files to {plan.url}")
    table = Table(box=None, show_header=False)
    for name, nbytes in plan.files.items():
        there = "" if name in plan.send else "is there already"
        table.add_row(name, screen.gigabytes(nbytes), there)
    for name in plan.delete:
        table.add_row(name, "", "deleted: of another model")
    screen.show(table)
    screen.show("Checked: the verification passed, and every shard has its recorded size")
    screen.show("After the upload: every file is compared by its hash before the merge")
    screen.show_notes(plan.notes)


def show(done: Pushed) -> None:
    """Print what was pushed."""
    from surgery.cli import screen

    if done.pull_request is None:
        screen.show(f"{done.url} has all of it already")
    else:
        merged = "merged" if done.merged else "open for you to look at"
        sent = f"{screen.gigabytes(done.nbytes)} in {len(done.send)} files"
        screen.show(f"sent {sent} to {done.url}, pull request {done.pull_request} {merged}")
    screen.show_notes(done.notes)
