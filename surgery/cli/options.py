"""Options that every converting command has, and what it does with them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from surgery.checkpoint.parsing import is_number
from surgery.cli.paths import LOCATION
from surgery.files import is_url

if TYPE_CHECKING:
    from surgery.checkpoint import Checkpoint
    from surgery.cli.screen import Bars
    from surgery.proof.require import Require
    from surgery.storage.processes import Group
    from surgery.workflow.convert import Result
    from surgery.workflow.publish import Pushed
    from surgery.workflow.request import Request

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[Any], Any]

strip_prefix: Decorator = click.option(
    "--strip-prefix",
    metavar="PREFIX",
    help="Strip PREFIX from the names of tensors, like the module. of a wrapped model.",
)
dequantize: Decorator = click.option(
    "--dequantize", is_flag=True, help="Open weights in fp8 or mxfp4 as bf16."
)
_CONVERTING: dict[str, Decorator] = {
    "model": click.argument("model", type=LOCATION, default="."),
    "revision": click.option("--revision", help="Branch, tag or commit of a Hub id."),
    "strip_prefix": strip_prefix,
    "dequantize": dequantize,
    "dtype": click.option(
        "--dtype",
        metavar="NAME",
        help="Convert weights to bf16, fp16 or fp32 while writing. [default: each tensor's own]",
    ),
    "max_shard_size": click.option(
        "--max-shard-size", metavar="SIZE", help="Largest shard, like 5GB or 500MB. [default: 5GB]"
    ),
}

_WRITING: dict[str, Decorator] = {
    "out": click.option(
        "--out",
        type=LOCATION,
        metavar="FOLDER",
        help="Output folder, or a URL like s3://bucket/name. "
        "[default: beside MODEL, named after the conversion]",
    ),
    "no_verify": click.option("--no-verify", is_flag=True, help="Leave out the verification."),
    "allow_nonfinite": click.option(
        "--allow-nonfinite",
        is_flag=True,
        help="Let a source pass whose logits are NaN or Inf: nothing can be compared with it, and "
        "the card says so.",
    ),
    "max_perplexity": click.option(
        "--max-perplexity",
        type=float,
        metavar="TIMES",
        help="Fail where perplexity is more than so many times the source's, in the geometric mean "
        "over all domains, like 1.2.",
    ),
    "push": click.option(
        "--push",
        metavar="REPO",
        help="Then publish it on the Hub as OWNER/NAME, as `surgery push` does.",
    ),
    "private": click.option(
        "--private", is_flag=True, help="With --push: create a private repository."
    ),
    "pr": click.option(
        "--pr", is_flag=True, help="With --push: leave a pull request open instead of merging it."
    ),
    "stream": click.option(
        "--stream",
        is_flag=True,
        help="Keep no copy of what is downloaded: only a shard or two are on the disk at a time.",
    ),
    "trust_remote_code": click.option(
        "--trust-remote-code", is_flag=True, help="Let code that comes with the checkpoint run."
    ),
    "print_recipe": click.option(
        "--print-recipe", is_flag=True, help="Print the recipe of this command. Write nothing."
    ),
    "dry_run": click.option(
        "--dry-run",
        is_flag=True,
        help="Print the plan: files, sizes, downloads, memory, time. Write nothing.",
    ),
    "as_json": click.option(
        "--json", "as_json", is_flag=True, help="Print JSON instead of tables."
    ),
    "quiet": click.option("--quiet", "-q", is_flag=True, help="No progress and no tables."),
}

_CALIBRATED: dict[str, Decorator] = {
    "tokens": click.option(
        "--tokens", type=click.IntRange(min=1), help="Tokens to calibrate on. [default: 65536]"
    ),
    "sequence_length": click.option(
        "--sequence-length", type=click.IntRange(min=2), help="Tokens of a sequence. [default: 512]"
    ),
    "text": click.option(
        "--text",
        type=LOCATION,
        multiple=True,
        metavar="PATH[=WEIGHT]",
        help="Text to calibrate on: a file, a .jsonl, a folder, or a built-in domain like "
        "builtin:german; again for more. [default: the built-in text of all domains]",
    ),
    "dataset": click.option(
        "--dataset",
        multiple=True,
        metavar="ID[=WEIGHT]",
        help="A data set of the Hub to calibrate on, OWNER/NAME or OWNER/NAME:CONFIGURATION; "
        "again for more.",
    ),
    "mix": click.option(
        "--mix",
        type=float,
        metavar="SHARE",
        help="The share of the built-in text of all domains beside --text and --dataset; with 0 it "
        "is not measured on either. [default: 0.5]",
    ),
    "generated": click.option(
        "--generated",
        type=click.FloatRange(0, 1),
        metavar="FRACTION",
        help="The part of the tokens that the model writes itself, which covers more domains. "
        "The model must fit in memory. [default: 0]",
    ),
    "device": click.option(
        "--device",
        metavar="NAME",
        help="Where to calibrate: cuda, mps, cpu. [default: the fastest there is]",
    ),
    "calibration_dtype": click.option(
        "--calibration-dtype",
        type=click.Choice(["bf16", "fp16", "fp32"]),
        help="Precision to calibrate in. [default: bf16 where that is fast]",
    ),
    "memory_budget": click.option(
        "--memory-budget",
        metavar="SIZE",
        help="Hidden states held in memory, like 2GB; the rest goes to TMPDIR. [default: all]",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonOptions:
    """The values of the shared options; `finetune` are options of the script in finetune/."""

    model: str
    revision: str | None
    strip_prefix: str | None
    dequantize: bool
    dtype: str | None
    max_shard_size: str | None
    out: str | None
    no_verify: bool
    allow_nonfinite: bool
    max_perplexity: float | None
    push: str | None
    private: bool
    pr: bool
    stream: bool
    trust_remote_code: bool
    print_recipe: bool
    dry_run: bool
    as_json: bool
    quiet: bool
    finetune: Mapping[str, Any] = field(default_factory=dict)

    def open(self) -> Checkpoint:
        """Open the source."""
        from surgery.storage import open_checkpoint

        return open_checkpoint(
            self.model,
            revision=self.revision,
            stream=self.stream,
            strip_prefix=self.strip_prefix,
            dequantize=self.dequantize,
        )

    @property
    def require(self) -> Require:
        """Return what the verification is to find for the output to pass."""
        from surgery.proof.require import Require

        return Require(max_perplexity=self.max_perplexity)

    @property
    def silent(self) -> bool:
        """Return whether no progress is shown."""
        return self.quiet or self.as_json

    @property
    def shard_bytes(self) -> int | None:
        """Return the largest shard in bytes; None for the default."""
        from surgery.checkpoint import parse_size

        return parse_size(self.max_shard_size) if self.max_shard_size else None

    @property
    def url(self) -> str | None:
        """Return where the output goes, if not to a folder on this disk."""
        return self.out if self.out and is_url(self.out) else None


# --- decorators of commands -----------------------------------------------------------------------


def _with_options(function: F, wrapped: Callable[..., Any], options: Sequence[Decorator]) -> F:
    """Return `wrapped` as the command `function`, whose own options come after `options`."""
    wrapped.__name__, wrapped.__doc__ = function.__name__, function.__doc__
    wrapped.__click_params__ = list(getattr(function, "__click_params__", []))  # type: ignore[attr-defined]
    for option in reversed(options):
        option(wrapped)
    return wrapped  # type: ignore[return-value]


def converting(function: F, without: Collection[str] = ()) -> F:
    """Add MODEL and the shared options; the command receives them as one `CommonOptions`, `common`.

    Those in `without` are left out, because the command has options of its own by these names.
    """
    known = _CONVERTING | _WRITING
    names = [name for name in known if name not in without]

    def wrapped(**values: Any) -> Any:
        found: dict[str, Any] = dict.fromkeys(known)
        found |= {name: values.pop(name) for name in names}
        return function(common=CommonOptions(**found), **values)

    return _with_options(function, wrapped, [known[name] for name in names])


def writing(function: F) -> F:
    """Add the shared options that no recipe holds; the command receives them as `options`."""

    def wrapped(**values: Any) -> Any:
        options = {name: values.pop(name) for name in _WRITING}
        return function(options=options, **values)

    return _with_options(function, wrapped, list(_WRITING.values()))


def calibrated(function: F) -> F:
    """Add the options of a calibration; the command receives those given as `calibration`."""

    def wrapped(**values: Any) -> Any:
        from surgery.checkpoint import parse_size

        found = {name: values.pop(name) for name in _CALIBRATED}
        given: dict[str, Any] = {
            n.removeprefix("calibration_"): list(v) if isinstance(v, tuple) else v
            for n, v in found.items()
            if v is not None and v != ()
        }
        if "memory_budget" in given:
            given["memory_budget"] = parse_size(given["memory_budget"])
        return function(calibration=given, **values)

    return _with_options(function, wrapped, list(_CALIBRATED.values()))


# --- what a command does --------------------------------------------------------------------------


def execute(
    common: CommonOptions,
    operation: Callable[[Checkpoint], Checkpoint],
    *,
    hardlink: bool = False,
) -> int:
    """Open, operate, write, verify, deliver and show; return the exit code.

    It may be one of several processes that do this together.
    """
    from surgery.operations.cast import cast
    from surgery.storage.processes import together
    from surgery.workflow.trust import require_trust

    with together() as group:
        if common.quiet or common.as_json or not sys.stderr.isatty():
            os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        _check_delivery(common)
        source = common.open()
        require_trust(source, common.trust_remote_code)
        output = operation(source)
        if common.dtype:
            output = cast(output, common.dtype)
        if common.print_recipe:
            return _print_recipe(common, output)
        if common.dry_run:
            return _show_plan(common, source, output, hardlink)
        return _convert(common, source, output, hardlink, group)


def _print_recipe(common: CommonOptions, output: Checkpoint) -> int:
    from surgery.cli import screen
    from surgery.workflow import recipe

    push = None
    if common.push:
        push = recipe.Push(repo=common.push, private=common.private, pr=common.pr)
    made = replace(
        recipe.recipe_of(output),
        max_shard_size=common.shard_bytes,
        verify=not common.no_verify,
        require=common.require,
        finetune=dict(common.finetune or {}),
        push=push,
    )
    screen.echo(recipe.dump(made), end="")
    return 0


def _show_plan(
    common: CommonOptions, source: Checkpoint, output: Checkpoint, hardlink: bool
) -> int:
    from surgery.cli import screen
    from surgery.cli.plan import show_plan
    from surgery.workflow import dry_run
    from surgery.workflow.delivery import is_delivered

    out, size = _folder(common, source, output), common.shard_bytes
    if common.url and not any(step.pending for step in output.steps):
        is_delivered(output, size, common.url)  # raises where the URL holds something else
    planned = dry_run.describe(source, output, _request(common, out, hardlink))
    if common.url:
        planned |= {"out": common.url, "staged": str(out)}
    if common.as_json:
        screen.echo_json(planned)
    else:
        show_plan(planned, source)
    return 0


def _folder(common: CommonOptions, source: Checkpoint, output: Checkpoint) -> Path:
    """Return the folder that is written; what goes to a URL is staged in this folder."""
    from surgery.workflow.record import default_out, suffix

    if common.url:
        return Path(f"{common.url.rstrip('/').rpartition('/')[2]}.staged")
    return Path(common.out) if common.out else default_out(source, suffix(output))


def _request(common: CommonOptions, out: Path, hardlink: bool) -> Request:
    from surgery.workflow.request import Request

    return Request(
        out=out,
        max_shard_size=common.shard_bytes,
        hardlink=hardlink,
        verify=not common.no_verify,
        require=common.require,
        allow_nonfinite=common.allow_nonfinite,
        finetune=common.finetune or {},
        trust_remote_code=common.trust_remote_code,
        command=command_line(),
    )


def _convert(
    common: CommonOptions, source: Checkpoint, output: Checkpoint, hardlink: bool, group: Group
) -> int:
    from surgery.cli import screen
    from surgery.workflow.checks import scratch_folder
    from surgery.workflow.convert import convert
    from surgery.workflow.delivery import is_delivered
    from surgery.workflow.settle import settle

    out, observer = _folder(common, source, output), screen.Bars(quiet=common.silent)
    if common.url:
        output = settle(output, scratch_folder(out), observer, group)
        if is_delivered(output, common.shard_bytes, common.url):
            if common.as_json:
                screen.echo_json({"out": common.url, "already": True})
            else:
                screen.show(f"{common.url} has all of it already")
            return 0
    asked = _request(common, out, hardlink)
    result = convert(source, output, asked, observer=observer, group=group)
    # Only the first of several processes has a result.
    return 0 if result is None else _deliver(common, result, observer)


def _check_delivery(common: CommonOptions) -> None:
    """Raise an error before hours of work if the output could not be delivered."""
    from surgery.errors import UsageError
    from surgery.storage.remote import require_known

    if (common.private or common.pr) and not common.push:
        raise UsageError("--private and --pr are of a push", "add --push OWNER/NAME")
    if common.push and common.no_verify:
        raise UsageError(
            "--push with --no-verify", "only what is proved is published: leave one of them out"
        )
    if common.url:
        require_known(common.url)
    if common.require.as_dict() and common.no_verify:
        raise UsageError("--max-perplexity with --no-verify", "leave one of them out")
    if common.push and common.url:
        raise UsageError("both --push and a URL", "push from a folder on this disk")
    if common.push and not common.print_recipe:
        from surgery.workflow import publish

        publish.require_token(common.push)


def _deliver(common: CommonOptions, result: Result, observer: Bars) -> int:
    """Show the output, send it where it is to go, and return the exit code."""
    from surgery.cli import outcome, screen

    shows = not common.silent
    if shows:
        outcome.show_result(result)
    passed = result.verification is None or result.verification.passed
    found = {"out": str(result.folder), **result.record}
    if passed and common.url:
        found["out"] = _send(common.url, result, observer, shows)
    done = _push(common, result, observer) if passed and common.push else None
    if done:
        found["push"] = done.as_dict()
    if common.as_json:
        screen.echo_json(found)
    if passed and shows:
        outcome.show_next(result.folder, result.record, pushed=common.push or "")
        outcome.show_conclusion(result.record["verification"], result.record)
    if not passed:
        outcome.report_failure(result.folder, result.record)
    return 0 if passed else 1


def _send(url: str, result: Result, observer: Bars, shows: bool) -> str:
    """Move the output to a URL, and return that."""
    from surgery.cli import screen
    from surgery.workflow.delivery import deliver

    deliver(result, url, observer)
    if shows:
        screen.show(f"moved to {url}")
    return url


def _push(common: CommonOptions, result: Result, observer: Bars) -> Pushed:
    from surgery.cli.push import show
    from surgery.workflow import publish

    done = publish.push(
        result.folder,
        str(common.push),
        private=common.private,
        pr=common.pr,
        observer=observer,
    )
    if not common.silent:
        show(done)
    return done


def command_line() -> str:
    """Return the command as the user typed it, for surgery.json."""
    return shlex.join(["surgery", *sys.argv[1:]])


def parse_rank(text: str, *words: str) -> int | str:
    """Return a rank, "full" or one of `words`. Raises click.BadParameter for anything else."""
    known = ("full", *words)
    if text in known or is_number(text):
        return text if text in known else int(text)
    expected = ", ".join(known)
    raise click.BadParameter(
        f"{text!r} is no rank: give a number or {expected}", param_hint="--bypass"
    )
