"""Families that no table knows are found by running a small model, and never taken wrongly.

What could break it: a gate taken for up, an activation that only looks the same on small numbers,
something that a module does besides its MLP, layers that compute different things, a key of the
config that changes nothing, a cache that is damaged or of another transformers.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import MODELS, config_of
from torch import nn

from surgery.errors import SurgeryError
from surgery.families import Family, find, remembered
from surgery.families.dense import DENSE
from surgery.families.discovery import discover
from surgery.families.probe import prove, trace
from surgery.families.shrink import shrink

# Facts that the tables do not state, or state only where an operation would need them.
UNSTATED = (
    "defaults",
    "body",
    "discovered",
    "embedding",
    "layers_on_disk",
    "pre_norms",
    "bias_key",
)


@pytest.mark.parametrize("name", [n for n in MODELS if n in DENSE])
def test_discovery_gives_each_row_by_itself(name: str) -> None:
    found, row = discover(config_of(name).to_dict()), DENSE[name]
    for field in fields(Family):
        if field.name not in UNSTATED:
            assert getattr(found, field.name) == getattr(row, field.name), field.name
    if row.pre_norms:
        assert found.pre_norms == row.pre_norms
    assert row.bias_key in (None, found.bias_key)


SOME: dict[str, dict[str, Any]] = {
    "olmo3": {"post_norm": "post_feedforward_layernorm", "pre_norms": (), "activation": "silu"},
    "lfm2": {
        "mlp": "feed_forward",
        "gate": "feed_forward.w1",
        "up": "feed_forward.w3",
        "down": "feed_forward.w2",
        "activation_key": "",
    },
    "glm4": {"up": "mlp.gate_up_proj", "fused_gate_up": True, "activation_key": "hidden_act"},
    "arcee": {"gate": None, "activation": "relu2"},
    "starcoder2": {"gate": None, "up": "mlp.c_fc", "bias_key": "use_bias"},
    "exaone": {
        "layers": "layers",
        "layers_on_disk": "transformer.h",
        "on_disk": {
            "mlp.gate_proj": "mlp.c_fc_0",
            "mlp.up_proj": "mlp.c_fc_1",
            "mlp.down_proj": "mlp.c_proj",
        },
    },
    "bert": {"loose": ("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense")},
    "apertus": {"own_activation": "mlp.act_fn", "activation": "XIELUActivation"},
    "qwen3_next": {
        "experts": "mlp.experts",
        "router": "mlp.gate",
        "shared": "mlp.shared_expert",
        "activation_key": "hidden_act",
    },
}


@pytest.mark.parametrize("kind", SOME)
def test_what_is_found_of_types_in_no_table(kind: str) -> None:
    found = discover(transformers.CONFIG_MAPPING[kind]().to_dict())
    assert {name: getattr(found, name) for name in SOME[kind]} == SOME[kind]


def test_a_class_may_name_a_base_that_it_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers are found in the body that it has, as the code of the blocks finds them."""
    monkeypatch.setattr(transformers.Olmo3ForCausalLM, "base_model_prefix", "language_model")
    found = discover(transformers.Olmo3Config().to_dict())
    assert (found.body, found.layers) == ("model", "layers")


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("mamba", "no MLP of mamba is proved"),
        ("bitnet", "no MLP of bitnet is proved"),  # a norm stands before down_proj
        ("longcat_flash", "layer 0 of longcat_flash has 2 MLPs"),
        ("zamba", "layers of zamba share one MLP"),
        ("hrm_text", "several stacks of layers"),
    ],
)
def test_what_is_not_proved_is_refused(kind: str, seen: str) -> None:
    with pytest.raises(SurgeryError, match=seen):
        discover(transformers.CONFIG_MAPPING[kind]().to_dict())


def test_multipliers_that_change_the_formula_are_refused() -> None:
    config = transformers.CONFIG_MAPPING["falcon_h1"]().to_dict()
    assert discover(config).gate == "feed_forward.gate_proj"
    with pytest.raises(SurgeryError, match="no MLP of falcon_h1 is proved"):
        discover(config | {"mlp_multipliers": [0.5, 2.0]})


class Mlp(nn.Module):
    """An MLP of three matrices with a twist."""

    def __init__(self, twist: str) -> None:
        super().__init__()
        self.twist = twist
        # Named against their roles: the shape and the numbers decide.
        self.gate_proj = nn.Linear(16, 8, bias=False)
        self.up_proj = nn.Linear(8, 16, bias=False)
        self.down_proj = nn.Linear(8, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.twist == "scaled input":
            x = 2 * x
        g, u = nn.functional.silu(self.up_proj(x)), self.down_proj(x)
        h = g.clamp(max=7) * u if self.twist == "clamp" else g * u
        y: torch.Tensor = self.gate_proj(h)
        return {"residual": y + x, "scale": 0.5 * y}.get(self.twist, y)


@pytest.mark.parametrize(
    ("twist", "extra"),
    [
        ("", ""),
        ("residual", "mlp changes what mlp.gate_proj gives, or adds to it"),
        ("scale", "mlp changes what mlp.gate_proj gives, or adds to it"),
        ("scaled input", "mlp changes its input before the matrices read it"),
        ("clamp", "mlp differs from the formula by"),
    ],
)
def test_roles_are_found_by_numbers_and_twists_are_seen(twist: str, extra: str) -> None:
    torch.manual_seed(0)
    layer = nn.ModuleDict({"mlp": Mlp(twist)}).double()
    x = torch.randn(5, 8, dtype=torch.float64)
    model = nn.ModuleDict({"layer": layer})
    (proof,) = prove(layer, "layer", trace(model, lambda: layer["mlp"](x)), ())
    assert (proof.gate, proof.up, proof.down) == ("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj")
    assert (
        proof.activation == "silu"
        and proof.extra.startswith(extra)
        and (not extra) == (not proof.extra)
    )


def test_a_large_config_costs_seconds() -> None:
    """The small model has the same switches; no matrix of the large one is ever made."""
    config = transformers.CONFIG_MAPPING["llama"](
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, vocab_size=128256
    ).to_dict()
    small = shrink(config)
    assert max(v for k, v in small.items() if k.endswith("_size")) <= 96
    assert small["num_hidden_layers"] <= 10 and small["hidden_act"] == "silu"


@pytest.mark.parametrize(
    ("stated", "kept"),
    [
        # A class may want its sizes to agree, or to be 1.
        ({"num_attention_heads": 64, "num_key_value_heads": 64}, {"num_key_value_heads": 4}),
        ({"num_attention_heads": 64, "num_key_value_heads": 8}, {"num_key_value_heads": 2}),
        ({"num_experts_per_tok": 1}, {"num_experts_per_tok": 1}),
        ({"qk_rope_head_dim": 64, "head_dim": 512}, {"qk_rope_head_dim": 8, "head_dim": 64}),
        ({"intermediate_size": [64, 128]}, {"intermediate_size": [56, 56]}),
        ({"vision_feature_layer": [24, 18]}, {"vision_feature_layer": [0, 1]}),
        ({"vision_feature_layer": -2}, {"vision_feature_layer": -2}),
        ({"vision_config": {"num_layers": 24}}, {"vision_config": {"num_layers": 2}}),
        (
            {"per_layer_config": {"03": {"head_dim": 512}}},
            {"per_layer_config": {"03": {"head_dim": 8}}},
        ),
    ],
)
def test_small_configs_keep_what_classes_check(
    stated: dict[str, Any], kept: dict[str, Any]
) -> None:
    small = shrink({"num_hidden_layers": 32, **stated})
    assert {name: small[name] for name in kept} == kept


def test_a_model_that_stays_large_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some towers multiply sizes of which shrinking knows nothing."""
    monkeypatch.setattr("surgery.families.discovery._MOST_PARAMETERS", 1000)
    with pytest.raises(SurgeryError, match=r"a small olmo3 has .* parameters here"):
        discover(transformers.CONFIG_MAPPING["olmo3"]().to_dict())


def test_what_was_found_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    remembered._discovered.cache_clear()
    config = transformers.CONFIG_MAPPING["olmo3"]().to_dict()
    found = find(config)
    (file,) = (tmp_path / "surgery" / "families").glob("*.json")
    remembered._discovered.cache_clear()
    monkeypatch.setattr("surgery.families.discovery.discover", lambda config: None)
    assert find(config) == found and find(config | {"transformers_version": "4"}) == found
    whole = file.read_bytes()
    wrong = {"gate": 5, "loose": "up", "on_disk": {"up": 1}, "transposed": "no", "layers": None}
    typed = (json.dumps(json.loads(whole) | {key: value}).encode() for key, value in wrong.items())
    broken = (b"", b"{", b"[]", b'{"family": 3}', whole.replace(b"gate", b"gat"))
    for damaged in (*broken, *typed):
        file.write_bytes(damaged)
        remembered._discovered.cache_clear()
        monkeypatch.setattr(
            "surgery.families.discovery.discover", lambda config: replace(found, activation="again")
        )
        assert find(config).activation == "again"
    remembered._discovered.cache_clear()
