"""The walk is the stock forward pass, bit for bit.

Its layers run with the arguments that the stock body gives them. What could break it: a mask that
differs by layer (sliding windows), a layer that returns a tuple, embeddings that are scaled,
positions that are learned, experts that the loader fuses, heads that are tied or soft-capped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from surgery.calibration import stock, walk
from surgery.calibration.walk import Walk
from surgery.checkpoint import Checkpoint
from surgery.errors import SurgeryError
from surgery.families import Family
from surgery.families.dense import DENSE
from surgery.storage import open_checkpoint

COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
SCALES = {"query_pre_attn_scalar": 8, "initializer_range": 0.2}
GEMMA = {**COMMON, "head_dim": 8, "sliding_window": 8, **SCALES}
OLD = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TOP_2 = {"num_experts_per_tok": 2, "num_experts": 4, "norm_topk_prob": True}
MOE = {**TOP_2, "moe_intermediate_size": 24}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
CAPS = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 0.5}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 8},
    "gemma2": {**GEMMA, **CAPS, "layer_types": LAYERS},
    "gemma3_text": {**GEMMA, "layer_types": LAYERS, "rope_local_base_freq": 100.0},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.3},
    "olmo2": {},
    "phi3": {"sliding_window": 8},
    "gpt2": {**OLD, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "opt": {
        **OLD,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 16,
        "max_position_embeddings": 128,
    },
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**MOE, "head_dim": 16, "mlp_only_layers": [1]},
}


AGREE = stock.NameReport(missing=(), unexpected=(), mismatched=())


def save_model(name: str, folder: Path, **changes: Any) -> Any:
    """Save a tiny random model of MODELS, and return it as stock loading reads it."""
    torch.manual_seed(0)
    model_type = name.split()[0]
    options = MODELS[name] if model_type in ("gpt2", "opt") else {**COMMON, **MODELS[name]}
    options = {"initializer_range": 0.2, **options, **changes}
    config = transformers.AutoConfig.for_model(model_type, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        # Norms at their initial 1 and biases at 0 would hide a tensor that was not loaded.
        if p.ndim == 1:
            torch.nn.init.normal_(p, p.mean().item(), 0.1)
    model.save_pretrained(folder)
    return load_stock(folder)


def load_stock(folder: Path) -> Any:
    """Load a model, eagerly where its attention caps scores."""
    config = transformers.AutoConfig.from_pretrained(folder)
    options: dict[str, Any] = {"dtype": torch.float32}
    if getattr(config, "attn_logit_softcapping", None):
        options["attn_implementation"] = "eager"
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def ids_of(rows: int, length: int, vocab_size: int = 61) -> torch.Tensor:
    """Return random ids [rows, length]."""
    return torch.randint(3, vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def whole_logits(w: Walk) -> torch.Tensor:
    """Return the logits [B, T, V], every chunk put where it says it belongs."""
    chunks = list(w.logits())
    rows, length = sum(len(h) for h in w.hidden), w.hidden[0].shape[1]
    out = torch.full((rows, length, chunks[0][1].shape[-1]), torch.nan)
    for where, logits in chunks:
        out[where] = logits
    return out


def walked(checkpoint: Checkpoint, ids: torch.Tensor, **options: Any) -> Walk:
    """Return a walk that has run all layers."""
    w = Walk(checkpoint, ids, **options)
    for layer in w:
        layer.run()
    return w


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_walk_is_the_stock_forward_pass(name: str, tmp_path: Path) -> None:
    """And no weight stays in memory."""
    model, ids = save_model(name, tmp_path), ids_of(2, 40)
    w = walked(open_checkpoint(tmp_path), ids)
    assert torch.equal(whole_logits(w), model(ids).logits)
    assert not [n for n, p in w.model.named_parameters() if not p.is_meta]


@torch.no_grad()
def test_hidden_states_are_those_between_the_stock_layers(tmp_path: Path) -> None:
    """Scaled embeddings are the input of the first."""
    model, ids = save_model("gemma2", tmp_path), ids_of(2, 40)
    expected = model(ids, output_hidden_states=True).hidden_states
    for layer, wanted in zip(Walk(open_checkpoint(tmp_path), ids), expected, strict=False):
        assert torch.equal(torch.cat(layer.hidden), wanted)


@pytest.mark.parametrize("part", ["LlamaModel", "LlamaDecoderLayer"])
def test_a_class_that_cannot_be_run_in_parts_is_refused(
    part: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Classes of transformers raise nearly anything where they are given less than they expect."""
    save_model("llama", tmp_path)

    def forward(self: Any, *args: Any, **kwargs: Any) -> None:
        raise TypeError("'NoneType' object is not iterable\nand more")

    monkeypatch.setattr(getattr(transformers.models.llama.modeling_llama, part), "forward", forward)
    with pytest.raises(SurgeryError) as caught:
        walked(open_checkpoint(tmp_path), ids_of(2, 8))
    assert caught.value.message.startswith(f"{part} cannot be run layer by layer")
    assert caught.value.message.endswith("'NoneType' object is not iterable (TypeError)")


@torch.no_grad()
def test_batches_and_chunks_of_positions_change_nothing_but_rounding(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Five rows in batches of 2 leave another shape, and chunks of 7 do not divide 40."""
    model, ids = save_model("mistral", tmp_path), ids_of(5, 40)
    monkeypatch.setattr(walk, "CHUNK_LOGITS", 7 * 2 * 61)
    w = walked(open_checkpoint(tmp_path), ids, batch_size=2)
    assert [tuple(h.shape) for h in w.hidden] == [(2, 40, 32), (2, 40, 32), (1, 40, 32)]
    assert max(logits.shape[0] * logits.shape[1] for _, logits in w.logits()) == 14
    torch.testing.assert_close(whole_logits(w), model(ids).logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_hidden_states_beyond_the_budget_lie_in_a_file(tmp_path: Path, monkeypatch: Any) -> None:
    """Two of three batches are in a file without a name, and stay in it."""
    model, ids = save_model("gemma2", tmp_path / "model"), ids_of(5, 40)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one_batch = 2 * 40 * 32 * 4
    w = Walk(open_checkpoint(tmp_path / "model"), ids, batch_size=2, memory_budget=one_batch + 1)
    assert w.hidden.mapped == {1, 2} and [f.name for f in tmp_path.iterdir()] == ["model"]  # type: ignore[attr-defined]
    places = [h.data_ptr() for h in w.hidden]
    for layer in w:
        layer.run()
    assert [h.data_ptr() for h in w.hidden][1:] == places[1:]
    assert torch.equal(whole_logits(w), whole_logits(walked(w.checkpoint, ids, batch_size=2)))
    torch.testing.assert_close(whole_logits(w), model(ids).logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_run_shows_each_output_as_it_comes(tmp_path: Path) -> None:
    """By the number of its batch."""
    save_model("llama", tmp_path)
    w = Walk(open_checkpoint(tmp_path), ids_of(3, 40), batch_size=1)
    for layer in w:
        seen: list[torch.Tensor] = []
        layer.run(lambda b, out: seen.insert(b, out))  # noqa: B023
        assert all(map(torch.equal, seen, layer.hidden)) and len(seen) == 3


@torch.no_grad()
def test_a_change_to_a_layer_is_seen_by_later_layers(tmp_path: Path) -> None:
    """Looking at its outputs does not move the walk."""
    model, ids = save_model("llama", tmp_path), ids_of(2, 40)
    w = Walk(open_checkpoint(tmp_path), ids)
    for layer in w:
        before = [h.clone() for h in layer.hidden]
        list(layer.outputs())  # looking does not move the walk
        assert all(map(torch.equal, before, layer.hidden))
        if layer.index == 1:
            layer.module.mlp.down_proj.weight.data.zero_()
    model.model.layers[1].mlp.down_proj.weight.data.zero_()
    assert torch.equal(whole_logits(w), model(ids).logits)


@torch.no_grad()
def test_a_fork_goes_on_from_kept_hidden_states(tmp_path: Path) -> None:
    """From the middle of the model, on the same modules."""
    model, ids = save_model("llama", tmp_path), ids_of(2, 40)
    w, kept = Walk(open_checkpoint(tmp_path), ids), []
    for layer in w:
        if layer.index == 2:
            kept = list(layer.hidden)
    fork = w.fork(w.checkpoint, kept)
    for layer in fork.steps(start=2):
        layer.run()
    assert torch.equal(whole_logits(fork), model(ids).logits)


@torch.no_grad()
def test_masks_are_kept_once(tmp_path: Path) -> None:
    """Ten batches of one shape share a mask, in all sliding layers.

    Otherwise memory would grow as batches × T².
    """
    save_model("gemma3_text", tmp_path)
    w = Walk(open_checkpoint(tmp_path), ids_of(10, 40), batch_size=1)
    masks = {id(kwargs["attention_mask"]) for i in (0, 2) for _, kwargs in w.arguments[i]}
    assert len(w.arguments[0]) == 10 and len(masks) == 1


@torch.no_grad()
def test_base_model_names_load(tmp_path: Path) -> None:
    """gpt2 on the Hub has "h.0.…" where the class has "transformer.h.0.…"."""
    model, ids = save_model("gpt2", tmp_path), ids_of(2, 40)
    checkpoint = open_checkpoint(tmp_path)
    tensors = {n.removeprefix("transformer."): t for n, t in checkpoint.tensors.items()}
    renamed = checkpoint.replace(tensors=tensors)
    assert "h.0.ln_1.weight" in tensors
    assert stock.check_names(renamed) == AGREE
    assert torch.equal(whole_logits(walked(renamed, ids)), model(ids).logits)


@torch.no_grad()
def test_language_model_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """The vision tower has a list of as many layers, and its weights are not read."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
    vision = {**sizes, "num_hidden_layers": 3, "num_attention_heads": 2}
    text = {**GEMMA, "layer_types": LAYERS}
    tokens = {"image_token_index": 60, "boi_token_index": 59, "eoi_token_index": 58}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    checkpoint, ids = open_checkpoint(tmp_path), ids_of(2, 40, 58)
    model = load_stock(tmp_path)
    assert any("vision" in n for n in checkpoint.tensors)
    assert torch.equal(whole_logits(walked(checkpoint, ids)), model(ids).logits)


@pytest.mark.parametrize("name", MODELS)
def test_names_of_a_stock_checkpoint_agree(name: str, tmp_path: Path) -> None:
    """For every family, with the loader's renaming."""
    save_model(name, tmp_path)
    assert stock.check_names(open_checkpoint(tmp_path)) == AGREE


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    """transformers 5 reports no missing name here.

    It fuses the other experts into a tensor of the wrong shape.
    """
    save_model("mixtral", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    tensors = dict(checkpoint.tensors)
    tensors.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight")
    report = stock.check_names(checkpoint.replace(tensors=tensors))
    assert "layers.1" in str(report.missing + report.mismatched) and not report.unexpected


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    """In the report on names, and in the error that stops a walk."""
    save_model("llama", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    cut = {name: checkpoint.tensors[name].rows(0, 40)}
    wrong = checkpoint.replace(tensors={**checkpoint.tensors, **cut})
    (mismatched,) = stock.check_names(wrong).mismatched
    assert mismatched == f"{name}: (40, 32) on disk, (48, 32) in the class"
    with pytest.raises(SurgeryError, match=r"up_proj.weight: \(40, 32\) on disk"):
        walked(wrong, ids_of(1, 8))


def test_a_missing_tensor_stops_the_walk_by_name(tmp_path: Path) -> None:
    """Otherwise the layer would compute with random weights."""
    save_model("llama", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    for name in ("model.layers.2.mlp.up_proj.weight", "model.norm.weight"):
        tensors = {n: t for n, t in checkpoint.tensors.items() if n != name}
        with pytest.raises(SurgeryError, match=name if "norm" in name else r"layer 2: .*up_proj"):
            walked(checkpoint.replace(tensors=tensors), ids_of(1, 8))


CONFIGURATION = """
from transformers import LlamaConfig
class TwinConfig(LlamaConfig):
    model_type = "twin"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_twin import TwinConfig
class TwinForCausalLM(LlamaForCausalLM):
    config_class = TwinConfig
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = 2 * out.logits
        return out
"""


@torch.no_grad()
def test_a_checkpoint_with_its_own_code(tmp_path: Path, monkeypatch: Any) -> None:
    """Its files are read from the checkpoint, wherever that is, and its own forward runs."""
    monkeypatch.setitem(DENSE, "twin", Family(model_type="twin"))
    folder, ids = tmp_path / "model", ids_of(2, 40)
    logits = save_model("llama", folder)(ids).logits
    config = json.loads((folder / "config.json").read_text())
    code = {
        "AutoConfig": "configuration_twin.TwinConfig",
        "AutoModelForCausalLM": "modeling_twin.TwinForCausalLM",
    }
    config |= {"model_type": "twin", "auto_map": code}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_twin.py").write_text(CONFIGURATION)
    (folder / "modeling_twin.py").write_text(MODELING)
    checkpoint = open_checkpoint(folder)
    assert stock.check_names(checkpoint) == AGREE
    assert torch.equal(whole_logits(walked(checkpoint, ids)), 2 * logits)


@pytest.mark.parametrize(("hidden", "width"), [(32, 66), (36, 64), (34, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_odd_sizes_are_eager(
    hidden: int, width: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """torch's grouped_mm refuses rows that are no multiple of 16 bytes, whatever the dtype."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(
        hidden_size=hidden,
        intermediate_size=width,
        head_dim=16,
        vocab_size=64,
        num_local_experts=4,
        **sizes,
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).to(dtype).eval()
    model.save_pretrained(tmp_path)
    model.config._experts_implementation = "eager"
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    walk = Walk(open_checkpoint(tmp_path), ids, dtype=dtype)
    for layer in walk:
        layer.run()
    found = torch.cat([logits for _, logits in walk.logits()], dim=1)
    with torch.no_grad():
        expected = model(ids).logits
    rounding = 1e-5 if dtype == torch.float32 else 0.02
    assert (found - expected).abs().max() <= rounding * expected.abs().max()


def test_experts_of_even_sizes_are_grouped(tmp_path: Path) -> None:
    """The eager path computes the same, slowly: it is for the sizes that need it."""
    from models import fake

    from surgery.calibration.stock import meta_model
    from surgery.operations.upcycle import upcycle

    even = meta_model(upcycle(fake("llama", hidden=32, width=64)))
    odd = meta_model(upcycle(fake("llama", hidden=32, width=66)))
    assert odd.config._experts_implementation == "eager"
    assert even.config._experts_implementation != "eager"
