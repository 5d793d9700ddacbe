"""Which architecture a dense model goes into: the one that is named, or the first that can hold it
exactly.

Where no architecture of transformers can, or none has the shape, the mixture is a block that
travels with the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgery.errors import SurgeryError, UsageError
from surgery.families.mlp import Blocks
from surgery.families.routes import ROUTES, Route, unmet
from surgery.families.targets import (
    SURGERY,
    TARGETS,
    UNABLE,
    Shape,
    Target,
    misfit,
    resolve,
    whole_copies,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The target, the route into it (None: the block that travels), and the shape that it gives the
    experts; `notes` say why it and which others could."""

    target: Target
    route: Route | None
    shape: Shape
    notes: tuple[str, ...] = ()


def choose(
    blocks: Blocks,
    config: Mapping[str, Any],
    target: str,
    shape: Shape,
    shared: int | None,
    chosen: Sequence[int],
) -> Choice:
    """The route into `target`; for "auto" the first exact one, of those that never tear a copy if
    there is one.

    Raises SurgeryError where there is none.
    """
    source = blocks.family.model_type
    if blocks.family.is_moe:
        raise SurgeryError(f"{source} is a mixture of experts already", "give a dense model")
    if target == SURGERY.model_type:
        return _travelling(blocks, shape, shared, chosen)
    able, reasons = _able(_named(blocks, target), config, shape, shared, chosen, blocks.count)
    if not able and target == "auto":
        return _travelling(blocks, shape, shared, chosen, _not_native(source, reasons))
    if not able:
        raise _none_fits(source, reasons, len(chosen) < blocks.count)
    best, *others = sorted(able, key=lambda c: not whole_copies(c.target, c.shape))
    notes = (
        _why(source, best.target, [c.target.model_type for c in others], reasons)
        if target == "auto"
        else ()
    )
    return Choice(target=best.target, route=best.route, shape=best.shape, notes=notes)


def _able(
    routes: Sequence[Route],
    config: Mapping[str, Any],
    shape: Shape,
    shared: int | None,
    chosen: Sequence[int],
    count: int,
) -> tuple[list[Choice], dict[str, str]]:
    """The routes that this model can take in this shape; and by the targets of the others why
    not.
    """
    able, reasons = list[Choice](), dict[str, str]()
    for route in routes:
        target = TARGETS[route.target]
        fitted = resolve(target, shape, shared)
        if bad := unmet(route, config):
            reasons[route.target] = ", ".join(bad)
        elif why := misfit(target, fitted, chosen, count):
            reasons[route.target] = f"{route.target} {why}"
        else:
            able.append(Choice(target=target, route=route, shape=fitted))
    return able, reasons


def _named(blocks: Blocks, target: str) -> list[Route]:
    """The routes of the source into `target`; for "auto" none where there is none."""
    source, names = blocks.family.model_type, ", ".join(["auto", *TARGETS, SURGERY.model_type])
    if target in UNABLE:
        raise UsageError(f"{target} {UNABLE[target]}", f"one of: {names}")
    if target not in ("auto", *TARGETS):
        raise UsageError(f"unknown target {target!r}", f"one of: {names}")
    found = [
        r
        for r in ROUTES
        if r.source == source and (r.target == target or (target == "auto" and r.auto))
    ]
    if not found and target != "auto":
        raise SurgeryError(f"{source} does not go into {target} exactly", "use --target auto")
    return found


def _travelling(
    blocks: Blocks, shape: Shape, shared: int | None, chosen: Sequence[int], why: str = ""
) -> Choice:
    """The block that travels; `why` no architecture is taken. Raises SurgeryError where it cannot
    hold the model either.
    """
    fitted = resolve(SURGERY, shape, shared)
    bad = (
        f"the block of surgery {found}"
        if (found := misfit(SURGERY, fitted, chosen, blocks.count))
        else ""
    )
    if bad:
        raise SurgeryError(
            f"{why}; {bad}" if why else bad, "ask for another shape, or give another model"
        )
    return Choice(
        target=SURGERY,
        route=None,
        shape=fitted,
        notes=(f"{why}: so it travels with its code",) if why else (),
    )


def _not_native(source: str, reasons: Mapping[str, str]) -> str:
    """Why no architecture of transformers does."""
    if not reasons:
        return f"no native mixture-of-experts architecture can hold a {source} exactly"
    listed = "; ".join(
        why if why.startswith(f"{target} ") else f"{target}: {why}"
        for target, why in reasons.items()
    )
    return f"this {source} does not go into a native architecture exactly in this shape ({listed})"


def _none_fits(source: str, reasons: Mapping[str, str], some_layers: bool) -> SurgeryError:
    """Why the target that was named does not do: the config, or the shape."""
    shape = [why for target, why in reasons.items() if why.startswith(f"{target} ")]
    if shape:
        hint = "leave --layers out" if some_layers else "ask for another shape, or another --target"
        return SurgeryError("; ".join(shape), f"{hint}; --target auto finds one")
    return SurgeryError(_not_native(source, reasons), "--target auto finds one that holds it")


def _why(
    source: str, best: Target, others: Sequence[str], reasons: Mapping[str, str]
) -> tuple[str, ...]:
    """What `--target auto` says of its choice."""
    could = f"; --target {' or '.join(others)} could too" if others else ""
    not_these = [
        why if why.startswith(f"{t} ") else f"{t} not: {why}" for t, why in reasons.items()
    ]
    cannot = f" ({'; '.join(not_these)})" if not_these else ""
    return (f"{best.model_type} holds this {source} exactly in this shape{could}{cannot}",)
