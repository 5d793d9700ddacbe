"""The content of a tokenizer.json, of byte pair encodings in two forms.

Merges are what neither form lists: a token may be made of any two others that give it, and those of
a lower rank, or a higher score, come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from surgery.storage.sentencepiece import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Model

SPACE = "▁"
# How Llama 3 cuts a text before it looks for tokens.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def of_pieces(model: Model) -> dict[str, Any]:
    """Return the tokenizer of a SentencePiece model of Llama's kind.

    It begins a text with the token for that, and falls back to bytes.
    """
    texts = [p.text for p in model.pieces]
    special = {texts[i]: i for i, p in enumerate(model.pieces) if p.type in (UNKNOWN, CONTROL)}
    own = {texts[i]: i for i, p in enumerate(model.pieces) if p.type == USER_DEFINED}
    prefix = [{"type": "Prepend", "prepend": SPACE}] if model.dummy_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if model.dummy_prefix else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    bpe = _bpe({t: i for i, t in enumerate(texts)}, _merges_of_pieces(model))
    unk = texts[model.unk] if 0 <= model.unk < len(texts) else None
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(special, True) + _added(own, False),
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, replace]},
        "pre_tokenizer": None,
        "post_processor": _begin(texts[model.bos], model.bos),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": bpe | {"unk_token": unk, "fuse_unk": True, "byte_fallback": True},
    }


def _merges_of_pieces(model: Model) -> list[list[str]]:
    """Return the merges of normal pieces, the likeliest first."""
    normal = {p.text: p.score for p in model.pieces if p.type == NORMAL}
    merges = [
        (score, i, text[:i], text[i:])
        for text, score in normal.items()
        for i in range(1, len(text))
        if text[:i] in normal and text[i:] in normal
    ]
    merges.sort(key=lambda m: (m[0], len(m[2]), len(m[3])), reverse=True)
    return [[left, right] for _, _, left, right in merges]


def of_ranks(
    ranks: Mapping[bytes, int], special: Mapping[str, int], words: str, begin: str
) -> dict[str, Any]:
    """Return the tokenizer of tokens of bytes that are ranked, as tiktoken has them.

    Args:
        ranks: the id of each token; lower ones are merged first.
        special: the ids of special tokens.
        words: the pattern by which a text is cut first.
        begin: the special token that begins a text.
    """
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    cut = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    # The reader numbers what is added by itself, behind the vocabulary.
    before = {t: i for t, i in special.items() if i < min(ranks.values())}
    vocab = before | {_text(token): rank for token, rank in ranks.items()}
    bytewise = level | {"use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(special, True),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, bytewise]},
        "post_processor": {
            "type": "Sequence",
            "processors": [
                level | {"trim_offsets": False, "use_regex": True},
                _begin(begin, special[begin]),
            ],
        },
        "decoder": level | {"use_regex": True},
        "model": _bpe(vocab, _merges_of_ranks(ranks)) | {"ignore_merges": True},
    }


def _merges_of_ranks(ranks: Mapping[bytes, int]) -> list[list[str]]:
    """Return the merges in the order of the tokens that they give."""
    merges = [
        (rank, ranks[token[:i]], ranks[token[i:]], token[:i], token[i:])
        for token, rank in ranks.items()
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    merges.sort(key=lambda m: m[:3])
    texts = {token: _text(token) for token in ranks}
    return [[texts[left], texts[right]] for *_, left, right in merges]


def _bpe(vocab: Mapping[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": dict(vocab),
        "merges": merges,
    }


def _added(tokens: Mapping[str, int], special: bool) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [{"id": i, "content": t, **flags, "special": special} for t, i in tokens.items()]


def _begin(token: str, number: int) -> dict[str, Any]:
    """Return the template that puts a token before every text."""

    def single(kind: int) -> list[dict[str, Any]]:
        first = {"SpecialToken": {"id": token, "type_id": kind}}
        return [first, {"Sequence": {"id": "AB"[kind], "type_id": kind}}]

    known = {token: {"id": token, "ids": [number], "tokens": [token]}}
    return {
        "type": "TemplateProcessing",
        "single": single(0),
        "pair": single(0) + single(1),
        "special_tokens": known,
    }


def _text(token: bytes) -> str:
    """Return bytes as the characters that stand for them in a byte-level encoding."""
    return token.decode("latin-1").translate(_characters())


@cache
def _characters() -> dict[int, str]:
    """Return a printable character for each byte that has none of its own, as GPT-2 chose them."""
    own = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    return {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in own)}
