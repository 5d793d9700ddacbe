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
    from surgery.workflow.run import Result

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
class Converting:
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
    """Add MODEL and the shared options; the command receives them as one `Converting`, `shared`."""

    def wrapped(**values: Any) -> Any:
        shared = Converting(
            **{name: values.pop(name) for name in Converting.__dataclass_fields__ if name in values}
        )
        return function(shared=shared, **values)

    return _with_options(function, wrapped, (*_CONVERTING, *_WRITING))


def writing(function: F) -> F:
    """Add those of the shared options that no recipe holds; the command receives their values as
    `options`.
    """
    names = [
        n
        for n in Converting.__dataclass_fields__
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
    shared: Converting, operation: Callable[[Checkpoint], Checkpoint], *, hardlink: bool = False
) -> int:
    """Open, operate, write, verify, deliver, show, alone or as one of several processes; the exit
    code.
    """
    from surgery.storage.processes import together

    with together() as group:
        return _execute(shared, operation, hardlink, group)


def _execute(
    shared: Converting, operation: Callable[[Checkpoint], Checkpoint], hardlink: bool, group: Group
) -> int:
    from surgery.checkpoint import parse_size
    from surgery.cli import screen
    from surgery.operations.cast import cast
    from surgery.storage import open_checkpoint
    from surgery.workflow import dry_run, recipe, run

    if shared.quiet or shared.as_json or not sys.stderr.isatty():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    _check_delivery(shared)
    size = parse_size(shared.max_shard_size) if shared.max_shard_size else None
    source = open_checkpoint(shared.model, revision=shared.revision, stream=shared.stream)
    run.require_trust(source, shared.trust_remote_code)
    output = operation(source)
    if shared.dtype:
        output = cast(output, shared.dtype)
    if shared.print_recipe:
        push = (
            recipe.Push(repo=shared.push, private=shared.private, pr=shared.pr)
            if shared.push
            else None
        )
        made = recipe.of(
            output,
            max_shard_size=size,
            verify=not shared.no_verify,
            finetune=shared.finetune,
            push=push,
        )
        click.echo(recipe.dump(made), nl=False)
        return 0
    out = Path(shared.out) if shared.out else run.default_out(source, run.suffix(output))
    if shared.url:
        out = Path(f"{shared.url.rstrip('/').rpartition('/')[2]}.staged")
    if shared.dry_run:
        planned = dry_run.describe(
            source, output, out, max_shard_size=size, verify=not shared.no_verify
        )
        screen.show_plan(
            planned | ({"out": shared.url, "staged": str(out)} if shared.url else {}),
            source,
            shared.as_json,
        )
        return 0
    if shared.url and run.is_delivered(output, size, shared.url):
        if shared.as_json:
            screen.echo_json({"out": shared.url, "already": True})
        else:
            screen.show(f"{shared.url} has all of it already")
        return 0
    if group.rank:
        run.assist(
            source,
            output,
            out,
            group,
            max_shard_size=size,
            hardlink=hardlink,
            verify=not shared.no_verify,
        )
        return 0
    observer = screen.Bars(quiet=shared.quiet or shared.as_json)
    result = run.convert(
        source,
        output,
        out,
        max_shard_size=size,
        hardlink=hardlink,
        verify=not shared.no_verify,
        finetune=shared.finetune,
        trust_remote_code=shared.trust_remote_code,
        command=command_line(),
        observer=observer,
        group=group,
    )
    if not shared.as_json:
        screen.show_result(result, quiet=shared.quiet)
    return _deliver(shared, result, observer)


def _check_delivery(shared: Converting) -> None:
    """Before hours of work: can the output be delivered at all?"""
    from surgery.errors import UsageError

    if (shared.private or shared.pr) and not shared.push:
        raise UsageError("--private and --pr are of a push", "add --push OWNER/NAME")
    if shared.push and shared.no_verify:
        raise UsageError(
            "--push with --no-verify", "only what is proved is published: leave one of them out"
        )
    if shared.push and shared.url:
        raise UsageError("both --push and a URL", "push from a folder on this disk")
    if shared.push and not (shared.dry_run or shared.print_recipe):
        from surgery.workflow import publish

        publish.require_token(shared.push)


def _deliver(shared: Converting, result: Result, observer: Bars) -> int:
    """Send the output where it is to go, show that; the exit code."""
    from surgery.cli import screen
    from surgery.cli.push import show
    from surgery.workflow import publish, run

    passed, found = (
        result.verification is None or result.verification.passed,
        {"out": str(result.folder), **result.record},
    )
    if passed and shared.url:
        run.deliver(result, shared.url, observer)
        found["out"] = shared.url
        if not (shared.quiet or shared.as_json):
            screen.show(f"moved to {shared.url}")
    if passed and shared.push:
        done = publish.push(
            result.folder, shared.push, private=shared.private, pr=shared.pr, observer=observer
        )
        found["push"] = done.as_dict()
        if not (shared.quiet or shared.as_json):
            show(done)
    if shared.as_json:
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
