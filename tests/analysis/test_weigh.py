"""Published figures of published models, from their config.json alone and from names as on disk."""

import json
import math
from pathlib import Path

import pytest
import transformers
from click.testing import CliRunner
from models import save_model

from surgery.analysis.devices import DEVICES, decode, parse_device
from surgery.analysis.weigh import BYTES, Weights, shapes_of, weigh
from surgery.cli.inspect import inspect_command
from surgery.demo import MODEL
from surgery.errors import SurgeryError, UsageError
from surgery.families.roles import MLP_ROLES
from surgery.operations.carve import carve
from surgery.operations.memory import memory
from surgery.operations.relufy import relufy
from surgery.storage import open_checkpoint

CONFIGS = Path(__file__).parents[1] / "configs"
H100 = DEVICES["h100"]
B = 1e9


def config_of(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def weights_of():
    """Return a function that weighs a published model; each is built on the meta device once."""
    known: dict[str, Weights] = {}

    def get(name: str) -> Weights:
        if name not in known:
            config = config_of(name)
            known[name] = weigh(shapes_of(config), config)
        return known[name]

    return get


def parameters_of_layer(weights: Weights, role: str, index: int = 0) -> int:
    return weights.layers[index].tallies[role].parameters


# --- dense models ---------------------------------------------------------------------------------


def test_llama_2_70b_parameters(weights_of):
    """151 M in a layer's attention, 82% in MLPs, 68.98 B in all."""
    w = weights_of("llama-2-70b")
    assert parameters_of_layer(w, "attention") == 150_994_944  # 151 M
    assert parameters_of_layer(w, "mlp") == 704_643_072
    layer = w.layers[0].tallies
    share = layer["mlp"].parameters / sum(t.parameters for t in layer.values())
    assert share == pytest.approx(0.82, abs=0.005)
    assert w.parameters(*MLP_ROLES) / B == pytest.approx(56.37, abs=0.005)
    assert w.parameters() == 68_976_648_192  # 68.98 B
    assert w.mlp_share == pytest.approx(0.82, abs=0.005)
    assert (w.gate, w.activation, w.tied) == ("SwiGLU", "silu", False)
    assert [group.label for group in w.groups()] == ["0–79"]


def test_llama_2_70b_costs(weights_of):
    """The MLPs take 112.7 GB and 33.6 ms per token on an H100, and need a batch of 296."""
    w = weights_of("llama-2-70b")
    step = decode(w, H100)
    assert w.flops("mlp") / 80 / 1e9 == pytest.approx(1.41, abs=0.005)
    assert step.mlp.flops / 1e9 == pytest.approx(112.7, abs=0.05)
    assert step.mlp.nbytes / 1e9 == pytest.approx(112.7, abs=0.05)  # fp16, as config.json says
    assert 1e3 * step.mlp.seconds(H100) == pytest.approx(33.6, abs=0.1)
    assert step.mlp.intensity == pytest.approx(1.0)
    assert H100.ridge == pytest.approx(295.2, abs=0.1)
    assert step.mlp.bound(H100) == "memory"
    assert step.compute_bound_from == 296
    assert decode(w, H100, batch=296).mlp.bound(H100) == "compute"
    assert decode(w, H100, batch=295).mlp.bound(H100) == "memory"


def test_other_dense_models(weights_of):
    """Biases count as parameters and not as multiplications, Conv1D keeps [in, out]."""
    llama3, llama2, gpt2 = weights_of("llama-3-8b"), weights_of("llama-2-7b"), weights_of("gpt2")
    assert parameters_of_layer(llama3, "mlp") == 176_160_768
    assert llama3.parameters() == 8_030_261_248
    assert llama2.layers[0].widths == {"mlp": 11008}
    assert llama2.parameters() == 6_738_415_616
    assert parameters_of_layer(gpt2, "mlp") == 4_722_432  # with biases
    assert gpt2.layers[0].tallies["mlp"].matrices == 2 * 768 * 3072
    assert gpt2.layers[0].widths == {"mlp": 3072}  # n_inner is null, Conv1D keeps [in, out]
    assert (gpt2.gate, gpt2.activation) == ("none", "gelu_new")


def test_a_tied_table_counts_once_and_is_the_head(weights_of):
    """A tied table is multiplied as the head and looked up for free."""
    gpt2, qwen = weights_of("gpt2"), weights_of("qwen2.5-0.5b")
    assert gpt2.tied and qwen.tied
    assert gpt2.parameters() == 124_439_808
    assert gpt2.parameters("head") == 50257 * 768
    assert gpt2.parameters("embedding") == 1024 * 768  # positions
    assert qwen.parameters() == qwen.active() == 494_032_768
    assert qwen.flops("head") == 2 * 151_936 * 896


@pytest.mark.skipif(
    "nemotron_h" not in transformers.CONFIG_MAPPING,
    reason="transformers 5 has NemotronH, 4.57 does not",
)
def test_hybrid_layers_are_grouped_by_what_they_hold(weights_of):
    """State-space, MLP and attention layers alternate in NemotronH."""
    w = weights_of("nemotron-h-8b")
    assert w.parameters() / B == pytest.approx(8.1, abs=0.01)
    held = {
        next(role for role in group.layers[0].tallies if role != "norms"): len(group.layers)
        for group in w.groups()
    }
    assert held == {"mixer": 24, "mlp": 24, "attention": 4}
    assert w.layers[1].widths == {"mlp": 21504}
    assert (w.gate, w.activation) == ("none", "relu2")


# --- mixtures of experts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "total", "active", "with_embedding"),
    [  # in billions
        ("mixtral-8x7b-v0.1", 46.70, 12.75, 12.88),
        ("deepseek-v3", 671.03, 36.63, 37.55),
        ("qwen3-235b-a22b", 235.09, 21.57, 22.19),
        ("gpt-oss-120b", 116.83, 5.13, 5.71),
        ("llama-4-maverick", 401.58, 16.15, 17.18),
    ],
)
def test_active_parameters(weights_of, name, total, active, with_embedding):
    """Totals and active parameters are the published ones.

    They are 47/13 B, 671/37 B (36.6 without the input embedding), 235/22 B, 116.8/5.1 B and 400/17
    B.
    """
    w = weights_of(name)
    assert w.parameters() / B == pytest.approx(total, abs=0.01)
    assert w.active() / B == pytest.approx(active, abs=0.01)
    assert w.active_with_embedding / B == pytest.approx(with_embedding, abs=0.01)
    assert "other" not in w.roles


def test_deepseek_v3_layers(weights_of):
    """Three dense layers, then 58 with a shared and 8 of 256 routed experts."""
    w = weights_of("deepseek-v3")
    dense, sparse = w.groups()
    assert (dense.label, sparse.label) == ("0–2", "3–60")
    assert dense.layers[0].widths == {"mlp": 18432}
    moe = sparse.layers[0]
    assert (moe.experts, moe.top_k) == (256, 8)
    assert moe.widths == {"routed_experts": 2048, "shared_experts": 2048}
    assert moe.active("routed_experts") == 8 * 3 * 7168 * 2048
    assert moe.active("shared_experts") == 3 * 7168 * 2048


def test_maverick_alternates_and_lists_its_vision_tower_apart(weights_of):
    """Text never multiplies the vision tower."""
    w = weights_of("llama-4-maverick")
    assert [group.label for group in w.groups()] == ["0–46 step 2", "1–47 step 2"]
    assert w.parameters("towers") == 871_932_416
    assert w.flops("towers") == w.active("towers") == 0
    assert any("871,932,416" in note for note in w.notes)


def test_gpt_oss_biases_are_no_multiplications(weights_of):
    """The fused biases of the experts are parameters only."""
    moe = weights_of("gpt-oss-120b").layers[0]
    assert moe.tallies["routed_experts"].matrices == 128 * 3 * 2880 * 2880
    assert moe.tallies["routed_experts"].parameters == 128 * (3 * 2880 * 2880 + 3 * 2880)


def test_a_batch_touches_more_experts(weights_of):
    """A batch of B reads 1 − (3/4)^B of Mixtral's experts, so intensity grows less than B."""
    w = weights_of("mixtral-8x7b-v0.1")
    routed = w.parameters("routed_experts") * 2
    assert w.nbytes("routed_experts") == pytest.approx(routed / 4)
    assert w.nbytes("routed_experts", batch=2) == pytest.approx(routed * 7 / 16)
    assert decode(w, H100, batch=2).mlp.intensity == pytest.approx(2 * (1 / 4) / (7 / 16))
    assert decode(w, H100).compute_bound_from == math.ceil(H100.ridge * 4)


# --- costs ----------------------------------------------------------------------------------------


def test_dtype_sets_the_bytes(weights_of):
    """A quarter of the bytes for int4, and half the batch for fp8."""
    w = weights_of("llama-2-70b")
    assert decode(w, H100, dtype="int4").mlp.nbytes == decode(w, H100).mlp.nbytes / 4
    assert decode(w, H100, dtype="fp8").compute_bound_from == 148
    assert BYTES["mxfp4"] == pytest.approx(0.53125)


def test_context_counts_scores_and_cache(weights_of):
    """Llama 2 70B has 2 products of 64 heads of 128 per position, and caches keys and values of 8.

    DeepSeek-V3 caches a latent, and every other layer of gpt-oss has a window.
    """
    w = weights_of("llama-2-70b")
    assert w.flops(context=4096) - w.flops() == 80 * 2 * 2 * 64 * 128 * 4096
    assert w.nbytes(batch=3, context=4096) - w.nbytes(batch=3) == 3 * 80 * 2 * 8 * 128 * 4096 * 2
    deepseek = weights_of("deepseek-v3")
    latent = 61 * 576 * 1000 * 2  # of MLA
    assert deepseek.nbytes(context=1000) - deepseek.nbytes() == latent
    oss = weights_of("gpt-oss-120b")  # every other layer sees 128 positions
    assert oss.flops(context=1000) - oss.flops() == 18 * 4 * 64 * 64 * (1000 + 128)


def test_devices():
    """By name in any case, or by rates with any SI prefix."""
    given = parse_device("3.35TB/s,989TFLOP/s")
    assert (given.bandwidth, given.peak) == (H100.bandwidth, H100.peak)
    assert parse_device("900 GB/s, 1.2 PFLOPS").ridge == pytest.approx(1333.3, abs=0.1)
    assert parse_device("RTX4090").ridge == pytest.approx(163.9, abs=0.1)
    with pytest.raises(UsageError, match="h1000"):
        parse_device("h1000")


# --- names as they are on disk --------------------------------------------------------------------


def mixtral(*, fused: bool) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return Mixtral's shapes: three matrices per expert as on disk, or fused as transformers 5."""
    shapes = dict(shapes_of(config_of("mixtral-8x7b-v0.1")))
    shapes = {n: s for n, s in shapes.items() if ".mlp." not in n and ".block_" not in n}
    for layer in range(32):
        block = f"model.layers.{layer}.{'mlp' if fused else 'block_sparse_moe'}"
        shapes[f"{block}.gate.weight"] = ((8, 4096), "BF16")
        if fused:
            shapes[f"{block}.experts.gate_up_proj"] = ((8, 2 * 14336, 4096), "BF16")
            shapes[f"{block}.experts.down_proj"] = ((8, 4096, 14336), "BF16")
        for expert in range(0 if fused else 8):
            shapes[f"{block}.experts.{expert}.w1.weight"] = ((14336, 4096), "BF16")
            shapes[f"{block}.experts.{expert}.w2.weight"] = ((4096, 14336), "BF16")
            shapes[f"{block}.experts.{expert}.w3.weight"] = ((14336, 4096), "BF16")
    return shapes


def test_one_tensor_per_expert_weighs_as_fused_ones(weights_of):
    """Both weigh as much as the class of the transformers in use, which has one of the two."""
    config = config_of("mixtral-8x7b-v0.1")
    split, fused = (weigh(mixtral(fused=fused), config) for fused in (False, True))
    assert split.as_dict() == fused.as_dict() == weights_of("mixtral-8x7b-v0.1").as_dict()
    assert split.layers[0].widths == {"routed_experts": 14336}


def test_mxfp4_blocks_hold_two_parameters_a_byte():
    """On disk gpt-oss has blocks [E, 2F, H/32, 16] of bytes, and a scale for 32 values."""
    experts = "model.layers.0.mlp.experts"
    shapes = {
        "model.embed_tokens.weight": ((100, 64), "BF16"),
        "lm_head.weight": ((100, 64), "BF16"),
        f"{experts}.gate_up_proj_blocks": ((4, 128, 2, 16), "U8"),
        f"{experts}.gate_up_proj_scales": ((4, 128, 2), "U8"),
        f"{experts}.gate_up_proj_bias": ((4, 128), "BF16"),
        f"{experts}.down_proj_blocks": ((4, 64, 2, 16), "U8"),
        f"{experts}.down_proj_scales": ((4, 64, 2), "U8"),
    }
    config = {
        "model_type": "gpt_oss",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_experts_per_tok": 1,
        "num_local_experts": 4,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    w = weigh(shapes, config)
    tally = w.layers[0].tallies["routed_experts"]
    assert tally.matrices == 4 * 3 * 64 * 64
    assert tally.nbytes == tally.matrices * BYTES["mxfp4"] + 4 * 128 * 2
    assert w.layers[0].widths == {"routed_experts": 64}
    assert w.notes == ()


def test_multi_token_prediction_and_scales_are_no_parameters_of_a_token():
    """On disk DeepSeek-V3 is in fp8 with block scales, and has one layer past the last."""
    shapes = {
        "model.embed_tokens.weight": ((100, 64), "BF16"),
        "lm_head.weight": ((100, 64), "BF16"),
    }
    for layer in (0, 1):
        shapes[f"model.layers.{layer}.mlp.up_proj.weight"] = ((256, 64), "F8_E4M3")
        shapes[f"model.layers.{layer}.mlp.up_proj.weight_scale_inv"] = ((2, 1), "F32")
    shapes["model.layers.1.embed_tokens.weight"] = ((100, 64), "BF16")
    w = weigh(shapes, {"model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 1})
    assert w.parameters("mlp") == 256 * 64
    assert w.nbytes("mlp") == 256 * 64 + 8
    assert w.parameters("towers") == 256 * 64 + 6400
    assert w.active() == 256 * 64 + 6400  # the MLP and the head


@pytest.mark.parametrize(("shared", "bypass"), [(0, 0), (3, 24)])
def test_a_mixture_in_custom_code_is_weighed_by_what_a_token_passes(shared, bypass):
    """The embedded model, 192 × 512, is cut into 16 parts of which 4 are active.

    A token then uses a quarter of its MLPs, apart from router and bypass.
    """
    source = open_checkpoint(MODEL)
    whole = weigh(source, source.config).parameters("mlp")
    output = carve(source, experts=16, active=4, shared=shared, bypass=bypass)
    w = weigh(output, output.config)
    assert w.parameters("shared_experts") == whole * shared // 16
    assert w.parameters("routed_experts") == whole * (16 - shared) // 16
    assert w.active("shared_experts") + w.active("routed_experts") == whole // 4
    assert w.active("mlp") == w.parameters("mlp") == 7 * 2 * 192 * bypass
    assert w.flops("routed_experts") == pytest.approx(2 * whole * (4 - shared) / 16)
    assert (w.layers[0].experts, w.layers[0].top_k) == (16 - shared, 4 - shared)
    assert w.layers[0].widths["routed_experts"] == 32
    assert w.notes == ()


def test_neurons_that_product_keys_find_are_weighed_in_their_layer():
    """Of 512 neurons in 23 × 23 slots a token reads 100.

    The query and the keys, of 32 and 2 dimensions, are read whole.
    """
    source = open_checkpoint(MODEL)
    output = memory(source, place="replace", layers=[2], find="product-keys", knn=100)
    w = weigh(output, output.config)
    neuron = 3 * 192
    assert (w.layers[2].experts, w.layers[2].top_k) == (529, 100) and w.layers[3].experts == 0
    assert w.parameters("routed_experts") == 529 * neuron
    assert w.active("routed_experts") == 100 * neuron
    assert w.layers[2].active("mlp") == 192 * 32 + 32 + 2 * 23 * 16 + 192 + 1
    assert w.parameters("embedding") == weigh(source, source.config).parameters("embedding")


def test_the_activation_is_that_of_the_custom_code_block():
    """config.json keeps the activation of the source."""
    source = open_checkpoint(MODEL)
    output = relufy(source, activation="fatrelu", threshold=0.1, repair="none")
    assert weigh(source, source.config).gate == "SwiGLU"
    weights = weigh(output, output.config)
    assert (weights.activation, weights.gate) == ("relu", "ReGLU")


def test_an_unknown_family_is_weighed_by_its_names():
    """Tensors that no rule knows count as active, and a note names them."""
    shapes = {
        "transformer.embed_tokens.weight": ((100, 64), "F32"),
        "transformer.blocks.0.ln_1.weight": ((64,), "F32"),
        "transformer.blocks.0.self_attn.qkv.weight": ((192, 64), "F32"),
        "transformer.blocks.0.mlp.gate_proj.weight": ((256, 64), "F32"),
        "transformer.blocks.0.mlp.down_proj.weight": ((64, 256), "F32"),
        "transformer.blocks.0.strange": ((7,), "F32"),
    }
    config = {"model_type": "novel", "d_model": 64, "n_layer": 1, "activation_function": "gelu"}
    w = weigh(shapes, config)
    assert w.roles == ("head", "attention", "mlp", "norms", "other")
    assert (w.gate, w.layers[0].widths) == ("GeGLU", {"mlp": 256})
    assert "strange" in w.notes[0]


def test_attention_of_a_width_that_nothing_tells_is_not_counted():
    """A guess at its width would be a wrong figure."""
    shapes = {
        "model.embed_tokens.weight": ((100, 64), "F32"),
        "model.layers.0.self_attn.q_proj.weight": ((64, 64), "F32"),
    }
    w = weigh(shapes, {"model_type": "novel", "num_attention_heads": 4})
    assert w.layers[0].scores is None and w.nbytes(context=1000) == w.nbytes()


def test_a_config_without_a_class_is_refused():
    """There are no shapes to weigh."""
    with pytest.raises(SurgeryError, match="novel"):
        shapes_of({"model_type": "novel"})


# --- the command ----------------------------------------------------------------------------------


def test_json_has_the_figures():
    """--json has those of the tables; batch 8 is still bound by memory."""
    arguments = [str(CONFIGS / "llama-2-70b.json"), "--json", "--batch", "8"]
    result = CliRunner().invoke(inspect_command, arguments)
    found = json.loads(result.stdout)
    assert found["parameters"] == 68_976_648_192
    assert found["roles"]["mlp"]["flops_per_token"] == 2 * 80 * 704_643_072
    assert found["layer_groups"][0]["widths"] == {"mlp": 28672}
    assert found["decode"]["mlp"]["ms"] == pytest.approx(33.65, abs=0.01)
    assert found["decode"]["mlp_compute_bound_from_batch"] == 296


PLACE = {"layers": [0], "mlp": "mlp", "gate": "g", "up": "u", "down": "d"}
MIXTURE = {"kind": "experts", "experts": 0, "width": 3, "top_k": 1, "shared_neurons": 0}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ([1], "item 0 of surgery_blocks is 1"),
        ([{"kind": "experts", "layers": [0]}], "no mlp"),
        ([{"kind": "/etc/passwd", **PLACE}], "unknown '/etc/passwd'"),
        ([{**MIXTURE, **PLACE}], "experts of surgery_blocks is 0"),
    ],
)
def test_blocks_that_nobody_wrote_are_refused(block, message, tmp_path):
    """A config.json may come from anywhere."""
    config = json.loads((CONFIGS / "gpt2.json").read_text()) | {"surgery_blocks": block}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(inspect_command, [str(tmp_path)])
    assert isinstance(result.exception, SurgeryError) and message in str(result.exception)


def test_a_folder_with_only_a_config_and_a_plot(tmp_path):
    """The tables fit into 120 columns in a pipe."""
    (tmp_path / "config.json").write_text((CONFIGS / "gpt2.json").read_text())
    plot = ["--plot", str(tmp_path / "weights.png")]
    result = CliRunner().invoke(inspect_command, [str(tmp_path), *plot])
    assert "MLPs hold 46% of the weights" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 120
    assert (tmp_path / "weights.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("columns", [70, 200])
def test_the_report_heeds_columns_in_a_pipe(columns, monkeypatch):
    """No number is cut off where the tables wrap, and a wide line needs no wrapping."""
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = CliRunner().invoke(inspect_command, [str(CONFIGS / "deepseek-v3.json")]).stdout
    assert max(map(len, shown.splitlines())) <= columns and "…" not in shown
    assert "11,274,289,152" in shown
    assert ("MLPs (without attention scores: give --context N)" in shown) == (columns == 200)


def test_a_checkpoint_is_weighed_from_its_headers(tmp_path):
    """The files that transformers writes weigh as much as the config.json beside them says."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    model.save_pretrained(tmp_path)
    shown = [
        CliRunner().invoke(inspect_command, [str(path), "--json"]).stdout
        for path in (tmp_path, tmp_path / "config.json")
    ]
    from_headers, bare = map(json.loads, shown)
    assert from_headers == bare
    assert from_headers["parameters"] == model.num_parameters()


def test_always_open_neurons_are_said(tmp_path: Path) -> None:
    """Of a relufied llama whose last 8 of 48 neurons are."""
    save_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"always_open_neurons": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shown = CliRunner().invoke(inspect_command, [str(tmp_path)])
    assert "d_ff 48, the last 8 always open" in " ".join(shown.output.split())
    found = json.loads(CliRunner().invoke(inspect_command, [str(tmp_path), "--json"]).output)
    assert found["always_open"] == 8
