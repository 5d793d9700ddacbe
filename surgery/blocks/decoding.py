"""Let a loaded model skip the zeros of its MLPs as it decodes."""

from __future__ import annotations

from typing import Any

from torch import nn

from surgery.blocks import block_config
from surgery.blocks.sparse_mlp import SparseMLP
from surgery.errors import SurgeryError
from surgery.families import Family, find
from surgery.families.roles import TOWERS

ZEROING = ("relu", "relu2", "relu6")


def set_sparse_decode(model: Any, on: bool = True) -> None:
    """Let the MLPs of a model of transformers skip neurons as they decode, or not.

    The MLPs of a stock model are put into blocks that compute the same from the same weights, under
    the same names. Those with hooks (of accelerate, or of adapters) are left as they are. Raises
    SurgeryError where no MLP has zeros, or none is a module.
    """
    if hasattr(model, "set_sparse_decode"):
        model.set_sparse_decode(on)
        return
    config = model.config.get_text_config().to_dict()
    family = find(config)
    activation = str(config.get(family.activation_key) or family.activation)
    if activation not in ZEROING:
        raise SurgeryError(
            f"the MLPs of this {family.model_type} have {activation}, which gives no zeros to skip",
            "relufy the checkpoint first, or load one whose activation is relu",
        )
    for layer in _layers(model, family):
        mlp = block_of(layer.get_submodule(family.mlp), family, activation)
        if isinstance(mlp, SparseMLP):
            mlp.sparse_decode = on
            layer.set_submodule(family.mlp, mlp)


def block_of(mlp: nn.Module, family: Family, activation: str) -> nn.Module:
    """Return the block that computes what a stock MLP does; the MLP itself where it has hooks."""
    if isinstance(mlp, SparseMLP) or _is_hooked(mlp):
        return mlp
    plain = block_config.Sparse(rule="plain", activation=activation)
    entry = block_config.sparse_entry(family, (), plain)
    return SparseMLP(mlp, entry).train(mlp.training)


def _is_hooked(mlp: nn.Module) -> bool:
    return bool(mlp._forward_hooks or mlp._forward_pre_hooks or hasattr(mlp, "_hf_hook"))


def _layers(model: nn.Module, family: Family) -> nn.ModuleList:
    """Return the decoder layers. Raises SurgeryError where the model has none."""
    family.require_dense()
    for name, module in model.named_modules():
        named = f".{name}".endswith(f".{family.layers}") and not TOWERS.search(name)
        if named and isinstance(module, nn.ModuleList):
            return module
    raise SurgeryError(
        f"{type(model).__name__} has no list of layers called {family.layers}",
        f"give a language model of type {family.model_type}",
    )
