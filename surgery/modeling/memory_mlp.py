"""A memory layer: a few values of a large table are looked up by product keys and summed.

Product keys, Lample et al. 2019, arXiv 1907.05242: a query is cut in halves; the best `knn` of n keys for each half make knn²
candidates among the n² slots, of which the best `knn` by the sum of both scores are read, weighted by the softmax of their sums.
Each head has its own keys; all heads, and all layers of an entry, read one table.

    pkm   m = Σ_i w_i V_i                             y = output(m ⊙ silu(gate(x))): Memory+, Berges et al. 2024, arXiv 2412.09764
    peer  m = Σ_i w_i act(x · V_i) U_i                y = m: a slot is an MLP of one neuron; PEER, He 2024, arXiv 2407.04153

With `gated` false, y = m for pkm too. `place` "beside" adds y to what the MLP gives; "replace" adds it to what is left in the
MLP's place: the `width` neurons that were kept of it, under their own names, and a `bypass` that is "affine" or a "bias".

The table belongs to the model and not to a layer, so that it is saved once. Tokens are looked up a chunk at a time.

Shapes: N tokens, H hidden_size, h heads, n keys of a half, d dimensions of a half of a query, k slots that are read, v value_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

SCRATCH = 2**24  # numbers that a chunk of tokens may make


def with_memory(base: nn.Module, entry: dict[str, Any], config: Any = None) -> nn.Module:
    """The MLP with a memory added to its output, or what takes its place. The submodules keep their names: the memory is one
    more, `memory`, and a hook adds what it gives."""
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
    """The query, the keys and what is done with the values, which are `Table`'s or `Experts`'."""

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

    def init_block_weights(self) -> None:
        """By functions of torch.nn.init, which spare what was loaded."""
        bound = self.entry["key_dim"] ** -0.5
        nn.init.uniform_(self.keys, -bound, bound)
        if self.output is not None:
            nn.init.zeros_(self.output.weight)  # nothing is added until it is trained
        if self.bypass is not None:
            nn.init.zeros_(self.bypass.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def make_shared(self) -> nn.Module:
        """The table that all layers of the entry read."""
        return (Table if self.entry["slots"] == "pkm" else Experts)(self.entry, self.hidden)

    def read_from(self, values: nn.Module) -> None:
        """Look up there from now on. The reference is no submodule: the table is saved and placed once."""
        object.__setattr__(self, "values", values)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]"""
        rows = x.reshape(-1, self.hidden)
        y = torch.cat([self._look_up(part) for part in rows.split(self._chunk())]) if len(rows) else rows
        if self.bypass is not None:
            y = y + self.bypass(rows)
        if self.bias is not None:
            y = y + self.bias
        return y.view(x.shape)

    def _chunk(self) -> int:
        """Tokens that are looked up at a time."""
        read = self.heads * self.knn * (self.hidden if self.entry["slots"] == "peer" else 1)
        return max(1, SCRATCH // (self.heads * (2 * self.keys_of_half + self.knn**2) + read))

    def _look_up(self, x: Tensor) -> Tensor:
        """y [N, H] of x [N, H]"""
        slots, scores = self._find(x)
        weights = scores.float().softmax(-1).to(x.dtype)
        m: Tensor = self.values(x, slots.flatten(1), weights.flatten(1)).to(x.device)
        if self.gate is None or self.output is None:
            return m
        y: Tensor = self.output(m * F.silu(self.gate(x)))
        return y

    def _find(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The slots that x [N, H] reads and their scores, [N, h, k] both."""
        q = self.query(x).view(len(x), self.heads, 2, -1)
        if self.query_norm is not None:
            q = self.query_norm(q)
        halves = torch.einsum("Nhsd,hsnd->Nhsn", q, self.keys).topk(self.knn)
        (s, t), (i, j) = halves.values.unbind(2), halves.indices.unbind(2)
        best = (s[..., :, None] + t[..., None, :]).flatten(2).topk(self.knn)
        slots = i.gather(2, best.indices // self.knn) * self.keys_of_half + j.gather(2, best.indices % self.knn)
        return slots, best.values


class Table(nn.Module):
    """The values of product keys [n², v]."""

    def __init__(self, entry: dict[str, Any], hidden: int) -> None:
        super().__init__()
        self.sparse = entry["sparse_gradients"]
        self.weight = nn.Parameter(torch.empty(entry["keys"] ** 2, entry["value_dim"]))

    def init_block_weights(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """Σ_i w_i V_i [N, v] of the slots [N, h·k] and their weights [N, h·k]."""
        weights = weights.to(self.weight.dtype)
        return F.embedding_bag(slots, self.weight, per_sample_weights=weights, mode="sum", sparse=self.sparse)


class Experts(nn.Module):
    """MLPs of one neuron each: V and U [n², H]."""

    def __init__(self, entry: dict[str, Any], hidden: int) -> None:
        super().__init__()
        self.sparse, self.act = entry["sparse_gradients"], ACT2FN[entry["activation"]]
        self.down = nn.Parameter(torch.empty(entry["keys"] ** 2, hidden))
        self.up = nn.Parameter(torch.empty(entry["keys"] ** 2, hidden))

    def init_block_weights(self) -> None:
        """Nothing is added until it is trained."""
        nn.init.normal_(self.down, std=self.down.shape[1] ** -0.5)
        nn.init.zeros_(self.up)

    def forward(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """Σ_i w_i act(x · V_i) U_i [N, H] of the slots [N, h·k] and their weights [N, h·k]."""
        rows = F.embedding(slots, self.down, sparse=self.sparse)
        weights = weights * self.act(torch.einsum("NH,NkH->Nk", x.to(rows.dtype), rows))
        weights = weights.to(self.up.dtype)
        return F.embedding_bag(slots, self.up, per_sample_weights=weights, mode="sum", sparse=self.sparse)


# --- what is left of the MLP ------------------------------------------------------------------------------------------


class Nothing(nn.Module):
    """What is left of an MLP none of whose neurons were kept."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def _narrowed(base: Any, entry: dict[str, Any]) -> nn.Module:
    """The MLP with `width` neurons."""
    width = entry["width"]
    if not width:
        return Nothing()
    for part in dict.fromkeys(entry[p] for p in ("gate", "up", "down") if entry[p]):
        old, rows = getattr(base, part), width * (2 if entry["fused"] and part == entry["up"] else 1)
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
