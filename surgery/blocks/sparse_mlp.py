"""An MLP most of whose products are zeros, and a decoding step that does not read the weights of
those.

y = down(h) with h = f(gate(x)) ⊙ up(x), or h = f(up(x)) where there is no gate. `rule` says what f
is, with the activation act and a threshold t:

    plain    act(g)
    fatrelu  act(g) where g >= t, else 0
             (ProSparse, Song et al. 2024, arXiv 2402.13516)
    shifted  act(g - t)
             (ReLU Strikes Back, Mirzadeh et al. 2023, arXiv 2310.04564)
    drelu    fatrelu of the gate, and of up with a threshold of its own
             (Turbo Sparse, Song et al. 2024, arXiv 2406.05955)
    cats     act(g) where |act(g)| >= t, else 0
             (CATS, Lee et al. 2024, arXiv 2404.08763)
    teal     act(g), and then h where |h| >= t, else 0
             (TEAL, Liu et al. 2024, arXiv 2408.14690)

t is one number [1], or one for each neuron [F] (`per_neuron`), kept in fp32 in the checkpoint. With
`inputs`, x is cut at a threshold of its own, as in TEAL. With `correction`, a bias [H] is added to
y. With `bypass` r, a linear map of x of rank r is added: bypass_out · bypass_in · x, or
bypass_out · x where r = H. The submodules keep their names, so that the weights load as they were.

Shapes: H hidden_size, F intermediate_size, n live neurons.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from .sparse_kernel import ACTIVATIONS, fits, live_mlp

GATHER = 0.6  # with more of the neurons live, reading all rows of up is as fast
# Bytes of gathered rows that a CPU works on at a time: more would not stay in its cache.
SCRATCH = 4 * 2**20
GPU_BAGS = 64  # sums that a GPU adds up side by side, each one row after another
_local = threading.local()


def _fatrelu(act: Callable[[Tensor], Tensor], g: Tensor, t: Tensor) -> Tensor:
    return act(g).masked_fill(g < t, 0)


def _above(x: Tensor, t: Tensor) -> Tensor:
    """Return x where |x| >= t, else 0."""
    return x.masked_fill(x.abs() < t, 0)


class Rule(NamedTuple):
    """Say what becomes of gate and up.

    `opens(act, g, t)` is f. Of `thresholds`, the first is that of the gate and the second that of
    up. With `cuts_product` the only one cuts the product instead.
    """

    opens: Callable[[Callable[[Tensor], Tensor], Tensor, Any], Tensor]
    thresholds: int = 1
    cuts_product: bool = False

    def multiply(self, act: Any, g: Tensor, u: Tensor | None, t: Any, t_up: Any) -> Tensor:
        """Return h [..., n] of gate and up of n neurons, with their thresholds.

        Without a gate, g is up and u is None.
        """
        h = self.opens(act, g, t)
        if u is not None:
            h = h * self.other(act, u, t_up)
        return _above(h, t) if self.cuts_product and t is not None else h

    def other(self, act: Any, u: Tensor, t: Any) -> Tensor:
        """Return what the gate is multiplied with."""
        return u if t is None or self.thresholds < 2 else self.opens(act, u, t)


RULES = {
    "plain": Rule(lambda act, g, t: act(g), thresholds=0),
    "fatrelu": Rule(_fatrelu),
    "shifted": Rule(lambda act, g, t: act(g - t).to(g.dtype)),
    "drelu": Rule(_fatrelu, thresholds=2),
    "cats": Rule(lambda act, g, t: _above(act(g), t)),
    "teal": Rule(lambda act, g, t: act(g), cuts_product=True),
}


class NeuronsMLP(nn.Module):
    """Hold what this block and that of experts_mlp.py have in common.

    That is the parts of the MLP that the block is built from, the rule with its thresholds, and
    what is added to the output. `neurons` is given where the block has another number of them.
    """

    def __init__(self, base: nn.Module, entry: dict[str, Any], neurons: int = 0) -> None:
        super().__init__()
        for name, child in base.named_children():
            weights = any(True for _ in child.parameters())
            if isinstance(child, nn.Dropout) or weights:
                self.add_module(name, child)
            if entry["activation"] or isinstance(child, nn.Dropout | nn.Linear | Conv1D):
                continue
            if weights:  # it keeps its name, under which its weights are stored
                self.__dict__["act"] = child
            else:
                self.act = child  # its name differs from class to class
        if entry["activation"]:
            self.act = ACT2FN[entry["activation"]]
        self.entry, self.rule_name = dict(entry), entry.get("rule", "plain")
        self.rule = RULES[self.rule_name]
        weight = self._part("down").weight
        self.hidden, width = reversed(weight.shape) if entry["transposed"] else weight.shape
        per_neuron = (neurons or width) if entry.get("per_neuron") else 1
        self._threshold("threshold", per_neuron if self.rule.thresholds else 0)
        self._threshold("threshold_up", per_neuron if self.rule.thresholds > 1 else 0)
        bias = nn.Parameter(torch.zeros(self.hidden, dtype=weight.dtype))
        self.register_parameter("correction", bias if entry.get("correction") else None)
        rank = entry.get("bypass", 0)
        for name, size in (("bypass_in", (rank, self.hidden)), ("bypass_out", (self.hidden, rank))):
            there = rank and (name == "bypass_out" or rank < self.hidden)
            self.register_parameter(
                name, nn.Parameter(torch.zeros(size, dtype=weight.dtype)) if there else None
            )

    def _threshold(self, name: str, size: int) -> None:
        self.register_buffer(name, torch.zeros(size, dtype=torch.float32) if size else None)

    def init_block_weights(self) -> None:
        """Begin with nothing cut and nothing added.

        The functions of torch.nn.init leave alone what was loaded.
        """
        for _, t in (*self.named_buffers(recurse=False), *self.named_parameters(recurse=False)):
            nn.init.zeros_(t)

    def _part(self, part: str) -> Any:
        return getattr(self, self.entry[part])

    def _product(self, x: Tensor) -> Tensor:
        """Return the products h [..., F]."""
        if not self.entry["gate"]:
            return self._multiply(self._part("up")(x), None, self.threshold, None)
        if self.entry["fused"]:
            g, u = self._part("up")(x).chunk(2, dim=-1)
        else:
            g, u = self._part("gate")(x), self._part("up")(x)
        return self._multiply(g, u, self.threshold, self.threshold_up)

    def _multiply(self, g: Tensor, u: Tensor | None, t: Any, t_up: Any) -> Tensor:
        """Return h [..., n] of gate and up of n neurons, with their thresholds."""
        return self.rule.multiply(self.act, g, u, t, t_up)

    def _complete(self, y: Tensor, x: Tensor) -> Tensor:
        """Return y [..., H] with what is added to it."""
        if self.correction is not None:
            y = y + self.correction
        if self.bypass_out is not None:
            y = y + F.linear(
                x if self.bypass_in is None else F.linear(x, self.bypass_in), self.bypass_out
            )
        return self.dropout(y) if hasattr(self, "dropout") else y


class SparseMLP(NeuronsMLP):
    """Take the place of the MLP that it is built from.

    With `sparse_decode`, tokens without gradients read only the rows of up and down whose neuron is
    live: on a CPU up to eight at a time by the kernel of sparse_kernel.py; on a GPU, and where the
    kernel cannot be compiled, one at a time by a gather in torch. It is off by default, because it
    pays only from some size and sparsity on, which `surgery bench` measures. The first such token
    changes the layout of `down` in memory to one row for each neuron. That is as fast for one
    sequence and for prefill. Rows read so bypass hooks, adapters, quantised or offloaded weights;
    where there are any, the MLP is computed densely. A compiler keeps the kernel, once that layout
    is there, and computes densely otherwise.
    """

    def __init__(self, base: nn.Module, entry: dict[str, Any], config: Any = None) -> None:
        super().__init__(base, entry)
        self.sparse_decode = bool(getattr(config, "sparse_decode", False))
        self._threshold("threshold_inputs", 1 if entry.get("inputs") else 0)
        self.act_name = _name_of(self.act)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., H] to [..., H]."""
        if self.threshold_inputs is not None:
            x = _above(x, self.threshold_inputs)
        if self.sparse_decode and self._has_kernel(x):
            y = self._by_kernel(x)
        elif self.sparse_decode and self._gathers(x):
            y = self._gathered(x)
        else:
            y = self._part("down")(self._product(x))
        return self._complete(y, x)

    # --- a few tokens -----------------------------------------------------------------------------

    def _has_kernel(self, x: Tensor) -> bool:
        """Return whether the kernel gives y of x: of a few tokens being decoded, from matrices."""
        if torch.is_grad_enabled() or not fits(x, self.rule_name, self.act_name):
            return False
        gate = self.entry["gate"] and not self.entry["fused"]
        if not all(is_plain(self._part(p), x) for p in ("up", "down", *("gate",) * bool(gate))):
            return False
        return not torch.compiler.is_compiling() or self._stored_rows("down").is_contiguous()

    def _by_kernel(self, x: Tensor) -> Tensor:
        up, down = self._rows("up"), self._rows("down")
        gate = gate_bias = None
        up_bias = self._part("up").bias
        if self.entry["fused"]:
            gate, up = up.chunk(2)
            gate_bias, up_bias = (None, None) if up_bias is None else up_bias.chunk(2)
        elif self.entry["gate"]:
            gate, gate_bias = self._rows("gate"), self._part("gate").bias
        biases = (gate_bias, up_bias, self._part("down").bias)
        both = (self.threshold, self.threshold_up)
        thresholds = (None if t is None else t.float() for t in both)  # to() may have cast them
        y: Tensor = live_mlp(x, gate, up, down, *biases, *thresholds, self.rule_name, self.act_name)
        return y

    # --- one token --------------------------------------------------------------------------------

    def _gathers(self, x: Tensor) -> bool:
        """Return whether x is one token being decoded whose rows may be gathered.

        They may where the submodules would read just the matrices that a gather does.
        """
        if x.numel() != self.hidden or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        known = x.device.type in ("cpu", "cuda")
        fit = known and not (self.entry["gate"] and self.entry["transposed"])
        return fit and all(is_plain(self._part(part), x) for part in ("up", "down"))

    def _gathered(self, x: Tensor) -> Tensor:
        """Return y [..., H] of one token."""
        h, live = self._live(x.reshape(1, self.hidden))
        down = self._part("down")
        y = _sum_rows(self._rows("down"), live, h)
        return (y if down.bias is None else y + down.bias).view(x.shape)

    def _live(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the products of x [1, H] that are not zero [n], and their neurons [n]."""
        if self.rule.cuts_product or not self.entry["gate"]:
            h = self._product(x)[0]
            live = h.nonzero()[:, 0]
            return h[live], live
        opened = self.rule.opens(self.act, self._gate(x), self.threshold)[0]
        live = opened.nonzero()[:, 0]
        t = self.threshold_up
        t = t[live] if t is not None and len(t) > 1 else t
        h = opened[live] * self.rule.other(self.act, self._rows_of_up(x, live), t)
        if self.rule.thresholds < 2:
            return h, live
        both = h.nonzero()[:, 0]
        return h[both], live[both]

    def _gate(self, x: Tensor) -> Tensor:
        if not self.entry["fused"]:
            gate: Tensor = self._part("gate")(x)
            return gate
        both = self._part("up")
        f = len(both.weight) // 2
        return F.linear(x, both.weight[:f], None if both.bias is None else both.bias[:f])

    def _rows_of_up(self, x: Tensor, live: Tensor) -> Tensor:
        """Return up of x [1, H] at the live neurons [n]."""
        up = self._part("up")
        skip = len(up.weight) // 2 if self.entry["fused"] else 0
        u = _dot_rows(up.weight[skip:], live, x)
        return u if up.bias is None else u + up.bias[skip:][live]

    # --- rows -------------------------------------------------------------------------------------

    def _stored_rows(self, part: str) -> Tensor:
        """Return the weight of a part as [F, H], whatever its layout in memory."""
        weight: Tensor = self._part(part).weight
        return weight if (part == "down") == bool(self.entry["transposed"]) else weight.t()

    def _rows(self, part: str) -> Tensor:
        """Return the weight of a part as [F, H], with a row of memory for each neuron."""
        if not self._stored_rows(part).is_contiguous():
            weight = self._part(part).weight
            with torch.inference_mode(False):  # or the weight could never be trained again
                weight.data = weight.data.t().contiguous().t()
        return self._stored_rows(part)


def _name_of(act: Any) -> str:
    """Return the name of an activation that the kernel knows, or ""."""
    return next((name for name in ACTIVATIONS if type(ACT2FN[name]) is type(act)), "")


def is_plain(module: nn.Module, x: Tensor, cast: bool = False) -> bool:
    """Return whether the module is no more than a matrix on the device of x.

    It must have the dtype of x too, unless `cast` says that weights are cast to it.
    """
    if (
        not isinstance(module, (nn.Linear, Conv1D))
        or module._forward_hooks
        or module._forward_pre_hooks
    ):
        return False
    weight = module.weight
    stands_in = torch.compiler.is_compiling() and type(weight) is FakeTensor  # in torch.export
    return (
        (type(weight) is nn.Parameter or stands_in)
        and weight.device == x.device
        and (cast or weight.dtype == x.dtype)
    )


def _dot_rows(weight: Tensor, live: Tensor, x: Tensor) -> Tensor:
    """Return weight[live] · x, [n], of weight [F, H] and x [1, H]."""
    if len(live) > GATHER * len(weight):
        return F.linear(x, weight)[0][live]
    if weight.device.type != "cpu":
        return F.linear(x, weight.index_select(0, live))[0]
    scratch = _scratch(weight)
    parts = live.split(len(scratch))
    rows = (torch.index_select(weight, 0, part, out=scratch[: len(part)]) for part in parts)
    return torch.cat([F.linear(x, r) for r in rows], dim=1)[0]


def _sum_rows(weight: Tensor, live: Tensor, h: Tensor) -> Tensor:
    """Return Σ_i h_i · weight[live_i], [H].

    No row is copied: each thread sums a bag of them, and the bags are added up.
    """
    bags = GPU_BAGS if weight.device.type == "cuda" else torch.get_num_threads()
    starts = torch.arange(0, max(1, len(live)), max(1, -(-len(live) // bags)), device=live.device)
    return F.embedding_bag(live, weight, starts, mode="sum", per_sample_weights=h).sum(0)


def _scratch(weight: Tensor) -> Tensor:
    """Return this thread's memory for gathered rows.

    New memory for each gather would cost more than the gather itself.
    """
    name = f"{weight.dtype}, {weight.shape[1]}"
    if not hasattr(_local, name):
        rows = max(1, SCRATCH // (weight.shape[1] * weight.element_size()))
        with torch.inference_mode(False):
            setattr(_local, name, torch.empty(rows, weight.shape[1], dtype=weight.dtype))
    scratch: Tensor = getattr(_local, name)
    return scratch
