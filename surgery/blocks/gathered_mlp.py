"""An MLP whose parts stand in the decoder layer itself (OPT's fc1, activation_fn and fc2) or in
several modules of it (BERT's intermediate.dense and output.dense), gathered in one module.

The layer applies `parts` one after another. They move into this module, which takes the place of
the first of them; the others are replaced by the identity. So the layer's own code computes what it
did, and a block of another kind can take the place of the whole.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class GatheredMLP(nn.Module):
    """Take the parts of the MLP over from the layer, under their own names."""

    def __init__(self, layer: nn.Module, entry: dict[str, Any], config: Any = None) -> None:
        super().__init__()
        self.parts = tuple(entry["parts"])
        for path in self.parts:
            self.add_module(_flat(path), layer.get_submodule(path))
            home, _, name = path.rpartition(".")
            setattr(layer.get_submodule(home), name, nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., H] to [..., H]."""
        for path in self.parts:
            x = getattr(self, _flat(path))(x)
        return x


def _flat(path: str) -> str:
    """Return the name that a part has in this module."""
    return path.replace(".", "_")
