"""See what an MLP computes, through forward hooks on a decoder layer of the walk.

The family's row says where the modules are; whether a layer routes its tokens is seen from its
modules. transformers 5 names some modules differently from the tensors on disk ("mlp" for
"block_sparse_moe") and fuses experts. A path may therefore be found under another parent, and the
product of an expert is computed once more from the expert's weights.

Shapes: as in collectors.py; N = b·T tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from surgery.calibration.collectors import Seen
from surgery.families import Family


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The modules of one layer: a dense MLP, a router, experts.

    `gate` is None for an MLP without a gate; gate, up and down are None for a layer without a dense
    MLP. `block` is a custom-code block that adds to the output of `down`
    (`surgery/blocks/sparse_mlp.py`).
    """

    gate: nn.Module | None = None
    up: nn.Module | None = None
    down: nn.Module | None = None
    router: nn.Module | None = None
    experts: nn.Module | None = None
    block: nn.Module | None = None

    @classmethod
    def of(cls, layer: nn.Module, family: Family) -> Parts:
        """Find the modules of a layer.

        In a layer that routes its tokens, the shared expert, if any, is shown as the dense MLP. A
        block of experts that surgery put into a layer of a dense family shows its router alone.
        """
        if (own := _own_router(layer, family)) is not None:
            return cls(router=own)
        router = _router(layer, family)
        if router is None:
            block = getattr(layer, family.mlp, None) if family.mlp else None
            paths = {"gate": family.gate, "up": family.up, "down": family.down}
            adds = hasattr(block, "correction")
            return cls(**_dense(layer, paths), block=block if adds else None)
        name, module = router
        block = layer.get_submodule(name.rpartition(".")[0])
        shared = _find(layer, family.shared) if family.shared else None
        dense = _dense(shared[1], leaves(family)) if shared else {}
        return cls(router=module, experts=getattr(block, "experts", None), **dense)


def leaves(family: Family) -> dict[str, str | None]:
    """Return gate, up and down as an expert names them: the last part of each path."""
    paths = {"gate": family.gate, "up": family.up, "down": family.down}
    return {part: path and path.split(".")[-1] for part, path in paths.items()}


def _dense(parent: nn.Module, paths: Mapping[str, str | None]) -> dict[str, nn.Module]:
    modules = dict(parent.named_modules())
    return {part: modules[path] for part, path in paths.items() if path in modules}


def _router(layer: nn.Module, family: Family) -> tuple[str, nn.Module] | None:
    found = _find(layer, family.router) if family.router else None
    return found if found and isinstance(getattr(found[1], "weight", None), Tensor) else None


def _own_router(layer: nn.Module, family: Family) -> nn.Module | None:
    """Return the router of a custom-code block of experts, if the layer has one.

    It gives logits, weights and choices (`surgery/blocks/experts_mlp.py`).
    """
    block = None if family.is_moe else getattr(layer, family.mlp, None)
    return getattr(block, "router", None)


def _find(layer: nn.Module, path: str) -> tuple[str, nn.Module] | None:
    """Return the name of a module and the module, looked up by `path` in three ways.

    1. At `path` itself.
    2. At the same path below another first name.
    3. At the path without its last name.
    """
    modules, parts = dict(layer.named_modules()), path.split(".")
    names = [path, *(n for n in modules if n.split(".")[1:] == parts[1:]), ".".join(parts[:-1])]
    return next(((name, modules[name]) for name in names if name in modules), None)


@dataclass(kw_only=True)
class Taps:
    """What the hooks saw in the last forward pass."""

    parts: Parts
    family: Family
    top_k: int
    caught: dict[str, Tensor] = field(default_factory=dict)

    @property
    def experts(self) -> int:
        """Return the number of experts of a layer that routes; 0 otherwise.

        It is the number of rows of the router, because config.json has had several names for it.
        """
        return len(self.parts.router.weight) if self.parts.router is not None else 0

    def dense(self, **where: Tensor) -> Seen:
        """Return what the dense MLP, or the shared expert, computed.

        `where` holds mask, sampled and index [b, T], and hidden [b, T, H].
        """
        shape, hidden = where["mask"].shape, where.pop("hidden")
        taps = {name: x.reshape(*shape, -1) for name, x in self.caught.items() if name in _DENSE}
        return Seen(taps={**taps, "hidden": hidden}, **where)

    def routed(self, **where: Tensor) -> Seen:
        """Return what the router and the routed experts computed, at the tokens that count."""
        counted = where["mask"].flatten()
        logits, selected = (self.caught.get(name) for name in ("router_logits", "selected"))
        assert selected is not None
        selected, logits = selected[counted], None if logits is None else logits[counted]
        taps, expert = self._products(self.caught["routed"][counted], selected)
        return Seen(
            taps={**taps, "hidden": where.pop("hidden")},
            router_logits=logits,
            selected=selected,
            expert=expert,
            **where,
        )

    def _products(self, x: Tensor, selected: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return gate and product [n·k, F] of x [n, H] by expert, and the expert of each row.

        None in place of the experts if the model class does not show what is inside them.
        """
        compute = _expert(self.parts.experts, self.family)
        if compute is None:
            return {}, None
        rows, expert = [], []
        for e in selected.unique().tolist():
            tokens = (selected == e).any(-1)
            rows.append(compute(e, x[tokens]))
            expert.append(torch.full((int(tokens.sum()),), e, device=x.device))
        gates, products = zip(*rows, strict=True)
        return {"gate": torch.cat(gates), "product": torch.cat(products)}, torch.cat(expert)


_DENSE = ("input", "gate", "up", "product", "output")


@contextmanager
def tapped(layer: nn.Module, family: Family, config: Mapping[str, Any]) -> Iterator[Taps]:
    """Hook the MLP of a decoder layer while the context lasts.

    `config` is the language model's config.
    """
    top_k = int(config.get(family.top_k_key) or 0)
    taps = Taps(parts=Parts.of(layer, family), family=family, top_k=top_k)
    hooks = [module.register_forward_hook(catch) for module, catch in _hooks(taps)]
    try:
        yield taps
    finally:
        for hook in hooks:
            hook.remove()


def _hooks(taps: Taps) -> Iterator[tuple[nn.Module, Callable[[Any, Any, Any], None]]]:
    """Yield each module to hook, and the hook."""
    caught, parts, family = taps.caught, taps.parts, taps.family

    def gate(module: nn.Module, inputs: Any, output: Tensor) -> None:
        caught["gate"] = output

    def up(module: nn.Module, inputs: Any, output: Tensor) -> None:
        caught["input"] = inputs[0]
        if family.fused_gate_up:
            caught["gate"], caught["up"] = output.chunk(2, dim=-1)
        else:
            caught["up" if family.gated else "gate"] = output

    def down(module: nn.Module, inputs: Any, output: Tensor) -> None:
        caught["product"] = inputs[0]
        caught["output"] = output.clone()  # falcon adds to the original in place

    def block(module: nn.Module, inputs: Any, output: Tensor) -> None:
        caught["output"] = output.clone()

    def router(module: nn.Module, inputs: Any, output: Any) -> None:
        caught["routed"] = inputs[0].reshape(-1, inputs[0].shape[-1])
        caught.update(routing(output, taps.experts, taps.top_k))

    if parts.up is not None and parts.down is not None:
        yield parts.up, up
        yield parts.down, down
        if parts.gate is not None and parts.gate is not parts.up:
            yield parts.gate, gate
    if parts.block is not None:
        yield parts.block, block
    if parts.router is not None:
        yield parts.router, router


def routing(output: Any, experts: int, top_k: int) -> dict[str, Tensor]:
    """Return `selected` [N, k], and `router_logits` [N, E] if the router gives them.

    A router returns its logits alone, or a tuple in any order of logits, weights and the integer
    indices of the experts. Weights may be [N, E] too, but they are never negative.
    """
    tensors = output if isinstance(output, tuple) else (output,)
    wide = [t for t in tensors if t.is_floating_point() and t.shape[-1] == experts]
    logits = next((t for t in wide if bool((t < 0).any())), wide[0] if wide else None)
    selected = next((t for t in tensors if not t.is_floating_point()), None)
    found = {} if logits is None else {"router_logits": logits.reshape(-1, experts)}
    if selected is None:
        assert logits is not None
        selected = logits.float().softmax(-1).topk(top_k).indices
    return {**found, "selected": selected.flatten(0, -2)}


def _expert(experts: Any, family: Family) -> Callable[[int, Tensor], tuple[Tensor, Tensor]] | None:
    """Return the function that maps (e, x [n, H]) to gate and product [n, F] of expert e.

    None if the class keeps its experts in some other way.
    """
    names = leaves(family)
    if isinstance(experts, nn.ModuleList) and names["gate"]:
        return lambda e, x: _separate(experts[e], names, x)
    if hasattr(experts, "gate_up_proj") and hasattr(experts, "_apply_gate"):
        return lambda e, x: _fused(experts, e, x)
    return None


def _separate(mlp: Any, names: Mapping[str, str | None], x: Tensor) -> tuple[Tensor, Tensor]:
    gate = getattr(mlp, str(names["gate"]))(x)
    return gate, mlp.act_fn(gate) * getattr(mlp, str(names["up"]))(x)


def _fused(experts: Any, e: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and product of one of transformers 5's fused experts.

    gate_up_proj is [E, 2F, H], or [E, H, 2F] if transposed. The gate's rows come first, or every
    other row is the gate's.
    """
    weight = experts.gate_up_proj[e]
    gate_up = x @ (weight if experts.is_transposed else weight.T)
    if experts.has_bias:
        gate_up = gate_up + experts.gate_up_proj_bias[e]
    gate = gate_up.chunk(2, dim=-1)[0] if experts.is_concatenated else gate_up[..., ::2]
    return gate, experts._apply_gate(gate_up)
