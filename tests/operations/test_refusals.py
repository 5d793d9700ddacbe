"""What cannot be converted is refused before any weight is read, with the value that was seen and
what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from models import fake

from surgery.checkpoint import Checkpoint, constant
from surgery.errors import SurgeryError, UsageError
from surgery.families.moe import MOE
from surgery.operations.carve import carve
from surgery.operations.cast import cast
from surgery.operations.memory import memory
from surgery.operations.relufy import relufy
from surgery.operations.splinify import splinify
from surgery.operations.upcycle import upcycle

LLAMA = fake("llama")
AWQ = {"quantization_config": {"quant_method": "awq"}}


def with_tensor(checkpoint: Checkpoint, name: str, dtype: str = "F32") -> Checkpoint:
    return checkpoint.replace(tensors={**checkpoint.tensors, name: constant(0.0, (12,), dtype)})


def with_biases(checkpoint: Checkpoint, part: str) -> Checkpoint:
    for i in range(3):
        checkpoint = with_tensor(checkpoint, f"model.layers.{i}.mlp.{part}.bias")
    return checkpoint


def refusal(operation: Callable[[], Checkpoint]) -> SurgeryError:
    with pytest.raises(SurgeryError) as caught:
        operation()
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"experts": 0, "top_k": 0}, "0 experts with top-k 0"),
        ({"experts": -8}, "-8 experts"),
        ({"top_k": 0}, "top-k 0"),
        ({"experts": 4, "top_k": 5}, "top-k 5 of 4 experts"),
        ({"experts": 1}, "top-k 2 of 1 experts"),
        ({"router_std": -0.02}, "-0.02"),
        ({"layers": [1, 7]}, "layers [1, 7] of a model with 3"),
        ({"layers": [-1]}, "layers [-1]"),
        ({"layers": []}, "no layer"),
        ({"target": "mixtal"}, "'mixtal'"),
    ],
)
def test_impossible_options_are_wrong_usage(options: dict[str, Any], seen: str) -> None:
    error = refusal(lambda: upcycle(LLAMA, **options))
    assert seen in error.message and isinstance(error, UsageError)


@pytest.mark.parametrize(
    ("checkpoint", "options", "seen", "hint"),
    [
        (
            LLAMA,
            {"layers": [0, 1], "target": "mixtral"},
            "mixtral has experts in every layer",
            "leave --layers out",
        ),
        (LLAMA, {"target": "qwen3_moe"}, "qwen3_moe cannot hold this llama", "--target auto"),
        (fake("opt"), {"target": "mixtral"}, "mixtral cannot hold this opt", "--target auto"),
        (fake("llama", mlp_bias=True), {"target": "mixtral"}, "mlp_bias is True", "--target auto"),
        (
            fake("llama", attention_bias=True),
            {"target": "mixtral"},
            "attention_bias is True",
            "--target auto",
        ),
        (fake("granite", head_dim=16), {"target": "granitemoe"}, "head_dim is 16", "--target auto"),
        (
            fake("qwen3", use_sliding_window=True, sliding_window=4),
            {"target": "qwen3_moe"},
            "use_sliding_window is True",
            "--target auto",
        ),
        (
            fake("phi3", partial_rotary_factor=0.75),
            {"target": "mixtral"},
            "partial_rotary_factor is 0.75",
            "--target auto",
        ),
        (
            fake(
                "phi3",
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                },
            ),
            {"target": "mixtral"},
            "partial_rotary_factor is 0.5",
            "--target auto",
        ),
        (with_biases(LLAMA, "up_proj"), {}, "layer 0 has biases", "--target surgery"),
        (with_biases(LLAMA, "gate_proj"), {}, "layer 0 has biases", "--target surgery"),
        (upcycle(LLAMA), {}, "this model is a mixture already: mixtral has experts", "dense"),
        (
            upcycle(fake("granite")),
            {},
            "this model is a mixture already: granitemoe has experts",
            "dense",
        ),
        (
            upcycle(fake("qwen3"), layers=[0]),
            {},
            "this model is a mixture already: qwen3_moe has experts",
            "dense",
        ),
    ],
)
def test_what_no_native_architecture_holds(
    checkpoint: Checkpoint, options: dict[str, Any], seen: str, hint: str
) -> None:
    error = refusal(lambda: upcycle(checkpoint, **options))
    assert seen in error.message and hint in error.hint


@pytest.mark.parametrize(
    ("checkpoint", "options", "why"),
    [
        (fake("gemma2"), {}, "no native mixture-of-experts architecture can hold a gemma2 exactly"),
        (fake("gpt2"), {}, "can hold a gpt2 exactly"),
        (LLAMA, {"layers": [0, 1]}, "mixtral has experts in every layer"),
        (fake("llama", mlp_bias=True), {}, "mixtral: mlp_bias is True"),
        (fake("llama", attention_bias=True, head_dim=16), {}, "granitemoe: head_dim is 16"),
        (fake("granite", head_dim=16), {}, "granitemoe: head_dim is 16"),
        (
            fake("qwen2", use_sliding_window=True, sliding_window=4),
            {},
            "qwen2_moe: use_sliding_window is True",
        ),
        (
            fake("gemma", use_bidirectional_attention=True),
            {},
            "mixtral: use_bidirectional_attention is True",
        ),
        (
            fake("hunyuan_v1_dense"),
            {"granularity": 4, "shared": 2},
            "hunyuan_v1_moe has 1 shared expert",
        ),
        (fake("smollm3"), {"granularity": 2}, "llama4_text has one shared expert"),
    ],
)
def test_what_travels_because_of_that(
    checkpoint: Checkpoint, options: dict[str, Any], why: str
) -> None:
    """With the reason, and with the code."""
    result = upcycle(checkpoint, **options)
    step = result.steps[-1]
    assert step.parameters["target"] == "surgery" and step.exact and result.custom_code
    assert why in step.notes[0] and step.notes[0].endswith(", so it becomes a custom-code block")
    assert result.config["model_type"] == f"surgery_{checkpoint.config['model_type']}"
    assert {f.name for f in result.files} == {
        "modeling_surgery.py",
        "experts_mlp.py",
        "sparse_kernel.py",
        "sparse_mlp.py",
    }


@pytest.mark.parametrize("operation", [upcycle, relufy])
def test_unknown_families(operation: Any) -> None:
    error = refusal(lambda: operation(LLAMA.replace(config={**LLAMA.config, "model_type": "lama"})))
    assert "'lama'" in error.message and "llama" in error.hint
    error = refusal(
        lambda: operation(
            LLAMA.replace(tensors={"model.embed_tokens.weight": constant(0.0, (4, 4), "F32")})
        )
    )
    assert "no tensor of a llama layer among 1" in error.message


@pytest.mark.parametrize(
    ("checkpoint", "activation", "seen"),
    [
        (fake("opt"), "relu", "activation of this opt is relu already"),
        (fake("llama", hidden_act="relu"), "relu", "activation of this llama is relu already"),
        (fake("nemotron"), "relu2", "activation of this nemotron is relu2 already"),
        (LLAMA, "gelu", "'gelu'"),
    ],
)
def test_an_activation_that_changes_nothing(
    checkpoint: Checkpoint, activation: str, seen: str
) -> None:
    assert seen in refusal(lambda: relufy(checkpoint, activation=activation)).message


def test_an_activation_that_no_field_decides() -> None:
    error = refusal(lambda: relufy(fake("gpt_oss"), repair="none"))
    assert "gpt_oss is fixed in its code" in error.message


def test_a_bypass_beside_the_experts_of_a_mixture() -> None:
    """No dense MLP is looked for in it."""
    error = refusal(lambda: relufy(upcycle(LLAMA), repair="none", bypass=4))
    assert error.message == "a bypass without a repair that fits it"


def test_an_unknown_dtype() -> None:
    error = refusal(lambda: cast(LLAMA, "bfloat8"))
    assert "'bfloat8'" in error.message and "bf16" in error.hint


@pytest.mark.parametrize("operation", [upcycle, relufy, carve, memory, splinify])
@pytest.mark.parametrize("family", sorted(MOE))
def test_a_mixture_is_called_one(operation: Any, family: str) -> None:
    """Never "download it again" for the MLPs that it does not have."""
    experts = {f"model.layers.{i}.{MOE[family].experts}.weight": (4, 8, 8) for i in range(2)}
    tensors = {n: constant(0.0, shape, "F32") for n, shape in experts.items()}
    embedding = MOE[family].embedding or "embed_tokens.weight"
    tensors[f"model.{embedding}"] = constant(0.0, (8, 8), "F32")
    config = {"model_type": family, "num_hidden_layers": 2, "hidden_size": 8}
    error = refusal(lambda: operation(LLAMA.replace(config=config, tensors=tensors)))
    assert error.message.startswith("this model is a mixture already")
    assert "dense model" in error.hint and "download" not in error.hint
