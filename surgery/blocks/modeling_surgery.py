"""A language model of transformers, alone or in a multimodal model, some of whose layers were
converted by surgery (pip install model-surgery).

BASE is the model_type of the source. `surgery_blocks` of config.json is a list of entries like

    {"kind": "sparse", "layers": [0, 1], "stack": "layers", "mlp": "mlp", ...}

and each puts a block of its kind in the place of the module `mlp`, in these layers of the list
`stack`. The block is built from the module that was there, or from `parts` of the layer. Entries
are applied in order. A ReLU follows the norms that `relu_after` names.

This file is the same in all checkpoints, except for the blocks that it imports, BASE and BLOCKS.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)

from .sparse_kernel import live_mlp as live_mlp
from .sparse_mlp import SparseMLP

BASE = "llama"
BLOCKS: dict[str, Any] = {"sparse": SparseMLP}

_Config: Any = CONFIG_MAPPING[BASE]
_Model: Any = MODEL_MAPPING[_Config]
_CausalLM: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(_Config, _Model)
_Wrapper: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(_Config, _CausalLM)


class SurgeryConfig(_Config):
    """The config of BASE, with the entries of the blocks.

    `sparse_decode` is the switch of the blocks that can skip neurons as they decode.
    """

    # Not BASE itself, with which the stock class would load the weights and ignore the blocks.
    model_type = f"surgery_{BASE}"
    base_model_tp_plan = None  # because it would not shard what a block keeps per neuron

    def __init__(
        self, surgery_blocks: Any = (), sparse_decode: bool = False, **kwargs: Any
    ) -> None:
        self.surgery_blocks = [dict(entry) for entry in surgery_blocks]
        self.sparse_decode = sparse_decode
        super().__init__(**kwargs)


class _Operated:
    """What both models have in common: a model of BASE with the blocks put into its body."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        body = self._body()
        for entry in config.surgery_blocks:
            layers = [body.get_submodule(entry["stack"])[index] for index in entry["layers"]]
            place = body.get_submodule(entry["stack"].rpartition(".")[0])
            _share(place, entry, [_operate(layer, entry, config) for layer in layers])
        # Models inside this one begin their layers by their own rule, which knows no blocks.
        for inner in self.modules():  # type: ignore[attr-defined]
            if inner is not self and hasattr(inner, "_init_weights"):
                inner._init_weights = partial(_begin, inner._init_weights)
                inner._initialize_weights = partial(_let_begin, inner._initialize_weights)
        self.post_init()  # type: ignore[attr-defined]

    def _body(self) -> Any:
        """Return the body; Gemma 3's text model in transformers 4 names a base that it has not."""
        base: Any = self.base_model  # type: ignore[attr-defined]
        if base is not self:
            return base
        return next((m for m in self.modules() if isinstance(m, _Model)), base)

    def _init_weights(self, module: nn.Module) -> None:
        """Begin as BASE does; a block knows how to begin what it adds.

        That is only seen where the checkpoint has nothing for it.
        """
        _begin(super()._init_weights, module)  # type: ignore[misc]

    def _initialize_weights(self, module: nn.Module, *custom: bool) -> None:
        _let_begin(super()._initialize_weights, module, *custom)  # type: ignore[misc]

    def set_sparse_decode(self, on: bool = True) -> None:
        """Let the blocks that can skip neurons as they decode one sequence do so, or not."""
        for module in self.modules():  # type: ignore[attr-defined]
            if hasattr(module, "sparse_decode"):
                module.sparse_decode = on


class SurgeryModel(_Operated, _Model):
    """The body of BASE, with the blocks in it."""

    config_class = SurgeryConfig


class SurgeryForCausalLM(_Operated, _CausalLM):
    """BASE's head over that body."""

    config_class = SurgeryConfig


class SurgeryForImageTextToText(_Operated, _Wrapper):
    """The same where BASE is multimodal: the blocks are in its language model."""

    config_class = SurgeryConfig


def _begin(rule: Callable[[nn.Module], None], module: nn.Module) -> None:
    """Begin a module by a rule of transformers, then what a block adds by the block's own."""
    rule(module)
    if hasattr(module, "init_block_weights"):
        module.init_block_weights()


def _let_begin(rule: Callable[..., None], module: nn.Module, *custom: bool) -> None:
    """Begin a module where something of it was not loaded.

    Code outside transformers may not begin a module without parameters of its own, and Falcon-H1's
    computes buffers of its layers there. Only blocks are such code here.
    """
    rule(module, *(c and hasattr(module, "init_block_weights") for c in custom))


def _operate(layer: nn.Module, entry: dict[str, Any], config: Any) -> nn.Module:
    """Put a block in its place, and return it."""
    base = layer if "parts" in entry else layer.get_submodule(entry["mlp"])
    block: nn.Module = BLOCKS[entry["kind"]](base, entry, config)
    place, _, name = entry["mlp"].rpartition(".")
    setattr(layer.get_submodule(place), name, block)
    for norm in entry.get("relu_after", ()):
        layer.get_submodule(norm).register_forward_hook(_relu)
    return block


def _share(place: nn.Module, entry: dict[str, Any], blocks: list[nn.Module]) -> None:
    """Give the module with the list of layers what all blocks of an entry read, as `shared`.

    In the blocks themselves it would be saved once for each.
    """
    readers: list[Any] = [m for block in blocks for m in block.modules() if hasattr(m, "read_from")]
    if readers:
        place.add_module(entry["shared"], readers[0].make_shared())
    for reader in readers:
        reader.read_from(place.get_submodule(entry["shared"]))


def _rename_as_base() -> None:
    """Let transformers 5 rename weights on loading as it does for BASE.

    It looks the names up by model_type or class, and knows neither of ours.
    """
    try:
        from transformers.conversion_mapping import (
            get_checkpoint_conversion_mapping,
            register_checkpoint_conversion_mapping,
        )
    except ImportError:  # transformers 4
        return
    names = ((_CausalLM if _CausalLM is not _Model else _Wrapper).__name__, BASE)
    mapping = next(filter(None, map(get_checkpoint_conversion_mapping, names)), None)
    if mapping:
        register_checkpoint_conversion_mapping(SurgeryConfig.model_type, mapping, overwrite=True)


def _relu(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return torch.relu(output)


_rename_as_base()
