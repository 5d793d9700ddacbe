"""The taps show what hooks on the whole stock model show, bit for bit, in every family.

What could break it: gate and up in one matrix, weights that are transposed, an MLP without a module
of its own, an output that the layer adds to in place, modules that transformers 5 renamed, experts
that it fused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import LAYERS, MODELS, load, sample_ids, save_config, save_model

from surgery.analysis.analyze import analyze
from surgery.calibration.collectors import Seen
from surgery.calibration.data import Sample
from surgery.calibration.observe import tapped
from surgery.calibration.walk import Walk
from surgery.checkpoint import Checkpoint, make_plan
from surgery.operations.upcycle import upcycle
from surgery.storage import open_checkpoint, write

# Where a stock layer has gate, up and down; the rest is as in llama.
PLACES = {
    "gpt2": (None, "mlp.c_fc", "mlp.c_proj"),
    "opt": (None, "fc1", "fc2"),
    "nemotron": (None, "mlp.up_proj", "mlp.down_proj"),
    "gpt_neox": (None, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    "falcon": (None, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    "phi3": ("mlp.gate_up_proj", "mlp.gate_up_proj", "mlp.down_proj"),
}
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "granite",
    "olmo2",
    "smollm3",
    "gpt2",
    "opt",
    "gpt_neox",
    "falcon",
    "nemotron",
)
IDS = sample_ids()
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
TOP_2 = {"num_experts": 4, "num_experts_per_tok": 2}
SMALL = {**TOP_2, "moe_intermediate_size": 24}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**SMALL, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen2_moe": {**SMALL, "shared_expert_intermediate_size": 40},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": TOP_2,
}
SAMPLE = Sample(input_ids=IDS, source="test", text=False)


def seen_by_walk(checkpoint: Checkpoint) -> list[dict[str, torch.Tensor]]:
    """Return the taps of each layer over IDS."""
    walk, found = Walk(checkpoint, IDS), []
    nothing = torch.zeros_like(IDS, dtype=torch.bool)
    for layer in walk:
        with tapped(layer.module, walk.blocks.family, checkpoint.text_config) as taps:
            seen: list[Seen] = []
            where = {"mask": ~nothing, "sampled": nothing, "index": IDS}
            layer.run(lambda b, out: seen.append(taps.dense(**where, hidden=out)))  # noqa: B023
        found.append({name: t.clone() for name, t in seen[0].taps.items()})
    return found


def seen_by_hooks(model: Any, places: tuple[str | None, str, str]) -> list[dict[str, torch.Tensor]]:
    """Return the same, from hooks on the whole model."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    layers = next(m for m in lists if len(m) == LAYERS)
    found: list[dict[str, torch.Tensor]] = [{} for _ in layers]
    gate, up, down = places

    def hook(module: Any, into: dict[str, torch.Tensor], name: str, of_input: bool = False) -> None:
        def keep(m: Any, inputs: Any, output: Any) -> None:
            seen = inputs[0] if of_input else output
            seen = seen[0] if isinstance(seen, tuple) else seen
            into[name] = seen.reshape(*IDS.shape, -1).clone()

        module.register_forward_hook(keep)

    for layer, into in zip(layers, found, strict=True):
        hook(layer.get_submodule(up), into, "input", of_input=True)
        hook(layer.get_submodule(up), into, "up" if gate else "gate")
        hook(layer.get_submodule(down), into, "product", of_input=True)
        hook(layer.get_submodule(down), into, "output")
        if gate and gate != up:
            hook(layer.get_submodule(gate), into, "gate")
        hook(layer, into, "hidden")
    with torch.no_grad():
        model(IDS)
    if gate and gate == up:
        for into in found:
            into["gate"], into["up"] = into["up"].chunk(2, dim=-1)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_taps_are_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    """In every family, whatever the names and layout of its weights."""
    assert name in MODELS
    save_model(name, tmp_path)
    model, _ = load(tmp_path)
    llama = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    expected = seen_by_hooks(model, PLACES.get(name, llama))
    got = seen_by_walk(open_checkpoint(tmp_path))
    for layer, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.keys() == b.keys() and {"input", "gate", "product", "output", "hidden"} <= a.keys()
        for tap in a:
            assert torch.equal(a[tap], b[tap]), (layer, tap)


@pytest.mark.parametrize("name", MIXTURES)
def test_router_load_is_that_of_the_stock_logits(name: str, tmp_path: Path) -> None:
    """In every family of mixtures, whatever its router returns."""
    save_config(transformers.AutoConfig.for_model(name, **SIZES, **MIXTURES[name]), tmp_path)
    check_routers(tmp_path)


def test_router_load_of_an_upcycled_model_before_it_is_written(tmp_path: Path) -> None:
    """Experts are then tensors that are computed."""
    save_model("llama", tmp_path / "dense")
    dense = open_checkpoint(tmp_path / "dense")
    moe = upcycle(dense, experts=4, top_k=2, router_std=0.3)
    write(make_plan(moe), tmp_path / "moe", source=dense)
    check_routers(tmp_path / "moe", moe)


def after_first(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [B·T, ·] without the first token of each sequence."""
    return rows.view(*IDS.shape, -1)[:, 1:].flatten(0, 1)


def check_routers(folder: Path, checkpoint: Checkpoint | None = None) -> None:
    """Compare load, entropy and firing with the whole model.

    It runs eagerly, with hooks on the activations of its experts.
    """
    model, _ = load(folder)
    found = [x.router for x in analyze(checkpoint or open_checkpoint(folder), SAMPLE).layers]
    with torch.no_grad():
        logits = model(IDS, output_router_logits=True).router_logits
    routers = [r for r in found if r]
    assert len(routers) == len(logits) >= 2
    for router, raw in zip(routers, logits, strict=True):
        p = after_first(raw).float().softmax(-1)
        assert torch.equal(router.load, torch.bincount(p.topk(2).indices.flatten(), minlength=4))
        entropy = -(p * p.log()).sum(-1).mean().item() / torch.tensor(4.0).log().item()
        assert router.entropy == pytest.approx(entropy, rel=1e-5)
        if router.active is not None or transformers.__version__ >= "5":
            assert router.active is not None and router.product and router.gate
            assert router.product.total == router.load.sum() * router.active.shape[1]
            positive = router.gate.positive * router.gate.total
            assert router.active.sum().item() == pytest.approx(positive)


def test_firing_of_each_expert(tmp_path: Path) -> None:
    """It agrees with a direct computation from the tensors on disk."""
    config = transformers.AutoConfig.for_model("mixtral", **SIZES, **MIXTURES["mixtral"])
    save_config(config, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    model, _ = load(tmp_path)
    inputs: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith((".mlp.gate", ".block_sparse_moe.gate")):
            module.register_forward_hook(lambda m, i, o: inputs.append(i[0].reshape(-1, 32)))
    with torch.no_grad():
        logits = model(IDS, output_router_logits=True).router_logits
    for layer in analyze(checkpoint, SAMPLE).layers:
        chosen = after_first(logits[layer.index]).softmax(-1).topk(2).indices
        assert layer.router and layer.router.active is not None and layer.router.nonzero is not None
        for e in range(4):
            start = f"model.layers.{layer.index}.block_sparse_moe.experts.{e}"
            w1 = checkpoint.tensors[f"{start}.w1.weight"].read()
            gate = after_first(inputs[layer.index])[(chosen == e).any(-1)] @ w1.T
            assert torch.equal(layer.router.active[e], (gate > 0).sum(0))
            assert (layer.router.nonzero[e] == len(gate)).all()


def test_layers_that_are_not_routed_and_shared_experts_are_seen_as_mlps(tmp_path: Path) -> None:
    """Qwen3's dense layers and Qwen2's shared experts have figures of their own."""
    for name, parts in (
        ("qwen3_moe", [(None, 4), ("mlp", None), (None, 4)]),
        ("qwen2_moe", [("shared expert", 4)] * 3),
    ):
        config = transformers.AutoConfig.for_model(name, **SIZES, **MIXTURES[name])
        save_config(config, tmp_path / name)
        layers = analyze(open_checkpoint(tmp_path / name), SAMPLE).layers
        assert [(x.mlp and x.mlp.part, x.router and x.router.experts) for x in layers] == parts
    assert layers[0].mlp and layers[0].mlp.width == 40


def test_router_load_of_a_custom_code_block(tmp_path: Path) -> None:
    """Only its router is seen; layers that stayed dense are seen as MLPs."""
    save_model("gemma3_text", tmp_path)
    moe = upcycle(open_checkpoint(tmp_path), experts=4, router_std=0.3, layers=[0, 2])
    layers = analyze(moe, SAMPLE).layers
    parts = [(x.mlp and x.mlp.part, x.router and x.router.experts) for x in layers]
    assert parts == [(None, 4), ("mlp", None), (None, 4)]
    walk, found = Walk(moe, IDS), []

    def keep_logits(router: Any, inputs: Any, output: Any) -> None:
        found.append(after_first(inputs[0].detach()) @ router.weight.T)

    for layer in walk:
        if layer.index != 1:
            layer.module.mlp.router.register_forward_hook(keep_logits)
        layer.run()
    for layer, logits in zip((layers[0], layers[2]), found, strict=True):
        assert layer.router and layer.router.top_k == 2 and layer.router.active is None
        load = torch.bincount(logits.topk(2).indices.flatten(), minlength=4)
        assert torch.equal(layer.router.load, load)
