"""`--dequantize` opens quantised weights as transformers dequantises them, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import Call, assert_two_lines, llama_tensors, write_llama
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import surgery
from surgery.checkpoint.tensors import LazyTensor, derive
from surgery.errors import SurgeryError, UsageError
from surgery.storage.dequantised import dequantised

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}


def lazy(t: Tensor) -> LazyTensor:
    names = {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.bfloat16: "BF16"}
    dtype = names.get(t.dtype, "F32")
    return derive("given", lambda: t, dtype=dtype, shape=tuple(t.shape))


def of(tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> dict[str, LazyTensor]:
    return dequantised(config or FP8, {n: lazy(t) for n, t in tensors.items()})[1]


def fp8(*shape: int) -> Tensor:
    return (torch.randn(shape) * 50).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "grid", [(), (1,), (1, 1), (2, 3), (16, 1)], ids=["scalar", "one", "1x1", "blocks", "rows"]
)
def test_fp8_as_transformers_does(grid: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, s = fp8(16, 24), torch.rand(grid) / 7
    found = of({"a.weight": q, "a.weight_scale_inv": s, "a.activation_scale": torch.ones(1)})
    wanted = Fp8Dequantize(None)._dequantize_one(
        q, s if len(grid) == 2 else s.reshape(1, 1), torch.bfloat16
    )
    assert set(found) == {"a.weight"}
    assert torch.equal(found["a.weight"].read(), wanted)


def test_a_scale_for_each_row_in_a_list() -> None:
    """Compressed-tensors and FBGEMM: weight_scale, [A] or [A, 1]."""
    torch.manual_seed(0)
    q, s = fp8(4, 6), torch.tensor([1.0, 2.0, 0.5, 3.0])
    found = of({"a.weight": q, "a.weight_scale": s, "a.input_scale": torch.ones(1)})
    assert torch.equal(found["a.weight"].read(), (q.float() * s[:, None]).bfloat16())


def test_exponents_as_bytes() -> None:
    q, s = fp8(2, 32), torch.tensor([[126], [129]], dtype=torch.uint8)
    found = of({"a.weight": q, "a.weight_scale_inv": s})["a.weight"].read()
    wanted = Fp8Dequantize(None)._dequantize_one(q, s, torch.bfloat16)
    assert torch.equal(found, wanted) and torch.equal(found[1], (q[1].float() * 4).bfloat16())


def test_the_last_block_may_be_smaller() -> None:
    """DeepSeek-V3's kv_a_proj has 576 rows in blocks of 128; here 12 in blocks of 8."""
    q, s = fp8(12, 8), torch.tensor([[2.0], [5.0]])
    found = of({"a.weight": q, "a.weight_scale_inv": s}, FP8)["a.weight"].read()
    # 12 is a multiple of 2 as well, so the config decides which rows a scale is for.
    assert torch.equal(found[:8], (q[:8].float() * 2).bfloat16())
    assert torch.equal(found[8:], (q[8:].float() * 5).bfloat16())


def test_mxfp4_as_transformers_does() -> None:
    torch.manual_seed(0)
    packed = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8)
    exponents = torch.randint(110, 135, (3, 8, 2), dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    found = of({f"{name}_blocks": packed, f"{name}_scales": exponents})
    assert list(found) == [name] and found[name].shape == (3, 64, 8)
    assert torch.equal(found[name].read(), convert_moe_packed_tensors(packed, exponents))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a.weight": fp8(16, 24), "a.weight_scale_inv": torch.ones(5, 3)}, "not those of its"),
        ({"a.weight": fp8(16, 24), "a.weight_scale_inv": torch.ones(1, 1, 1)}, "not those of its"),
        ({"a.weight": fp8(2, 3, 4), "a.weight_scale_inv": torch.ones(1)}, "no matrix"),
        (
            {"a.weight": fp8(8, 8), "a.weight_scale": torch.ones(1), "b.weight": fp8(8, 8)},
            "b.weight is F8_E4M3 and has no scales",
        ),
        (
            {
                "x_blocks": torch.zeros(1, 2, 3, 16, dtype=torch.uint8),
                "x_scales": torch.zeros(1, 2, 4, dtype=torch.uint8),
            },
            "no mxfp4 of gpt-oss",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tensors: dict[str, Tensor], words: str) -> None:
    with pytest.raises(SurgeryError, match=words):
        of(tensors)


def test_what_cannot_be_dequantised_is_named() -> None:
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    with pytest.raises(SurgeryError, match="quantised by 'gptq' cannot be"):
        of({"a.qweight": torch.ones(2, 2)}, config)
    with pytest.raises(UsageError, match="nothing is quantised"):
        of({"a.weight": torch.ones(2, 2)}, {"model_type": "llama"})


# --- whole models ---------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A llama whose matrices in layers are in fp8, each with a scale for blocks of 8 × 8."""
    folder = write_llama(tmp_path / "m", tensors=llama_tensors())
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name in [n for n in tensors if "layers" in n and n.endswith("proj.weight")]:
        rows, columns = tensors[name].shape
        tensors[name] = (tensors[name] * 3).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.rand(rows // 8, columns // 8)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | FP8))
    return folder


def test_an_fp8_model_is_upcycled_exactly(model: Path, tmp_path: Path, call: Call) -> None:
    """Without the option it is refused, with a hint; verify and recipe know how it was opened."""
    out, again = tmp_path / "out", tmp_path / "again"
    upcycle = ("upcycle", model, "--experts", 2, "--quiet")
    assert_two_lines(call(*upcycle, "--out", out), "quant_method 'fp8'", "--dequantize opens")
    assert call(*upcycle, "--dequantize", "--out", out).code == 0
    record = json.loads((out / "surgery.json").read_text())
    assert record["source"]["dequantize"] and record["verification"]["passed"] and record["exact"]
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert call("verify", model, out, "--quiet").code == 0
    assert call("run", out / "recipe.yaml", "--out", again, "--quiet").code == 0
    for file in out.glob("*.safetensors"):
        assert file.read_bytes() == (again / file.name).read_bytes()
    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    source = surgery.open(model, dequantize=True).tensors["model.layers.0.mlp.gate_proj.weight"]
    (expert,) = [t for f in out.glob("*.safetensors") for n, t in load_file(f).items() if n == name]
    assert torch.equal(expert, source.read())


def test_the_api_and_analyze(model: Path, tmp_path: Path, call: Call) -> None:
    assert call("analyze", model, "--dequantize", "--tokens", 64, "--quiet").code == 0
    assert surgery.open(model, dequantize=True).parameters == sum(
        t.numel() for t in llama_tensors().values()
    )
