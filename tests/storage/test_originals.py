"""Meta's and Mistral's own forms are opened as the Hugging Face models that they are."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import LLAMA3, greedy, load, read_config
from originals import (
    ranks_of_bytes,
    sentencepiece_model,
    write_mistral,
    write_original,
)
from safetensors.torch import load_file
from support import assert_two_lines, surgery
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import surgery as api
from surgery.errors import SurgeryError
from surgery.storage import open_checkpoint

# What config.json says of the model's function, by the name of an AutoConfig.
FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "tie_word_embeddings",
    "rope_parameters",
    "hidden_act",
    "model_type",
)
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64, "vocab_size": 64}
# By name: the model, and how it is written.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one part": ("llama", {}),
    "two parts": ("llama", {"parts": 2, "vocab_size": 62}),
    "eight parts": ("llama", {"parts": 8, **EIGHT, "intermediate_size": 176}),
    "as many key-value heads": ("llama with as many key-value heads", {}),
    "tied": ("llama tied", {}),
    "tied, two parts by rows": ("llama tied", {"parts": 2, "vocab_size": 62, "embedding_axis": 0}),
    "Llama 3.1": (
        "llama with llama3 rope",
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192}},
    ),
    "Llama 3.2": (
        "llama with llama3 rope",
        {
            "rope_parameters": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
            "tie_word_embeddings": True,
        },
    ),
}


def assert_is(opened: api.Checkpoint, hf: Path) -> None:
    """The checkpoint has the tensors of a Hugging Face folder, bit for bit, and its config."""
    expected = load_file(hf / "model.safetensors")
    assert set(opened.tensors) == set(expected)
    for name, t in expected.items():
        found = opened.tensors[name].read()
        assert found.dtype == t.dtype and torch.equal(found, t), name


@pytest.mark.parametrize("case", CASES)
def test_metas_form_is_the_hugging_face_model(case: str, tmp_path: Path) -> None:
    name, options = CASES[case]
    source = write_original(name, tmp_path, **options)
    opened = open_checkpoint(source)
    assert_is(opened, tmp_path / "hf")
    out = api.write(api.upcycle(opened, experts=2), tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(out)
    expected = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    for field in set(FIELDS) - {"model_type"}:
        assert getattr(config, field) == getattr(expected, field), field
    assert greedy(load(out)[0]) == greedy(load(tmp_path / "hf")[0])


def test_mistrals_form_is_the_hugging_face_model(tmp_path: Path) -> None:
    """The head dimension and the sliding window are its own."""
    source = write_mistral(tmp_path)
    opened = open_checkpoint(source)
    assert_is(opened, tmp_path / "hf")
    out = api.write(api.cast(opened, "fp32"), tmp_path / "out")
    config, expected = (read_config(f) for f in (out, tmp_path / "hf"))
    for field in (*set(FIELDS) - {"rope_parameters"}, "sliding_window"):
        assert config.get(field) == expected[field], field
    assert greedy(load(out)[0]) == greedy(load(tmp_path / "hf")[0])


def test_the_rotary_embeddings_are_those_of_meta(tmp_path: Path) -> None:
    """Scores by Meta's formula and weights are those of transformers with ours.

    Meta takes each pair of neighbours as a complex number and turns it by its position.
    """
    source = write_original("llama", tmp_path)
    meta, opened = torch.load(source / "consolidated.00.pth"), open_checkpoint(source)
    x = torch.randn(1, 10, 32, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(10.0)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)

    def by_meta(name: str, heads: int) -> torch.Tensor:
        rows = (x @ meta[f"layers.0.attention.{name}.weight"].float().T).view(1, 10, heads, 4, 2)
        turned = torch.view_as_complex(rows) * torch.polar(torch.ones(10, 4), angles)[:, None]
        return torch.view_as_real(turned).flatten(3).transpose(1, 2)

    def by_us(name: str, heads: int) -> torch.Tensor:
        weight = opened.tensors[f"model.layers.0.self_attn.{name}.weight"].read().float()
        return (x @ weight.T).view(1, 10, heads, 8).transpose(1, 2)

    cos, sin = (f(torch.cat([angles, angles], -1))[None] for f in (torch.cos, torch.sin))
    q, k = apply_rotary_pos_emb(by_us("q_proj", 4), by_us("k_proj", 2), cos, sin)
    scores = q @ k.repeat_interleave(2, 1).mT
    theirs = by_meta("wq", 4) @ by_meta("wk", 2).repeat_interleave(2, 1).mT
    torch.testing.assert_close(scores, theirs)


def test_a_hugging_face_model_beside_it_is_taken_and_said(tmp_path: Path) -> None:
    source = write_original("llama", tmp_path)
    hf = tmp_path / "hf"
    (hf / "original").mkdir()
    for path in source.iterdir():
        path.rename(hf / "original" / path.name)
    opened = open_checkpoint(hf)
    assert opened.shards and not opened.tensors["model.norm.weight"].inputs
    assert opened.notes == (
        "the source holds its original form as well, which is ignored: "
        "original/consolidated.00.pth",
    )
    assert_is(open_checkpoint(hf / "original"), hf)


def test_the_command_line_takes_it(tmp_path: Path) -> None:
    """The output is verified against the source, and says what was assumed."""
    source = write_original("llama", tmp_path, parts=2, vocab_size=320)
    (source / "tokenizer.model").write_bytes(sentencepiece_model())
    out = tmp_path / "out"
    ran = surgery("upcycle", source, "--experts", "2", "--out", out)
    assert ran.code == 0, ran.err
    record = json.loads((out / "surgery.json").read_text())
    assert record["verification"]["passed"]
    assert any("Meta's original form (2 parts)" in note for note in record["notes"])
    assert any("max_position_embeddings 4096 is assumed" in note for note in record["notes"])
    assert "llama" in surgery("inspect", source).out


# --- tokenizers -----------------------------------------------------------------------------------


def written(source: Path, tmp_path: Path) -> tuple[Path, Any]:
    """Return an output of the source, and its tokenizer as a user loads it."""
    out = api.write(api.cast(open_checkpoint(source), "fp32"), tmp_path / "out")
    return out, transformers.AutoTokenizer.from_pretrained(out)


def test_a_sentencepiece_model(tmp_path: Path) -> None:
    """It merges by score, falls back to bytes and begins a text; its own file goes along."""
    source = write_original("llama", tmp_path, vocab_size=320)
    (source / "tokenizer.model").write_bytes(sentencepiece_model())
    out, tokenizer = written(source, tmp_path)
    ids = {"▁a": 259, "ab": 260, "▁ab": 261, "▁": 262, "a": 263, "b": 264}
    # ▁a is likelier than ab, so that it is merged first, and ▁ab is made of ▁a and b.
    assert tokenizer("ab a").input_ids == [1, ids["▁ab"], ids["▁a"]]
    assert tokenizer("é").input_ids == [1, ids["▁"], 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode([ids["▁ab"], 3 + 0xC3, 3 + 0xA9]) == "abé"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert (out / "tokenizer.model").read_bytes() == sentencepiece_model()


def test_the_first_piece_may_begin_a_text(tmp_path: Path) -> None:
    """An id of 0 is an id, not the lack of one."""
    source = write_original("llama", tmp_path, vocab_size=320)
    model = sentencepiece_model(("<s>", "</s>", "<unk>"))
    (source / "tokenizer.model").write_bytes(model)
    config = open_checkpoint(source).config
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)


def test_an_instruct_model_ends_with_its_turns(tmp_path: Path) -> None:
    """Only the name of the source tells it, which a note says."""
    source = write_original("llama", tmp_path / "Llama-3-Instruct", vocab_size=258 + 256)
    (source / "tokenizer.model").write_bytes(ranks_of_bytes())
    opened = open_checkpoint(source)
    assert opened.config["eos_token_id"] == [258 + 1, 258 + 9]
    assert any("the source's name says Instruct" in note for note in opened.notes)


@pytest.mark.parametrize(
    ("scaled", "eot", "name"), [(False, 9, "eot_id"), (True, 10, "python_tag")]
)
def test_the_ranks_of_llama_3(scaled: bool, eot: int, name: str, tmp_path: Path) -> None:
    """Special tokens follow the ranks; their names changed with Llama 3.1.

    The file of ranks stays behind: other tools take a tokenizer.model for a SentencePiece model.
    """
    source = write_original("llama", tmp_path, vocab_size=258 + 256)
    (source / "tokenizer.model").write_bytes(ranks_of_bytes())
    if scaled:
        params = json.loads((source / "params.json").read_text())
        (source / "params.json").write_text(json.dumps(params | {"use_scaled_rope": True}))
    out, tokenizer = written(source, tmp_path)
    assert tokenizer("ababab b").input_ids == [258, 257, 256, 32, 98]
    assert tokenizer.convert_tokens_to_ids(f"<|{name}|>") == 258 + eot
    assert tokenizer.decode([258, 257, 32]) == "<|begin_of_text|>abab "
    config = read_config(out)
    assert (config["bos_token_id"], config["eos_token_id"]) == (258, 259)
    assert config["max_position_embeddings"] == (131072 if scaled else 8192)
    assert not (out / "tokenizer.model").exists()


def test_tekken(tmp_path: Path) -> None:
    """Special tokens come first, and the vocabulary is cut to its size."""
    import base64

    source = write_mistral(tmp_path, vocab_size=61)
    tokens = [bytes([b]) for b in range(256)] + [b"ab", b"beyond"]
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode()} for i, t in enumerate(tokens)
    ]
    config = {"pattern": r"\S+|\s+", "default_vocab_size": 267, "default_num_special_tokens": 10}
    special = [
        {"rank": i, "token_str": t} for i, t in enumerate(("<unk>", "<s>", "</s>", "[INST]"))
    ]
    tekken = {"config": config, "vocab": entries, "special_tokens": special}
    (source / "tekken.json").write_text(json.dumps(tekken))
    files = {f.name: f.path() for f in open_checkpoint(source).files}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(files["tokenizer.json"]))
    assert tokenizer("ab[INST]a").input_ids == [1, 266, 3, 107]
    assert len(tokenizer) == 267 and "tekken.json" in files


# --- what is refused ------------------------------------------------------------------------------


def edit_params(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "params.json"
        params = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in params.items() if v != "absent"}))

    return edit


def edit_part(number: int, edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / f"consolidated.{number:02d}.pth"
        tensors = torch.load(path)
        torch.save(edit(tensors) or tensors, path)

    return change


def cut(folder: Path) -> None:
    path = folder / "consolidated.01.pth"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


class Bomb:
    """An object whose pickle is a call of `open(path, "w")`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "the first part is missing": (
        lambda f: (f / "consolidated.00.pth").unlink(),
        r"consolidated\.00\.pth is not in .*, which has consolidated\.01\.pth",
    ),
    "the last part is missing": (
        lambda f: (f / "consolidated.01.pth").unlink(),
        r"is \[62, 16\] of 1 parts, and params\.json says \[any, 32\]",
    ),
    "a part of another shape": (
        edit_part(1, lambda t: t.update({"norm.weight": torch.ones(3)})),
        r"norm\.weight is BF16 \[32\] in consolidated\.00\.pth and F32 \[3\] in consolidated\.01",
    ),
    "a part without a tensor": (
        edit_part(1, lambda t: {n: t[n] for n in t if n != "layers.1.attention.wq.weight"}),
        r"layers\.1\.attention\.wq\.weight is in consolidated\.00\.pth alone \(1 such",
    ),
    "a layer too many": (edit_params(n_layers=2), r"layers\.2\..* is no tensor of a dense model"),
    "a layer too few": (edit_params(n_layers=4), r"the weights lack layers\.3\.attention_norm"),
    "another width": (
        edit_params(multiple_of=64),
        r"feed_forward\.w1\.weight is \[96, 32\] of 2 parts, .* says \[128, 32\]",
    ),
    "another vocabulary": (edit_params(vocab_size=70), r"\[62, 32\] of 2 parts, .* \[70, 32\]"),
    "a text for a number": (edit_params(dim="32"), r"params\.json of .*: dim is '32'"),
    "no heads": (edit_params(n_heads=0), r"n_heads is 0"),
    "too many layers": (edit_params(n_layers=10**6), r"n_layers is 1000000"),
    "heads that do not divide": (edit_params(n_heads=3), r"dim 32 with 3 heads and 2 key-value"),
    "a negative multiple": (edit_params(multiple_of=-1), r"the MLP would have 0 neurons"),
    "no dim": (edit_params(dim="absent"), r"no dim"),
    "a mixture": (edit_params(moe={"num_experts": 8}), r"unknown key 'moe'"),
    "a picture model": (edit_params(vision_chunk_size=448), r"unknown key 'vision_chunk_size'"),
    "neither maker": (
        edit_params(multiple_of="absent"),
        r"neither multiple_of \(Meta\) nor hidden",
    ),
    "no object": (lambda f: (f / "params.json").write_text("[]"), r"is not a JSON object"),
    "truncated": (cut, r"consolidated\.01\.pth cannot be read as plain weights"),
    "a bare pickle": (
        lambda f: (f / "consolidated.00.pth").write_bytes(pickle.dumps({"a": 1})),
        r"consolidated\.00\.pth cannot be read as plain weights",
    ),
    "a pointer of Git LFS": (
        lambda f: (f / "consolidated.00.pth").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
        ),
        r"consolidated\.00\.pth is a pointer of Git LFS",
    ),
    "a tokenizer that is none": (
        lambda f: (f / "tokenizer.model").write_bytes(b"\x0a\xff\xff\xff\x7fno"),
        r"tokenizer\.model is no SentencePiece model",
    ),
    "ranks with a hole": (
        lambda f: (f / "tokenizer.model").write_bytes(ranks_of_bytes().replace(b" 257", b" 300")),
        r"tokenizer\.model has ranks that leave holes",
    ),
    "a link to elsewhere": (
        lambda f: (f / "tokenizer.model").symlink_to("/etc/passwd"),
        r"tokenizer\.model",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_error(case: str, tmp_path: Path) -> None:
    source = write_original("llama", tmp_path, parts=2, vocab_size=62)
    change, message = WRONG[case]
    change(source)
    with pytest.raises(SurgeryError, match=message) as caught:
        open_checkpoint(source)
    assert caught.value.hint and "\n" not in caught.value.message


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    source, trace = write_original("llama", tmp_path), tmp_path / "executed"
    edit_part(0, lambda t: {**t, "bomb": Bomb(trace)})(source)
    assert_two_lines(surgery("inspect", source), "consolidated.00.pth cannot be read")
    assert not trace.exists()
