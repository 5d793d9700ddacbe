"""A tokenizer as llama.cpp reads it from the metadata of a GGUF file.

llama.cpp has two kinds: BPE on bytes, "gpt2", whose pre-tokenizer it knows by name, and
SentencePiece, "llama", which merges the pair with the highest score. Everything is read from
tokenizer.json, as structure: two tokenizers with the same regular expressions have the same name,
whatever their vocabulary is. What has no name there is refused, because a model behind a tokenizer
that divides words elsewhere is silently worse.

Source: llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from surgery.checkpoint import Checkpoint, SourceFile
from surgery.checkpoint.parsing import read_json
from surgery.engines.gguf import Value
from surgery.errors import SurgeryError
from surgery.files import JSON_LIMIT, content
from surgery.storage.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from surgery.storage.tokenizer_json import LLAMA_3, SPACE

_DIGITS = "digits, each by itself"
_GPT2 = "the regular expression of GPT-2"
_QWEN2 = LLAMA_3.replace(r"|\p{N}{1,3}|", r"|\p{N}|")
# By what divides a text and whether whole words of the vocabulary are taken unmerged: the name.
_PRE_TOKENIZERS: dict[tuple[tuple[str, ...], bool], str] = {
    ((_GPT2,), False): "gpt-2",
    ((_DIGITS, _GPT2), False): "smollm",
    ((_QWEN2,), False): "qwen2",
    ((LLAMA_3,), True): "llama-bpe",
    ((LLAMA_3,), False): "smaug-bpe",
}
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def fields(checkpoint: Checkpoint, rows: int) -> dict[str, Value]:
    """Return the metadata that describes the tokenizer of a checkpoint.

    Args:
        checkpoint: with a tokenizer.json.
        rows: of the embedding; those beyond the vocabulary become unused tokens.

    Raises SurgeryError where there is no tokenizer.json, and where llama.cpp has no name for it.
    """
    spec = _json(checkpoint, "tokenizer.json")
    if spec is None:
        raise SurgeryError(
            f"{checkpoint.source.location} has no tokenizer.json, and a GGUF file holds its "
            "tokenizer",
            "save it beside the weights: AutoTokenizer.from_pretrained(…).save_pretrained(FOLDER)",
        )
    try:
        model = spec["model"]
        if model.get("type", "BPE") != "BPE":
            raise _unknown(f"its model is {model['type']}, not BPE")
        tokens, types = _vocabulary(spec, rows)
        kind = _sentencepiece if model.get("byte_fallback") else _byte_level
        found = kind(spec, tokens, types)
    except (KeyError, TypeError, AttributeError, IndexError) as e:
        raise _unknown(f"it is not understood ({type(e).__name__}: {e})") from None
    shared: dict[str, Value] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    return found | shared | _special(checkpoint, spec, tokens) | _template(checkpoint)


def _unknown(why: str) -> SurgeryError:
    return SurgeryError(
        f"the tokenizer cannot be written for llama.cpp: {why}",
        "known are SentencePiece and the byte-level BPE of "
        + ", ".join(sorted(set(_PRE_TOKENIZERS.values()))),
    )


# --- the vocabulary -------------------------------------------------------------------------------


def _vocabulary(spec: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Return the tokens by id, and their types."""
    added = {token["id"]: token for token in spec.get("added_tokens") or ()}
    by_id = {i: t for t, i in spec["model"]["vocab"].items()}
    by_id |= {i: token["content"] for i, token in added.items()}
    if by_id and (most := max(by_id)) >= rows:
        raise _unknown(f"it has a token {most}, and the embedding has {rows} rows")
    unknown = spec["model"].get("unk_token")
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(rows)]
    types = [_type(i, by_id, added, unknown) for i in range(rows)]
    return tokens, types


def _type(
    i: int, by_id: Mapping[int, str], added: Mapping[int, Mapping[str, Any]], unknown: str | None
) -> int:
    """Return the type of token `i`."""
    if i not in by_id:
        return UNUSED
    if unknown is not None and by_id[i] == unknown:
        return UNKNOWN
    if i in added:
        return CONTROL if added[i].get("special") else USER_DEFINED
    return NORMAL


# --- the two kinds --------------------------------------------------------------------------------


def _byte_level(
    spec: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> dict[str, Value]:
    """Return what is particular to BPE on bytes."""
    normalizer = spec.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise _unknown(f"it changes texts before it divides them ({normalizer.get('type')})")
    steps = tuple(_steps(spec["pre_tokenizer"]))
    whole = bool(spec["model"].get("ignore_merges"))
    if (steps, whole) not in _PRE_TOKENIZERS:
        raise _unknown(f"it divides texts by {', then '.join(steps) or 'nothing'}")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _PRE_TOKENIZERS[steps, whole],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in _merges(spec)],
    }


def _steps(pre: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a pre-tokenizer divides a text by, in order."""
    kind = pre["type"]
    if kind == "Sequence":
        for step in pre["pretokenizers"]:
            yield from _steps(step)
    elif kind == "Digits":
        yield _DIGITS if pre["individual_digits"] else "digits, together"
    elif kind == "ByteLevel":
        if pre.get("add_prefix_space"):
            yield "a space in front"
        if pre.get("use_regex", True):
            yield _GPT2
    elif kind == "Split" and "Regex" in pre["pattern"] and pre["behavior"] == "Isolated":
        yield str(pre["pattern"]["Regex"])
    else:
        yield kind


def _sentencepiece(
    spec: Mapping[str, Any], tokens: Sequence[str], types: list[int]
) -> dict[str, Value]:
    """Return what is particular to SentencePiece, and mark the bytes in `types`.

    The pair that is merged next is the one with the smallest rank in tokenizer.json and the one
    whose token has the highest score in llama.cpp: the score is minus the first rank of a token.
    """
    for i, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[i] = BYTE
    ranks: dict[str, int] = {}
    last = ""
    for rank, pair in enumerate(_merges(spec)):
        token = "".join(pair)
        if token != last and token in ranks:
            raise _unknown(f"merges to {token!r} lie apart, which scores cannot say")
        ranks.setdefault(token, rank)
        last = token
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [float(-ranks.get(t, len(ranks))) for t in tokens],
        "tokenizer.ggml.add_space_prefix": _adds_space(spec),
    }


def _adds_space(spec: Mapping[str, Any]) -> bool:
    """Return whether a text gets a space in front. Raises SurgeryError for other changes."""
    pre, normalizer = spec.get("pre_tokenizer"), spec.get("normalizer")
    if pre and pre["type"] == "Metaspace" and not normalizer:
        return bool(pre.get("prepend_scheme", "always") != "never")
    steps = (normalizer or {}).get("normalizers") or [normalizer or {}]
    kinds = [step.get("type") for step in steps]
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if pre or kinds not in (["Prepend", "Replace"], ["Replace"]) or steps[-1] != replaces:
        raise _unknown("it is no SentencePiece of Llama's kind: it changes texts in another way")
    return kinds[0] == "Prepend"


def _merges(spec: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Yield the pairs that are merged, in order; older files hold them as one text each."""
    for pair in spec["model"]["merges"]:
        yield pair.split(" ", 1) if isinstance(pair, str) else pair


# --- special tokens -------------------------------------------------------------------------------


def _special(
    checkpoint: Checkpoint, spec: Mapping[str, Any], tokens: Sequence[str]
) -> dict[str, Value]:
    """Return the ids of special tokens, and which of them a text begins and ends with."""
    config = _json(checkpoint, "tokenizer_config.json") or {}
    ids = {token: i for i, token in enumerate(tokens)}
    found: dict[str, Value] = {}
    for key, name in _SPECIAL.items():
        token = config.get(key)
        text = token.get("content") if isinstance(token, Mapping) else token
        if text in ids:
            found[f"tokenizer.ggml.{name}_token_id"] = ids[text]
    before, after = _around(spec.get("post_processor"))
    found["tokenizer.ggml.add_bos_token"] = before
    found["tokenizer.ggml.add_eos_token"] = after
    return found


def _around(post: Mapping[str, Any] | None) -> tuple[bool, bool]:
    """Return whether a special token is put before a text, and after it."""
    for step in (post or {}).get("processors") or [post or {}]:
        if step.get("type") == "TemplateProcessing":
            kinds = ["SpecialToken" in part for part in step["single"]]
            return kinds[0], len(kinds) > 1 and kinds[-1]
    return False, False


def _template(checkpoint: Checkpoint) -> dict[str, Value]:
    """Return the chat template, where there is one."""
    config = _json(checkpoint, "tokenizer_config.json") or {}
    text = config.get("chat_template")
    if file := _file(checkpoint, "chat_template.jinja"):
        text = content(file.path(), JSON_LIMIT).decode("utf-8", "replace")
    return {"tokenizer.chat_template": text} if isinstance(text, str) and text else {}


def _json(checkpoint: Checkpoint, name: str) -> dict[str, Any] | None:
    """Return the object in a side file, or None where there is no such file."""
    if (file := _file(checkpoint, name)) is None:
        return None
    hint = "save the tokenizer again with save_pretrained"
    found = read_json(content(file.path(), JSON_LIMIT), name, hint)
    if not isinstance(found, dict):
        raise SurgeryError(f"{name} holds no object", hint)
    return found


def _file(checkpoint: Checkpoint, name: str) -> SourceFile | None:
    return next((file for file in checkpoint.files if file.name == name), None)
