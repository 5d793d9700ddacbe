"""Options that every converting command has, and what it does with them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from surgery.checkpoint import Checkpoint
    from surgery.cli.screen import Bars
    from surgery.storage.processes import Group
    from surgery.workflow.convert import Result

F = TypeVar("F", bound=Callable[..., Any])

_CONVERTING = (
    click.argument("model", default="."),
    click.option("--revision", help="Branch, tag or commit of a Hub id."),
    click.option(
        "--dtype",
        metavar="NAME",
        help="Convert weights to bf16, fp16 or fp32 while writing. [default: each tensor's own]",
    ),
    click.option(
        "--max-shard-size", metavar="SIZE", help="Largest shard, like 5GB or 500MB. [default: 5GB]"
    ),
)

_WRITING = (
    click.option(
        "--out",
        metavar="FOLDER",
        help="Output folder, or a URL like s3://bucket/name. [default: beside MODEL, with a telling name]",
    ),
    click.option("--no-verify", is_flag=True, help="Leave out the verification."),
    click.option(
        "--push",
        metavar="REPO",
        help="Then publish it on the Hub as OWNER/NAME, as `surgery push` does.",
    ),
    click.option("--private", is_flag=True, help="With --push: create it as a private one."),
    click.option(
        "--pr", is_flag=True, help="With --push: leave a pull request open instead of merging it."
    ),
    click.option(
        "--stream",
        is_flag=True,
        help="Keep no copy of what is downloaded: a shard or two at a time are on the disk.",
    ),
    click.option(
        "--trust-remote-code", is_flag=True, help="Let code that comes with the checkpoint run."
    ),
    click.option(
        "--print-recipe", is_flag=True, help="Print the recipe that this amounts to. Write nothing."
    ),
    click.option(
        "--dry-run",
        is_flag=True,
        help="Print the plan: files, sizes, downloads, memory, free space. Write nothing.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables."),
    click.option("--quiet", "-q", is_flag=True, help="No progress bars and no tables."),
)

_CALIBRATED = (
    click.option(
        "--tokens", type=click.IntRange(min=1), help="Tokens to calibrate on. [default: 65536]"
    ),
    click.option(
        "--sequence-length", type=click.IntRange(min=2), help="Tokens of a sequence. [default: 512]"
    ),
    click.option(
        "--text",
        metavar="PATH",
        help="Text to calibrate on: a file, a .jsonl or a folder. [default: built-in, mixed]",
    ),
    click.option(
        "--dataset",
        metavar="ID",
        help="A data set of the Hub to calibrate on, OWNER/NAME or OWNER/NAME:CONFIGURATION.",
    ),
    click.option(
        "--generated",
        type=click.FloatRange(0, 1),
        metavar="FRACTION",
        help="Of the tokens, the part that the model writes itself, for more domains; it must fit in memory. [default: 0]",
    ),
    click.option(
        "--device",
        metavar="NAME",
        help="Where to calibrate: cuda, mps, cpu. [default: the fastest there is]",
    ),
    click.option(
        "--calibration-dtype",
        type=click.Choice(["bf16", "fp16", "fp32"]),
        help="Calibrate in. [default: bf16 where that is fast]",
    ),
    click.option(
        "--memory-budget",
        metavar="SIZE",
        help="Hidden states held in memory, like 2GB; the rest goes to TMPDIR. [default: all]",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonOptions:
    """The values of the shared options."""

    model: str
    revision: str | None
    dtype: str | None
    max_shard_size: str | None
    out: str | None
    no_verify: bool
    push: str | None
    private: bool
    pr: bool
    stream: bool
    trust_remote_code: bool
    print_recipe: bool
    dry_run: bool
    as_json: bool
    quiet: bool
    finetune: Mapping[str, Any] = field(
        default_factory=dict
    )  # options of the script beside the output

    @property
    def silent(self) -> bool:
        """Whether no progress is shown."""
        return self.quiet or self.as_json

    @property
    def shard_bytes(self) -> int | None:
        from surgery.checkpoint import parse_size

        return parse_size(self.max_shard_size) if self.max_shard_size else None

    @property
    def url(self) -> str | None:
        """Where the output goes, if not to a folder on this disk."""
        return self.out if self.out and "://" in self.out else None


def _with_options(
    function: F, wrapped: Callable[..., Any], options: Sequence[Callable[[Any], Any]]
) -> F:
    """`wrapped` as the command `function`, with what click knows of it already and `options` before
    that.
    """
    wrapped.__name__, wrapped.__doc__ = function.__name__, function.__doc__
    wrapped.__click_params__ = list(getattr(function, "__click_params__", []))  # type: ignore[attr-defined]
    for option in reversed(options):
        option(wrapped)
    return wrapped  # type: ignore[return-value]


def converting(function: F) -> F:
    """Add MODEL and the shared options; the command receives them as one `CommonOptions`, `common`."""

    def wrapped(**values: Any) -> Any:
        common = CommonOptions(
            **{
                name: values.pop(name)
                for name in CommonOptions.__dataclass_fields__
                if name in values
            }
        )
        return function(common=common, **values)

    return _with_options(function, wrapped, (*_CONVERTING, *_WRITING))


def writing(function: F) -> F:
    """Add those of the shared options that no recipe holds; the command receives their values as
    `options`.
    """
    names = [
        n
        for n in CommonOptions.__dataclass_fields__
        if n not in ("model", "revision", "dtype", "max_shard_size")
    ]

    def wrapped(**values: Any) -> Any:
        options = {name: values.pop(name) for name in names if name in values}
        return function(options=options, **values)

    return _with_options(function, wrapped, _WRITING)


def calibrated(function: F) -> F:
    """Add the options of a calibration; the command receives what was given of them as
    `calibration`.
    """
    names = (
        "tokens",
        "sequence_length",
        "text",
        "dataset",
        "generated",
        "device",
        "calibration_dtype",
        "memory_budget",
    )

    def wrapped(**values: Any) -> Any:
        from surgery.checkpoint import parse_size

        given = {
            n.removeprefix("calibration_"): v for n in names if (v := values.pop(n)) is not None
        }
        if "memory_budget" in given:
            given["memory_budget"] = parse_size(given["memory_budget"])
        return function(calibration=given, **values)

    return _with_options(function, wrapped, _CALIBRATED)


def execute(
    common: CommonOptions,
    operation: Callable[[Checkpoint], Checkpoint],
    *,
    hardlink: bool = False,
) -> int:
    """Open, operate, write, verify, deliver, show, alone or as one of several processes.

    Returns the exit code.
    """
    from surgery.operations.cast import cast
    from surgery.storage import open_checkpoint
    from surgery.storage.processes import together
    from surgery.workflow.trust import require_trust

    with together() as group:
        if common.quiet or common.as_json or not sys.stderr.isatty():
            os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        _check_delivery(common)
        source = open_checkpoint(common.model, revision=common.revision, stream=common.stream)
        require_trust(source, common.trust_remote_code)
        output = operation(source)
        if common.dtype:
            output = cast(output, common.dtype)
        if common.print_recipe:
            return _print_recipe(common, output)
        if common.dry_run:
            return _show_plan(common, source, output)
        return _convert(common, source, output, hardlink, group)


def _print_recipe(common: CommonOptions, output: Checkpoint) -> int:
    from surgery.workflow import recipe

    push = None
    if common.push:
        push = recipe.Push(repo=common.push, private=common.private, pr=common.pr)
    made = recipe.recipe_of(
        output,
        max_shard_size=common.shard_bytes,
        verify=not common.no_verify,
        finetune=common.finetune,
        push=push,
    )
    click.echo(recipe.dump(made), nl=False)
    return 0


def _show_plan(common: CommonOptions, source: Checkpoint, output: Checkpoint) -> int:
    from surgery.cli import screen
    from surgery.workflow import dry_run

    out, verify = _folder(common, source, output), not common.no_verify
    size = common.shard_bytes
    planned = dry_run.describe(source, output, out, max_shard_size=size, verify=verify)
    if common.url:
        planned |= {"out": common.url, "staged": str(out)}
    screen.show_plan(planned, source, common.as_json)
    return 0


def _folder(common: CommonOptions, source: Checkpoint, output: Checkpoint) -> Path:
    """Return the folder that is written; what goes to a URL is staged beside."""
    from surgery.workflow.record import default_out, suffix

    if common.url:
        return Path(f"{common.url.rstrip('/').rpartition('/')[2]}.staged")
    return Path(common.out) if common.out else default_out(source, suffix(output))


def _convert(
    common: CommonOptions, source: Checkpoint, output: Checkpoint, hardlink: bool, group: Group
) -> int:
    from surgery.cli import screen
    from surgery.workflow.convert import convert, scratch
    from surgery.workflow.delivery import is_delivered
    from surgery.workflow.settle import settle

    out, observer = _folder(common, source, output), screen.Bars(quiet=common.silent)
    if common.url:
        output = settle(output, scratch(out), observer, group)
        if is_delivered(output, common.shard_bytes, common.url):
            if common.as_json:
                screen.echo_json({"out": common.url, "already": True})
            else:
                screen.show(f"{common.url} has all of it already")
            return 0
    result = convert(
        source,
        output,
        out,
        max_shard_size=common.shard_bytes,
        hardlink=hardlink,
        verify=not common.no_verify,
        finetune=common.finetune,
        trust_remote_code=common.trust_remote_code,
        command=command_line(),
        observer=observer,
        group=group,
    )
    if result is None:  # one of several processes, and not the first
        return 0
    if not common.as_json:
        screen.show_result(result, quiet=common.quiet)
    return _deliver(common, result, observer)


def _check_delivery(common: CommonOptions) -> None:
    """Before hours of work: can the output be delivered at all?"""
    from surgery.errors import UsageError

    if (common.private or common.pr) and not common.push:
        raise UsageError("--private and --pr are of a push", "add --push OWNER/NAME")
    if common.push and common.no_verify:
        raise UsageError(
            "--push with --no-verify", "only what is proved is published: leave one of them out"
        )
    if common.push and common.url:
        raise UsageError("both --push and a URL", "push from a folder on this disk")
    if common.push and not (common.dry_run or common.print_recipe):
        from surgery.workflow import publish

        publish.require_token(common.push)


def _deliver(common: CommonOptions, result: Result, observer: Bars) -> int:
    """Send the output where it is to go, show that; the exit code."""
    from surgery.cli import screen
    from surgery.cli.push import show
    from surgery.workflow import publish
    from surgery.workflow.delivery import deliver

    passed, found = (
        result.verification is None or result.verification.passed,
        {"out": str(result.folder), **result.record},
    )
    if passed and common.url:
        deliver(result, common.url, observer)
        found["out"] = common.url
        if not (common.quiet or common.as_json):
            screen.show(f"moved to {common.url}")
    if passed and common.push:
        done = publish.push(
            result.folder, common.push, private=common.private, pr=common.pr, observer=observer
        )
        found["push"] = done.as_dict()
        if not (common.quiet or common.as_json):
            show(done)
    if common.as_json:
        screen.echo_json(found)
    if not passed:
        screen.report_failure(result.folder)
    return 0 if passed else 1


def command_line() -> str:
    """The command as the user typed it, for surgery.json."""
    return shlex.join(["surgery", *sys.argv[1:]])


def parse_rank(text: str) -> int | str:
    """A rank, or "full"."""
    if text == "full" or text.isdecimal():
        return text if text == "full" else int(text)
    raise click.BadParameter(f"{text!r} is no rank: give a number or full", param_hint="--bypass")
