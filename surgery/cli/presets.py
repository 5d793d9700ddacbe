"""`--quality`: presets of other options.

A preset only sets options that the command line does not give. surgery.json and recipes hold the
values that it stands for, not its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

F = TypeVar("F", bound=Callable[..., Any])

PRESETS: dict[str, dict[str, dict[str, Any]]] = {  # by command and name; "default" sets nothing
    "relufy": {
        "fast": {"tokens": 8192},
        "default": {},
        "best": {"tokens": 131_072, "bypass": "full", "repair": "reconstruct"},
    },
    "carve": {
        "fast": {"tokens": 8192},
        "default": {},
        "best": {"tokens": 131_072, "bypass": "full"},
    },
}


def quality(command: str) -> Callable[[F], F]:
    """Add `--quality` to a command that has presets."""
    return click.option(
        "--quality",
        type=click.Choice(list(PRESETS[command])),
        default="default",
        show_default=True,
        help="A preset of the options for calibration and repair; see Quality above.",
    )


def preset(command: str, name: str) -> dict[str, Any]:
    """Return what a preset sets, without the options that the command line gives."""
    context = click.get_current_context()
    given = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    wanted = PRESETS[command][name]
    return {k: v for k, v in wanted.items() if context.get_parameter_source(k) not in given}
