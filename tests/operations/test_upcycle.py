"""Upcycling keeps the function exactly, in the stock class of the target, for every route.

What could break it: routing weights that do not sum to one, a rope or window that the target's
class assumes otherwise, a scale that the source's class applies and the target's does not, experts
or a head that the loader initialises anew because their names are not the ones it looks for.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    LAYERS,
    LLAMA3,
    ONLY_5,
    UPCYCLED,
    Workshop,
    fake,
    greedy,
    load,
    logits_of,
    read_config,
    save_model,
)
from safetensors.torch import load_file, save_file

from surgery.checkpoint import Checkpoint, make_plan
from surgery.checkpoint.compat import complete
from surgery.families.targets import ROUTES
from surgery.operations.relufy import relufy
from surgery.operations.upcycle import upcycle
from surgery.storage import open_checkpoint, write
from surgery.workflow.record import notes_of


def delta(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def test_every_route_is_tried() -> None:
    tried = {(case.model.split()[0], case.target) for case in (UPCYCLED | ONLY_5).values()}
    assert tried == {(r.source, r.target) for r in ROUTES}


@pytest.mark.parametrize("name", [*UPCYCLED, *ONLY_5])
def test_the_stock_class_computes_the_same(name: str, workshop: Workshop) -> None:
    c = workshop.convert(name)
    model, info = load(c.output)
    assert model.config.model_type == c.case.target
    assert {k: v for k, v in info.items() if v} == {}
    std = c.logits.std().item()
    assert std > 0.3
    assert delta(logits_of(model), c.logits) <= 1e-5 * max(1.0, std)
    assert greedy(model) == c.tokens
    _check_experts(model, c.case.options)


def _check_experts(model: Any, options: dict[str, Any]) -> None:
    """As many experts as asked for, in the layers asked for, as many of them active as asked
    for.
    """
    layers = options.get("layers", range(options.get("dense_first", 0), LAYERS))
    experts = [
        p.shape[0] for n, p in model.named_parameters() if n.endswith("experts.gate_up_proj")
    ]
    assert experts == [options.get("experts", 4)] * len(layers)
    active = {m.top_k for m in model.modules() if isinstance(getattr(m, "top_k", None), int)}
    assert active == {options.get("top_k", 2)}


DEFAULT_ROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "rope_theta": 1e4,
    "rope_scaling": None,
}
HALF_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
# One field of config.json wrong, as the target's class would have it by default or by mistake.
WRONG: dict[str, dict[str, Any]] = {
    "llama, silent config": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_theta": 1e6,
    },
    "llama with llama3 rope": DEFAULT_ROPE,
    "llama with attention biases": {"attention_multiplier": 1.0},
    "mistral": {"sliding_window": None},
    "qwen2": {"norm_topk_prob": False},
    "qwen3": {"norm_topk_prob": False},
    "phi3 with longrope": DEFAULT_ROPE,
    "granite": {"residual_multiplier": 1.0},
    # not norm_topk_prob: the norm after the MLP takes any scale out again
    "olmo2": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 5e5},
    "gemma": {"hidden_act": "silu"},
    "qwen2 into glm4_moe": {"partial_rotary_factor": 0.5, "rope_parameters": HALF_ROTARY},
    "phi3 with partial rotary": {
        "partial_rotary_factor": 1.0,
        "rope_parameters": DEFAULT_ROPE["rope_parameters"],
    },
    "qwen3 into glm4_moe": {"norm_topk_prob": False},
    "qwen3, G=2": {"routed_scaling_factor": 1.0},
    "qwen3 with windows": {"layer_types": ["full_attention"] * LAYERS},
    "granite into granitemoeshared": {"attention_multiplier": 1.0},
    "smollm3": {"no_rope_layers": [1, 1, 1]},
    "ernie4_5": DEFAULT_ROPE,
    "hunyuan_v1_dense": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_theta": 5e5,
    },
    "llama with llama3 rope into gpt_oss": {"swiglu_alpha": 1.702},
    "mistral into gpt_oss": {"layer_types": ["full_attention"] * LAYERS},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_field_of_the_config_shows_in_the_logits(
    name: str, workshop: Workshop, tmp_path: Path
) -> None:
    """Else parity on these models would prove nothing of that field."""
    c = workshop.convert(name)
    wrong = Path(shutil.copytree(c.output, tmp_path / "wrong"))
    (wrong / "config.json").write_text(json.dumps(read_config(c.output) | WRONG[name]))
    model, info = load(wrong)
    assert {k: v for k, v in info.items() if v} == {}  # no name or shape gives it away
    assert delta(logits_of(model), c.logits) > 1e-3


# --- config.json ----------------------------------------------------------------------------------


def written_config(checkpoint: Checkpoint) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(make_plan(checkpoint).small["config.json"])
    return config


def test_both_versions_names_are_written(workshop: Workshop) -> None:
    """What transformers 5 saves has neither rope_theta nor torch_dtype, which is all that 4
    reads.
    """
    c = workshop.convert("llama with llama3 rope")
    before, after = read_config(c.source), read_config(c.output)
    assert {"rope_theta", "rope_scaling", "torch_dtype"}.isdisjoint(before)
    expected = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "rope_theta": 500000.0,
        "rope_parameters": LLAMA3,
        "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"},
        "dtype": "float32",
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "head_dim": 8,
        "num_key_value_heads": 2,
        "sliding_window": None,
    }
    assert {k: after.get(k, "absent") for k in expected} == expected
    assert after["dtype"] == before["dtype"]


def test_qwen3_moe_is_told_what_it_would_assume_otherwise(workshop: Workshop) -> None:
    """norm_topk_prob is False by default; 4 reads num_experts, 5 num_local_experts."""
    expected = {
        "norm_topk_prob": True,
        "num_experts": 4,
        "num_local_experts": 4,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 48,
        "intermediate_size": 48,
        "head_dim": 16,
    }
    for name, dense in (("qwen3", []), ("qwen3, two layers", [1])):
        after = read_config(workshop.convert(name).output)
        assert {k: after.get(k, "absent") for k in (*expected, "mlp_only_layers")} == {
            **expected,
            "mlp_only_layers": dense,
        }


def test_windows_and_ties_are_kept(workshop: Workshop) -> None:
    for name, window, tied in (
        ("mistral", 8, False),
        ("mistral without window", None, False),
        ("phi3 with window, k=E", 8, False),
        ("llama tied, k=1", None, True),
    ):
        config = read_config(workshop.convert(name).output)
        assert (config["sliding_window"], config["tie_word_embeddings"]) == (window, tied)


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        (
            "llama",
            {
                "rope_theta": 1e4,
                "num_key_value_heads": 2,
                "rms_norm_eps": 1e-6,
                "sliding_window": None,
            },
        ),
        (
            "mistral",
            {
                "rope_theta": 1e4,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-6,
                "sliding_window": 4096,
            },
        ),
        (
            "phi3",
            {
                "rope_theta": 1e4,
                "num_key_value_heads": 2,
                "rms_norm_eps": 1e-5,
                "sliding_window": None,
            },
        ),
        (
            "gemma",
            {
                "rope_theta": 1e4,
                "num_key_value_heads": 16,
                "head_dim": 256,
                "hidden_act": "gelu_pytorch_tanh",
            },
        ),
        ("olmo2", {"rope_theta": 1e4, "rms_norm_eps": 1e-5, "pad_token_id": 1}),
    ],
)
def test_a_silent_config_means_what_its_own_class_assumes(
    model_type: str, expected: dict[str, Any]
) -> None:
    """Mixtral assumes rope_theta 1e6, 8 key-value heads, eps 1e-5 and no window; Flex-OLMo
    rope_theta 5e5.
    """
    config = written_config(upcycle(fake(model_type), experts=2))
    assert {k: config.get(k, "absent") for k in expected} == expected
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}
    assert config["dtype"] == config["torch_dtype"] == "float32"


def test_null_key_value_heads_are_as_many_as_heads() -> None:
    assert (
        written_config(upcycle(fake("llama", num_key_value_heads=None), experts=2))[
            "num_key_value_heads"
        ]
        == 2
    )


def test_unknown_fields_are_kept_but_code_is_not_named() -> None:
    """A Mixtral that named the code of the source would run that instead."""
    checkpoint = fake(
        "phi3",
        auto_map={"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
        license={"by": ["me"]},
    )
    result = upcycle(checkpoint.replace(custom_code=True), experts=2)
    config = written_config(result)
    assert (
        config["license"] == {"by": ["me"]} and "auto_map" not in config and not result.custom_code
    )


def test_the_tokenizer_class_is_one_that_4_has(workshop: Workshop) -> None:
    c = workshop.convert("llama in bf16")
    before, after = (
        json.loads((f / "tokenizer_config.json").read_text()) for f in (c.source, c.output)
    )
    assert before["tokenizer_class"] == "TokenizersBackend"
    assert after == before | {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert (c.output / "tokenizer.json").read_bytes() == (c.source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_longrope_has_one_name(name: str) -> None:
    """The first Phi-3 files call it "su"; a Mixtral knows "longrope" alone, and "yarn" as something
    else.
    """
    factors = {"short_factor": [1.0], "long_factor": [2.0]}
    source = fake(
        "phi3",
        rope_theta=1e4,
        rope_scaling={"type": name, **factors},
        original_max_position_embeddings=16,
    )
    config = written_config(upcycle(source, experts=2))
    assert config["rope_scaling"] == {"type": "longrope", **factors}
    assert config["rope_parameters"] == {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    assert config["original_max_position_embeddings"] == 16


@pytest.mark.parametrize(
    "name", [n for n in UPCYCLED if "rope" in n or "yarn" in n or "config" in n]
)
def test_completing_a_config_twice_changes_nothing(name: str, workshop: Workshop) -> None:
    """Upcycling completes it once, the plan once more, and each further conversion again."""
    for config in (
        read_config(workshop.convert(name).source),
        read_config(workshop.convert(name).output),
    ):
        assert complete(complete(config)) == complete(config)


# --- the head -------------------------------------------------------------------------------------

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("kind", "names", "noted"),
    [
        ("tied and equal", {EMBEDDING}, False),
        ("tied and different", {HEAD, EMBEDDING}, True),
        ("untied", {HEAD, EMBEDDING}, False),
    ],
)
def test_a_head_is_left_out_where_it_is_the_embedding(
    kind: str, names: set[str], noted: bool, tmp_path: Path
) -> None:
    """Transformers leaves a tied head out when it saves; other writers do not, and some train it
    apart all the same.
    """
    source, out = tmp_path / "source", tmp_path / "out"
    save_model("llama" if kind == "untied" else "llama tied", source)
    file = source / "model.safetensors"
    tensors = load_file(file)
    if kind != "untied":
        assert HEAD not in tensors
        tensors[HEAD] = (
            tensors[EMBEDDING].clone() if "equal" in kind else tensors[EMBEDDING].flip(0)
        )
        save_file(tensors, file, metadata={"format": "pt"})
    checkpoint = open_checkpoint(source)
    result = upcycle(checkpoint, experts=2)
    assert names == {HEAD, EMBEDDING} & set(result.tensors)
    assert any(HEAD in note and "differs" in note for note in notes_of(result)) == noted
    write(make_plan(result), out, source=checkpoint)
    (expected, _), (model, info) = load(source), load(out)
    assert {k: v for k, v in info.items() if v} == {}
    assert delta(logits_of(model), logits_of(expected)) <= 1e-5
    assert torch.equal(model.lm_head.weight, tensors.get(HEAD, tensors[EMBEDDING]))


# --- the router -----------------------------------------------------------------------------------

ROUTER = "model.layers.{}.mlp.gate.weight"


def test_router_values_are_decided_by_seed_and_name() -> None:
    """Not by the order of drawing, the layers chosen, the dtype of the others or the process."""
    wide = fake("qwen3", hidden=256)
    all_layers = upcycle(wide, experts=64, seed=3).tensors
    one_layer = upcycle(wide, experts=64, seed=3, layers=[2]).tensors
    a, b = all_layers[ROUTER.format(2)].read(), all_layers[ROUTER.format(1)].read()
    assert a.shape == (64, 256) and torch.equal(a, one_layer[ROUTER.format(2)].read())
    assert not torch.equal(a, b)
    assert not torch.equal(a, upcycle(wide, experts=64, seed=4).tensors[ROUTER.format(2)].read())
    larger = upcycle(wide, experts=64, seed=3, router_std=0.06).tensors[ROUTER.format(2)].read()
    torch.testing.assert_close(larger, 3 * a)
    assert a.std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(a.mean().item()) < 0.02 * 5 / 128  # five standard errors of 64 x 256 values


def test_router_values_are_those_of_other_machines() -> None:
    """A generator whose stream changed between versions would make a resumed output a mixture of
    two.
    """
    values = upcycle(fake("qwen3"), experts=2).tensors[ROUTER.format(0)].read()[0, :3]
    assert values.tolist() == pytest.approx([-0.00441332, -0.0013325, 0.02304584], abs=1e-8)


def test_bytes_do_not_depend_on_run_or_shards(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "source")
    checkpoint = open_checkpoint(tmp_path / "source")
    files = []
    for i, size in enumerate((None, None, 20_000)):
        out = tmp_path / str(i)
        write(make_plan(upcycle(checkpoint, experts=4, seed=1), size), out, source=checkpoint)
        files.append(sorted(out.glob("*.safetensors")))
    assert [len(f) for f in files[:2]] == [1, 1] and len(files[2]) > 5
    assert files[0][0].read_bytes() == files[1][0].read_bytes()
    whole, parts = load_file(files[0][0]), {n: t for f in files[2] for n, t in load_file(f).items()}
    assert whole.keys() == parts.keys() and all(torch.equal(whole[n], parts[n]) for n in whole)


# --- what training starts from --------------------------------------------------------------------


def test_bf16_logits_are_as_near_as_rounding_lets_them(workshop: Workshop) -> None:
    """Identical experts and weights that sum to one: only the order of bf16 sums differs (8 bits of
    mantissa).
    """
    c = workshop.convert("llama in bf16")
    (source, _), (model, _) = load(c.source, torch.bfloat16), load(c.output, torch.bfloat16)
    a, b = logits_of(source).float(), logits_of(model).float()
    rounding = delta(a, c.logits)  # of the source itself, against fp32
    assert 0 < rounding < 0.2 * c.logits.std().item()
    assert delta(a, b) <= rounding / 4


def test_relufy_and_upcycle_commute(tmp_path: Path) -> None:
    """One pass over the disk for both, whichever comes first, and the same bytes."""
    save_model("llama", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    plans = [
        make_plan(upcycle(relufy(checkpoint, repair="none"), experts=2)),
        make_plan(relufy(upcycle(checkpoint, experts=2), repair="none")),
    ]
    assert plans[0].fingerprint == plans[1].fingerprint
    assert json.loads(plans[0].small["config.json"])["hidden_act"] == "relu"


def test_the_step_says_what_was_done() -> None:
    step = upcycle(fake("qwen3"), experts=4, top_k=1, layers=[2, 0], seed=7).steps[-1]
    assert (step.exact, step.layers) == (True, (0, 2))
    assert step.parameters == {
        "experts": 4,
        "top_k": 1,
        "granularity": 1,
        "shared": 0,
        "layers": [0, 2],
        "target": "qwen3_moe",
        "drop": 0.0,
        "noise": 0.0,
        "expert_models": [],
        "attention": "base",
        "router": "normal",
        "router_std": 0.02,
        "seed": 7,
    }
    assert upcycle(fake("qwen3"), **step.parameters).steps[-1] == dataclasses.replace(
        step, advice=step.advice[1:]
    )
    assert "never gets a gradient" in step.notes[0]
