"""Every figure of an analysis is that of the whole stock model, whose activations hooks record.

What could break it: tokens that do not count, weights that are transposed, sums over batches,
layers mixed up.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import COMMON, LAYERS, load, sample_ids, save_config, save_model
from safetensors.torch import load_file

import surgery
from surgery import demo
from surgery.analysis.analyze import Analysis, MlpStatistics, Settings, analyze
from surgery.analysis.devices import DEVICES
from surgery.analysis.weigh import weigh
from surgery.calibration import walk
from surgery.calibration.data import Sample
from surgery.calibration.data import sample_ids as text_ids
from surgery.checkpoint import constant
from surgery.families import ALWAYS_OPEN
from surgery.operations.relufy import relufy
from surgery.report import analysis as report
from surgery.storage import open_checkpoint

IDS = sample_ids()
SAMPLE = Sample(input_ids=IDS, source="test", text=False)
H100 = DEVICES["h100"]
SHARED = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}


def activations(model: Any, down: str, up: str, gate: str) -> list[dict[str, torch.Tensor]]:
    """Return input, gate, product and output [n, ·] of each layer, and its down_proj.

    The n tokens leave out the first of each sequence.
    """
    found: list[dict[str, torch.Tensor]] = []
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    layers = next(m for m in lists if len(m) == LAYERS)
    kept = lambda t: t.detach().reshape(*IDS.shape, -1)[:, 1:].flatten(0, 1).clone()  # noqa: E731

    def hook(module: Any, see: Any) -> None:
        module.register_forward_hook(lambda m, inputs, output: see(inputs[0], output))

    for layer in layers:
        into: dict[str, torch.Tensor] = {}
        hook(layer.get_submodule(gate), lambda x, y, d=into: d.update(gate=kept(y)))
        hook(layer.get_submodule(up), lambda x, y, d=into: d.update(input=kept(x)))
        hook(
            layer.get_submodule(down),
            lambda x, y, d=into: d.update(product=kept(x), output=kept(y)),
        )
        into["down"] = layer.get_submodule(down).weight.detach()
        found.append(into)
    with torch.no_grad():
        model(IDS)
    return found


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("llama", ("mlp.down_proj", "mlp.up_proj", "mlp.gate_proj")),
        ("gpt2", ("mlp.c_proj", "mlp.c_fc", "mlp.c_fc")),
        ("opt", ("fc2", "fc1", "fc1")),
    ],
)
def test_figures_are_those_of_the_whole_model(
    name: str, paths: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of one sequence, so that sums run over several batches."""
    save_model(name, tmp_path)
    expected = activations(load(tmp_path)[0], *paths)
    monkeypatch.setattr(walk, "BATCH_TOKENS", IDS.shape[1])
    for layer, e in zip(analyze(open_checkpoint(tmp_path), SAMPLE).layers, expected, strict=True):
        assert layer.mlp
        check(layer.mlp, e, e["down"] if name == "gpt2" else e["down"].T)


def check(m: MlpStatistics, e: dict[str, torch.Tensor], down: torch.Tensor) -> None:
    """Compare the figures of one MLP with its activations `e` and W_down [F, H]."""
    gate, h = e["gate"], e["product"]
    assert m.tokens == len(h) == IDS.numel() - len(IDS)
    assert torch.equal(m.active, (gate > 0).sum(0)) and torch.equal(m.nonzero, (h != 0).sum(0))
    assert m.product.zero == (h == 0).double().mean()
    assert m.rate.mean().item() == pytest.approx((gate > 0).double().mean().item())
    quarter = gate.view(len(IDS), -1, gate.shape[1])[:, ::4]
    assert m.gate.positive == (quarter > 0).double().mean() and m.gate.total == quarter.numel()
    mass = h.abs().double().mean(0) * down.double().norm(dim=1)
    torch.testing.assert_close(m.mass, mass, rtol=1e-5, atol=0)
    rms = e["input"].double().square().mean(0).sqrt()
    torch.testing.assert_close(m.input_rms, rms, rtol=1e-5, atol=0)
    assert m.input_norm == pytest.approx(e["input"].norm(dim=1).mean().item(), rel=1e-5)
    rows = (gate > 0).view(len(IDS), -1, gate.shape[1])
    overlap = (rows[:, 1:] & rows[:, :-1]).sum() / rows[:, 1:].sum()
    assert m.overlap == pytest.approx(overlap.item())
    union = torch.stack([rows[:, i : i + 16].any(1) for i in (0, 16)]).double().mean().item()
    assert m.unions[16] == pytest.approx(1 - union)
    for t in m.truncations:  # all tokens are in the reservoir
        inactive = h.abs() * down.norm(dim=1) < t.threshold
        tail = (h * inactive).double() @ down.double()
        error = tail.norm(dim=1) / e["output"].double().norm(dim=1)
        assert t.sparsity == pytest.approx(inactive.double().mean().item(), abs=1e-3)
        assert t.cett == pytest.approx(error.mean().item(), rel=1e-2)


def test_relu_makes_exact_zeros_and_silu_none() -> None:
    """On the trained embedded model, ReLU makes a zero of every gate that is not positive."""
    source = open_checkpoint(demo.MODEL)
    sample = text_ids(source, tokens=256, sequence_length=64)
    silu, relu = analyze(source, sample), analyze(relufy(source, repair="none"), sample)
    assert [m.product.zeros for m in silu.mlps] == [m.gate_zero for m in silu.mlps] == [0] * 7
    for m in relu.mlps:
        assert 0.3 < m.product.zero < 0.9
        assert m.product.zero == pytest.approx(1 - m.rate.mean().item(), abs=1e-4)
        assert m.gate_zero == 1 - m.gate.positive
        assert all(t.sparsity > m.product.zero for t in m.truncations)
    assert report.finding(silu).startswith("No product is an exact zero")
    zero = relu.mean(lambda m: m.product.zero)
    assert report.finding(relu).startswith(f"{zero:.0%} of the products are exact zeros")


def test_always_open_neurons_are_counted_apart(tmp_path: Path) -> None:
    """Zeros are those of the first 32 of 48 neurons; what is saved is of all."""
    save_model("llama", tmp_path)
    plain = relufy(open_checkpoint(tmp_path), repair="none")
    marked = plain.replace(config=plain.config | {ALWAYS_OPEN: 16})
    before, found = analyze(plain, SAMPLE), analyze(marked, SAMPLE)
    assert [m.always_open for m in found.mlps] == [16] * LAYERS
    zeros = [1 - m.nonzero[:32].double().mean().item() / m.tokens for m in found.mlps]
    assert [m.zero_of_others for m in found.mlps] == pytest.approx(zeros)
    assert found.savings[0].sparsity == before.savings[0].sparsity
    assert report.finding(found).startswith(f"{sum(zeros) / LAYERS:.0%} of the products")
    over_all = before.mean(lambda m: m.product.zero)
    (note,) = (n for n in report.notes(found) if "always open" in n)
    assert "the last 16 neurons" in note and f"{over_all:.1%}" in note
    assert not any("always open" in n for n in report.notes(before))


def test_savings_are_the_kernels_share_of_the_mlps_bytes(tmp_path: Path) -> None:
    """Exact zeros save two thirds of a gated MLP in proportion, and as many FLOPs as bytes."""
    save_model("llama", tmp_path)
    checkpoint = relufy(open_checkpoint(tmp_path), repair="none")
    found = analyze(checkpoint, SAMPLE)
    first, mlps = found.savings[0], weigh(checkpoint, checkpoint.config).nbytes("mlp")
    assert (first.rule, first.kernel) == ("exact zeros", "gate first")
    assert first.before.nbytes == mlps == LAYERS * 3 * 32 * 48 * 4
    assert first.after.nbytes == pytest.approx(mlps * (1 + 2 * (1 - first.sparsity)) / 3)
    # An fp32 weight is 4 bytes and 2 FLOPs.
    assert first.after.flops == pytest.approx(first.after.nbytes / 2)


def mixture(folder: Path, name: str = "mixtral", **changes: Any) -> Analysis:
    """Analyse a mixture of 4 experts with ReLU, 2 of them for a token."""
    sizes = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
    options = {**COMMON, **sizes, "hidden_act": "relu", **changes}
    save_config(transformers.AutoConfig.for_model(name, **options), folder)
    return analyze(open_checkpoint(folder), SAMPLE)


def expert_products(folder: Path) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return by layer and expert of a mixtral its products [n, F] and its W_down [F, H].

    The n tokens are those that were sent to the expert.
    """
    model, tensors, inputs = load(folder)[0], open_checkpoint(folder).tensors, []
    for name, module in model.named_modules():
        if name.endswith((".mlp.gate", ".block_sparse_moe.gate")):
            module.register_forward_hook(
                lambda m, i, o: inputs.append(i[0].reshape(*IDS.shape, -1)[:, 1:].flatten(0, 1))
            )
    with torch.no_grad():
        model(IDS)
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for layer, x in enumerate(inputs):
        start = f"model.layers.{layer}.block_sparse_moe"
        chosen = (x @ tensors[f"{start}.gate.weight"].read().T).softmax(-1).topk(2).indices
        found.append([])
        for e in range(4):
            w1, w2, w3 = (tensors[f"{start}.experts.{e}.w{i}.weight"].read() for i in (1, 2, 3))
            kept = x[(chosen == e).any(-1)]
            found[-1].append(((kept @ w1.T).relu() * (kept @ w3.T), w2.T))
    return found


def test_cett_of_the_experts_is_that_of_their_own_outputs(tmp_path: Path) -> None:
    """It agrees with a direct computation from the tensors on disk, over all tokens."""
    found = mixture(tmp_path)
    for layer, experts in zip(found.layers, expert_products(tmp_path), strict=True):
        assert layer.router and layer.router.product
        products = torch.cat([h.flatten() for h, _ in experts])
        assert layer.router.product.zeros == int((products == 0).sum())
        assert layer.router.product.total == len(products)
        for t in layer.router.truncations:
            errors, kept = [], 0
            for h, down in experts:
                large = h.abs() * down.norm(dim=1) >= t.threshold
                errors.append(((h * ~large) @ down).norm(dim=1) / (h @ down).norm(dim=1))
                kept += int(large.sum())
            assert t.cett == pytest.approx(torch.cat(errors).mean().item(), rel=1e-4)
            assert t.sparsity == pytest.approx(1 - kept / len(products), abs=1e-4)


def test_savings_of_a_mixture_are_those_of_its_experts(tmp_path: Path) -> None:
    """A token reads 2 of 4 experts, and of those what their own zeros leave."""
    found = mixture(tmp_path)
    zeros, routed = [r.product.zero for r in found.routers if r.product], 2 * 3 * 32 * 48 * 4
    exact, *tails = found.savings
    assert len(zeros) == LAYERS and all(0.3 < z < 0.7 for z in zeros)
    assert exact.before.nbytes == LAYERS * routed
    assert exact.sparsity == pytest.approx(sum(zeros) / LAYERS)
    assert exact.after.nbytes == pytest.approx(sum((1 + 2 * (1 - z)) / 3 * routed for z in zeros))
    for s, cett in zip(tails, (0.1, 0.1, 0.2, 0.2), strict=True):
        at = [r.at(cett).sparsity for r in found.routers]
        share = {"down only": lambda a: (3 - a) / 3, "foreseen": lambda a: 1 - a}[s.kernel]
        assert s.after.nbytes == pytest.approx(sum(share(a) * routed for a in at))
    assert found.as_dict(H100)["totals"]["routed_experts"]["exact_zero"] == exact.sparsity


def test_savings_weigh_a_shared_expert_beside_the_routed_ones(tmp_path: Path) -> None:
    """Each has its own sparsity.

    The one shown is the mean over the neurons that a token passes through: 40, and 2 × 24.
    """
    found = mixture(tmp_path, "qwen2_moe", **SHARED)
    seen = [(i.mlp, i.router) for i in found.layers if i.mlp and i.router]
    pairs = [(mlp.product.zero, router.product.zero) for mlp, router in seen if router.product]
    assert len(pairs) == LAYERS and all(a != b for a, b in pairs)
    exact, weights = found.savings[0], [3 * 32 * width * 4 for width in (40, 48)]
    left = sum(w * (3 - 2 * z) / 3 for pair in pairs for w, z in zip(weights, pair, strict=True))
    assert exact.before.nbytes == LAYERS * sum(weights)
    assert exact.after.nbytes == pytest.approx(left)
    assert exact.sparsity == pytest.approx(sum(40 * a + 48 * b for a, b in pairs) / (LAYERS * 88))


def test_experts_that_cannot_be_looked_into_stay_whole_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving on experts that nobody looked into would be a guess."""
    monkeypatch.setattr("surgery.calibration.observe._expert", lambda experts, family: None)
    found = mixture(tmp_path / "routed")
    assert found.savings == []
    assert not any("cannot be looked into" in note for note in report.notes(found))
    shared = mixture(tmp_path / "shared", "qwen2_moe", **SHARED)
    exact, own = shared.savings[0], 3 * 32 * 40 * 4
    left = sum(3 * 32 * 48 * 4 + own * (3 - 2 * m.product.zero) / 3 for m in shared.mlps)
    assert exact.after.nbytes == pytest.approx(left)
    note = "routed experts cannot be looked into here: the savings count them whole"
    assert note in list(report.notes(shared))


def test_saved_files_hold_the_figures(tmp_path: Path) -> None:
    """The files hold what the analysis says, in counts and in fractions."""
    save_model("llama", tmp_path / "model")
    found = analyze(open_checkpoint(tmp_path / "model"), SAMPLE)
    found.save(tmp_path / "out", H100)
    tensors = load_file(tmp_path / "out" / "analysis.safetensors")
    record = json.loads((tmp_path / "out" / "analysis.json").read_text())
    for layer in found.layers:
        assert layer.mlp
        assert torch.equal(tensors[f"layers.{layer.index}.mlp.active"], layer.mlp.active)
        d = record["layers"][layer.index]["mlp"]
        assert d["firing_rate"] == pytest.approx(layer.mlp.rate.mean().item())
        assert d["cett"][1]["sparsity"] == layer.mlp.at(0.2).sparsity
    assert record["sample"]["sha256"] == SAMPLE.sha256
    assert record["totals"]["neurons"] == LAYERS * 48


def test_the_same_command_finds_the_same_twice(tmp_path: Path) -> None:
    """The tokens of the reservoir are drawn with a seed."""
    save_model("llama", tmp_path)
    a, b = (analyze(open_checkpoint(tmp_path), SAMPLE).as_dict(H100) for _ in range(2))
    assert a == b


def test_coactivation_is_given_layer_by_layer(tmp_path: Path) -> None:
    """Each matrix is AᵀA of the 0/1 activations of its own layer."""
    save_model("llama", tmp_path)
    expected = activations(load(tmp_path)[0], "mlp.down_proj", "mlp.up_proj", "mlp.gate_proj")
    pairs: dict[int, torch.Tensor] = {}
    analyze(open_checkpoint(tmp_path), SAMPLE, settings=Settings(coactivation=pairs.__setitem__))
    assert list(pairs) == list(range(LAYERS))
    for i, e in enumerate(expected):
        a = (e["gate"] > 0).int()
        assert torch.equal(pairs[i], a.T @ a)


def test_an_mlp_of_zeros_leaves_valid_json(tmp_path: Path) -> None:
    """Its output has no norm to divide by, and JSON has no NaN."""
    save_model("llama", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    zeros = {"model.layers.1.mlp.up_proj.weight": constant(0.0, (48, 32), "F32")}
    zeroed = checkpoint.replace(tensors={**checkpoint.tensors, **zeros})
    found = analyze(zeroed, SAMPLE)
    json.dumps(found.as_dict(H100), allow_nan=False)
    assert found.layers[1].mlp and found.layers[1].mlp.product.zero == 1
    show(found)


def test_a_linear_mlp_is_named(tmp_path: Path) -> None:
    """gpt2 with the identity for its activation is two matrices that compose into one."""
    save_model("gpt2", tmp_path, activation_function="linear")
    found = analyze(open_checkpoint(tmp_path), SAMPLE)
    assert all(m.linearity.r2 > 0.999 for m in found.mlps)
    note = "layer 0: on this sample the MLP is affine: two matrices that compose into one"
    assert note in list(report.notes(found))


def show(found: Analysis) -> str:
    """Return the report as text, 120 columns wide."""
    from rich.console import Console

    console = Console(width=120)
    with console.capture() as capture:
        for part in report.tables(found, H100):
            console.print(part)
    return capture.get()


def test_report_has_a_row_for_every_layer(tmp_path: Path) -> None:
    """And the row has the layer's own numbers."""
    save_model("opt", tmp_path)
    found = analyze(open_checkpoint(tmp_path), SAMPLE)
    text = show(found)
    assert not math.isnan(found.mean(lambda m: m.product.zero))
    rows = [line.split() for line in text.splitlines() if line[:1].isdigit() and " 48 " in line]
    assert [r[0] for r in rows] == ["0", "1", "2"]
    assert rows[1][2] == f"{found.mlps[1].product.zero:.1%}"


LLAMA_4 = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "attention_chunk_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("step", [1, 2])
def test_llama_4_with_dense_layers_between_those_of_experts(step: int, tmp_path: Path) -> None:
    """Its dense MLPs are wider and stand where other layers have experts: both are measured."""
    config = transformers.Llama4TextConfig(**LLAMA_4, interleave_moe_layer_step=step)
    torch.manual_seed(0)
    transformers.Llama4ForCausalLM(config).float().save_pretrained(tmp_path)
    found = surgery.analyze(
        surgery.open(tmp_path), tokens=128, sequence_length=32, dtype="fp32", device="cpu"
    )
    routed = [layer.router is not None for layer in found.layers]
    assert routed == [step == 1, True, step == 1, True]
    widths = [layer.mlp.width for layer in found.layers if layer.mlp and not layer.router]
    assert widths == ([] if step == 1 else [96, 96])
    assert all(0 < layer.residual <= 1 for layer in found.layers)


@pytest.mark.parametrize("step", [1, 2])
def test_llama_4_is_relufied(step: int, tmp_path: Path) -> None:
    """Where every layer has experts no MLP is left whose bytes could be compared."""
    config = transformers.Llama4TextConfig(**LLAMA_4, interleave_moe_layer_step=step)
    torch.manual_seed(0)
    transformers.Llama4ForCausalLM(config).float().save_pretrained(tmp_path / "source")
    source = surgery.open(tmp_path / "source")
    folder = surgery.write(surgery.relufy(source, repair="none"), tmp_path / "out")
    verification = surgery.verify(source, folder)
    rows = {row.key: row for row in verification.rows}
    assert verification.passed and rows["zeros.output"].value > 0.3
    assert ("left.bytes" in rows) == (step == 2)
    assert json.loads((folder / "config.json").read_text())["hidden_act"] == "relu"
