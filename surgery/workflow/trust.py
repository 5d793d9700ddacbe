"""Whose code would run: a checkpoint's own only where the user trusts it, or where it is ours."""

from __future__ import annotations

from surgery.blocks import custom_code
from surgery.checkpoint import Checkpoint
from surgery.checkpoint.parsing import Unreadable, read_json
from surgery.errors import SurgeryError
from surgery.files import JSON_LIMIT, content


def require_trust(checkpoint: Checkpoint, trust_remote_code: bool) -> None:
    """Refuse a checkpoint with code of its own, unless the user trusts it or surgery wrote it.

    Raises SurgeryError.
    """
    if checkpoint.custom_code and not trust_remote_code and not _is_ours(checkpoint):
        raise SurgeryError(
            f"{checkpoint.source.location} brings code of its own (auto_map in config.json)",
            "read that code, then give --trust-remote-code to let it run",
        )


def _is_ours(checkpoint: Checkpoint) -> bool:
    code = {f.name: content(f.path()) for f in checkpoint.files if f.name.endswith(".py")}
    configs = [dict(checkpoint.config)]
    for file in checkpoint.files:
        if file.name.endswith("_config.json"):
            try:
                found = read_json(content(file.path(), JSON_LIMIT), file.name, "")
            except Unreadable:
                return False
            configs += [found] if isinstance(found, dict) else []
    return bool(code) and custom_code.runs_only_ours(configs, code)
