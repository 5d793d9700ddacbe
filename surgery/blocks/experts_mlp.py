"""A mixture of experts that is one wide MLP: its neurons stand in groups, and a router chooses
which groups a token passes.

    y = down(h ⊙ s),  h = act(gate(x)) ⊙ up(x), or act(up(x)) where there is no gate

The first S neurons are shared, and every token passes them (s = 1); E experts of w neurons each
follow. s is the routing weight of a neuron's expert, 0 where the expert is not among the K chosen.
Weights keep the names and the form that they have in the MLP whose place the block takes, with
S + E·w neurons. So all experts with weight 1 are that MLP again. The biases of gate and up belong
to the neurons; the bias of down is added once.

`router` says how the logits [E] are computed, in fp32:

    linear   W x, with a bias or without
    mlp      W f(V x), where f is tanh or ReLU (MoEfication, Zhang et al. 2022, arXiv 2110.01786)
    neurons  |act(V x) ⊙ W x|, or |act(W x)|: one neuron of each expert stands for it
             (CMoE, Pei et al. 2025, arXiv 2502.04416)

`weights` says what the K experts with the largest logits are multiplied by:

    renormalised  factor · softmax over the K (Mixtral, Jiang et al. 2024, arXiv 2401.04088)
    one           1, for parts of an MLP, as they were in it
    scaled        1 + u · softmax over all E, where u [E] begins at 0 (CMoE)

An entry may have the `rule`, the thresholds, the `correction` and the `bypass` of sparse_mlp.py;
then h and y have them too. With `group` G, experts are chosen G at a time, by the mean of their
logits, so that a copy of an MLP that was cut into G experts is chosen as a whole.

Shapes: H hidden_size, N = S + E·w neurons, n tokens, r the width of an MLP that routes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from .sparse_mlp import NeuronsMLP, is_plain


class Router(nn.Module):
    """Map x [n, H] to logits [n, E], routing weights [n, K] and the chosen experts [n, K].

    A hook of a balancing loss reads these three.
    """

    def __init__(self, entry: dict[str, Any], hidden: int, std: float) -> None:
        super().__init__()
        self.kind, self.weighting, self.factor, self.std = (
            entry["router"],
            entry["weights"],
            entry["factor"],
            std,
        )
        self.experts, self.top_k, self.group = entry["experts"], entry["top_k"], entry["group"]
        self.inner = ACT2FN[entry["router_activation"]] if self.kind == "mlp" else None
        e, gated = self.experts, bool(entry["gate"])
        first = (
            entry["router_width"]
            if self.kind == "mlp"
            else e
            if self.kind == "neurons" and gated
            else 0
        )
        reads = first if self.kind == "mlp" else hidden
        biased = entry["router_bias"]
        shapes = {
            "weight_in": (first, hidden),
            "bias_in": (first if biased else 0,),
            "weight": (e, reads),
            "bias": (e if biased else 0,),
            "scale": (e if self.weighting == "scaled" else 0,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)) if shape[0] else None)

    def init_block_weights(self) -> None:
        """Begin without a preference for any expert.

        The functions of torch.nn.init leave alone what was loaded.
        """
        for name, p in self.named_parameters():
            if "weight" in name:
                nn.init.normal_(p, std=self.std)
            else:
                nn.init.zeros_(p)

    def forward(self, x: Tensor, act: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            logits = self._logits(x.float(), act)
            chosen = self._chosen(logits)
            return logits, self._weights(logits, chosen), chosen

    def _logits(self, x: Tensor, act: nn.Module) -> Tensor:
        v = x if self.weight_in is None else _linear(x, self.weight_in, self.bias_in)
        if self.kind == "linear":
            return _linear(x, self.weight, self.bias)
        if self.kind == "mlp":
            assert self.inner is not None
            return _linear(self.inner(v), self.weight, self.bias)
        w = _linear(x, self.weight, self.bias)
        return (act(w) if self.weight_in is None else act(v) * w).abs()

    def _chosen(self, logits: Tensor) -> Tensor:
        g = self.group
        if g == 1:
            return logits.topk(self.top_k, dim=-1).indices
        groups = logits.unflatten(-1, (-1, g)).mean(-1).topk(self.top_k // g, dim=-1).indices
        return (groups[..., None] * g + torch.arange(g, device=groups.device)).flatten(-2)

    def _weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        if self.weighting == "renormalised":
            return self.factor * logits.gather(-1, chosen).softmax(-1)
        if self.weighting == "scaled":
            return 1 + (self.scale.float() * logits.softmax(-1)).gather(-1, chosen)
        return torch.ones_like(chosen, dtype=logits.dtype)


class ExpertsMLP(NeuronsMLP):
    """Take the place of the MLP that it is built from.

    It keeps the submodules of that MLP which have as many neurons as it needs. Tokens are sorted by
    expert, and each chosen expert multiplies its tokens together, so that one token reads the
    weights of its K experts alone. That would bypass hooks, adapters, a compiler, and quantised,
    sharded or offloaded weights. Where there are any, all experts are computed by the submodules,
    and most of them multiplied by zero.
    """

    def __init__(self, base: nn.Module, entry: dict[str, Any], config: Any = None) -> None:
        experts, width, shared = entry["experts"], entry["width"], entry["shared_neurons"]
        neurons = shared + experts * width
        super().__init__(base, entry, neurons)
        self.experts, self.width, self.shared = experts, width, shared
        wide = neurons * (2 if entry["fused"] else 1)
        for part in self._parts():
            sizes = (neurons, self.hidden) if part == "down" else (self.hidden, wide)
            setattr(self, entry[part], _sized(self._part(part), *sizes))
        self.router = Router(entry, self.hidden, getattr(config, "initializer_range", 0.02))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., H] to [..., H]."""
        flat = x.reshape(-1, x.shape[-1])
        _, weights, chosen = self.router(flat, self.act)
        cast = torch.is_autocast_enabled(x.device.type)
        sorts = (
            self.router.top_k < self.experts
            and not torch.compiler.is_compiling()
            and all(is_plain(self._part(p), flat, cast) for p in self._parts())
        )
        y = (self._sorted if sorts else self._masked)(flat, weights, chosen)
        return self._complete(y, flat).view(x.shape)

    # --- all experts ------------------------------------------------------------------------------

    def _masked(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Compute all experts by the submodules, and multiply products by the routing weights.

        The weight of an expert that was not chosen is 0.
        """
        h = self._product(x)
        scale = weights.new_zeros(len(x), self.experts).scatter(-1, chosen, weights).to(h.dtype)
        scale = F.pad(scale.repeat_interleave(self.width, -1), (self.shared, 0), value=1.0)
        y: Tensor = self._part("down")(h * scale)
        return y

    # --- those chosen -----------------------------------------------------------------------------

    def _sorted(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Compute each expert on the tokens that chose it."""
        n, k = chosen.shape
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.experts).tolist()
        shared, experts = self._experts()
        y = weights.new_zeros(n, x.shape[1])
        for rows, weight, parts in zip(
            (order // k).split(counts), weights.flatten()[order].split(counts), experts, strict=True
        ):
            if len(rows):
                y.index_add_(0, rows, self._neurons(x[rows], parts) * weight[:, None])
        y = y.to(x.dtype)
        if self.shared:
            y = y + self._neurons(x, shared)
        bias = self._part("down").bias
        return y if bias is None else y + bias

    def _neurons(self, x: Tensor, parts: dict[str, Tensor]) -> Tensor:
        """Return the output [n, H] of some of the neurons."""
        up = F.linear(x, parts["up"], parts.get("up_bias"))
        g, u = (
            (F.linear(x, parts["gate"], parts.get("gate_bias")), up)
            if "gate" in parts
            else (up, None)
        )
        t, t_up = (parts.get(name, getattr(self, name)) for name in ("threshold", "threshold_up"))
        h = self._multiply(g, u, t, t_up)
        return h @ parts["down"]

    def _experts(self) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        """Return the `_rows` of the shared neurons, and those of each expert.

        They are made by split and unbind, whose gradient is one tensor for all experts.
        """
        shared, experts = dict[str, Tensor](), [dict[str, Tensor]() for _ in range(self.experts)]
        for name, rows in self._rows().items():
            shared[name], routed = rows.split([self.shared, self.experts * self.width])
            for expert, part in zip(
                experts, routed.unflatten(0, (self.experts, self.width)).unbind(), strict=True
            ):
                expert[name] = part
        return shared, experts

    def _rows(self) -> dict[str, Tensor]:
        """Return the tensors that have a row for each neuron.

        They are gate, up and down [N, H], and gate_bias, up_bias and thresholds [N].
        """
        found: dict[str, Tensor] = {}
        for part in self._parts():
            module = self._part(part)
            turned = self.entry["transposed"] == (part != "down")
            found[part] = module.weight.t() if turned else module.weight
            if part != "down" and module.bias is not None:
                found[f"{part}_bias"] = module.bias
        if self.entry["fused"]:
            for name in [n for n in found if n != "down"]:
                found[name.replace("up", "gate")], found[name] = found[name].chunk(2)
        return found | {name: t for name, t in self.named_buffers(recurse=False) if len(t) > 1}

    def _parts(self) -> tuple[str, ...]:
        """Return the names of the parts that are modules of their own."""
        return (
            ("gate", "up", "down")
            if self.entry["gate"] and not self.entry["fused"]
            else ("up", "down")
        )


def _sized(module: Any, inputs: int, outputs: int) -> nn.Module:
    """Return a matrix of these sizes, which is the module itself where it has them."""
    shape, kind = (inputs, outputs), type(module)
    if issubclass(kind, Conv1D):
        made = module if module.weight.shape == shape else kind(outputs, inputs)
    else:
        made = (
            module
            if module.weight.shape == shape[::-1]
            else kind(inputs, outputs, bias=module.bias is not None)
        )
    return made.to(module.weight.device, module.weight.dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.float(), None if bias is None else bias.float())
