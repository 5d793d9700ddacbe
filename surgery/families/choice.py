"""Choose the architecture that a dense model goes into.

It is the one that the user names, or the first that can hold the model exactly. Where no
architecture of transformers can, or none can have the shape, the mixture is a custom-code block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    """The architecture that a model goes into.

    Args:
        target: the architecture.
        route: the route into it; None for a custom-code block.
        shape: the shape that it gives the experts.
        notes: why it was chosen, and which others could be.
    """

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
    """Return the architecture, the route into it and the shape of the experts.

    With the target "auto" it is the first that holds the model exactly; those that always select
    whole copies go before those that may not.

    Args:
        blocks: the dense model's decoder layers.
        config: its config, with the defaults of its class written out.
        target: a `model_type`, "surgery" for a custom-code block, or "auto".
        shape: the shape that was asked for.
        shared: the shared parts that were asked for; None for what the target usually has.
        chosen: the layers that become mixtures.

    Raises SurgeryError where there is none, UsageError for a target that cannot be one.
    """
    source = blocks.family.model_type
    blocks.family.require_dense()
    if target == SURGERY.model_type:
        return _custom_code(blocks, shape, shared, chosen)
    able, reasons = _able(_named(blocks, target), config, shape, shared, chosen, blocks.count)
    if not able and target == "auto":
        return _custom_code(blocks, shape, shared, chosen, _not_native(source, reasons))
    if not able:
        raise _none_fits(source, reasons, len(chosen) < blocks.count)
    best, *others = sorted(able, key=lambda c: not whole_copies(c.target, c.shape))
    if target != "auto":
        return best
    names = [c.target.model_type for c in others]
    return replace(best, notes=(_why(source, best.target, names, reasons),))


def _able(
    routes: Sequence[Route],
    config: Mapping[str, Any],
    shape: Shape,
    shared: int | None,
    chosen: Sequence[int],
    count: int,
) -> tuple[list[Choice], dict[str, str]]:
    """Return the routes that are possible in this shape, and why not the others, by target."""
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
    """Return the routes of the source into `target`; only for "auto" there may be none."""
    source, names = blocks.family.model_type, ", ".join(["auto", *TARGETS, SURGERY.model_type])
    if target in UNABLE:
        raise UsageError(f"{target} {UNABLE[target]}", f"one of: {names}")
    if target not in ("auto", *TARGETS):
        raise UsageError(f"unknown target {target!r}", f"one of: {names}")
    routes = [r for r in ROUTES if r.source == source]
    found = [r for r in routes if r.target == target or (target == "auto" and r.auto)]
    if not found and target != "auto":
        raise SurgeryError(f"{target} cannot hold this {source} exactly", "use --target auto")
    return found


def _custom_code(
    blocks: Blocks, shape: Shape, shared: int | None, chosen: Sequence[int], why: str = ""
) -> Choice:
    """Return the custom-code block; `why` says why no architecture of transformers is chosen.

    Raises SurgeryError where it cannot have the shape either.
    """
    fitted = resolve(SURGERY, shape, shared)
    if found := misfit(SURGERY, fitted, chosen, blocks.count):
        bad = f"the custom-code block {found}"
        raise SurgeryError(
            f"{why}; {bad}" if why else bad, "ask for another shape, or give another model"
        )
    notes = (f"{why}, so it becomes a custom-code block",) if why else ()
    return Choice(target=SURGERY, route=None, shape=fitted, notes=notes)


def _not_native(source: str, reasons: Mapping[str, str]) -> str:
    """Return why no architecture of transformers holds the model."""
    if not reasons:
        return f"no native mixture-of-experts architecture can hold a {source} exactly"
    listed = "; ".join(
        why if why.startswith(f"{target} ") else f"{target}: {why}"
        for target, why in reasons.items()
    )
    return f"no native architecture holds this {source} exactly in this shape ({listed})"


def _none_fits(source: str, reasons: Mapping[str, str], some_layers: bool) -> SurgeryError:
    """Return the error for a named target that does not fit the config or the shape."""
    shape = [why for target, why in reasons.items() if why.startswith(f"{target} ")]
    if shape:
        hint = "leave --layers out" if some_layers else "ask for another shape, or another --target"
        return SurgeryError("; ".join(shape), f"{hint}; --target auto finds one")
    return SurgeryError(_not_native(source, reasons), "--target auto finds one that holds it")


def _why(source: str, best: Target, others: Sequence[str], reasons: Mapping[str, str]) -> str:
    """Return the note about what `--target auto` chose."""
    could = f"; --target {' or '.join(others)} could too" if others else ""
    not_these = [
        why if why.startswith(f"{t} ") else f"{t} cannot: {why}" for t, why in reasons.items()
    ]
    cannot = f" ({'; '.join(not_these)})" if not_these else ""
    return f"{best.model_type} holds this {source} exactly in this shape{could}{cannot}"
