"""A causal language model of transformers, some of whose layers were operated on by surgery (pip
install model-surgery).

BASE is the model_type of the source. `surgery_blocks` of config.json is a list of entries like

    {"kind": "sparse", "layers": [0, 1], "stack": "layers", "mlp": "mlp", ...}

and each puts a block of its kind in the place of the module `mlp` of these layers of the list
`stack`; the block is built from the module that was there (or from `parts` of the layer), and
entries are applied in order. A ReLU follows the norms that `relu_after` names.

Two checkpoints have the same file but for what is imported from beside it, BASE and BLOCKS.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from .sparse_mlp import SparseMLP

BASE = "llama"
BLOCKS: dict[str, Any] = {"sparse": SparseMLP}

_Config: Any = CONFIG_MAPPING[BASE]
_Model: Any = MODEL_MAPPING[_Config]
_CausalLM: Any = MODEL_FOR_CAUSAL_LM_MAPPING[_Config]


class SurgeryConfig(_Config):
    """The config of BASE, the blocks, and the switch `sparse_decode` of those that can skip neurons
    as they decode.
    """

    model_type = (
        f"surgery_{BASE}"  # not BASE: the stock class would load the weights and ignore the blocks
    )
    base_model_tp_plan = None  # nothing would shard what a block keeps per neuron

    def __init__(
        self, surgery_blocks: Any = (), sparse_decode: bool = False, **kwargs: Any
    ) -> None:
        self.surgery_blocks = [dict(entry) for entry in surgery_blocks]
        self.sparse_decode = sparse_decode
        super().__init__(**kwargs)


class _Operated:
    """What both models do."""

    def _init_weights(self, module: nn.Module) -> None:
        """As BASE does; a block knows how what it adds starts, where the checkpoint has nothing for
        it.
        """
        super()._init_weights(module)  # type: ignore[misc]
        if hasattr(module, "init_block_weights"):
            module.init_block_weights()

    def set_sparse_decode(self, on: bool = True) -> None:
        """Whether blocks that can skip neurons where they decode one sequence do so."""
        for module in self.modules():  # type: ignore[attr-defined]
            if hasattr(module, "sparse_decode"):
                module.sparse_decode = on


class SurgeryModel(_Operated, _Model):
    """The body of BASE, operated on."""

    config_class = SurgeryConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for entry in config.surgery_blocks:
            layers = [self.get_submodule(entry["stack"])[index] for index in entry["layers"]]
            _share(self, entry, [_operate(layer, entry, config) for layer in layers])
        for inner in (
            self.children()
        ):  # OPT's decoder is a model too, and would begin its layers by its own rule
            if hasattr(inner, "_init_weights"):
                inner._init_weights = self._init_weights
        self.post_init()


class SurgeryForCausalLM(_Operated, _CausalLM):
    """BASE with a head, over that body."""

    config_class = SurgeryConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        body = next(name for name, module in self.named_children() if type(module) is _Model)
        setattr(self, body, SurgeryModel(config))
        self.post_init()


def _operate(layer: nn.Module, entry: dict[str, Any], config: Any) -> nn.Module:
    """Puts a block in its place, and returns it."""
    base = layer if "parts" in entry else getattr(layer, entry["mlp"])
    block: nn.Module = BLOCKS[entry["kind"]](base, entry, config)
    setattr(layer, entry["mlp"], block)
    for norm in entry.get("relu_after", ()):
        layer.get_submodule(norm).register_forward_hook(_relu)
    return block


def _share(body: nn.Module, entry: dict[str, Any], blocks: list[nn.Module]) -> None:
    """What all blocks of an entry read is the body's own, under the name `shared`: in each of them
    it would be saved as often.
    """
    readers: list[Any] = [m for block in blocks for m in block.modules() if hasattr(m, "read_from")]
    if readers:
        body.add_module(entry["shared"], readers[0].make_shared())
    for reader in readers:
        reader.read_from(body.get_submodule(entry["shared"]))


def _rename_as_base() -> None:
    """transformers 5 renames some weights as it loads, by model_type or class: here what it does
    for the class of BASE.
    """
    try:
        from transformers.conversion_mapping import (
            get_checkpoint_conversion_mapping,
            register_checkpoint_conversion_mapping,
        )
    except ImportError:  # transformers 4
        return
    mapping = get_checkpoint_conversion_mapping(
        _CausalLM.__name__
    ) or get_checkpoint_conversion_mapping(BASE)
    if mapping:
        register_checkpoint_conversion_mapping(SurgeryConfig.model_type, mapping, overwrite=True)


def _relu(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return torch.relu(output)


_rename_as_base()
