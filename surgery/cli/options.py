"""Options that every converting command has, and what it does with them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from surgery.checkpoint import Checkpoint

F = TypeVar("F", bound=Callable[..., Any])

_CONVERTING = (
    click.argument("model", default="."),
    click.option("--out", type=click.Path(path_type=Path), help="Output folder. [default: beside MODEL, with a telling name]"),
    click.option("--revision", help="Branch, tag or commit of a Hub id."),
    click.option("--dtype", metavar="NAME", help="Convert weights to bf16, fp16 or fp32 while writing. [default: each tensor's own]"),
    click.option("--max-shard-size", metavar="SIZE", help="Largest shard, like 5GB or 500MB. [default: 5GB]"),
    click.option("--no-verify", is_flag=True, help="Leave out the verification."),
    click.option("--trust-remote-code", is_flag=True, help="Let code that comes with the checkpoint run."),
    click.option("--dry-run", is_flag=True, help="Print the plan: files, sizes, memory, free space. Write nothing."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables."),
    click.option("--quiet", "-q", is_flag=True, help="No progress bars and no tables."),
)  # fmt: skip

_CALIBRATED = (
    click.option("--tokens", type=click.IntRange(min=1), help="Tokens to calibrate on. [default: 65536]"),
    click.option("--sequence-length", type=click.IntRange(min=2), help="Tokens of a sequence. [default: 512]"),
    click.option("--text", metavar="PATH", help="Text to calibrate on: a file, a .jsonl or a folder. [default: built-in, mixed]"),
    click.option("--dataset", metavar="ID", help="A data set of the Hub to calibrate on, OWNER/NAME or OWNER/NAME:CONFIGURATION."),
    click.option("--device", metavar="NAME", help="Where to calibrate: cuda, mps, cpu. [default: the fastest there is]"),
    click.option("--calibration-dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="Calibrate in. [default: bf16 where that is fast]"),
    click.option("--memory-budget", metavar="SIZE", help="Hidden states held in memory, like 2GB; the rest goes to TMPDIR. [default: all]"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Converting:
    """The values of the shared options."""

    model: str
    out: Path | None
    revision: str | None
    dtype: str | None
    max_shard_size: str | None
    no_verify: bool
    trust_remote_code: bool
    dry_run: bool
    as_json: bool
    quiet: bool


def _with_options(function: F, wrapped: Callable[..., Any], options: Sequence[Callable[[Any], Any]]) -> F:
    """`wrapped` as the command `function`, with what click knows of it already and `options` before that."""
    wrapped.__name__, wrapped.__doc__ = function.__name__, function.__doc__
    wrapped.__click_params__ = list(getattr(function, "__click_params__", []))  # type: ignore[attr-defined]
    for option in reversed(options):
        option(wrapped)
    return wrapped  # type: ignore[return-value]


def converting(function: F) -> F:
    """Add MODEL and the shared options; the command receives them as one `Converting`, `shared`."""

    def wrapped(**values: Any) -> Any:
        shared = Converting(**{name: values.pop(name) for name in Converting.__dataclass_fields__})
        return function(shared=shared, **values)

    return _with_options(function, wrapped, _CONVERTING)


def calibrated(function: F) -> F:
    """Add the options of a calibration; the command receives what was given of them as `calibration`."""
    names = ("tokens", "sequence_length", "text", "dataset", "device", "calibration_dtype", "memory_budget")

    def wrapped(**values: Any) -> Any:
        from surgery.checkpoint import parse_size

        given = {n.removeprefix("calibration_"): v for n in names if (v := values.pop(n)) is not None}
        if "memory_budget" in given:
            given["memory_budget"] = parse_size(given["memory_budget"])
        return function(calibration=given, **values)

    return _with_options(function, wrapped, _CALIBRATED)


def execute(shared: Converting, operation: Callable[[Checkpoint], Checkpoint], *, hardlink: bool = False) -> int:
    """Open, operate, write, verify, show; the exit code."""
    from surgery import run
    from surgery.checkpoint import make_plan, open_checkpoint, parse_size
    from surgery.cli import screen
    from surgery.operations.cast import cast

    if shared.quiet or shared.as_json:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    size = parse_size(shared.max_shard_size) if shared.max_shard_size else None
    source = open_checkpoint(shared.model, revision=shared.revision)
    run.require_trust(source, shared.trust_remote_code)
    output = operation(source)
    if shared.dtype:
        output = cast(output, shared.dtype)
    out = shared.out or run.default_out(source, run.suffix(output))
    if shared.dry_run:
        plan = make_plan(output, size)
        screen.show_plan(run.describe(plan, out, output), source, shared.as_json)
        return 0
    observer = screen.Bars(quiet=shared.quiet or shared.as_json)
    result = run.convert(source, output, out, max_shard_size=size, hardlink=hardlink, verify=not shared.no_verify,
                         trust_remote_code=shared.trust_remote_code, command=command_line(), observer=observer)  # fmt: skip
    return screen.show_result(result, as_json=shared.as_json, quiet=shared.quiet)


def command_line() -> str:
    """The command as the user typed it, for surgery.json."""
    return shlex.join(["surgery", *sys.argv[1:]])
