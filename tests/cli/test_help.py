"""Help is instant, every command has examples, and the examples parse."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import click
import pytest
from support import Call, environment

from surgery import __version__
from surgery.cli import COMMANDS, surgery

HEAVY = (
    "torch",
    "transformers",
    "huggingface_hub",
    "safetensors",
    "numpy",
    "matplotlib",
    "accelerate",
)


def test_help_imports_nothing_heavy() -> None:
    """torch takes seconds to import, and `--help` is what is typed most."""
    code = f"""
import sys
from surgery.cli import COMMANDS, run
for arguments in (["--help"], ["--version"], *([c, "--help"] for c in COMMANDS)):
    assert run(arguments) == 0, arguments
    heavy = [m for m in {HEAVY} if m in sys.modules]
    assert not heavy, (arguments, heavy)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr


def examples(command: click.Command) -> list[str]:
    return re.findall(
        r"^\s+(surgery .*)$", (command.help or "").partition("Examples:")[2], re.MULTILINE
    )


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_examples_parse(name: str, call: Call) -> None:
    """An option that was renamed must not live on in an example."""
    shown = call(*([name] if name else []), "--help")
    assert shown.code == 0 and "Examples:" in shown.out
    command = surgery.get_command(click.Context(surgery), name) if name else surgery
    assert command
    found = examples(command)
    assert len(found) >= 2
    for line in found:
        # \b keeps click from wrapping it.
        assert " ".join(line.split()) in " ".join(shown.out.split())
        _, used, *arguments = shlex.split(re.sub(r"\s>>?.*", "", line))
        assert used == name or not name
        target = surgery.get_command(click.Context(surgery), used)
        assert target
        target.make_context(used, arguments)  # raises click.UsageError for what is not an option


def test_every_option_says_what_it_does() -> None:
    for name in COMMANDS:
        command = surgery.get_command(click.Context(surgery), name)
        assert command
        for parameter in command.params:
            assert (
                not isinstance(parameter, click.Option) or parameter.help or parameter.show_default
            ), (
                name,
                parameter.name,
            )


def test_no_arguments_are_a_call_for_help(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["surgery"])
    alone, asked = call(), call("-h")
    assert (
        alone == asked
        and asked.code == 0
        and asked.out.startswith("Usage: surgery ")
        and not asked.err
    )


def test_version(call: Call) -> None:
    assert call("--version").out == f"surgery, version {__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, call: Call) -> None:
    """The script that is printed asks this very program."""
    ran = call("completion", shell)
    assert ran.code == 0 and "_SURGERY_COMPLETE" in ran.out and "surgery" in ran.out
    words = subprocess.run(
        [sys.executable, "-c", "from surgery.cli import surgery; surgery(prog_name='surgery')"],
        capture_output=True,
        text=True,
        env=environment(_SURGERY_COMPLETE="bash_complete", COMP_WORDS="surgery up", COMP_CWORD="1"),
    )
    assert "upcycle" in words.stdout
