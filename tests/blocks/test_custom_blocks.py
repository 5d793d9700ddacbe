"""A checkpoint with sparse blocks computes its rule, in both versions of transformers, however it
is loaded.

What could break it: a class that loads the weights and ignores the blocks, a buffer that is cast or
left unset, a head that loses its tie as the body is built anew, code that is not saved along, and
weights that are elsewhere when a gather wants them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from custom_blocks import CASES, added, family_of, hook, write
from models import LAYERS, greedy, logits_of, sample_ids
from safetensors.torch import load_file, save_file
from support import found_by_transformers_4

from surgery.blocks import block_config, custom_code
from surgery.blocks.block_config import Sparse
from surgery.calibration import stock
from surgery.calibration.walk import Walk
from surgery.checkpoint.config import BLOCKS
from surgery.storage import open_checkpoint


def load(
    folder: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, dict[str, Any]]:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, trust_remote_code=True, output_loading_info=True, **options
    )
    return model.eval(), {k: v for k, v in info.items() if v}


def assert_gives(model: Any, want: dict[str, Any]) -> None:
    torch.testing.assert_close(
        logits_of(model), want["logits"], rtol=0, atol=1e-5 * max(1.0, want["logits"].std().item())
    )
    assert greedy(model) == want["tokens"]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_rule(case: str, shop: Any) -> None:
    model, found = load(shop.case(case))
    assert found == {} and type(model).__name__ == "SurgeryForCausalLM"
    want = shop.expected(case)
    assert_gives(model, want)
    model.set_sparse_decode()
    assert greedy(model) == want["tokens"]


@pytest.mark.parametrize(
    "case", ["llama, shifted", "gemma3_text, drelu", "phi3, teal", "gpt2, cats", "falcon, stage 2"]
)
@torch.no_grad()
def test_the_walk_runs_it_and_names_fit(case: str, shop: Any) -> None:
    checkpoint = open_checkpoint(shop.case(case))
    names = stock.check_names(checkpoint)
    assert (names.missing, names.unexpected, names.mismatched) == ((), (), ())
    assert "surgery_blocks" not in stock.unknown_fields(checkpoint)
    walk = Walk(checkpoint, sample_ids())
    for layer in walk:
        layer.run()
    logits = torch.cat([part for _, part in walk.logits()], dim=1)
    assert torch.equal(logits, logits_of(load(shop.case(case))[0]))


def test_saved_again_it_is_the_same(shop: Any, tmp_path: Path) -> None:
    """Weights, thresholds and code; and it loads from there."""
    folder = shop.case("llama, fatrelu")
    load(folder)[0].save_pretrained(tmp_path)
    for file in ("modeling_surgery.py", "sparse_kernel.py", "sparse_mlp.py"):
        assert (tmp_path / file).read_bytes() == (folder / file).read_bytes()
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path))
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    assert_gives(load(tmp_path)[0], shop.expected("llama, fatrelu"))


def test_saved_after_skipping_it_is_the_same(shop: Any, tmp_path: Path) -> None:
    """`down` lies transposed in memory then."""
    folder = shop.case("llama, shifted")
    model, _ = load(folder, sparse_decode=True)
    assert greedy(model) == shop.expected("llama, shifted")["tokens"]
    assert not model.model.layers[0].mlp.down_proj.weight.is_contiguous()
    assert_gives(model, shop.expected("llama, shifted"))
    model.save_pretrained(tmp_path)
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path))
    assert all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("skipping", [False, True])
@pytest.mark.parametrize(
    "places",
    [
        {"model.layers.1": "disk", "model.layers.2": "cpu"},
        {"model.layers.1": "cpu", "model.layers.2": "disk"},
    ],
)
def test_offloaded_it_is_the_same(
    places: dict[str, str], skipping: bool, shop: Any, tmp_path: Path
) -> None:
    outer = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0")
    model, _ = load(
        shop.case("llama, shifted"),
        device_map={**dict.fromkeys(outer, "cpu"), **places},
        offload_folder=tmp_path,
        sparse_decode=skipping,
    )
    assert any(p.is_meta for p in model.parameters())
    assert_gives(model, shop.expected("llama, shifted"))


def test_auto_device_map_places_it(shop: Any, tmp_path: Path) -> None:
    model, _ = load(
        shop.case("qwen3, fatrelu"),
        device_map="auto",
        max_memory={"cpu": 60_000},
        offload_folder=tmp_path,
    )
    assert set(map(str, model.hf_device_map.values())) == {"cpu", "disk"}
    assert_gives(model, shop.expected("qwen3, fatrelu"))


def test_a_tied_head_stays_tied(shop: Any) -> None:
    model, _ = load(shop.case("llama tied, cats"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert load(shop.case("llama, cats"))[0].lm_head.weight is not model.model.embed_tokens.weight


def test_thresholds_stay_fp32_in_bf16(shop: Any) -> None:
    folder = shop.case("qwen2, shifted")
    model, _ = load(folder, torch.bfloat16)
    on_disk = load_file(folder / "model.safetensors")["model.layers.1.mlp.threshold"]
    mlp = model.model.layers[1].mlp
    assert torch.equal(mlp.threshold, on_disk) and mlp.threshold.dtype == torch.float32
    assert mlp.correction.dtype == mlp.up_proj.weight.dtype == torch.bfloat16
    want = shop.expected("qwen2, shifted")["logits"]
    assert (logits_of(model) - want).abs().mean() < 0.02 * want.std()


def test_what_the_checkpoint_lacks_starts_as_nothing(shop: Any, tmp_path: Path) -> None:
    """Not as what memory held: zeros cut nothing, and the rest of the block is loaded."""
    folder = shop.case("llama, shifted")
    write(
        tmp_path / "less",
        shop.source("llama"),
        json.loads((folder / "config.json").read_text())["surgery_blocks"],
        {},
    )
    model, found = load(tmp_path / "less")
    assert len(found["missing_keys"]) == 2 * LAYERS
    mlp = model.model.layers[2].mlp
    assert not mlp.threshold.any() and not mlp.correction.any()
    stock_model = transformers.AutoModelForCausalLM.from_pretrained(shop.source("llama")).eval()
    hook(stock_model, "llama", {"rule": "plain", "activation": "relu"}, {})
    torch.testing.assert_close(logits_of(model), logits_of(stock_model), rtol=0, atol=1e-5)


def test_a_fresh_model_is_finite(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory that holds NaN, as torch.empty may find it."""
    config = load(shop.case("gpt2, shifted"))[0].config
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: _poisoned(empty(*a, **k)))
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert [n for n, t in model.state_dict().items() if not t.isfinite().all()] == []
    assert model.transformer.h[0].mlp.c_fc.weight.std() > 0.1


def _poisoned(t: torch.Tensor) -> torch.Tensor:
    return t.fill_(torch.nan) if t.is_floating_point() and not t.is_meta else t


def test_the_body_loads_alone(shop: Any) -> None:
    body = transformers.AutoModel.from_pretrained(
        shop.case("gpt2, plain"), trust_remote_code=True
    ).eval()
    model, _ = load(shop.case("gpt2, plain"))
    with torch.no_grad():
        assert torch.equal(
            model.lm_head(body(sample_ids()).last_hidden_state), model(sample_ids()).logits
        )


def test_it_learns(shop: Any) -> None:
    """Gradients reach the correction and what is behind an open gate, and none what is behind a
    closed one.
    """
    model, _ = load(shop.case("llama, shifted"), sparse_decode=True)
    model(sample_ids(), labels=sample_ids()).loss.backward()
    mlp = model.model.layers[0].mlp
    assert mlp.correction.grad.abs().max() > 0 and mlp.gate_proj.weight.grad.abs().max() > 0
    assert mlp.threshold.grad is None


def test_blocks_follow_one_another(
    shop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second kind, around the sparse block of layer 0 and the stock MLP of layer 2; another
    sparse block in layer 1.
    """
    monkeypatch.setitem(BLOCKS, "negative", ("negative_mlp", "NegativeMLP"))
    read = custom_code._read
    monkeypatch.setattr(
        custom_code, "_read", lambda name: NEGATIVE if name == "negative_mlp.py" else read(name)
    )
    source, family = shop.source("llama"), family_of("llama")
    specs = [{"rule": "cats", "activation": "silu"}, {"rule": "plain", "activation": "relu"}]
    entries = [
        block_config.sparse_entry(family, [i], Sparse(**spec)) for i, spec in enumerate(specs)
    ]
    tensors = added("llama", entries[0], source, range(1))
    out = tmp_path / "out"
    write(out, source, [*entries, block_config.entry(family, "negative", [0, 2])], tensors)
    assert {p.name for p in out.glob("*.py")} == {
        "modeling_surgery.py",
        "sparse_kernel.py",
        "sparse_mlp.py",
        "negative_mlp.py",
    }
    weights = load_file(out / "model.safetensors")
    save_file(
        {re.sub(r"([02])\.mlp\.", r"\1.mlp.base.", n): t for n, t in weights.items()},
        out / "model.safetensors",
        {"format": "pt"},
    )
    stock_model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32
    ).eval()
    layers = stock_model.model.layers
    for i, spec in enumerate(specs):
        stack = torch.nn.ModuleList([layers[i]])
        hook(
            _Holding(stack),
            "llama",
            spec,
            {n.replace(f".{i}.", ".0."): t for n, t in tensors.items()} if i == 0 else {},
        )
    for i in (0, 2):
        layers[i].mlp.register_forward_hook(lambda module, args, y: -y)
    model, found = load(out)
    assert found == {}
    torch.testing.assert_close(logits_of(model), logits_of(stock_model), rtol=0, atol=1e-5)


class _Holding(torch.nn.Module):
    """Holds layers where a llama does."""

    def __init__(self, layers: torch.nn.ModuleList) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = layers


NEGATIVE = b"""
from torch import nn

class NegativeMLP(nn.Module):
    def __init__(self, base, entry, config):
        super().__init__()
        self.base = base

    def forward(self, x):
        return -self.base(x)
"""


# --- transformers 4 -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found_by_4(shop: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every case, in one process: its import costs more than all the models."""
    return found_by_transformers_4(
        {case: shop.case(case) for case in CASES}, tmp_path_factory.mktemp("modules")
    )


@pytest.mark.parametrize("case", CASES)
def test_transformers_4_gives_the_same(case: str, found_by_4: dict[str, Any]) -> None:
    found = found_by_4[case]
    assert "error" not in found, found["error"]
    limit = 1e-5 * max(1.0, found["std"])
    assert found["keys"] == {} and found["class"] == "SurgeryForCausalLM"
    assert found["delta"] <= limit and found["same_tokens"] and found["same_tokens_skipping"]
    assert found["again"] <= limit
    assert found["files"] == ["modeling_surgery.py", "sparse_kernel.py", "sparse_mlp.py"]
    assert found["dtypes"] == ["torch.bfloat16"] and set(found["threshold_dtypes"]) <= {
        "torch.float32"
    }
    assert found["not_finite"] == []
