"""A memory layer: a few values of a large table are looked up by product keys and summed.

Product keys (Lample et al. 2019, arXiv 1907.05242) work as follows. A query is cut in halves. The
best `knn` of n keys for each half make knn² candidates among the n² slots. The best `knn` of those,
by the sum of both scores, are read, weighted by the softmax of their sums. Each head has its own
keys; all heads, and all layers of an entry, read one table. What it holds depends on `slots`:

    pkm      values: m = Σ_i w_i V_i, and y = output(m ⊙ silu(gate(x)))
             (Memory+, Berges et al. 2024, arXiv 2412.09764)
    peer     MLPs of one neuron: y = m = Σ_i w_i act(x · V_i) U_i
             (PEER, He 2024, arXiv 2407.04153)
    neurons  the neurons of a trained MLP: y = m = Σ_i (1 + scale · w_i) h_i D_i, where h_i is
             act(x · G_i) (x · U_i), or act(x · U_i) without a gate, with the neuron's biases

The slots of neurons are as they were in the trained MLP: `scale` begins at 0, and through it the
query learns.

With `gated` false, y = m for pkm too. `place` "beside" adds y to what the MLP gives. "replace" adds
it to what is left in the MLP's place: the `width` neurons of the MLP that were kept, under their
own names, and a `bypass` that is "affine" or a "bias".

The table belongs to the model and not to a layer, so that it is saved once. Tokens are looked up a
chunk at a time.

Shapes: N tokens, H hidden_size, h heads, n keys of a half, d dimensions of a half of a query, k
slots that are read, v value_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

SCRATCH = 2**24  # the most numbers that a chunk of tokens makes


def with_memory(base: nn.Module, entry: dict[str, Any], config: Any = None) -> nn.Module:
    """Return the MLP, or what takes its place, with a memory added to its output.

    The submodules keep their names. The memory is one more, `memory`, and a hook adds its output.
    """
    hidden = config.get_text_config().hidden_size
    block = base if entry["place"] == "beside" else _narrowed(base, entry)
    block.memory = Memory(entry, hidden)
    block.register_forward_hook(_add)
    return block


def _add(block: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    memory: Any = block.memory
    y: Tensor = output + memory(inputs[0])
    return y


class Memory(nn.Module):
    """Hold the query and the keys, and what is done with the values.

    The values themselves are in a module of a class of VALUES, which the layers share.
    """

    def __init__(self, entry: dict[str, Any], hidden: int) -> None:
        super().__init__()
        self.entry, self.hidden = dict(entry), hidden
        self.heads, self.keys_of_half, self.knn = entry["heads"], entry["keys"], entry["knn"]
        self.values: Any
        object.__setattr__(self, "values", None)
        half = entry["key_dim"] // 2
        self.query = nn.Linear(hidden, self.heads * 2 * half)
        self.query_norm = nn.LayerNorm(half) if entry["query_norm"] else None
        self.keys = nn.Parameter(torch.empty(self.heads, 2, self.keys_of_half, half))
        self.gate = nn.Linear(hidden, entry["value_dim"], bias=False) if entry["gated"] else None
        self.output = nn.Linear(entry["value_dim"], hidden, bias=False) if entry["gated"] else None
        self.bypass = nn.Linear(hidden, hidden) if entry["bypass"] == "affine" else None
        self.bias = nn.Parameter(torch.empty(hidden)) if entry["bypass"] == "bias" else None
        self.scale = nn.Parameter(torch.empty(1)) if entry["slots"] == "neurons" else None

    def init_block_weights(self) -> None:
        """Begin at random, with nothing added to the stream.

        The functions of torch.nn.init leave alone what was loaded.
        """
        bound = self.entry["key_dim"] ** -0.5
        nn.init.uniform_(self.keys, -bound, bound)
        if self.output is not None:
            nn.init.zeros_(self.output.weight)  # nothing is added until it is trained
        if self.bypass is not None:
            nn.init.zeros_(self.bypass.weight)
        for p in (self.bias, self.scale):
            if p is not None:
                nn.init.zeros_(p)

    def make_shared(self) -> nn.Module:
        """Return a new table, which all layers of the entry read."""
        values: nn.Module = VALUES[self.entry["slots"]](self.entry, self.hidden)
        return values

    def read_from(self, values: nn.Module) -> None:
        """Look values up in this table from now on.

        The reference is no submodule, so that the table is saved and placed on a device once.
        """
        object.__setattr__(self, "values", values)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., H] to [..., H]."""
        rows = x.reshape(-1, self.hidden)
        y = (
            torch.cat([self._look_up(part) for part in rows.split(self._chunk())])
            if len(rows)
            else rows
        )
        if self.bypass is not None:
            y = y + self.bypass(rows)
        if self.bias is not None:
            y = y + self.bias
        return y.view(x.shape)

    def _chunk(self) -> int:
        """Return how many tokens are looked up at a time."""
        read = self.heads * self.knn * (self.hidden if self.entry["slots"] == "peer" else 1)
        candidates = min(self.knn, self.keys_of_half) ** 2
        products = 3 * self.keys_of_half**2 if self.entry["slots"] == "neurons" else 0
        return max(
            1, SCRATCH // (self.heads * (2 * self.keys_of_half + candidates) + read + products)
        )

    def _look_up(self, x: Tensor) -> Tensor:
        """Return y [N, H] of x [N, H]."""
        slots, scores = self._find(x)
        weights = scores.float().softmax(-1)
        if self.scale is not None:
            weights = 1 + self.scale.float() * weights
        weights = weights.to(x.dtype)
        m: Tensor = self.values(x, slots.flatten(1), weights.flatten(1)).to(x.device)
        if self.gate is None or self.output is None:
            return m
        y: Tensor = self.output(m * F.silu(self.gate(x)))
        return y

    def _find(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots that x [N, H] reads and their scores, both [N, h, k]."""
        q = self.query(x).view(len(x), self.heads, 2, -1)
        if self.query_norm is not None:
            q = self.query_norm(q)
        m = min(self.knn, self.keys_of_half)  # of a half
        halves = torch.einsum("Nhsd,hsnd->Nhsn", q, self.keys).topk(m)
        (s, t), (i, j) = halves.values.unbind(2), halves.indices.unbind(2)
        best = (s[..., :, None] + t[..., None, :]).flatten(2).topk(self.knn)
        slots = i.gather(2, best.indices // m) * self.keys_of_half + j.gather(2, best.indices % m)
        return slots, best.values


class Table(nn.Module):
    """Hold the values of product keys [n², v]."""

    def __init__(self, entry: dict[str, Any], hidden: int) -> None:
        super().__init__()
        self.sparse = entry["sparse_gradients"]
        self.weight = nn.Parameter(torch.empty(entry["keys"] ** 2, entry["value_dim"]))

    def init_block_weights(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """Return Σ_i w_i V_i [N, v] of the slots [N, h·k] and their weights [N, h·k]."""
        weights = weights.to(self.weight.dtype)
        return F.embedding_bag(
            slots, self.weight, per_sample_weights=weights, mode="sum", sparse=self.sparse
        )


class Experts(nn.Module):
    """Hold MLPs of one neuron each: V and U [n², H]."""

    def __init__(self, entry: dict[str, Any], hidden: int) -> None:
        super().__init__()
        self.sparse, self.act = entry["sparse_gradients"], ACT2FN[entry["activation"]]
        self.down = nn.Parameter(torch.empty(entry["keys"] ** 2, hidden))
        self.up = nn.Parameter(torch.empty(entry["keys"] ** 2, hidden))

    def init_block_weights(self) -> None:
        """Add nothing to the stream until it is trained."""
        nn.init.normal_(self.down, std=self.down.shape[1] ** -0.5)
        nn.init.zeros_(self.up)

    def forward(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """Return Σ_i w_i act(x · V_i) U_i [N, H] of the slots [N, h·k] and their weights."""
        rows = F.embedding(slots, self.down, sparse=self.sparse)
        weights = weights * self.act(torch.einsum("NH,NkH->Nk", x.to(rows.dtype), rows))
        weights = weights.to(self.up.dtype)
        return F.embedding_bag(
            slots, self.up, per_sample_weights=weights, mode="sum", sparse=self.sparse
        )


class Neurons(nn.Module):
    """Hold the neurons of an MLP, as many as there are slots.

    `parts` are some of gate, up and down [n², H], gate_bias and up_bias [n²]. Where the tokens
    together read every slot about once, all neurons are computed, and those that a token does not
    read are multiplied by zero: a copy of the rows that each token reads would be many times the
    table. Sparse gradients need that copy; the gradients of biases are dense.
    """

    def __init__(self, entry: dict[str, Any], hidden: int) -> None:
        super().__init__()
        self.sparse, self.act = entry["sparse_gradients"], ACT2FN[entry["activation"]]
        for name in ("gate", "up", "down", "gate_bias", "up_bias"):
            shape = (entry["keys"] ** 2,) if "bias" in name else (entry["keys"] ** 2, hidden)
            self.register_parameter(
                name, nn.Parameter(torch.empty(shape)) if name in entry["parts"] else None
            )

    def init_block_weights(self) -> None:
        """Add nothing to the stream until it is trained."""
        for name, p in self.named_parameters():
            if name in ("gate", "up"):
                nn.init.normal_(p, std=p.shape[1] ** -0.5)
            else:
                nn.init.zeros_(p)

    def forward(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """Return Σ_i w_i h_i D_i [N, H] of the slots [N, k] and their weights [N, k]."""
        x = x.to(self.up.dtype)
        if slots.numel() >= len(self.up) and not self.sparse:
            h = self._product(self._all(x, "gate"), self._all(x, "up"))
            y: Tensor = (h * torch.zeros_like(h).scatter(1, slots, weights.to(h.dtype))) @ self.down
            return y
        tokens = max(1, SCRATCH // (2 * slots.shape[1] * x.shape[1]))
        parts = zip(x.split(tokens), slots.split(tokens), weights.split(tokens), strict=True)
        return torch.cat([self._gathered(*part) for part in parts])

    def _gathered(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        h = weights * self._product(self._some(x, slots, "gate"), self._some(x, slots, "up"))
        h = h.to(self.down.dtype)
        return F.embedding_bag(
            slots, self.down, per_sample_weights=h, mode="sum", sparse=self.sparse
        )

    def _product(self, gate: Any, up: Any) -> Tensor:
        h: Tensor = self.act(up) if gate is None else self.act(gate) * up
        return h

    def _all(self, x: Tensor, part: str) -> Tensor | None:
        """Return one part's products with x at every slot, [N, n²]."""
        weight = getattr(self, part)
        return None if weight is None else F.linear(x, weight, getattr(self, f"{part}_bias"))

    def _some(self, x: Tensor, slots: Tensor, part: str) -> Tensor | None:
        """Return one part's products with x at the slots [N, k], [N, k]."""
        weight, bias = getattr(self, part), getattr(self, f"{part}_bias")
        if weight is None:
            return None
        found = torch.einsum("NH,NkH->Nk", x, F.embedding(slots, weight, sparse=self.sparse))
        return found if bias is None else found + bias[slots]


VALUES: dict[str, Any] = {"pkm": Table, "peer": Experts, "neurons": Neurons}


# --- what is left of the MLP ----------------------------------------------------------------------


class Nothing(nn.Module):
    """Stand in for an MLP none of whose neurons were kept."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def _narrowed(base: Any, entry: dict[str, Any]) -> nn.Module:
    """Return the MLP with `width` neurons."""
    width = entry["width"]
    if not width:
        return Nothing()
    for part in dict.fromkeys(entry[p] for p in ("gate", "up", "down") if entry[p]):
        old, rows = (
            getattr(base, part),
            width * (2 if entry["fused"] and part == entry["up"] else 1),
        )
        down = part == entry["down"]
        options: dict[str, Any] = {"dtype": old.weight.dtype, "device": old.weight.device}
        if isinstance(old, Conv1D):
            new: nn.Module = Conv1D(old.nf, rows) if down else Conv1D(rows, old.weight.shape[0])
            new.to(**options)
        else:
            shape = (rows, old.out_features) if down else (old.in_features, rows)
            new = nn.Linear(*shape, bias=old.bias is not None, **options)
        setattr(base, part, new)
    return base
