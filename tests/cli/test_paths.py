"""Paths as users write them: `--out=~/x`, which no shell expands, and file:// and local://.

A folder called `~` in the working folder is how this goes wrong.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import click
import pytest
from support import Call, Ran, assert_two_lines

import surgery as api
from surgery.cli import surgery as main
from surgery.cli.paths import Location, UserPath
from surgery.demo import MODEL
from surgery.errors import SurgeryError, UsageError
from surgery.files import expanded

PATHS = ("FOLDER", "DIR", "PATH", "FILE", "MODEL", "OUTPUT", "SOURCE", "RECIPE")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "words.txt").write_text("one two three four five six seven eight\n" * 50)
    shutil.copytree(MODEL, tmp_path / "m")  # it has a tokenizer
    return tmp_path


@pytest.fixture
def run(home: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command from another folder, where nothing may be left."""
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "work")

    def run(*arguments: object) -> Ran:
        ran = call(*arguments)
        assert not list((home / "work").iterdir()), ran
        return ran

    return run


RELUFY = ("--repair", "none", "--no-verify", "-q")


@pytest.mark.parametrize("start", ["~/", "file://{home}/", "local://{home}/", "file://~/"])
def test_a_path_means_the_same_however_it_is_written(
    start: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home))
    written = start.format(home=home) + "m"
    assert UserPath().convert(written, None, None) == home / "m" == expanded(written)
    assert Location().convert(written, None, None) == str(home / "m")


def test_every_command_takes_it(home: Path, run: Call) -> None:
    at = "file://~/"  # both that a shell leaves alone
    assert run("relufy", f"{at}m", *RELUFY, f"--out={at}x").code == 0
    assert (home / "x" / "config.json").is_file()
    assert run("verify", f"{at}m", f"{at}x", "-q").code == 0
    assert run("inspect", f"{at}m", f"--plot={at}w.svg").code == 0
    assert (home / "w.svg").is_file()
    analyze = ("analyze", f"{at}m", "--tokens", 64, f"--text={at}words.txt", f"--out={at}r", "-q")
    assert run(*analyze).code == 0
    assert (home / "r" / "analysis.json").is_file()
    fatrelu = ("relufy", f"{at}m", "--rule", "fatrelu", f"--analysis={at}r", *RELUFY)
    again = run(*fatrelu, f"--out={at}y")
    assert again.code == 0 or "No such option" in again.err, again
    assert run("finetune-script", f"{at}x", "-q").code == 0
    assert run("run", f"{at}x/recipe.yaml", "--no-verify", "-q", f"--out={at}z").code == 0
    assert (home / "z" / "config.json").is_file()


def commands(group: click.Group) -> list[tuple[str, click.Command]]:
    found = []
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        found.append((name, command))
        if isinstance(command, click.Group):
            found += commands(command)
    return found


def test_every_option_that_names_a_path_is_expanded() -> None:
    """By its type, so that a new option cannot be forgotten."""
    seen = set()
    for name, command in commands(main):
        for parameter in command.params:
            metavar = parameter.metavar or (parameter.name or "").upper()
            assert type(parameter.type) is not click.Path, f"{name} {parameter.name}"
            if metavar in PATHS:
                assert isinstance(parameter.type, UserPath | Location), f"{name} {parameter.name}"
                seen.add(parameter.name)
    assert {"out", "text", "model", "source", "output", "folder", "analysis", "plot"} <= seen


def test_the_api_expands_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "work")
    source = api.open("~/m")
    out = api.write(api.relufy(source, repair="none"), "file://~/x")
    assert out == home / "x" and (out / "config.json").is_file()
    assert api.verify(source, "~/x").passed
    assert api.analyze(source, text=f"local://{home}/words.txt", tokens=64).layers
    assert not list((home / "work").iterdir())
    with pytest.raises(UsageError, match="s3://a/b is a URL"):
        api.write(source, "s3://a/b")


def test_a_home_that_is_not_known() -> None:
    with pytest.raises(SurgeryError, match="a home folder that is not known"):
        expanded("~nobody-by-this-name/x")


# --- URLs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "location",
    [
        "reference::{home}/refs.json",
        "reference://{home}/refs.json",
        "reference:://x",
        "simplecache::s3://bucket/m",
        "memory://x::file:///etc",
        "zip://m::https://example.org/a.zip",
        "filecache::memory://m",
        "zip:///etc/a.zip",
        "github://owner:repo@main/",
        "dir://x",
        "data:text/plain;base64,AAAA://",
        "S3://bucket/m",
        "ftp://host/m",
    ],
)
def test_a_location_that_leads_to_others_is_refused(location: str, home: Path, run: Call) -> None:
    """fsspec would open them, and reference:// has run what such a file says."""
    (home / "refs.json").write_text(
        '{"version": 1, "templates": {"u": "{{ cycler.__init__.__globals__.os.system('
        f'\'touch {home}/ran\') }}}}"}}, "refs": {{"config.json": ["{{{{u}}}}"]}}}}'
    )
    place = location.format(home=home)
    for arguments in (("inspect", place), ("relufy", f"{home}/m", *RELUFY, "--out", place)):
        if arguments[0] == "relufy" and "://" not in place:
            continue  # It is the name of a folder.
        assert_two_lines(run(*arguments), "not supported", "s3://", "hf://")
    assert not (home / "ran").exists()
