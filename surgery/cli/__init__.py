"""The command line: parse, call, render. Nothing below this package prints.

Commands are imported when they are called and heavy modules inside them, so that `--help` needs
neither torch nor transformers.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

import click

from surgery import __version__
from surgery.errors import ReportedElsewhere, SurgeryError, UsageError

COMMANDS = {  # in the order of the help
    "inspect": "Weigh a model: parameters, FLOPs, bytes, milliseconds per token.",
    "analyze": "Measure on text how sparse the MLPs are.",
    "upcycle": "Turn each MLP into a mixture of copies, exactly.",
    "carve": "ExpertSplit each MLP into experts of its own neurons.",
    "relufy": "Make the MLPs sparse: ReLU and kin, repaired.",
    "memory": "Put product-key memory beside MLPs, exactly, or in their place.",
    "splinify": "Make the activation learnable, exactly.",
    "run": "Do what a recipe says: one file describes a surgery.",
    "recipes": "List, show and describe recipes.",
    "bench": "Time the MLPs as they decode: dense, and with zeros skipped.",
    "verify": "Prove an output against its source.",
    "finetune-script": "Write the script that trains an output, again.",
    "push": "Publish a verified output on the Hub.",
    "families": "List the supported architectures.",
    "demo": "Upcycle and relufy the embedded model, verify both.",
    "completion": "Print the shell completion script.",
}
# not surgery.cli.run, which would hide this module's function
_MODULES = {"run": "recipes", "finetune-script": "finetune"}
_ALONE = (
    "inspect",
    "recipes",
    "bench",
    "verify",
    "finetune-script",
    "push",
    "families",
    "demo",
    "completion",
)  # on one process


class Commands(click.Group):
    """Commands by name, each in a module of its own."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"surgery.cli.{_MODULES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


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
    """Run the command line. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if _rank():
        if arguments[0] in _ALONE:
            return 0
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - the first process speaks for all
    try:
        code = surgery.main(arguments, prog_name="surgery", standalone_mode=False)
        return code if isinstance(code, int) else 0
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
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - the reader of the pipe is gone
        return 1
    except OSError as e:
        hint = (
            "free some space, then run the same command again"
            if e.errno == errno.ENOSPC
            else _DEBUG
        )
        return _report(f"{e.strerror or e}{f': {e.filename}' if e.filename else ''}", hint, 1)
    except Exception as e:
        return _report(
            f"unexpected {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}",
            f"this is a bug; {_DEBUG}",
            1,
        )


_DEBUG = "SURGERY_DEBUG=1 shows where"


def _rank() -> int:
    """The number of this process among those that torchrun or accelerate launch started
    together.
    """
    return int(os.environ.get("RANK", "0")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 0


def _report(message: str, hint: str, code: int) -> int:
    if _rank():
        if code in (2, 130):  # which all of them see
            return code
        sys.stderr, message = sys.__stderr__, f"process {_rank()}: {message}"
    if os.environ.get("SURGERY_DEBUG") == "1" and sys.exc_info()[0] not in (
        None,
        KeyboardInterrupt,
    ):
        import traceback

        traceback.print_exc()
    message = " ".join(
        line.strip() for line in message.splitlines()
    )  # click lists choices one a line
    click.echo(
        click.style("error: ", fg="red", bold=True) + message if code != 130 else message, err=True
    )
    if hint:
        click.echo(f"hint: {hint}", err=True)
    return code
