"""The commands that come next, with the real folder and quoted for a shell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from surgery.checkpoint.config import parse_config
from surgery.files import JSON_LIMIT, content
from surgery.proof import verdict
from surgery.quoting import command, python

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def commands(folder: Path, record: Mapping[str, Any], *, pushed: str = "") -> list[tuple[str, str]]:
    """Return what to do with a written output, as labels and commands.

    Args:
        folder: of the output; nothing comes next where it is not there any more.
        record: its surgery.json.
        pushed: the repository that it was pushed to.
    """
    return list(_commands(folder, record, pushed)) if folder.is_dir() else []


def _commands(folder: Path, record: Mapping[str, Any], pushed: str) -> Iterator[tuple[str, str]]:
    name = pushed or str(folder)
    yield "load", load(name, trust=needs_trust(folder), text=_has_tokenizer(folder))
    if has_zeros(record):
        yield "time", command("surgery", "bench", folder)
    script = folder / "finetune" / "finetune.py"
    if script.is_file():
        yield "fine-tune", command("python", script, "--smoke")
    if not pushed and (record.get("verification") or {}).get("passed"):
        yield "publish", command("surgery", "push", folder, "OWNER/NAME")


def load(name: str, *, trust: bool = False, text: bool = True) -> str:
    """Return the command that loads a model and, with a tokenizer, prints what it writes."""
    given = python(name)
    more = ", trust_remote_code=True" if trust else ""
    if text:
        made = f'pipeline("text-generation", {given}{more})("The", max_new_tokens=20)'
        code = f'from transformers import pipeline; print({made}[0]["generated_text"])'
    else:
        made = f"AutoModelForCausalLM.from_pretrained({given}{more})"
        code = f"from transformers import AutoModelForCausalLM; print({made})"
    return command("python", "-c", code)


def needs_trust(folder: Path) -> bool:
    """Return whether loading the output runs code that is saved with it."""
    path = folder / "config.json"
    return "auto_map" in parse_config(content(path, JSON_LIMIT), str(path))


def has_zeros(record: Mapping[str, Any]) -> bool:
    """Return whether the verification found zeros that a kernel could skip."""
    return "left.bytes" in verdict.rows_by_key(record.get("verification"))


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZERS)
