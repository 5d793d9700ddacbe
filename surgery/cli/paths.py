"""The types of arguments that name a path, which `--out=~/x` does not let the shell expand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from surgery.files import expanded


class UserPath(click.Path):
    """A path as a user writes it, with `~` or `file://`; the command receives a Path."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(expanded(value), param, ctx)


class Location(click.ParamType):
    """A path, or something else by a name of its own: a URL, a Hub id, a shipped recipe."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        written = value.startswith(("~", "file:", "local:"))
        return str(expanded(value)) if written else value


LOCATION = Location()
