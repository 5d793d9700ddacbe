"""Prefixes that wrappers of a training put before the names of tensors.

A wrapped model saves its tensors under other names than its class reads, like
`module.model.norm.weight`. They are refused unless the user asks for the prefix to be stripped,
because a name that is changed silently could be the wrong one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from surgery.checkpoint.tensors import LazyTensor
from surgery.errors import SurgeryError, UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """A prefix, and what puts it there.

    Args:
        text: the prefix.
        origin: what adds it.
        inside: whether it may also stand before a module inside the model, which was wrapped alone.
    """

    text: str
    origin: str
    inside: bool = False


PREFIXES = (
    Prefix(text="_orig_mod.", origin="torch.compile", inside=True),
    Prefix(text="_fsdp_wrapped_module.", origin="FSDP", inside=True),
    Prefix(text="_checkpoint_wrapped_module.", origin="activation checkpointing", inside=True),
    Prefix(text="_forward_module.", origin="Lightning"),
    Prefix(text="module.", origin="DistributedDataParallel"),
    Prefix(text="base_model.model.", origin="PEFT"),
)


def require_plain_names(names: Collection[str]) -> None:
    """Raise SurgeryError where names have the prefix of a wrapper."""
    if not (found := _found(names)):
        return
    prefix = "".join(p.text for p in found)
    wrapped = [n for n in names if any(_has(p, n) for p in found)]
    origin = " and ".join(p.origin for p in found)
    if any(".lora_" in n for n in wrapped):
        raise SurgeryError(
            f"the checkpoint holds an adapter that is not merged (like {wrapped[0]})",
            "call merge_and_unload() of peft, then save_pretrained(), and give that folder",
        )
    raise SurgeryError(
        f"{len(wrapped)} of {len(names)} tensors have the prefix {prefix} in their names, which "
        f"{origin} adds (like {wrapped[0]})",
        f"give --strip-prefix {prefix} (strip_prefix= in Python), or save the model unwrapped",
    )


def stripped(tensors: Mapping[str, LazyTensor], prefix: str) -> dict[str, LazyTensor]:
    """Return the tensors under their names without the prefix.

    The prefix of a known wrapper that may be inside the model is removed there too. Names without
    the prefix stay.

    Raises UsageError where no name has it, SurgeryError where two names become one.
    """
    parts = _parts(prefix) or [Prefix(text=prefix, origin="")]
    names = {name: _without(parts, name) for name in tensors}
    if all(old == new for old, new in names.items()):
        raise UsageError(
            f"no tensor's name begins with {prefix!r}, among {len(names)} like {next(iter(names))}",
            "leave --strip-prefix out, or give the prefix with its dot",
        )
    found: dict[str, LazyTensor] = {}
    for old, new in names.items():
        if new in found or not new:
            raise SurgeryError(
                f"without the prefix {prefix} two tensors would be called {new!r}",
                "give a prefix that keeps the names apart",
            )
        found[new] = tensors[old]
    return found


def _found(names: Collection[str]) -> list[Prefix]:
    """Return the prefixes that names begin with, outermost first, then those inside the model."""
    found: list[Prefix] = []
    left = set(names)
    while outer := next((p for p in PREFIXES if any(n.startswith(p.text) for n in left)), None):
        found.append(outer)
        left = {n.removeprefix(outer.text) for n in left}
    inner = (p for p in PREFIXES if p.inside and p not in found)
    return [*found, *(p for p in inner if any(_has(p, n) for n in left))]


def _has(prefix: Prefix, name: str) -> bool:
    return name.startswith(prefix.text) or (prefix.inside and f".{prefix.text}" in name)


def _parts(prefix: str) -> list[Prefix]:
    """Return the known prefixes that a text is made of, none where it is made of others too."""
    parts: list[Prefix] = []
    while prefix:
        part = next((p for p in PREFIXES if prefix.startswith(p.text)), None)
        if part is None:
            return []
        parts.append(part)
        prefix = prefix.removeprefix(part.text)
    return parts


def _without(parts: Collection[Prefix], name: str) -> str:
    for part in parts:
        name = name.removeprefix(part.text)
        if part.inside:
            name = name.replace(f".{part.text}", ".")
    return name
