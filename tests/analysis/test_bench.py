"""`surgery bench`: sparsity and bytes are those of the model's own MLPs; what it says follows from
what it measured.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from models import save_model
from safetensors.torch import load_file, save_file
from support import write_llama

from surgery.analysis import bench as module
from surgery.analysis import generation
from surgery.analysis.bench import Bench, LayerBench, bench
from surgery.analysis.weigh import weigh
from surgery.blocks import block_config, custom_code, sparse_kernel
from surgery.calibration.data import Sample
from surgery.cli.bench import _show as show
from surgery.cli.bench import bench_command
from surgery.errors import SurgeryError
from surgery.families import ALWAYS_OPEN, known
from surgery.storage import open_checkpoint

IDS = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(1))
SAMPLE = Sample(input_ids=IDS, source="random", text=False)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVICT", 4096)


@pytest.fixture
def relu(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "relu", fields={"hidden_act": "relu"}, dtype=torch.float32)


def with_custom_code(
    folder: Path, out: Path, rule: str, activation: str, threshold: float, layers: list[int]
) -> Path:
    """A llama with a sparse block in some layers."""
    config = json.loads((folder / "config.json").read_text()) | {"hidden_act": "silu"}
    options = block_config.Sparse(rule=rule, activation=activation)
    entry = block_config.sparse_entry(known()["llama"], layers, options)
    config |= block_config.config_changes(config, [entry])
    tensors = load_file(folder / "model.safetensors")
    for i in layers:
        names = block_config.sparse_tensors(entry, 32, 64)
        tensors |= {
            f"model.layers.{i}.{n}": torch.full(shape, threshold) for n, shape in names.items()
        }
    out.mkdir()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    for name, data in custom_code.files("llama", ["sparse"]).items():
        (out / name).write_bytes(data)
    return out


def products(folder: Path) -> list[torch.Tensor]:
    """gate and down's inputs of each layer at the tokens that count, by hooks on the stock
    class.
    """
    import transformers

    model, seen = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0][:, 1:]))
    with torch.no_grad():
        model(IDS)
    return seen


def test_a_stock_relu_model_is_measured_at_its_own_sparsity(relu: Path) -> None:
    found = bench(open_checkpoint(relu), SAMPLE, threads=1)
    for layer, h in zip(found.layers, products(relu), strict=True):
        sparsity = (h == 0).double().mean().item()
        assert layer.sparsity == pytest.approx(sparsity) and 0.3 < sparsity < 0.7
        assert layer.left == pytest.approx((1 + 2 * (1 - sparsity)) / 3)  # up is as live as down
        assert layer.skips and 0 <= layer.error < 1e-5 and layer.dense > 0 and layer.skipping > 0
    assert found.threads == 1 and found.model_type == "llama"


def test_always_open_neurons_are_counted_apart(relu: Path) -> None:
    source = open_checkpoint(relu)
    found = bench(source.replace(config=source.config | {ALWAYS_OPEN: 24}), SAMPLE, threads=1)
    for layer, h in zip(found.layers, products(relu), strict=True):
        assert layer.sparsity == pytest.approx((h[..., :40] == 0).double().mean().item())
        assert layer.sparsity_of_all == pytest.approx((h == 0).double().mean().item())
    assert found.as_dict()["always_open"] == 24


def test_threads_are_put_back(relu: Path) -> None:
    before = torch.get_num_threads()
    assert bench(open_checkpoint(relu), SAMPLE, threads=before + 1).threads == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("rule", "activation", "threshold"), [("teal", "silu", 0.01), ("drelu", "relu", 0.02)]
)
def test_the_code_that_travels_is_what_is_timed(
    rule: str, activation: str, threshold: float, relu: Path, tmp_path: Path
) -> None:
    folder = with_custom_code(relu, tmp_path / "out", rule, activation, threshold, [1])
    dense, sparse = bench(open_checkpoint(folder), SAMPLE).layers
    assert not dense.skips and dense.sparsity == 0 and dense.skipping == dense.dense
    assert sparse.skips and 0.1 < sparse.sparsity < 0.95 and sparse.error < 1e-5
    up, down = 3 * sparse.left - 1 - (1 - sparse.sparsity), 1 - sparse.sparsity
    if rule == "teal":
        assert up == pytest.approx(1)  # computed before anything is known
    else:
        assert down < 0.8 * up < 0.8  # a gate is open more often than its product is live


def test_a_model_without_zeros_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SurgeryError, match="has zeros to skip"):
        bench(open_checkpoint(write_llama(tmp_path / "silu")), SAMPLE)


def test_an_mlp_that_is_no_module_is_refused(tmp_path: Path) -> None:
    """OPT has ReLU, but its matrices stand in the layer."""
    save_model("opt", tmp_path)
    with pytest.raises(SurgeryError, match="opt keeps its MLP's matrices in the layer itself"):
        bench(open_checkpoint(tmp_path), SAMPLE)


def a_bench(dense: float, skipping: float, left: float = 0.5) -> Bench:
    layer = LayerBench(index=0, sparsity=0.75, left=left, dense=dense, skipping=skipping, error=0.0)
    other = dataclasses.replace(layer, index=1, left=1.0, skips=False, skipping=dense)
    return Bench(
        source="m",
        model_type="llama",
        dtype="float32",
        device="cpu",
        threads=1,
        sample=SAMPLE,
        layers=(layer, other),
    )


def test_the_verdict_is_what_was_measured() -> None:
    assert a_bench(4.0, 6.0).verdict.startswith(
        "no gain at this size and sparsity: skipping runs at 0.80x"
    )
    assert a_bench(4.0, 3.9).verdict.startswith("no gain")  # within what timings vary
    assert a_bench(4.0, 2.4).verdict == (
        "skipping makes the MLPs 1.25x as fast as dense; the bytes it leaves out would allow 1.33x"
    )


def test_a_busy_machine_is_warned_of() -> None:
    """Timings beside another program say little: half of them far from the median is a sign."""
    calm = a_bench(4.0, 2.0)
    assert calm.warnings == []
    busy = dataclasses.replace(calm, load=1000.0)
    assert [w.partition(":")[0] for w in busy.warnings] == ["the machine is busy"]
    wide = dataclasses.replace(calm.layers[0], dense_quartiles=(3.0, 6.0))
    spread = dataclasses.replace(calm, layers=(wide, calm.layers[1]))
    (warning,) = spread.warnings
    assert "the timings of dense spread: half of them lie between 3.000 and 6.000 ms" in warning
    assert spread.as_dict()["warnings"] == [warning]


def test_quartiles_stand_beside_the_median() -> None:
    assert module.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
    assert module.quartiles([1.0]) == (1.0, 1.0)


def test_json_and_table(relu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        str(relu),
        "--tokens",
        "64",
        "--threads",
        "1",
        "--dtype",
        "fp32",
        "--device",
        "cpu",
        "--new-tokens",
        "4",
    ]
    more = ["--json", "--source", str(relu)]
    bench_command.main([*arguments, *more], standalone_mode=False)
    printed = json.loads(capsys.readouterr().out)
    assert printed["threads"] == 1 and printed["dtype"] == "float32" and len(printed["layers"]) == 2
    low, high = printed["dense_ms_quartiles"]
    assert 0 < low <= printed["dense_ms"] * 1.5 and low <= high
    generation = printed["generation"]
    assert generation["same_tokens"] and generation["new_tokens"] == 4
    ways = {"source", "dense", "skipping", *["kernel, all rows"] * sparse_kernel.available()}
    assert set(generation["tokens_per_second"]) == ways
    assert printed["speedup"] == pytest.approx(printed["dense_ms"] / printed["skipping_ms"])
    assert printed["dense_ms"] == pytest.approx(
        sum(layer["dense_ms"] for layer in printed["layers"])
    )
    bench_command.main([*arguments, "--quiet"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(("no gain", "skipping makes"))
    assert lines[1].startswith("the whole model generates ") and "x dense;" in lines[1]
    assert "float32 on cpu, 1 threads" in lines[2] and "quartiles" in lines[3]
    assert any(line.startswith("note: the tokens are random") for line in lines)
    assert "\\n" not in "".join(lines)


def test_the_table_fits_into_100_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is cut off where times have many digits, as on a large model or a busy machine."""
    monkeypatch.setenv("COLUMNS", "100")
    slow = a_bench(1234.5, 361.97)
    wide = dataclasses.replace(
        slow.layers[0], dense_quartiles=(1038.25, 1270.4), skipping_quartiles=(206.51, 457.61)
    )
    show(dataclasses.replace(slow, layers=(wide,) * 2))
    out = capsys.readouterr().out
    assert "1,230" in out and "1,040–1,270" in out and "207–458" in out and "…" not in out
    table = out.partition("\n\n")[2].partition("\nideal:")[0]
    assert "error" in table and max(map(len, table.splitlines())) <= 100


def test_the_ideal_of_the_whole_model_counts_what_is_read(relu: Path, tmp_path: Path) -> None:
    """Attention, norms and the head whole, the output's bypass whole, its MLPs in part."""
    source = open_checkpoint(relu)
    mlps, rest = 2 * 3 * 32 * 64, weigh(source, source.config).active() - 2 * 3 * 32 * 64
    found = generation._ideal(source, source, [0.5, 0.25])
    assert found == pytest.approx((rest + mlps) / (rest + 0.375 * mlps))
    out = tmp_path / "out"
    folder = with_custom_code(relu, out, "shifted", "relu", 0.1, [0, 1])
    config = json.loads((folder / "config.json").read_text())
    config["surgery_blocks"][0]["bypass"] = 32
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.{i}.mlp.bypass_out": torch.zeros(32, 32) for i in range(2)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found = generation._ideal(source, open_checkpoint(folder), [0.5, 0.25])
    read = rest + 0.375 * mlps + 2 * 32 * 32
    assert found == pytest.approx((rest + mlps) / read, rel=1e-3)  # thresholds


@torch.no_grad()
def test_every_way_leaves_the_model_as_it_was(relu: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(relu, dtype=torch.float32).eval()
    before = model(IDS).logits
    for way in (generation._dense, generation._skipping, generation._all_rows):
        with way(model):
            model(IDS[:1, :3])
        torch.testing.assert_close(model(IDS).logits, before)
    blocks = [layer.mlp for layer in model.model.layers]
    assert [(b.rule_name, b.act_name, b.sparse_decode) for b in blocks] == [
        ("plain", "relu", False)
    ] * 2
