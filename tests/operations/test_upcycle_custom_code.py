"""Models that no native architecture holds: upcycled into a block that travels, they compute what
they did.

In both versions of transformers, loaded, offloaded, saved again and generating. What could break
it: neurons that are joined along the wrong dimension of a fused or transposed matrix, biases, a
window or soft cap that the stock class has, a head that loses its tie, copies of which a token gets
a part.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compared import verify
from models import LAYERS, VOCAB, greedy, load, logits_of, sample_ids, save_model
from safetensors.torch import load_file
from support import found_by_transformers_4

from surgery.checkpoint import Checkpoint, make_plan
from surgery.fitting.experts import joined, part
from surgery.operations.upcycle import OPERATION, upcycle
from surgery.proof.copies import torn_copies
from surgery.storage import open_checkpoint, write

FINE: dict[str, Any] = {"granularity": 4, "experts": 12, "top_k": 6, "shared": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {})
    for name in ("gemma2", "gemma3_text", "gpt2", "gpt_neox", "falcon", "nemotron", "opt")
} | {
    "smollm3, mlp biases": ("smollm3", {"config": {"mlp_bias": True}}),
    "llama tied, mlp biases, one layer": (
        "llama tied",
        {"config": {"mlp_bias": True}, "layers": [1]},
    ),
    "qwen2 with windows": ("qwen2 with windows", {}),
    "llama with llama3 rope, k=1": ("llama with llama3 rope", {"target": "surgery", "top_k": 1}),
    "phi3 with longrope": ("phi3 with longrope", {"target": "surgery"}),
    "gemma": ("gemma", {"target": "surgery"}),
    "granite": ("granite", {"target": "surgery", "router": "zero"}),
    "gemma3_text, fine": ("gemma3_text", FINE),
    "gpt2, fine": ("gpt2", FINE),
    "opt, fine, one layer": ("opt", {**FINE, "layers": [1]}),
    "phi3, fine": ("phi3", {"target": "surgery", **FINE}),
    "olmo2, fine, k=E": (
        "olmo2",
        {"target": "surgery", "granularity": 3, "experts": 12, "top_k": 12},
    ),
}


class Shop:
    """Makes each case once: folders of source and output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.case = cache(self._case)

    def _case(self, name: str) -> tuple[Path, Path, Checkpoint]:
        model, options = CASES[name]
        options = {"experts": 4, "top_k": 2, "router_std": 0.3, **options}
        folder = self.folder / f"case{list(CASES).index(name)}"
        source, output = folder / "source", folder / "output"
        save_model(model, source, **options.pop("config", {}))
        checkpoint = open_checkpoint(source)
        result = upcycle(checkpoint, **options)
        write(make_plan(result), output, source=checkpoint)
        reference, _ = load(source)
        torch.save(
            {"ids": sample_ids(), "logits": logits_of(reference), "tokens": greedy(reference)},
            f"{output}.pt",
        )
        return source, output, result


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(tmp_path_factory.mktemp("upcycled"))


def loaded(
    folder: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, dict[str, Any]]:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, trust_remote_code=True, output_loading_info=True, **options
    )
    return model.eval(), {k: v for k, v in info.items() if v}


def assert_same(model: Any, output: Path) -> None:
    want = torch.load(f"{output}.pt")
    limit = 1e-5 * max(1.0, want["logits"].std().item())
    torch.testing.assert_close(logits_of(model), want["logits"], rtol=0, atol=limit)
    assert greedy(model) == want["tokens"]


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_the_source_does(name: str, shop: Shop) -> None:
    _, output, result = shop.case(name)
    model, found = loaded(output)
    assert found == {} and type(model).__name__ == "SurgeryForCausalLM" and result.exact
    assert_same(model, output)
    options = CASES[name][1]
    blocks = [m for m in model.modules() if type(m).__name__ == "ExpertsMLP"]
    assert [b.experts for b in blocks] == [options.get("experts", 4)] * len(
        options.get("layers", range(LAYERS))
    )
    assert {b.router.top_k for b in blocks} == {options.get("top_k", 2)}


VERIFIED = (
    "gemma3_text",
    "gpt2, fine",
    "falcon",
    "opt, fine, one layer",
    "phi3 with longrope",
    "llama tied, mlp biases, one layer",
)


@pytest.mark.parametrize("name", VERIFIED)
def test_it_is_verified_layer_by_layer(name: str, shop: Shop) -> None:
    source, output, result = shop.case(name)
    shards = 3 if "fine" in name else 1
    found = verify(
        open_checkpoint(source),
        open_checkpoint(output),
        exact=True,
        layers=result.steps[-1].layers,
        checks=OPERATION.checks(result.steps[-1].parameters),
        tokens=256,
    )
    rows = {r.key: r for r in found.rows}
    assert found.passed and rows["logits.difference"].value >= 0  # type: ignore[operator]
    control = rows["logits.control"].value
    assert isinstance(control, float) and control > 0.1
    assert ("routers.no_gradient" in rows) == (shards == 1)


@pytest.mark.parametrize("name", ["gemma3_text, fine", "gpt2, fine", "phi3, fine"])
def test_copies_are_chosen_whole_in_bf16(name: str, shop: Shop, tmp_path: Path) -> None:
    model, _ = CASES[name]
    save_model(model, tmp_path, dtype=torch.bfloat16)
    result = upcycle(open_checkpoint(tmp_path), target="surgery", **FINE)
    ids = torch.randint(3, VOCAB - 3, (16, 96), generator=torch.Generator().manual_seed(2))
    found = torn_copies(result, ids, shards=3, dtype=torch.bfloat16)
    assert (found.torn, found.total) == (0, 16 * 96 * LAYERS)


def test_bf16_logits_are_as_near_as_rounding_lets_them(tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "output"
    save_model("gemma3_text", source, dtype=torch.bfloat16)
    checkpoint = open_checkpoint(source)
    write(make_plan(upcycle(checkpoint, experts=4, router_std=0.3)), output, source=checkpoint)
    exact = logits_of(load(source)[0])
    a, b = (
        logits_of(m).float()
        for m in (load(source, torch.bfloat16)[0], loaded(output, torch.bfloat16)[0])
    )
    rounding = (a - exact).abs().mean()
    assert rounding > 0 and (b - exact).abs().mean() <= 1.3 * rounding


def test_saved_again_it_is_the_same(shop: Shop, tmp_path: Path) -> None:
    _, output, _ = shop.case("gemma3_text")
    loaded(output)[0].save_pretrained(tmp_path)
    for file in ("modeling_surgery.py", "experts_mlp.py", "sparse_kernel.py", "sparse_mlp.py"):
        assert (tmp_path / file).read_bytes() == (output / file).read_bytes()
    before, after = (load_file(f / "model.safetensors") for f in (output, tmp_path))
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    again, found = loaded(tmp_path)
    assert found == {}
    torch.testing.assert_close(
        logits_of(again), torch.load(f"{output}.pt")["logits"], rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(
    "places",
    [
        {"model.layers.1": "disk", "model.layers.2": "cpu"},
        {"model.layers.1": "cpu", "model.layers.2": "disk"},
    ],
)
def test_offloaded_it_is_the_same(places: dict[str, str], shop: Shop, tmp_path: Path) -> None:
    _, output, _ = shop.case("gemma3_text")
    outer = dict.fromkeys(
        ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0"), "cpu"
    )
    if hasattr(loaded(output)[0].model, "rotary_emb_local"):
        outer["model.rotary_emb_local"] = "cpu"
    model, _ = loaded(output, device_map={**outer, **places}, offload_folder=tmp_path)
    assert any(p.is_meta for p in model.parameters())
    assert_same(model, output)


def test_a_fresh_model_has_routers_that_are_drawn(shop: Shop) -> None:
    config = loaded(shop.case("gpt2")[1])[0].config
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    weight = model.transformer.h[0].mlp.router.weight
    assert weight.std().item() == pytest.approx(config.initializer_range, rel=0.3)
    assert all(t.isfinite().all() for t in model.state_dict().values())


def test_it_learns(shop: Shop) -> None:
    """Of copies, weights alone; of copies cut in parts, the router too."""
    for name, learns in (("gemma3_text", False), ("gemma3_text, fine", True)):
        model = loaded(shop.case(name)[1])[0].train()
        model(sample_ids(), labels=sample_ids()).loss.backward()
        mlp = model.model.layers[1].mlp
        assert mlp.up_proj.weight.grad.abs().max() > 0
        assert (mlp.router.weight.grad.norm().item() > 1e-3) == learns


# --- tensors --------------------------------------------------------------------------------------


def test_gate_and_up_are_copied_by_the_kernel_and_down_is_read_once(tmp_path: Path) -> None:
    save_model("gemma3_text", tmp_path)
    source = open_checkpoint(tmp_path)
    made = upcycle(source, experts=16).tensors
    start = "model.layers.1.mlp."
    for p in ("gate", "up"):
        wide, one = made[f"{start}{p}_proj.weight"], source.tensors[f"{start}{p}_proj.weight"]
        assert wide.extents == one.extents * 16 and wide.shape == (16 * 48, 32)
    down = made[f"{start}down_proj.weight"]
    assert list(down.sources()) == list(source.tensors[f"{start}down_proj.weight"].extents)
    assert torch.equal(down.read(), source.tensors[f"{start}down_proj.weight"].read().repeat(1, 16))
    router = made[f"{start}router.weight"]
    assert (router.dtype, router.shape) == ("F32", (16, 32))


def test_expert_e_is_part_j_of_copy_c_after_the_shared_ones(shop: Shop) -> None:
    source, output, _ = shop.case("gpt2, fine")
    old, new = (load_file(f / "model.safetensors") for f in (source, output))
    # Conv1D: a column for each neuron.
    up, wide = (t["transformer.h.0.mlp.c_fc.weight"] for t in (old, new))
    w = up.shape[1] // 4
    assert wide.shape[1] == 13 * w and torch.equal(wide[:, :w], up[:, :w])
    for e in range(12):
        j = 1 + e % 3
        assert torch.equal(wide[:, (1 + e) * w : (2 + e) * w], up[:, j * w : (j + 1) * w])
    router = new["transformer.h.0.mlp.router.weight"].view(4, 3, -1)
    assert torch.equal(router, router[:, :1].expand_as(router))
    assert torch.equal(
        new["transformer.h.0.mlp.c_proj.bias"], old["transformer.h.0.mlp.c_proj.bias"]
    )


def test_parts_joined_are_the_whole(tmp_path: Path) -> None:
    from surgery.families import locate

    save_model("gpt2", tmp_path)
    mlp = locate(open_checkpoint(tmp_path)).mlp(0)
    again = joined([part(mlp, start, start + 32) for start in range(0, mlp.width, 32)])
    for name in ("up", "down", "up_bias", "down_bias"):
        assert torch.equal(getattr(again, name).read(), getattr(mlp, name).read()), name


def test_experts_of_several_models_with_biases(tmp_path: Path) -> None:
    """Of gpt2, whose matrices are transposed: one bias of the output is the mean of theirs."""
    models = []
    for i in range(3):
        save_model("gpt2", tmp_path / str(i), initializer_range=0.1 + 0.1 * i)
        models.append(open_checkpoint(tmp_path / str(i)))
    made = upcycle(models[0], expert_models=models[1:])
    assert made.steps[-1].exact is False and made.steps[-1].parameters["experts"] == 2
    start = "transformer.h.2.mlp."
    each = [
        [m.tensors[f"{start}{n}"].read() for m in models[1:]]
        for n in ("c_fc.weight", "c_fc.bias", "c_proj.bias")
    ]
    assert torch.equal(made.tensors[f"{start}c_fc.weight"].read(), torch.cat(each[0], 1))
    assert torch.equal(made.tensors[f"{start}c_fc.bias"].read(), torch.cat(each[1]))
    torch.testing.assert_close(
        made.tensors[f"{start}c_proj.bias"].read(), (each[2][0] + each[2][1]) / 2
    )


def test_dropped_neurons_have_their_biases_drawn_too(tmp_path: Path) -> None:
    save_model("gpt2", tmp_path)
    source = open_checkpoint(tmp_path)
    made = upcycle(source, experts=2, drop=0.5).tensors
    old, new = (t["transformer.h.0.mlp.c_fc.bias"].read() for t in (source.tensors, made))
    weight, wide = (t["transformer.h.0.mlp.c_fc.weight"].read() for t in (source.tensors, made))
    changed = new.view(2, -1) != old
    assert changed.sum(1).tolist() == [len(old) // 2] * 2
    assert torch.equal(changed.flatten(), (wide != weight.repeat(1, 2)).any(0))


# --- transformers 4 -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found_by_4(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by_transformers_4(
        {n: shop.case(n)[1] for n in CASES}, tmp_path_factory.mktemp("modules")
    )


@pytest.mark.parametrize("name", CASES)
def test_transformers_4_gives_the_same(name: str, found_by_4: dict[str, Any]) -> None:
    found = found_by_4[name]
    assert "error" not in found, found["error"]
    limit = 1e-5 * max(1.0, found["std"])
    assert found["keys"] == {} and found["class"] == "SurgeryForCausalLM"
    assert found["delta"] <= limit and found["same_tokens"] and found["again"] <= limit
    gathers = ["gathered_mlp.py"] if name.startswith("opt") else []
    sparse = ["modeling_surgery.py", "sparse_kernel.py", "sparse_mlp.py"]
    assert found["files"] == ["experts_mlp.py", *gathers, *sparse]
    assert found["not_finite"] == []
