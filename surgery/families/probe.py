"""Find the MLPs of a model by running it, and prove what they compute.

Every module is hooked while a small model reads a few tokens in fp64. An MLP is then three matrices
(or two) between which the numbers agree with a formula:

    y = down(act(gate(x)) * up(x))        or        y = down(act(up(x)))

where x is what gate and up read, and act is a function of ACT2FN. Names decide nothing: the formula
must reproduce what `down` read to TOLERANCE, on the model's own rows and on rows 20 times as large,
which a clamp would change.

Shapes: n rows, H hidden_size, F intermediate_size.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

TOLERANCE = 1e-10
LARGE = 20.0
# Parts of paths that hold no MLP of the language model's stream.
ELSEWHERE = re.compile(
    r"(^|[._])(\w*attn\w*|\w*attention\w*|\w*norm\w*|router|experts)([._]|$)", re.I
)
# The first of several names of one function is taken.
COMMON = (
    "silu",
    "gelu",
    "gelu_new",
    "gelu_pytorch_tanh",
    "relu",
    "relu2",
    "quick_gelu",
    "tanh",
    "sigmoid",
    "gelu_fast",
)


# Two matrices with nothing between them are a map of low rank, and no MLP.
BENDING = {n for n in ACT2FN if n != "linear"}


@dataclass(slots=True)
class Call:
    """What one call of a module was given and gave back."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor

    @property
    def input(self) -> Tensor | None:
        """Return the first tensor that it was given."""
        given = (*self.args, *self.kwargs.values())
        return next((t for t in given if isinstance(t, Tensor) and t.is_floating_point()), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """One MLP whose formula was proved. Paths are relative to its layer.

    Args:
        gate: None where there is none; the same as `up` where both are one matrix.
        activation: a name of ACT2FN, or of the class of `act`.
        up_first: whether a fused matrix holds the rows of up before those of gate.
        home: the module that computes the MLP and nothing else; "" where no module does.
        act: the module of the activation, if it has one.
        own: whether the activation is that module's own function, and none of ACT2FN.
        extra: what the smallest module around the MLP computes besides, in words; "" if nothing.
    """

    gate: str | None
    up: str
    down: str
    activation: str
    fused: bool = False
    up_first: bool = False
    transposed: bool = False
    home: str = ""
    act: str | None = None
    own: bool = False
    extra: str = ""
    width: int = 0


@dataclass(kw_only=True, slots=True)
class Trace:
    """The first calls of every module of a model, by name, in the order in which they ended.

    `times` says how often each was called.
    """

    calls: dict[str, Call] = field(default_factory=dict)
    times: Counter[str] = field(default_factory=Counter)


def trace(model: nn.Module, run: Callable[[], Any]) -> Trace:
    """Run the model once, and return the first call of every module."""
    found, hooks = Trace(), []

    def watch(name: str, module: nn.Module) -> None:
        given: list[tuple[Any, Any]] = []

        def before(m: nn.Module, args: Any, kwargs: Any) -> None:
            given.append((_copied(args), _copied(kwargs)))

        def after(m: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list) and output else output
            inputs, keywords = given.pop()
            found.times[name] += 1
            if isinstance(first, Tensor) and name not in found.calls:
                found.calls[name] = Call(inputs, keywords, first.detach().clone())

        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(module.register_forward_hook(after, with_kwargs=True))

    for name, module in model.named_modules():
        watch(name, module)
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple | list):
        return type(value)(_copied(v) for v in value) if type(value) in (tuple, list) else value
    if type(value) is dict:
        return {k: _copied(v) for k, v in value.items()}
    return value


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Give all weights sizes at which activations bend: the pre-activations reach ±4 or so."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                spread = 1.5 / max(1, min(p.shape[-1], p.shape[-2])) ** 0.5
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * spread)
            elif p.is_floating_point():
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.1)


def prove(layer: nn.Module, name: str, found: Trace, stated: Sequence[str]) -> Iterator[Proof]:
    """Yield the MLPs of a layer that are proved.

    Args:
        layer: the layer.
        name: its name in the model.
        found: a run of the model.
        stated: the activations that the config names, which go before others of the same function.
    """
    matrices = {
        path: m
        for path, m in layer.named_modules()
        if isinstance(m, nn.Linear | Conv1D)
        and f"{name}.{path}" in found.calls
        and not ELSEWHERE.search(path)
    }
    for down, module in matrices.items():
        wide, hidden = _sizes(module)
        if hidden == wide:
            continue
        others = [p for p, m in matrices.items() if p != down and _sizes(m)[0] == hidden]
        for parts in _parts(others, matrices, wide):
            if (act := _formula(parts, down, layer, name, found, stated)) is not None:
                yield _proof(layer, name, parts, down, act, found)
                break


def holds_alone(layer: nn.Module, proof: Proof, rows: Tensor) -> bool:
    """Return whether the formula of another layer's MLP holds for this layer, on rows [n, H].

    This is for layers that text does not pass through, whose module is run by itself.
    """
    if not proof.home or proof.extra or proof.own:
        return False
    parts = _Parts(proof.gate, proof.up, proof.fused, proof.up_first)
    home, act = layer.get_submodule(proof.home), _Act(proof.activation)
    with torch.no_grad():
        return all(
            same(home(x), _compute(layer, parts, proof.down, act, x)) for x in (rows, LARGE * rows)
        )


def prove_experts(experts: nn.Module, name: str, found: Trace, stated: Sequence[str]) -> str | None:
    """Return the activation of routed experts, proved on the tokens that they were given.

    They are fused, gate_up_proj [E, 2F, H] or [E, H, 2F] and down_proj, or a list of modules, whose
    own MLPs are proved instead. None where no formula reproduces their output.
    """
    if isinstance(experts, nn.ModuleList):
        proofs = [list(prove(m, f"{name}.{i}", found, stated)) for i, m in enumerate(experts)]
        acts = {p.activation for each in proofs for p in each}
        return acts.pop() if len(acts) == 1 else None
    call = found.calls.get(name)
    given = (
        [t for t in (*call.args, *call.kwargs.values()) if isinstance(t, Tensor)] if call else []
    )
    chosen = next((t for t in given if not t.is_floating_point()), None)
    floats = [t for t in given if t.is_floating_point()]
    if call is None or chosen is None or len(floats) < 2:
        return None
    names = dict.fromkeys([*stated, *COMMON, *ACT2FN])
    for act in (_Act(n) for n in names if n in BENDING):
        for interleaved in (False, True):
            y = _experts(experts, floats[0], chosen, floats[1], act, interleaved)
            if same(call.output, y):
                return act.name
    return None


@torch.no_grad()
def _experts(
    experts: Any, x: Tensor, chosen: Tensor, weights: Tensor, act: _Act, interleaved: bool
) -> Tensor | None:
    """Return what fused experts give for rows [n, H], `chosen` and `weights` [n, k]."""
    if not (hasattr(experts, "gate_up_proj") and hasattr(experts, "down_proj")):
        return None
    rows, out = x.flatten(0, -2), torch.zeros_like(x.flatten(0, -2))
    if chosen.shape != weights.shape:
        return None
    for e in chosen.unique().tolist():
        gate_up, down = experts.gate_up_proj[e], experts.down_proj[e]
        both = rows @ (gate_up if gate_up.shape[0] == rows.shape[1] else gate_up.T)
        first, second = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, dim=-1)
        h = act.product(first, second)
        if h is None:
            return None
        y = h @ (down if down.shape[0] == h.shape[1] else down.T)
        out += y * (weights * (chosen == e)).sum(-1, keepdim=True)
    return out


def _sizes(module: Any) -> tuple[int, int]:
    """Return how many numbers a matrix reads and how many it gives."""
    rows, columns = module.weight.shape
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)


@dataclass(frozen=True, slots=True)
class _Parts:
    gate: str | None
    up: str
    fused: bool = False
    up_first: bool = False


def _parts(others: Sequence[str], matrices: Mapping[str, Any], wide: int) -> Iterator[_Parts]:
    """Yield the possible gates and ups of an MLP of this width."""
    single = [p for p in others if _sizes(matrices[p])[1] == wide]
    for gate, up in permutations(single, 2):
        yield _Parts(gate, up)
    for up in single:
        yield _Parts(None, up)
    for both in (p for p in others if _sizes(matrices[p])[1] == 2 * wide):
        yield _Parts(both, both, fused=True)
        yield _Parts(both, both, fused=True, up_first=True)


@dataclass(frozen=True, slots=True)
class _Act:
    """An activation: a name of ACT2FN, or a module of the layer that computes another function."""

    name: str
    module: Any = None

    @property
    def own(self) -> bool:
        return self.module is not None

    def product(self, g: Tensor, u: Tensor | None) -> Tensor | None:
        """Return act(g), times u where there is one; None where it does not run here."""
        try:
            function: Any = self.module if self.own else ACT2FN[self.name]
            if isinstance(function, nn.Module) and not self.own:
                function = function.to(g.dtype)
            opened: Tensor = function(g)
        except Exception:  # one that needs a GPU, or a shape of its own
            return None
        return opened if u is None else opened * u


def _formula(
    parts: _Parts, down: str, layer: nn.Module, name: str, found: Trace, stated: Sequence[str]
) -> _Act | None:
    """Return the activation with which the formula holds; None if there is none."""
    h = found.calls[f"{name}.{down}"].input
    up = found.calls[f"{name}.{parts.up}"]
    gate = found.calls[f"{name}.{parts.gate}"] if parts.gate else None
    if h is None or up.input is None or (gate and not same(gate.input, up.input)):
        return None
    g, u = _gate_and_up(parts, None if gate is None else gate.output, up.output)
    if g.numel() != h.numel():
        return None
    named = (_Act(n) for n in dict.fromkeys([*stated, *COMMON, *ACT2FN]) if n in BENDING)
    own = (_Act(type(m).__name__, m) for m in layer.modules() if _could_be_activation(m))
    with torch.no_grad():
        return next((a for a in (*named, *own) if same(h, a.product(g, u))), None)


def _could_be_activation(module: nn.Module) -> bool:
    """Return whether a module has the look of an activation with weights or a form of its own."""
    matrices = any(p.ndim > 1 for p in module.parameters())
    other = isinstance(module, nn.Dropout | nn.Identity) or "norm" in type(module).__name__.lower()
    return not (matrices or other or list(module.children()))


def _gate_and_up(parts: _Parts, gate: Tensor | None, up: Tensor) -> tuple[Tensor, Tensor | None]:
    if parts.fused:
        first, second = up.chunk(2, dim=-1)
        return (second, first) if parts.up_first else (first, second)
    return (up, None) if gate is None else (gate, up)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors hold the same numbers, in whatever shape."""
    if a is None or b is None or a.numel() != b.numel() or not a.numel():
        return False
    a, b = a.detach().flatten().double(), b.detach().flatten().double()
    return float((a - b).norm()) <= TOLERANCE * float(b.norm()) and bool(b.norm() > 0)


def _proof(layer: nn.Module, name: str, parts: _Parts, down: str, act: _Act, found: Trace) -> Proof:
    """Return the MLP, with the module that is its home."""
    home = _home(parts, down)
    extra = _extra(layer, name, parts, down, act, found) if home else ""
    h = found.calls[f"{name}.{down}"].input
    up = found.calls[f"{name}.{parts.up}"].output
    gate = found.calls[f"{name}.{parts.gate}"].output if parts.gate else None
    g, _ = _gate_and_up(parts, gate, up)
    named = (
        p
        for p, m in layer.named_modules()
        if p
        and _could_be_activation(m)
        and (c := found.calls.get(f"{name}.{p}"))
        and (parts.gate is not None or same(c.output, h))
        and same(c.input, g)
    )
    matrix = layer.get_submodule(down)
    return Proof(
        gate=parts.gate,
        up=parts.up,
        down=down,
        activation=act.name,
        own=act.own,
        fused=parts.fused,
        up_first=parts.up_first,
        transposed=isinstance(matrix, Conv1D),
        home=home,
        act=next(named, None),
        extra=extra,
        width=_sizes(matrix)[0],
    )


def _common(paths: Sequence[str]) -> str:
    """Return the path of the module that all of these are in; "" for the layer itself."""
    split = [p.split(".")[:-1] for p in paths]
    shared = []
    for names in zip(*split, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)


def _home(parts: _Parts, down: str) -> str:
    """Return the module that holds all matrices of an MLP, "" where only the layer does."""
    return _common([path for path in (parts.gate, parts.up, down) if path])


def _extra(layer: nn.Module, name: str, parts: _Parts, down: str, act: _Act, found: Trace) -> str:
    """Return what the home of an MLP computes besides the formula, "" where that is nothing."""
    home = _home(parts, down)
    call = found.calls.get(f"{name}.{home}")
    if call is None or call.input is None:
        return f"{home} gives no tensor"
    if not same(call.input, found.calls[f"{name}.{parts.up}"].input):
        return f"{home} changes its input before the matrices read it"
    if not same(call.output, found.calls[f"{name}.{down}"].output):
        return f"{home} changes what {down} gives, or adds to it"
    module = layer.get_submodule(home)
    if isinstance(module, nn.Sequential):
        return f"{home} is a sequence of modules, which a block would break"
    rows = call.input
    for scale in (1.0, LARGE):
        x = rows * scale
        wanted = _compute(layer, parts, down, act, x)
        try:
            with torch.no_grad():
                given = module(x, *call.args[1:], **_without_first(call))
        except Exception as e:
            return f"{home} cannot run alone ({type(e).__name__})"
        given = given[0] if isinstance(given, tuple) else given
        if not same(given, wanted):
            error = float((given - wanted).norm() / wanted.norm())
            return (
                f"{home} differs from the formula by {error:.1e} on rows {scale:g} times as large"
            )
    return ""


def _without_first(call: Call) -> dict[str, Any]:
    """Return the keywords of a call without the rows, where those were one of them."""
    if call.args:
        return call.kwargs
    first = next((k for k, v in call.kwargs.items() if isinstance(v, Tensor)), "")
    return {k: v for k, v in call.kwargs.items() if k != first}


@torch.no_grad()
def _compute(layer: nn.Module, parts: _Parts, down: str, act: _Act, x: Tensor) -> Tensor:
    up = layer.get_submodule(parts.up)(x)
    gate = layer.get_submodule(parts.gate)(x) if parts.gate and not parts.fused else None
    h = act.product(*_gate_and_up(parts, gate, up))
    y: Tensor = layer.get_submodule(down)(h)
    return y
