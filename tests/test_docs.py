"""The first page and the documentation say what is there: links, commands, options, messages."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from surgery import operations
from surgery.cli import COMMANDS
from surgery.cli import surgery as program

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
GENERATED = {"index.md": ROOT / "README.md", "contributing.md": ROOT / "CONTRIBUTING.md"}
GUIDES = {"recipes": "run", "finetune-script": "finetune"}  # the guide of a command, if another
NO_GUIDE = {"families", "demo", "completion"}  # in guides/index.md
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(
    r"(?:^\$ |^|`|-m |--from \. |--spec \. |&& |\$ )(surgery [^`\n\"]+)", re.MULTILINE
)
MOST_GENERAL = 7  # characters that a message has of its own: "no … in …"
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*(/[A-Z]+)*")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_the_readme_is_short() -> None:
    """It is the first page: what does not fit belongs in docs/."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """A page that moves takes its links along, and so does a heading that is renamed."""
    text = without_code(page.read_text())
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        file = GENERATED.get(file.name, file) if file.parent == ROOT / "docs" else file
        assert file.exists(), f"{name(page)} links to {target}"
        assert not anchor or anchor in anchors(file), f"{name(page)}: no heading {target}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_scripts_and_tests_that_are_named_exist(page: Path) -> None:
    """A figure says by which script it was made: that script must be there."""
    named = re.findall(r"\b(?:benchmarks|tests|surgery)/[\w/]+\.\w+", page.read_text())
    assert not [path for path in named if not (ROOT / path).exists()]


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The ids that mkdocs gives the headings."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[\s-]+", "-", heading) for heading in plain}


def commands(page: Path) -> list[str]:
    """Every `surgery …` in code: lines of blocks, and inline; lines that end in \\ are joined."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"```(?!ya?ml)[a-z]*\n(.*?)```", text, re.DOTALL)
    indented = re.findall(r"^    .*$", text, re.MULTILINE)
    inline = [f"`{code}`" for code in re.findall(r"`([^`\n]+)`", without_code(text))]
    return [
        found
        for part in (*blocks, *indented, *inline)
        for found in COMMAND.findall("\n".join(line.strip() for line in part.splitlines()))
    ]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_parse(page: Path) -> None:
    """Every command exists, takes the options that a page gives it, and their choices."""
    for line in commands(page):
        words = shlex.split(line.partition(" | ")[0].replace("…", ""), comments=True)[1:]
        if words and not PLACEHOLDER.fullmatch(words[0]):
            try:
                parse(program, words, "surgery")
            except click.UsageError as error:
                pytest.fail(f"{name(page)}: {line}: {error.format_message()}")


def parse(command: click.Command, words: list[str], called: str) -> None:
    """Parse without running: no option is left without its value, no path need exist."""
    # click keeps the help option of the first context that asks for it, so the settings matter.
    context = click.Context(command, info_name=called, **command.context_settings)
    options, rest, _ = command.make_parser(context).parse_args(list(words))
    for parameter in command.params:
        given = options.get(parameter.name or "")
        check(parameter, given, context)
    if isinstance(command, click.Group):
        if rest:
            _, inner, rest = command.resolve_command(context, rest)
            assert inner is not None
            parse(inner, rest, f"{called} {inner.name}")
    elif rest:
        raise click.UsageError(f"unexpected argument {rest[0]}", context)


def check(parameter: click.Parameter, given: Any, context: click.Context) -> None:
    """A value that is one of a few, or a number, is one."""
    if not isinstance(parameter.type, click.Choice | click.IntRange | click.FloatRange):
        return
    for value in given if isinstance(given, list) else [given]:
        if isinstance(value, str) and not PLACEHOLDER.fullmatch(value):
            parameter.type.convert(value, parameter, context)


def test_the_reader_of_commands_finds_what_is_wrong() -> None:
    """A test that reads prose may find nothing: it must fail where it should."""
    assert any("relufy" in c for c in commands(ROOT / "README.md"))
    for wrong in ("relufi MODEL", "relufy MODEL --bypas full", "relufy MODEL --repair magic"):
        with pytest.raises(click.UsageError):
            parse(program, wrong.split(), "surgery")


def test_every_operation_and_command_has_a_guide() -> None:
    wanted = {GUIDES.get(c, c) for c in (*operations.names(), *COMMANDS) if c not in NO_GUIDE}
    assert wanted <= {p.stem for p in (ROOT / "docs/guides").glob("*.md")}
    overview = (ROOT / "docs/guides/index.md").read_text()
    assert all(f"surgery {c}" in overview for c in COMMANDS)


def test_every_page_is_in_the_navigation() -> None:
    """A page that the site's menu does not have is not found."""

    def leaves(node: Any) -> list[str]:
        if isinstance(node, str):
            return [node]
        return [
            leaf
            for part in node
            for leaf in leaves(next(iter(part.values())) if isinstance(part, dict) else part)
        ]

    listed = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    there = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed)) and set(listed) == there | set(GENERATED)


def test_the_messages_of_troubleshooting_are_those_of_the_code() -> None:
    """A user searches the page for what is on the screen. Names and numbers are examples there."""
    text = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = re.findall(r"^### `(.+)`$", text, re.MULTILINE)
    known = [p for path in (ROOT / "surgery").rglob("*.py") for p in messages(path)]
    assert len(quoted) >= 30
    unknown = [
        q
        for q in quoted  # whole, or behind the place that it names: "recipe.yaml, line 4: …"
        if not any(p.fullmatch(q) or p.fullmatch(q.rpartition(": ")[2]) for p in known)
    ]
    assert not unknown


def messages(path: Path) -> list[re.Pattern[str]]:
    """The strings of a file as patterns: what is put in may be anything, the rest is literal."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else None for p in node.values]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = [
                p if i % 2 == 0 else None for i, p in enumerate(re.split(r"\{(\w+)\}", node.value))
            ]
        else:
            continue
        if sum(len(str(p)) for p in parts if p) >= MOST_GENERAL:
            pattern = "".join(".*" if p is None else re.escape(str(p)) for p in parts)
            found.append(re.compile(pattern, re.DOTALL))
    return found


def test_the_picture_of_the_readme_is_of_this_program_alone() -> None:
    """The session needs no font from the network, and shows no path of the machine it ran on."""
    picture = (ROOT / "docs/assets/session.svg").read_text()
    assert set(re.findall(r"https?://[^\"') ]+", picture)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"/(home|root|tmp|Users|work)/", picture)
