"""An exported file holds the checkpoint: every tensor, the metadata and the tokenizer, as gguf's
own reader reads them, and llama.cpp's formula of it gives transformers' logits.

What could break it: a tensor under the wrong name or transposed, a rotary base or an epsilon that
is lost, neurons of the padding that compute something, rounding that differs from llama.cpp's, a
file that looks whole and is not.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from models import Workshop, sample_ids
from support import Call
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

import surgery
from surgery.demo import MODEL
from surgery.engines import gguf as format
from surgery.engines.quantise import TYPES, encode
from surgery.errors import SurgeryError, UsageError
from surgery.workflow import export as exporting

gguf = pytest.importorskip("gguf", reason="pip install gguf, the library of llama.cpp")

# The largest error of a value in steps: half of one in q8_0, and a whole one in q4_0, whose largest
# is cut off. Beside it, fp16 rounds the scale, by which up to 127 or 8 steps are multiplied: by
# 2⁻¹¹ of it, and by 2⁻²⁵ where it is subnormal.
STEPS = {"q8_0": (0.5, 127), "q4_0": (1.0, 8)}


@pytest.fixture(scope="module")
def relufied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with ReLU, in its own bf16."""
    out = tmp_path_factory.mktemp("demo") / "relu"
    return surgery.write(surgery.relufy(surgery.open(MODEL), repair="none"), out)


def read(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata and the tensors of a file."""
    reader = gguf.GGUFReader(file)
    return (
        {key: field.contents() for key, field in reader.fields.items()},
        {tensor.name: tensor for tensor in reader.tensors},
    )


def names(folder: Path) -> list[str]:
    """Return what is in a folder, hidden files included."""
    return [path.name for path in folder.iterdir()]


def values(tensor: Any) -> torch.Tensor:
    """Return what a tensor of a file holds, in fp32."""
    found = gguf.quants.dequantize(numpy.asarray(tensor.data), tensor.tensor_type)
    shape = [int(n) for n in tensor.shape[::-1]]
    return torch.from_numpy(numpy.array(found, dtype=numpy.float32)).reshape(shape)


def with_tokenizer(folder: Path, out: Path) -> Path:
    """Copy a tiny model, and give it a byte-level tokenizer of 40 tokens."""
    shutil.copytree(folder, out)
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *"abcdefghijklm"])}
    tokenizer = Tokenizer(models.BPE({**vocabulary, "ab": len(vocabulary)}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(out / "tokenizer.json"))
    return out


# --- the formula ----------------------------------------------------------------------------------


def logits(file: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a file as src/models/smallthinker.cpp computes them, [B, T, V]."""
    meta, found = read(file)
    w = {name: values(tensor) for name, tensor in found.items()}
    of = {k.removeprefix("smallthinker."): v for k, v in meta.items()}
    eps, heads = of["attention.layer_norm_rms_epsilon"], of["attention.head_count"]
    shared, size = heads // of["attention.head_count_kv"], of["attention.key_length"]
    length = ids.shape[1]
    inverse = of["rope.freq_base"] ** -(torch.arange(0, size, 2) / of["rope.dimension_count"])
    angle = torch.arange(length)[:, None] * inverse / of.get("rope.scaling.factor", 1.0)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * w[name]

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(1))
        return y.unflatten(-1, (-1, size)).transpose(1, 2)

    def rotate(x: torch.Tensor) -> torch.Tensor:  # NEOX order: halves, not pairs
        half = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)
        return x * cos + half * sin

    x = w["token_embd.weight"][ids]
    for i in range(of["block_count"]):
        blk = f"blk.{i}."
        router = (x @ w[f"{blk}ffn_gate_inp.weight"].T).softmax(-1)
        assert (router == 1).all() and of["expert_used_count"] == of["expert_count"] == 1
        h = norm(x, f"{blk}attn_norm.weight")
        q, k, v = (project(h, f"{blk}attn_{part}") for part in "qkv")
        k, v = (t.repeat_interleave(shared, 1) for t in (rotate(k), v))
        mixed = torch.nn.functional.scaled_dot_product_attention(rotate(q), k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2) @ w[f"{blk}attn_output.weight"].T
        h = norm(x, f"{blk}ffn_norm.weight")
        gate, up, down = (w[f"{blk}ffn_{part}_exps.weight"][0] for part in ("gate", "up", "down"))
        x = x + ((h @ gate.T).relu() * (h @ up.T)) @ down.T
    return norm(x, "output_norm.weight") @ w.get("output.weight", w["token_embd.weight"]).T


@pytest.mark.parametrize("name", ["llama, relu", "mistral, relu", "qwen2, relu"])
def test_the_formula_of_llama_cpp_gives_the_logits_of_transformers(
    name: str, workshop: Workshop, tmp_path: Path
) -> None:
    done = workshop.convert(name)
    folder = with_tokenizer(done.output, tmp_path / "model")
    ids, expected = sample_ids(), done.logits
    if name.startswith("mistral"):  # the file holds no more context than the window
        window = json.loads((folder / "config.json").read_text())["sliding_window"]
        ids, expected = ids[:, :window], expected[:, :window]
    surgery.export(surgery.open(folder), tmp_path / "m.gguf", type="f32")
    found = logits(tmp_path / "m.gguf", ids)
    assert torch.allclose(found, expected, atol=1e-4 * expected.std().item())


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_widths_that_blocks_do_not_divide_are_padded_with_neurons_that_compute_nothing(
    kind: str, workshop: Workshop, tmp_path: Path
) -> None:
    """48 neurons become 64: rows of zeros in gate and up, columns of zeros in down."""
    folder = with_tokenizer(workshop.convert("llama, relu").output, tmp_path / "model")
    surgery.export(surgery.open(folder), tmp_path / "m.gguf", type=kind)
    meta, found = read(tmp_path / "m.gguf")
    assert meta["smallthinker.feed_forward_length"] == 64
    assert meta["smallthinker.expert_feed_forward_length"] == 64
    for part, expected in (("gate", (1, 64, 32)), ("up", (1, 64, 32)), ("down", (1, 32, 64))):
        value = values(found[f"blk.1.ffn_{part}_exps.weight"])
        assert value.shape == expected
        beyond = value[..., 48:] if part == "down" else value[:, 48:]
        assert not beyond.any() and value.any()


# --- values, metadata, tokenizer ------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(TYPES))
def test_every_tensor_is_the_source_s(kind: str, relufied: Path, tmp_path: Path) -> None:
    """Floats that the type holds are exact; quantised ones have the bytes of gguf's own rounding,
    and lie within a step.
    """
    source = surgery.open(relufied)
    surgery.export(source, tmp_path / "m.gguf", type=kind)
    _, found = read(tmp_path / "m.gguf")
    renamed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    parts = {
        **{f"self_attn.{p}_proj": f"attn_{p}" for p in "qkv"},
        "self_attn.o_proj": "attn_output",
        **{f"mlp.{p}_proj": f"ffn_{p}_exps" for p in ("gate", "up", "down")},
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for i in range(7):
        renamed |= {
            f"model.layers.{i}.{old}.weight": f"blk.{i}.{new}.weight" for old, new in parts.items()
        }
    assert set(renamed) == set(source.tensors)
    assert set(found) == {*renamed.values(), *(f"blk.{i}.ffn_gate_inp.weight" for i in range(7))}
    for old, new in renamed.items():
        expected, tensor = source.tensors[old].read().float(), found[new]
        value = values(tensor).reshape(expected.shape)
        if kind not in STEPS or expected.ndim == 1:
            # fp16 holds every bf16 above 2⁻¹⁷ exactly, and a smaller one to 2⁻²⁵.
            assert torch.allclose(value, expected, rtol=0, atol=2**-25 if kind == "f16" else 0)
            continue
        used = "q8_0" if new == "token_embd.weight" else kind
        assert tensor.tensor_type.name == used.upper()
        packed = gguf.quants.quantize(expected.numpy(), tensor.tensor_type)
        assert numpy.asarray(tensor.data).tobytes() == packed.tobytes()
        blocks, off = expected.reshape(-1, 32), (value - expected).reshape(-1, 32).abs()
        within, steps = STEPS[used]
        step = blocks.abs().amax(1, keepdim=True) / steps
        assert (off <= 1.001 * (within + steps / 2**11) * step + steps / 2**25).all()


def test_the_metadata_is_the_config_s(relufied: Path, tmp_path: Path) -> None:
    surgery.export(surgery.open(relufied), tmp_path / "m.gguf", type="q8_0")
    meta, _ = read(tmp_path / "m.gguf")
    own = {k.removeprefix("smallthinker."): v for k, v in meta.items() if "smallthinker." in k}
    assert own.pop("attention.layer_norm_rms_epsilon") == pytest.approx(1e-5)
    assert own == {
        "block_count": 7,
        "context_length": 1024,
        "vocab_size": 4096,
        "embedding_length": 192,
        "feed_forward_length": 512,
        "expert_feed_forward_length": 512,
        "expert_count": 1,
        "expert_used_count": 1,
        "expert_gating_func": 1,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "rope.dimension_count": 32,
        "rope.freq_base": 10000.0,
    }
    assert (meta["general.architecture"], meta["general.file_type"]) == ("smallthinker", 7)


def test_the_tokenizer_is_the_source_s(relufied: Path, tmp_path: Path) -> None:
    surgery.export(surgery.open(relufied), tmp_path / "m.gguf")
    meta, _ = read(tmp_path / "m.gguf")
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    spec = json.loads((MODEL / "tokenizer.json").read_text())
    own = {k.removeprefix("tokenizer.ggml."): v for k, v in meta.items()}
    assert (own["model"], own["pre"]) == ("gpt2", "gpt-2")
    assert own["tokens"] == [tokenizer.id_to_token(i) for i in range(4096)]
    assert own["merges"] == [" ".join(pair) for pair in spec["model"]["merges"]]
    assert own["token_type"] == [3, 3, 3] + [1] * 4093
    assert (own["bos_token_id"], own["eos_token_id"], own["add_bos_token"]) == (1, 2, True)
    assert not own["add_eos_token"]


def test_a_context_beyond_the_sliding_window_is_cut_with_a_note(
    workshop: Workshop, tmp_path: Path
) -> None:
    folder = with_tokenizer(workshop.convert("mistral, relu").output, tmp_path / "model")
    done = surgery.export(surgery.open(folder), tmp_path / "m.gguf")
    assert read(tmp_path / "m.gguf")[0]["smallthinker.context_length"] == 8
    assert "the context is 8 tokens, the sliding window, instead of 128" in done.notes[0]


def test_rows_read_in_parts_give_the_same_bytes(
    relufied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded by CHUNK, and no result depends on it."""
    surgery.export(surgery.open(relufied), tmp_path / "whole.gguf", type="q4_0")
    monkeypatch.setattr(format, "CHUNK", 1000)
    surgery.export(surgery.open(relufied), tmp_path / "parts.gguf", type="q4_0")
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "parts.gguf").read_bytes()


@pytest.mark.parametrize("kind", list(TYPES))
def test_rounding_is_the_library_s(kind: str) -> None:
    """Ties, zeros, scales below the smallest fp16, and blocks of one value."""
    draw = numpy.random.default_rng(0)
    rows = draw.standard_normal((64, 64)).astype(numpy.float32)
    rows[0], rows[1], rows[2, 1:], rows[3] = 0, 1e-30, 0, -1.0
    rows[4] = numpy.arange(64) / 2 - 16
    rows[5] = numpy.linspace(-127, 127, 64).round() + 0.5
    number = gguf.GGMLQuantizationType[kind.upper()]
    assert encode(rows, kind, "t") == gguf.quants.quantize(rows, number).tobytes()


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "seen"),
    [
        ({"hidden_act": "silu"}, "its activation is silu"),
        ({"model_type": "granite"}, "a granite is none of llama, mistral, qwen2"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "of the type llama3"),
        ({"auto_map": {"AutoConfig": "c.C"}}, "code of its own"),
    ],
)
def test_what_cannot_be_held_is_refused(
    edit: dict[str, Any], seen: str, relufied: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(relufied, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | edit))
    with pytest.raises(SurgeryError, match=seen):
        surgery.export(surgery.open(folder), tmp_path / "m.gguf")
    assert names(tmp_path) == ["model"]


def test_a_tensor_without_a_place_is_refused(relufied: Path, tmp_path: Path) -> None:
    """A bias that is left out is a model that is silently worse."""
    source = surgery.open(relufied)
    for name in ("mlp.up_proj.bias", "self_attn.o_proj.bias", "self_attn.q_norm.weight"):
        whole = f"model.layers.0.{name}"
        more = source.replace(
            tensors={**source.tensors, whole: source.tensors["model.norm.weight"]}
        )
        with pytest.raises(SurgeryError, match=f"no place for {whole}"):
            surgery.export(more, tmp_path / "m.gguf")


def test_what_is_fitted_on_text_is_written_first(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="relufy fits on text"):
        surgery.export(surgery.relufy(surgery.open(MODEL)), tmp_path / "m.gguf")


def test_a_model_without_tokenizer_is_refused(relufied: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(relufied, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SurgeryError, match=r"has no tokenizer\.json"):
        surgery.export(surgery.open(folder), tmp_path / "m.gguf")


@pytest.mark.parametrize("value", [float("nan"), 1e5])
def test_a_value_that_the_type_cannot_hold_leaves_no_file(
    value: float, relufied: Path, tmp_path: Path
) -> None:
    source = surgery.open(relufied)
    name = "model.layers.3.self_attn.q_proj.weight"
    spoilt = source.tensors[name].map(f"spoilt by {value}", lambda t: t * 0 + value)
    changed = source.replace(tensors={**source.tensors, name: spoilt})
    with pytest.raises(SurgeryError, match=r"blk\.3\.attn_q\.weight holds .*f16 cannot hold"):
        surgery.export(changed, tmp_path / "m.gguf", type="f16")
    assert not names(tmp_path)


# --- the file -------------------------------------------------------------------------------------


def test_a_file_is_whole_or_not_there(relufied: Path, tmp_path: Path) -> None:
    """Ctrl-C leaves nothing; a killed run leaves a hidden file, which the next one replaces."""

    class Interrupted:
        def stage(self, title: str, total: int, unit: str) -> Any:
            from contextlib import nullcontext

            seen = 0

            def advance(n: int) -> None:
                nonlocal seen
                seen += n
                if seen > total / 2:
                    raise KeyboardInterrupt

            return nullcontext(advance)

    source = surgery.open(relufied)
    with pytest.raises(KeyboardInterrupt):
        exporting.export(source, tmp_path / "m.gguf", observer=Interrupted())
    assert not names(tmp_path)
    (tmp_path / ".m.gguf.partial").write_bytes(b"of a killed run")
    done = surgery.export(source, tmp_path / "m.gguf")
    assert names(tmp_path) == ["m.gguf"]
    assert (tmp_path / "m.gguf").stat().st_size == done.nbytes
    assert surgery.export(source, tmp_path / "m.gguf").already
    with pytest.raises(SurgeryError, match=r"m\.gguf exists, and is not what this command writes"):
        surgery.export(source, tmp_path / "m.gguf", type="q8_0")


def test_the_place_is_checked_first(
    relufied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = surgery.open(relufied)
    with pytest.raises(SurgeryError, match="inside the source"):
        surgery.export(source, relufied / "m.gguf")
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "m.gguf").symlink_to("elsewhere")
    with pytest.raises(SurgeryError):
        surgery.export(source, tmp_path / "m.gguf")
    assert (tmp_path / "elsewhere").read_text() == "mine"
    usage = shutil._ntuple_diskusage(10**9, 10**9, 1000)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(SurgeryError, match=r"needs 0\.01 GB and the disk has 0\.00 GB free"):
        surgery.export(source, tmp_path / "other.gguf")


def test_the_command(relufied: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "m.gguf"
    plan = call("export", relufied, "--type", "q8_0", "--out", out, "--dry-run", "--json")
    assert plan.code == 0 and not out.exists()
    done = call("export", relufied, "--type", "q8_0", "--out", out, "--json")
    assert json.loads(done.out) == json.loads(plan.out)
    assert out.stat().st_size == json.loads(done.out)["nbytes"]
    again = call("export", relufied, "--type", "q8_0", "--out", out)
    assert again.code == 0 and "was there already" in again.out
    refused = call("export", MODEL, "--out", tmp_path / "silu.gguf")
    assert refused.code == 1 and "its activation is silu" in refused.err


# --- SentencePiece and names of pre-tokenizers ----------------------------------------------------


def spoken(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what `surgery.engines.tokenizer` says of a tokenizer."""
    from surgery.engines.tokenizer import fields

    tokenizer.save(str(folder / "tokenizer.json"))
    found = fields(surgery.open(folder), 64)
    return {k.removeprefix("tokenizer.ggml."): v for k, v in found.items()}


@pytest.fixture
def folder(relufied: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(relufied, tmp_path / "model"))


def bpe(*merges: tuple[str, str], **options: Any) -> Tokenizer:
    """Return a tokenizer of these merges, without a pre-tokenizer."""
    parts = dict.fromkeys(["<unk>", *(c for pair in merges for c in "".join(pair))])
    tokens = dict.fromkeys([*parts, *("".join(pair) for pair in merges)])
    return Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, list(merges), **options))


def test_sentencepiece_has_scores_in_the_order_of_its_merges(folder: Path) -> None:
    tokenizer = bpe(("▁", "a"), ("b", "c"), ("▁a", "bc"), byte_fallback=True, unk_token="<unk>")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens(["<0x0A>"])
    found = spoken(folder, tokenizer)
    score = dict(zip(found["tokens"], found["scores"], strict=True))
    kind = dict(zip(found["tokens"], found["token_type"], strict=True))
    assert found["model"] == "llama" and found["add_space_prefix"] is True
    assert score["▁a"] > score["bc"] > score["▁abc"] > score["b"]
    assert (kind["<unk>"], kind["<s>"], kind["<0x0A>"], kind["bc"]) == (2, 3, 6, 1)
    assert found["tokens"][-1] == "[PAD63]" and found["token_type"][-1] == 5


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("pattern", "options", "name"),
    [
        (None, {}, "smollm"),
        (QWEN2, {}, "qwen2"),
        (QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1), {"ignore_merges": True}, "llama-bpe"),
    ],
)
def test_pre_tokenizers_are_known_by_what_divides(
    pattern: str | None, options: dict[str, Any], name: str, folder: Path
) -> None:
    from tokenizers import Regex

    tokenizer = bpe(("a", "b"), **options)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    first = pre_tokenizers.Digits(individual_digits=True)
    if pattern is not None:
        first = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])
    assert spoken(folder, tokenizer)["pre"] == name


def test_other_tokenizers_are_refused_with_the_reason(folder: Path) -> None:
    tokenizer = bpe(("a", "b"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(SurgeryError, match="it divides texts by Whitespace"):
        spoken(folder, tokenizer)
    tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(SurgeryError, match="changes texts before it divides them"):
        spoken(folder, tokenizer)
