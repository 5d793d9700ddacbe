"""The command line: parse, call, render. Nothing below this package prints.

Commands are imported when they are called, and heavy modules inside them, so that `--help` needs
neither torch nor transformers.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import TextIO

import click

from surgery import __version__
from surgery.errors import ReportedElsewhere, SurgeryError, UsageError
from surgery.quoting import printable

COMMANDS = {  # those with a module here, in the order of the help
    "inspect": "Weigh a model: parameters, FLOPs, bytes, milliseconds per token.",
    "analyze": "Measure on text how sparse the MLPs are.",
    "upcycle": "Turn each MLP into a mixture of copies, exactly.",
    "carve": "Cut each MLP into experts of its own neurons.",
    "relufy": "Make the MLPs sparse: ReLU and kin, repaired.",
    "memory": "Add product-key memory beside MLPs, exactly, or in their place.",
    "splinify": "Make the activation learnable, exactly.",
    "run": "Run a recipe: one file that describes a surgery.",
    "recipes": "List, show and describe recipes.",
    "bench": "Time the MLPs as they decode: dense, and with zeros skipped.",
    "verify": "Check an output against its source.",
    "finetune-script": "Write the script that trains an output once more.",
    "export": "Write a relufied model as a file for llama.cpp.",
    "push": "Publish a verified output on the Hub.",
    "families": "List the supported architectures.",
    "demo": "Upcycle and relufy the embedded model, and verify both.",
    "completion": "Print the shell completion script.",
}
AFTER_OPERATIONS = "run"  # the first command that is no operation
# The module of `run` is not surgery.cli.run, which would hide this module's function.
_MODULES = {"run": "recipes", "finetune-script": "finetune"}
# Commands that run on one process even if several were started.
_ALONE = (
    "inspect",
    "recipes",
    "bench",
    "verify",
    "finetune-script",
    "export",
    "push",
    "families",
    "demo",
    "completion",
)


def generic() -> list[str]:
    """Return the operations without a module here, whose commands are made from their records."""
    from surgery import operations

    return [name for name in operations.names() if name not in COMMANDS]


class Commands(click.Group):
    """Commands by name, imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_summaries())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return _generic(cmd_name)
        module = importlib.import_module(f"surgery.cli.{_MODULES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_summaries().items()))


def _summaries() -> dict[str, str]:
    """Return the summaries of all commands in the order of the help, operations together."""
    from surgery import operations

    more = {name: operations.find(name).summary for name in generic()}
    found: dict[str, str] = {}
    for name, summary in COMMANDS.items():
        found |= more if name == AFTER_OPERATIONS else {}
        found[name] = summary
    return found


def _generic(name: str) -> click.Command | None:
    """Return the command of an operation without a module here; None where there is none."""
    if name not in generic():
        return None
    from surgery.cli.operation import command_of

    return command_of(name)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="surgery")
def surgery() -> None:
    """Operate on the MLP blocks of trained Hugging Face checkpoints.

    \b
    Examples:
      surgery demo
      surgery inspect meta-llama/Llama-2-70b-hf
      surgery upcycle --experts 8 Qwen/Qwen3-8B
      surgery relufy ./my-model --dry-run
      surgery verify ./my-model ./my-model-relu

    MODEL is a folder, a .safetensors file or a Hub id, owner/name or owner/name@revision.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if _rank():
        if arguments[0] in _ALONE:
            return 0
        sys.stdout = sys.stderr = _nowhere()  # the first process speaks for all
    logging.setLogRecordFactory(_LogRecord)
    try:
        code = surgery.main(arguments, prog_name="surgery", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (Exception, KeyboardInterrupt) as error:
        return _failed(error)


def _failed(error: BaseException) -> int:
    """Report an error that is being handled, and return the exit code."""
    try:
        raise error
    except ReportedElsewhere:
        return 1
    except (KeyboardInterrupt, click.Abort):
        return _report("interrupted", "run the same command again to go on", 130)
    except click.UsageError as e:
        command = e.ctx.command_path if e.ctx else "surgery"
        return _report(e.format_message(), f"see `{command} --help`", 2)
    except click.ClickException as e:
        return _report(e.format_message(), "", 1)
    except UsageError as e:
        return _report(e.message, e.hint, 2)
    except SurgeryError as e:
        return _report(e.message, e.hint, 1)
    except BrokenPipeError:
        sys.stdout = _nowhere()  # the reader of the pipe is gone
        return 1
    except OSError as e:
        full = e.errno == errno.ENOSPC
        hint = "free some space, then run the same command again" if full else _DEBUG
        return _report(f"{e.strerror or e}{f': {e.filename}' if e.filename else ''}", hint, 1)
    except RecursionError:
        return _report("something in this model is nested too deeply to be read", _DEBUG, 1)
    except Exception as e:
        first = str(e).splitlines()[0] if str(e) else ""
        return _report(f"unexpected {type(e).__name__}: {first}", f"this is a bug; {_DEBUG}", 1)


class _LogRecord(logging.LogRecord):
    """A message of transformers or another library, which may quote a config."""

    def getMessage(self) -> str:  # noqa: N802
        return printable(super().getMessage(), lines=True)


_DEBUG = "SURGERY_DEBUG=1 shows where"


def _nowhere() -> TextIO:
    return open(os.devnull, "w")  # noqa: PTH123 - open until the process ends


def _rank() -> int:
    """Return this process's rank among those of torchrun or accelerate launch; 0 if alone."""
    return int(os.environ.get("RANK", "0")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 0


def _report(message: str, hint: str, code: int) -> int:
    """Print an error and its hint on stderr, and return the exit code."""
    if _rank():
        if code in (2, 130):  # every process sees these: the first one reports them
            return code
        sys.stderr, message = sys.__stderr__, f"process {_rank()}: {message}"
    interrupted = code == 130
    if os.environ.get("SURGERY_DEBUG") == "1" and not interrupted:
        import traceback

        traceback.print_exc()
    # click lists choices in lines.
    message = printable(" ".join(line.strip() for line in message.split("\n")))
    prefix = "" if interrupted else click.style("error: ", fg="red", bold=True)
    click.echo(prefix + message, err=True)
    if hint:
        click.echo(f"hint: {printable(hint)}", err=True)
    return code
