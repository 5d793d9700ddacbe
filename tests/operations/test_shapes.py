"""Finer experts, shared experts, the choice of the target, and experts that differ from the start.

That finer shapes keep the function is in test_upcycle.py. What could break them here: a copy of
which a token gets a part alone, in the dtype that the model is loaded in; weights that are read
whole to cut them; neurons that are drawn anew in one matrix and kept in another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compared import verify
from models import (
    FINE,
    LAYERS,
    ONLY_5,
    UPCYCLED,
    VOCAB,
    Workshop,
    fake,
    load,
    logits_of,
    save_model,
)
from safetensors.torch import load_file

from surgery.checkpoint import Checkpoint, Step, make_plan
from surgery.errors import SurgeryError, UsageError
from surgery.families.targets import TARGETS
from surgery.operations.upcycle import upcycle
from surgery.proof.copies import is_torn, torn_copies
from surgery.storage import open_checkpoint, write

GATE, UP, DOWN = (f"model.layers.{{}}.mlp.{p}_proj.weight" for p in ("gate", "up", "down"))
EXPERT = (
    "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"  # of a mixtral: w1 gate, w3 up, w2 down
)


def refusal(checkpoint: Checkpoint, **options: Any) -> SurgeryError:
    with pytest.raises(SurgeryError) as caught:
        upcycle(checkpoint, **options)
    assert caught.value.hint
    return caught.value


def shards(step: Step) -> int:
    p = step.parameters
    return int(p["granularity"] - p["shared"]) if p["granularity"] > 1 else 1


# --- whole copies ---------------------------------------------------------------------------------


def many_ids() -> torch.Tensor:
    return torch.randint(3, VOCAB - 3, (16, 96), generator=torch.Generator().manual_seed(2))


GROUPS = [n for n, c in FINE.items() if TARGETS[c.target].groups]


@pytest.mark.parametrize("name", GROUPS)
def test_groups_are_never_torn(name: str, workshop: Workshop) -> None:
    """In bf16, where the logits of copies are often equal."""
    c = workshop.convert(name)
    step = c.checkpoint.steps[-1]
    found = torn_copies(
        open_checkpoint(c.output), many_ids(), shards=shards(step), dtype=torch.bfloat16
    )
    assert (found.torn, found.total) == (0, 16 * 96 * len(step.layers))


def test_experts_chosen_one_by_one_are_torn_in_bf16(tmp_path: Path) -> None:
    """Else the test above would prove nothing; and the step does not claim to be exact."""
    save_model("llama", tmp_path, dtype=torch.bfloat16)
    plain = upcycle(open_checkpoint(tmp_path), target="mixtral", granularity=3, router_std=0.3)
    assert torn_copies(plain, many_ids(), shards=3, dtype=torch.bfloat16).torn > 0
    assert torn_copies(plain, many_ids(), shards=3, dtype=torch.float32).torn == 0
    assert not plain.steps[-1].exact and "--target glm4_moe" in plain.steps[-1].advice[0]


def test_torn() -> None:
    chosen = torch.tensor([[0, 1, 2, 3], [6, 3, 7, 2], [0, 2, 4, 6], [0, 1, 2, 4]])
    assert is_torn(chosen, 2).tolist() == [False, False, True, True]


@pytest.mark.parametrize("name", UPCYCLED)
def test_every_shape_claims_to_be_exact(name: str, workshop: Workshop) -> None:
    assert workshop.convert(name).checkpoint.exact


def test_a_zero_router_is_exact_where_groups_are_chosen() -> None:
    """One that ties all experts: whole copies by luck alone where they are chosen one by one."""
    options = {"granularity": 2, "experts": 8, "top_k": 4, "router": "zero"}
    exact = {t: upcycle(fake("llama"), target=t, **options).exact for t in ("mixtral", "glm4_moe")}
    assert exact == {"mixtral": False, "glm4_moe": True}


# --- cutting --------------------------------------------------------------------------------------


def test_expert_e_is_part_j_of_copy_c(workshop: Workshop) -> None:
    """e = c·G + j: gate and up are rows, down columns, and the router's rows of a copy are
    equal.
    """
    c = workshop.convert("llama, G=6")
    source, made = (
        load_file(c.source / "model.safetensors"),
        load_file(c.output / "model.safetensors"),
    )
    for e in range(24):
        rows = slice(e % 6 * 8, e % 6 * 8 + 8)
        for part, full in (
            ("gate", source[GATE.format(1)][rows]),
            ("up", source[UP.format(1)][rows]),
            ("down", source[DOWN.format(1)][:, rows]),
        ):
            assert torch.equal(made[f"model.layers.1.mlp.experts.{e}.{part}_proj.weight"], full)
    router = made["model.layers.1.mlp.gate.weight"].view(4, 6, 32)
    assert (
        torch.equal(router, router[:, :1].expand(4, 6, 32)) and len(router[:, 0].unique(dim=0)) == 4
    )


def test_the_shared_expert_takes_the_first_parts(workshop: Workshop) -> None:
    c = workshop.convert("qwen3 into dots1, G=6, S=2")
    source, made = (
        load_file(c.source / "model.safetensors"),
        load_file(c.output / "model.safetensors"),
    )
    assert torch.equal(
        made["model.layers.0.mlp.shared_experts.down_proj.weight"], source[DOWN.format(0)][:, :16]
    )
    for e, part in ((0, 2), (3, 5), (6, 4)):
        expected = source[UP.format(0)][part * 8 : part * 8 + 8]
        assert torch.equal(made[f"model.layers.0.mlp.experts.{e}.up_proj.weight"], expected)


def test_rows_are_copied_by_the_kernel_and_columns_one_tensor_at_a_time(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    source = open_checkpoint(tmp_path)
    fine = upcycle(source, granularity=4, experts=64, top_k=8)
    for name, tensor in fine.tensors.items():
        if ".experts." in name:
            assert (tensor.compute is None) == (".down_proj." not in name)
    assert make_plan(fine).peak_memory < 4 * source.tensors[DOWN.format(0)].nbytes


def test_three_parts_keep_their_factor_in_fp32(tmp_path: Path) -> None:
    """Times 3 in bf16 would be rounded; times 2 is exact."""
    save_model("llama", tmp_path, dtype=torch.bfloat16)
    source = open_checkpoint(tmp_path)
    for granularity, dtype in ((3, "F32"), (2, "BF16")):
        experts = 2 * granularity
        made = upcycle(source, granularity=granularity, experts=experts, top_k=experts).tensors
        down = made[EXPERT.format(0, 0, "w2")]
        assert down.dtype == dtype
        width = 48 // granularity
        assert torch.equal(
            down.read().float(),
            granularity * source.tensors[DOWN.format(0)].read()[:, :width].float(),
        )
        assert made[EXPERT.format(0, 0, "w1")].dtype == "BF16"


def test_a_fused_mlp_that_stays_dense_is_unfused(tmp_path: Path) -> None:
    """GLM-4's dense layers have no gate_up_proj."""
    source, out = tmp_path / "source", tmp_path / "out"
    save_model("phi3", source)
    checkpoint = open_checkpoint(source)
    fine = upcycle(checkpoint, granularity=2, dense_first=2, experts=8, top_k=4)
    write(make_plan(fine), out, source=checkpoint)
    (expected, _), (model, info) = load(source), load(out)
    assert {k: v for k, v in info.items() if v} == {}
    assert (logits_of(model) - logits_of(expected)).abs().max().item() <= 1e-5


def test_copies_by_default() -> None:
    """Eight copies and two of them, however finely they are cut."""
    for options, experts, top_k in (
        ({}, 8, 2),
        ({"granularity": 2}, 16, 4),
        ({"granularity": 4, "shared": 1}, 24, 6),
    ):
        p = upcycle(fake("qwen3"), **options).steps[-1].parameters
        assert (p["experts"], p["top_k"]) == (experts, top_k)


def test_a_width_that_grouped_kernels_refuse_is_said() -> None:
    notes = upcycle(fake("llama", width=48), granularity=4).steps[-1].notes
    assert any("12 neurons" in n and "multiples of 8" in n for n in notes)
    assert not any(
        "multiples of 8" in n
        for n in upcycle(fake("llama", width=48), granularity=6).steps[-1].notes
    )


# --- the target -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options", "target", "said"),
    [
        ("llama", {}, "mixtral", "--target granitemoe or glm4_moe could too"),
        ("llama", {"granularity": 2}, "glm4_moe", "--target mixtral or granitemoe could too"),
        ("qwen3", {"dense_first": 1}, "qwen3_moe", "--target glm4_moe or dots1 could too"),
        ("qwen3", {"shared": 1}, "glm4_moe", "dots1 could too (qwen3_moe has no shared expert)"),
        ("qwen3", {"layers": [1]}, "qwen3_moe", "dots1 can keep only the first layers dense"),
        ("olmo2", {}, "flex_olmo", "flex_olmo holds this olmo2 exactly in this shape"),
        ("phi3", {}, "glm4_moe", "mixtral cannot: partial_rotary_factor is 0.5"),
    ],
)
def test_auto_says_why(model: str, options: dict[str, Any], target: str, said: str) -> None:
    part = {"partial_rotary_factor": 0.5} if model == "phi3" else {}
    step = upcycle(fake(model, **part), **options).steps[-1]
    assert step.parameters["target"] == target and said in step.advice[0]
    named = upcycle(fake(model, **part), target=target, **options).steps[-1]
    assert (
        named.notes == step.notes
        and named.advice == step.advice[1:]
        and named.parameters == step.parameters
    )


def test_gpt_oss_is_for_transformers_5_alone_and_says_so(workshop: Workshop) -> None:
    assert "gpt_oss" not in upcycle(fake("llama")).steps[-1].advice[0]
    for name in ONLY_5:
        assert any("transformers 5" in n for n in workshop.convert(name).checkpoint.steps[-1].notes)


def test_transformers_4_computes_another_function_of_gpt_oss(
    workshop: Workshop, run_transformers_4: Any
) -> None:
    """Without a word, so that the note is needed."""
    job = {
        n: {"folder": str(workshop.convert(n).output), "expected": str(workshop.expected(n))}
        for n in ONLY_5
    }
    for found in run_transformers_4({"models": job})["models"].values():
        assert found["keys"] == {} and found["delta"] > 1e-2


VERIFIED = (
    "smollm3, one layer",
    "ernie4_5, shared, inner layer",
    "hunyuan_v1_dense, nothing shared",
    "granite, G=4, S=3",
    "qwen3 with windows, G=3",
    "qwen2 with windows into gpt_oss",
    "phi3 with partial rotary, G=3",
)


@pytest.mark.parametrize("name", VERIFIED)
def test_each_kind_of_block_is_verified_layer_by_layer(name: str, workshop: Workshop) -> None:
    """The walk finds layers, routers and MLPs of every target."""
    c = workshop.convert(name)
    source, output = open_checkpoint(c.source), open_checkpoint(c.output)
    found = verify(source, output, exact=True, layers=c.checkpoint.steps[-1].layers, tokens=256)
    control = next(r for r in found.rows if r.check.startswith("control"))
    assert found.passed and isinstance(control.value, float) and control.value > 0.1


@pytest.mark.parametrize(
    ("model", "options", "seen", "hint"),
    [
        ("llama", {"granularity": 5}, "granularity 5 does not divide 12 neurons", "4 does"),
        ("llama", {"granularity": 0}, "0 shared of 0 parts", "at least"),
        ("llama", {"granularity": 4, "shared": 4}, "4 shared of 4 parts", "at least"),
        ("llama", {"shared": 2}, "2 shared of 1 parts", "--granularity"),
        (
            "llama",
            {"granularity": 4, "experts": 8, "top_k": 2},
            "top-k 2 is no multiple of the 4 routed",
            "--experts 32 --top-k 8",
        ),
        (
            "llama",
            {"granularity": 4, "experts": 6, "top_k": 4},
            "experts 6 is no multiple of the 4",
            "--top-k 8",
        ),
        ("llama", {"granularity": 2, "top_k": 18}, "top-k 18 of 16 experts", "at most"),
        ("llama", {"dense_first": 3}, "3 dense layers of 3", "1 to 2"),
        ("llama", {"dense_first": 1, "layers": [1]}, "both --layers and --dense-first", "one"),
        ("llama", {"drop": 1.5}, "drop 1.5", "0 to 1"),
        ("llama", {"noise": -1.0}, "deviation -1.0", "0 or more"),
        ("llama", {"router": "ones"}, "'ones'", "normal, zero, centroids, class-means"),
        ("llama", {"router": "class-means"}, "0 texts for 0 models", "--expert-text FILE"),
        ("llama", {"expert_texts": ["a"]}, "a router that begins normal", "--router class-means"),
        ("llama", {"attention": "mean"}, "'mean'", "base, average"),
        ("llama", {"attention": "average"}, "no models", "--expert"),
        ("llama", {"target": "deepseek_v3"}, "compressed keys and values", "glm4_moe"),
    ],
)
def test_impossible_shapes_are_wrong_usage(
    model: str, options: dict[str, Any], seen: str, hint: str
) -> None:
    error = refusal(fake(model), **options)
    assert isinstance(error, UsageError) and seen in error.message and hint in error.hint


@pytest.mark.parametrize(
    ("model", "options", "seen", "hint"),
    [
        ("llama", {"shared": 1, "target": "mixtral"}, "mixtral has no shared expert", "--target"),
        (
            "olmo2",
            {"shared": 1},
            "flex_olmo has no shared expert); the custom-code block can share a part of the MLP",
            "another shape",
        ),
        (
            "olmo2",
            {"shared": 1, "target": "surgery"},
            "the custom-code block can share a part of the MLP",
            "another shape",
        ),
        (
            "smollm3",
            {"granularity": 2, "target": "llama4_text"},
            "llama4_text has one shared expert",
            "another shape",
        ),
        (
            "smollm3",
            {"shared": 0, "target": "llama4_text"},
            "llama4_text has one shared expert",
            "--target auto",
        ),
        (
            "hunyuan_v1_dense",
            {"granularity": 4, "shared": 2, "target": "hunyuan_v1_moe"},
            "hunyuan_v1_moe has 1 shared expert",
            "another shape",
        ),
        (
            "qwen2",
            {"target": "glm4_moe", "layers": [0, 1]},
            "glm4_moe can keep only the first layers dense",
            "--layers",
        ),
        (
            "ernie4_5",
            {"layers": [0, 2], "target": "ernie4_5_moe"},
            "ernie4_5_moe can keep only the first and the last",
            "--layers",
        ),
        (
            "qwen3",
            {"target": "dots1", "experts": 1, "top_k": 1},
            "dots1 needs at least two experts",
            "another shape",
        ),
    ],
)
def test_shapes_that_no_target_has(
    model: str, options: dict[str, Any], seen: str, hint: str
) -> None:
    error = refusal(fake(model), **options)
    assert seen in error.message and hint in error.hint and "\n" not in error.message


def test_blocks_of_our_own_code() -> None:
    """Thresholds of a sparse block would be lost without a word."""
    operated = fake("llama").replace(config={**fake("llama").config, "model_type": "surgery_llama"})
    error = refusal(operated)
    assert "surgery_llama has blocks" in error.message and "llama that it was made of" in error.hint


# --- experts that differ --------------------------------------------------------------------------


def written(checkpoint: Checkpoint, layer: int, expert: int) -> list[torch.Tensor]:
    """Gate, up and down [F, H] of an expert of a mixtral."""
    gate, up, down = (
        checkpoint.tensors[EXPERT.format(layer, expert, w)].read().float()
        for w in ("w1", "w3", "w2")
    )
    return [gate, up, down.T]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("wide")
    save_model("llama", folder, hidden_size=64, intermediate_size=256, num_hidden_layers=1)
    checkpoint = open_checkpoint(folder)
    # A mean that is not 0.
    shifted = checkpoint.tensors[UP.format(0)].map("plus 1", lambda t: t + 1.0)
    return checkpoint.replace(tensors={**checkpoint.tensors, UP.format(0): shifted})


def test_dropped_neurons_are_the_same_in_gate_up_and_down(wide: Checkpoint) -> None:
    made = upcycle(wide, experts=3, drop=0.5, seed=1)
    source = [wide.tensors[n.format(0)].read() for n in (GATE, UP, DOWN)]
    source[2] = source[2].T
    chosen = []
    for e in range(3):
        changed = [
            (new != old).any(1) for new, old in zip(written(made, 0, e), source, strict=True)
        ]
        assert torch.equal(changed[0], changed[1]) and torch.equal(changed[0], changed[2])
        assert int(changed[0].sum()) == 128
        chosen.append(changed[0])
    assert not torch.equal(chosen[0], chosen[1]) and not torch.equal(chosen[1], chosen[2])
    assert abs(int((chosen[0] & chosen[1]).sum()) - 64) < 20  # independent draws
    assert made.steps[-1].exact is False and any(
        "differ from the start" in n for n in made.steps[-1].notes
    )


def test_dropped_neurons_have_the_statistics_of_what_they_replace(wide: Checkpoint) -> None:
    """Mean and standard deviation per matrix: 128 x 64 values, so a hundredth of a deviation is the
    standard error.
    """
    made = upcycle(wide, experts=2, drop=0.5)
    for new, name in zip(written(made, 0, 0), (GATE, UP, DOWN), strict=True):
        old = wide.tensors[name.format(0)].read()
        old = old.T if name == DOWN else old
        rows = (new != old).any(1)
        assert new[rows].std().item() == pytest.approx(old[rows].std().item(), rel=0.05)
        assert new[rows].mean().item() == pytest.approx(
            old[rows].mean().item(), abs=0.05 * old.std().item()
        )
        correlation = torch.corrcoef(torch.stack([new[rows].flatten(), old[rows].flatten()]))[
            0, 1
        ].item()
        assert abs(correlation) < 0.05


def test_what_is_drawn_depends_on_seed_and_place_alone(wide: Checkpoint) -> None:
    a, b, c = (
        upcycle(wide, experts=e, drop=0.25, noise=0.01, seed=s) for e, s in ((2, 3), (4, 3), (4, 4))
    )
    for x, y, z in zip(*(written(m, 0, 1) for m in (a, b, c)), strict=True):
        assert torch.equal(x, y) and not torch.equal(x, z)
    everything = upcycle(wide, experts=2, drop=1.0)
    assert (written(everything, 0, 0)[0] != wide.tensors[GATE.format(0)].read()).any(1).all()
    nothing = upcycle(wide, experts=2, drop=0.003)  # of 256 neurons
    assert torch.equal(written(nothing, 0, 0)[0], wide.tensors[GATE.format(0)].read())


def test_noise(wide: Checkpoint) -> None:
    made = upcycle(wide, experts=2, noise=0.05)
    difference = [
        n - o
        for n, o in zip(written(made, 0, 0), written(upcycle(wide, experts=2), 0, 0), strict=True)
    ]
    assert [d.std().item() for d in difference] == pytest.approx([0.05] * 3, rel=0.05)
    assert not torch.equal(written(made, 0, 0)[0], written(made, 0, 1)[0]) and not made.exact


def test_drop_works_on_parts_and_in_fused_layouts(tmp_path: Path) -> None:
    save_model("granite", tmp_path)
    source = open_checkpoint(tmp_path)
    made = upcycle(source, target="granitemoeshared", granularity=4, shared=3, experts=4, drop=0.5)
    fused = (
        made.tensors["model.layers.0.block_sparse_moe.input_linear.weight"]
        .read()
        .view(4, 2, 12, 32)
    )
    gate, up = (source.tensors[n.format(0)].read()[36:] for n in (GATE, UP))
    kept = (fused[:, 0] == gate).all(-1)
    assert kept.sum(1).tolist() == [6] * 4 and torch.equal(kept, (fused[:, 1] == up).all(-1))
    assert torch.equal(
        made.tensors["model.layers.0.shared_mlp.output_linear.weight"].read(),
        source.tensors[DOWN.format(0)].read()[:, :36],
    )


# --- several models -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    """A base and two models that were trained on from it."""
    folder = tmp_path_factory.mktemp("family")
    save_model("llama", folder / "base")
    base = open_checkpoint(folder / "base")
    out = [base]
    for i in (1, 2):
        tensors = {n: t.map(f"plus {i}", lambda t, i=i: t + i / 8) for n, t in base.tensors.items()}
        changed = base.replace(tensors=tensors)
        write(make_plan(changed), folder / str(i), source=base)
        out.append(open_checkpoint(folder / str(i)))
    return out


def test_experts_come_from_the_models_in_turn(family: list[Checkpoint]) -> None:
    base, *models = family
    made = upcycle(base, expert_models=models, experts=4)
    for e, model in enumerate([models[0], models[0], models[1], models[1]]):
        for w, name in (("w1", GATE), ("w3", UP), ("w2", DOWN)):
            new = made.tensors[EXPERT.format(2, e, w)]
            assert new.extents == model.tensors[name.format(2)].extents  # copied by the kernel
    query = "model.layers.0.self_attn.q_proj.weight"
    assert made.tensors[query] is base.tensors[query]
    step = made.steps[-1]
    assert not step.exact and step.parameters["expert_models"] == [
        m.source.location for m in models
    ]
    assert (
        upcycle(base, **{**step.parameters, "expert_models": models})
        .tensors[EXPERT.format(0, 3, "w1")]
        .read()
        .equal(made.tensors[EXPERT.format(0, 3, "w1")].read())
    )


def test_one_copy_of_each_model_by_default(family: list[Checkpoint]) -> None:
    assert upcycle(family[0], expert_models=family).steps[-1].parameters["experts"] == 3


def test_all_else_can_be_averaged(family: list[Checkpoint]) -> None:
    """Of the experts' models; the base counts where it is one of them. Shared experts are averaged
    too.
    """
    base, *models = family
    made = upcycle(base, expert_models=models, attention="average", target="glm4_moe", shared=1)
    for name in (
        "model.layers.0.self_attn.q_proj.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
    ):
        torch.testing.assert_close(made.tensors[name].read(), base.tensors[name].read() + 1.5 / 8)
    shared = made.tensors["model.layers.0.mlp.shared_experts.gate_proj.weight"].read()
    torch.testing.assert_close(shared, base.tensors[GATE.format(0)].read() + 1.5 / 8)


def test_a_model_as_its_own_experts_is_itself(family: list[Checkpoint], tmp_path: Path) -> None:
    """Averaged and mixed, with parts: the same function, though nothing is claimed."""
    base = family[0]
    made = upcycle(base, expert_models=[base, base], attention="average", granularity=2)
    write(make_plan(made), tmp_path / "out", source=base)
    (expected, _), (model, _) = load(Path(base.source.location)), load(tmp_path / "out")
    assert (logits_of(model) - logits_of(expected)).abs().max().item() <= 1e-5


def test_models_that_are_no_kin(family: list[Checkpoint], tmp_path: Path) -> None:
    base = family[0]
    for kind, changes in (
        ("wide", {"intermediate_size": 64}),
        ("rope", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}),
        ("words", {"vocab_size": VOCAB + 3}),
    ):
        save_model("llama", tmp_path / kind, **changes)
    wide, rope, words = (open_checkpoint(tmp_path / k) for k in ("wide", "rope", "words"))
    save_model("qwen3", tmp_path / "qwen3")
    for model, attention, seen in (
        (wide, "base", "has intermediate_size 64, the base 48"),
        (rope, "base", "rope"),
        (open_checkpoint(tmp_path / "qwen3"), "base", "the base"),
        (
            words,
            "average",
            f"lm_head.weight of the expert {tmp_path / 'words'} is [64, 32], the base's [61, 32]",
        ),
    ):
        error = refusal(base, expert_models=[model], attention=attention, experts=2)
        assert seen in error.message and "fine-tuned" in error.hint and "\n" not in error.message
    # Its own words do not matter where its embedding is not taken.
    upcycle(base, expert_models=[words], experts=2)
    assert (
        "3 copies of 2 expert models" in refusal(base, expert_models=family[1:], experts=3).message
    )


def test_a_model_in_another_dtype_is_cast(family: list[Checkpoint], tmp_path: Path) -> None:
    save_model("llama", tmp_path, dtype=torch.bfloat16)
    made = upcycle(family[0], expert_models=[open_checkpoint(tmp_path)], experts=2)
    assert {t.dtype for t in made.tensors.values()} == {"F32"}


# --- the router -----------------------------------------------------------------------------------


def test_a_zero_router() -> None:
    made = upcycle(fake("qwen3"), experts=4, router="zero")
    assert made.exact
    for i in range(LAYERS):
        assert made.tensors[f"model.layers.{i}.mlp.gate.weight"].read().count_nonzero() == 0


@pytest.mark.parametrize("name", ["qwen3 in bf16, G=2", "qwen2 in bf16, G=2"])
def test_routers_and_corrections_stay_in_fp32(name: str, workshop: Workshop) -> None:
    made = load_file(workshop.convert(name).output / "model.safetensors")
    kinds = {n.split("mlp.gate.")[-1]: t.dtype for n, t in made.items() if ".mlp.gate." in n}
    assert kinds == {"weight": torch.float32, "e_score_correction_bias": torch.float32}
    assert made["model.layers.0.mlp.experts.0.down_proj.weight"].dtype == torch.bfloat16
