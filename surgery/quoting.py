r"""Text from strangers, quoted for the place where it goes: one function for each kind of place.

Names of files, fields of a config, records and model cards come from anywhere. Nothing of them may
end a string of Python, begin a tag of HTML, add a key of YAML or give an order to a terminal.
HTML is left to jinja2's autoescape and `html.escape`, YAML and JSON to their own writers.

    printable("a\x1b[31m")              is  a\x1b[31m, in visible characters
    python('a"\n')                      is  "a\"\n"
    command("surgery", "push", "a b")   is  surgery push 'a b'
    markdown("<b>|")                    is  &lt;b&gt;\|
"""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

_MARKED = re.compile(r"[\\`*_{}\[\]#|~$]")  # what Markdown gives a meaning inside a line
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def printable(text: str, *, lines: bool = False) -> str:
    r"""Return a text for a terminal, its control characters visible, such as "\x1b".

    Escape sequences, marks of the writing direction, half surrogate pairs and line separators are
    among those. Line breaks are too, unless `lines` is set.
    """
    return _replaced(text, _visible, "\n" if lines else "")


def printable_json(text: str) -> str:
    r"""Return JSON whose strings hold nothing that a terminal obeys; its value stays the same."""
    return _replaced(text, _of_json, "\n")


def plotted(text: str) -> str:
    """Return a text for matplotlib, which would read a pair of dollars as a formula."""
    return printable(text).replace("$", r"\$")


def python(text: str) -> str:
    """Return a Python literal of one line in double quotes, whose value is `text`."""
    return _replaced(json.dumps(text, ensure_ascii=False), _of_python)


def shell(word: str) -> str:
    r"""Return one word for a shell.

    A word that cannot be printed takes the form $'a\x1b', which bash, zsh and ksh read.
    """
    if word.isprintable():
        return shlex.quote(word)
    quoted = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{_replaced(quoted, _of_shell)}'"


def command(*words: object) -> str:
    """Return a command to copy into a shell; a path in it is never read as an option."""
    paths = (f"./{w}" if isinstance(w, Path) and str(w).startswith("-") else w for w in words)
    return " ".join(shell(str(word)) for word in paths)


def markdown(text: str) -> str:
    """Return a text as words of one line of Markdown, also in a table: no markup, no HTML."""
    return html.escape(_MARKED.sub(r"\\\g<0>", printable(text)), quote=False)


def code(text: str, *, cell: bool = False) -> str:
    """Return a text as a code span of Markdown; `cell` is set where it stands in a table."""
    text = printable(text)
    if cell:
        text = text.replace("|", "\\|")
    marks = "`" * (1 + _longest(text))
    space = " " if not text.strip() or "`" in (text[0], text[-1]) else ""
    return f"{marks}{space}{text}{space}{marks}"


def prose(text: str) -> str:
    """Return a sentence in Markdown: what stands between backticks is code, the rest is words."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return markdown(text)
    each = enumerate(parts)
    return "".join(code(part, cell=True) if i % 2 else markdown(part) for i, part in each)


def fenced(text: str, language: str = "") -> str:
    """Return a block of code in Markdown, which nothing in it can end."""
    text = printable(text, lines=True)
    marks = "`" * max(3, 1 + _longest(text))
    return f"{marks}{language}\n{text}\n{marks}"


def _longest(text: str) -> int:
    """Return how many backticks follow each other at most."""
    return max(map(len, re.findall("`+", text)), default=0)


def _replaced(text: str, escape: Callable[[str], str], keep: str = "") -> str:
    """Return a text with every character that cannot be printed escaped, except those to keep."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else escape(c) for c in text)


def _visible(c: str) -> str:
    return _SHORT.get(c) or (f"\\x{ord(c):02x}" if ord(c) < 256 else _of_python(c))


def _of_python(c: str) -> str:
    return f"\\u{ord(c):04x}" if ord(c) < 2**16 else f"\\U{ord(c):08x}"


def _of_json(c: str) -> str:
    return json.dumps(c)[1:-1] if ord(c) > 127 else f"\\u{ord(c):04x}"


def _of_shell(c: str) -> str:
    half = "surrogateescape" if "\udc80" <= c <= "\udcff" else "surrogatepass"
    return "".join(f"\\x{byte:02x}" for byte in c.encode(errors=half))
