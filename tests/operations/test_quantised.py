"""A quantised checkpoint is refused by every operation, whether or not its config says so.

Taken as plain numbers, its integers make a model of noise, and its scales are copied beside it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from operated import EVERY_OPERATION as OPERATIONS
from safetensors.torch import load_file, save_file
from support import write_llama

import surgery
from surgery import operations
from surgery.checkpoint.tensors import FLOATS
from surgery.errors import SurgeryError
from surgery.storage import open_checkpoint

NAME = "model.layers.0.mlp.up_proj"


def int8(shape: tuple[int, ...] = (64, 32)) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int8)


ONE = torch.ones(64)
# What is written in place of, or beside, NAME.weight, by the format that does so.
FORMATS = {
    "LLM.int8()": {"weight": int8(), "SCB": ONE},
    "int8 alone": {"weight": int8()},
    "uint8 alone": {"weight": int8().to(torch.uint8)},
    "bitsandbytes nf4": {
        "weight": torch.zeros(1024, 1, dtype=torch.uint8),
        "weight.absmax": ONE,
        "weight.quant_map": torch.ones(16),
        "weight.quant_state.bitsandbytes__nf4": torch.zeros(90, dtype=torch.uint8),
    },
    "GPTQ": {
        "qweight": torch.ones(4, 64, dtype=torch.int32),
        "qzeros": torch.ones(1, 8, dtype=torch.int32),
        "scales": torch.ones(1, 64, dtype=torch.float16),
        "g_idx": torch.zeros(32, dtype=torch.int32),
    },
    "compressed-tensors, int8": {"weight": int8(), "weight_scale": torch.ones(64, 1)},
    "a scale beside bf16": {"weight": torch.ones(64, 32).bfloat16(), "weight_scale": ONE},
    "compressed-tensors, packed": {
        "weight_packed": torch.ones(64, 4, dtype=torch.int32),
        "weight_scale": torch.ones(64, 1),
        "weight_shape": torch.tensor([64, 32]),
    },
    "FP8": {"weight": torch.ones(64, 32).to(torch.float8_e4m3fn), "weight_scale_inv": ONE},
    "MLX without its config": {
        "weight": torch.ones(64, 4, dtype=torch.uint32),
        "scales": torch.ones(64, 1),
        "biases": torch.ones(64, 1),
    },
}


def written(folder: Path, parts: dict[str, torch.Tensor]) -> Path:
    write_llama(folder, layers=2, hidden=32, ff=64)
    file = folder / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if n != f"{NAME}.weight"}
    save_file(tensors | {f"{NAME}.{part}": t for part, t in parts.items()}, file)
    return folder


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", FORMATS)
def test_it_is_known_by_its_tensors(kind: str, operation: str, tmp_path: Path) -> None:
    source = open_checkpoint(written(tmp_path / "m", FORMATS[kind]))
    with pytest.raises(SurgeryError, match=f"quantised .{NAME}") as caught:
        OPERATIONS[operation](source)
    assert "quantise the result" in caught.value.hint


def test_every_operation_is_asked() -> None:
    assert set(OPERATIONS) == set(operations.names())


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "gptq"}},
        {"quantization_config": "awq"},
        {"compression_config": {"format": "int-quantized"}},
        {"quantization": {"group_size": 64, "bits": 4}},
        {"text_config": {"quantization": {"bits": 4}}},
    ],
)
def test_it_is_known_by_its_config(config: dict[str, object], tmp_path: Path) -> None:
    source = open_checkpoint(write_llama(tmp_path / "m", layers=2))
    with pytest.raises(SurgeryError, match="is quantised"):
        surgery.relufy(source.replace(config={**source.config, **config}), repair="none")


@pytest.mark.parametrize(
    ("card", "named"),
    [
        ("---\nlicense: mit\nbase_model: Qwen/Qwen3-8B\n---\n# Title\n", True),
        ("---\nbase_model:\n- Qwen/Qwen3-8B\ntags: [awq]\n---\n", True),
        ("---\nlicense: mit\n---\n\nbase_model: Qwen/Qwen3-8B\n", False),
        ("---\nbase_model: \x1b[31m/x\n---\n", False),
    ],
)
def test_the_hint_names_the_original(card: str, named: bool, tmp_path: Path) -> None:
    """It is the one of the card's metadata; a card's text and odd names do not count."""
    (write_llama(tmp_path / "m", layers=2) / "README.md").write_text(card)
    source = open_checkpoint(tmp_path / "m")
    quantised = source.replace(config={**source.config, "quantization_config": {"bits": 4}})
    with pytest.raises(SurgeryError, match="is quantised") as caught:
        surgery.cast(quantised, "fp32")
    assert caught.value.hint.endswith("made from Qwen/Qwen3-8B") == named
    assert caught.value.hint.startswith("give the original")


def test_plain_checkpoints_with_integers_and_scales_are_not(tmp_path: Path) -> None:
    """GPT-2 keeps its mask as bytes, position ids are integers, and some norms have a scale."""
    file = write_llama(tmp_path / "m", layers=2) / "model.safetensors"
    others = {
        "model.norm.scales": torch.ones(3),
        "model.norm.scale": torch.ones(3),
        "model.mask.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
        "model.position_ids": torch.arange(4),
    }
    save_file(load_file(file) | others, file)
    output = surgery.relufy(open_checkpoint(tmp_path / "m"), repair="none")
    assert output.tensors["model.mask.bias"].dtype == "U8"


def test_routers_hold_floating_point_numbers(tmp_path: Path) -> None:
    source = open_checkpoint(write_llama(tmp_path / "m", layers=2))
    output = surgery.upcycle(source, experts=2)
    new = {n: t.dtype for n, t in output.tensors.items() if n not in source.tensors}
    assert any("gate.weight" in n for n in new) and set(new.values()) <= set(FLOATS)
