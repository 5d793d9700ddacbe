"""tokenizer.json made from the tokenizers of Meta and of Mistral.

They come as a SentencePiece model, as the ranks of tiktoken (Llama 3) or as tekken.json. Which
packages a loader needs for these differs between versions of transformers; each of them reads
tokenizer.json.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgery.checkpoint import BuiltFile, GeneratedFile
from surgery.checkpoint.compat import dump
from surgery.checkpoint.parsing import read_json
from surgery.checkpoint.tensors import SourceFile
from surgery.errors import SurgeryError
from surgery.files import JSON_LIMIT, content
from surgery.storage import sentencepiece, tokenizer_json
from surgery.storage.store import File, Store

_AGAIN = "download the tokenizer again"
_RANKS = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")
_MOST_BYTES = 1000  # of a token: each of its cuts is looked at
_RESERVED = "<|reserved_special_token_{}|>"


def _llama3(names: Sequence[str], reserved: int) -> tuple[str, ...]:
    """Return the 256 special tokens of a Llama 3, of which those without a name are reserved."""
    numbers = range(reserved, reserved + 256 - len(names))
    return (*names, *map(_RESERVED.format, numbers))


_BEGIN = ("<|begin_of_text|>", "<|end_of_text|>", _RESERVED.format(0), _RESERVED.format(1))
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>")
_LLAMA_3 = _llama3(
    (
        *_BEGIN,
        _RESERVED.format(2),
        _RESERVED.format(3),
        *_HEADERS,
        _RESERVED.format(4),
        "<|eot_id|>",
    ),
    5,
)
_LLAMA_3_1 = _llama3(
    (
        *_BEGIN,
        "<|finetune_right_pad_id|>",
        _RESERVED.format(2),
        *_HEADERS,
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
    ),
    3,
)
# Those of a tekken.json that does not list them.
_TEKKEN = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenizer:
    """What is known of a model's tokenizer.

    Args:
        bos, eos: ids of the tokens that begin and end a text.
        of_ranks: whether it is the one of Llama 3.
        files: those that are made of it.
        left: the files of the source that these stand for, which stay behind.
        notes: what the user should know.
    """

    bos: int = 1
    eos: int | list[int] = 2
    of_ranks: bool = False
    files: tuple[SourceFile, ...] = ()
    left: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_tokenizer(store: Store, params: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of an original.

    Args:
        store: the files of the source.
        params: its params.json, which tells the releases of Llama 3 apart.

    Raises SurgeryError where the file of the tokenizer cannot be read.
    """
    if (file := store.files.get("tekken.json")) is not None:
        return _tekken(file, store)
    for name in sorted(store.files):
        if re.fullmatch(r"tokenizer\.model(\.v[0-9]+)?", name):
            file = store.files[name]
            if _RANKS.match(file.read(0, min(file.size, 4 * _MOST_BYTES))):
                return _ranks(file, store, bool(params.get("use_scaled_rope")))
            return _pieces(file, store)
    return Tokenizer(notes=("the source has no tokenizer, and so the output has none",))


def _made(
    source: File, store: Store, build: Callable[[], Any], names: Mapping[str, Any]
) -> tuple[SourceFile, ...]:
    """Return tokenizer.json, built when it is read, and its config, unless they are there.

    Args:
        source: the file that they are made of.
        store: the files of the source.
        build: returns what tokenizer.json holds.
        names: the special tokens, for the config.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **names,
    }
    made = (
        BuiltFile("tokenizer.json", f"{source.name}@{source.identity}", lambda: dump(build())),
        GeneratedFile("tokenizer_config.json", dump(config)),
    )
    return tuple(f for f in made if f.name not in store.files)


# --- one function for each form -------------------------------------------------------------------


def _pieces(file: File, store: Store) -> Tokenizer:
    """Return the tokenizer of a SentencePiece model, whose file goes along."""
    model = sentencepiece.parse(content(file.path()), file.name)
    names = {
        key: model.pieces[i].text
        for key, i in (("unk_token", model.unk), ("bos_token", model.bos), ("eos_token", model.eos))
        if 0 <= i < len(model.pieces)
    }
    if model.type != sentencepiece.BPE or not {"bos_token", "eos_token"} <= set(names):
        made: tuple[SourceFile, ...] = ()
        notes: tuple[str, ...] = (f"{file.name} goes along as it is: it is no BPE of Llama's kind",)
    else:
        made, notes = _made(file, store, lambda: tokenizer_json.of_pieces(model), names), ()
    bos, eos = (i if i >= 0 else usual for i, usual in ((model.bos, 1), (model.eos, 2)))
    return Tokenizer(bos=bos, eos=eos, files=made, notes=notes)


def _ranks(file: File, store: Store, later: bool) -> Tokenizer:
    """Return the tokenizer of a Llama 3; `later` are the releases from 3.1 on.

    Its file has the name of a SentencePiece model and is none, so it stays behind.
    """
    ranks = dict[bytes, int]()
    try:
        for line in content(file.path()).splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error):
        raise SurgeryError(
            f"{file.name} holds a line without a token and its rank", _AGAIN
        ) from None
    _require_dense(ranks, file)
    special = {t: len(ranks) + i for i, t in enumerate(_LLAMA_3_1 if later else _LLAMA_3)}
    begin, end = _BEGIN[:2]
    eos: int | list[int] = special[end]
    notes: tuple[str, ...] = ()
    if "instruct" in store.location.lower():  # nothing in the files says it
        ends = [t for t in (end, "<|eom_id|>", "<|eot_id|>") if t in special]
        eos = [special[t] for t in ends]
        notes = (f"a text ends with {' or '.join(ends)}: the source's name says Instruct",)
    return Tokenizer(
        bos=special[begin],
        eos=eos,
        of_ranks=True,
        files=_made(
            file,
            store,
            lambda: tokenizer_json.of_ranks(ranks, special, tokenizer_json.LLAMA_3, begin),
            {"bos_token": begin, "eos_token": end},
        ),
        left=(file.name,),
        notes=notes,
    )


def _tekken(file: File, store: Store) -> Tokenizer:
    """Return the tokenizer of a tekken.json, which goes along."""
    data = read_json(content(file.path(), JSON_LIMIT), file.name, _AGAIN)
    try:
        config, listed = data["config"], data.get("special_tokens")
        names = [str(t["token_str"]) for t in listed] if listed else list(_TEKKEN)
        count = int(config.get("default_num_special_tokens") or len(names))
        names += [f"<SPECIAL_{i}>" for i in range(len(names), count)]
        entries = data["vocab"][: int(config["default_vocab_size"]) - count]
        ranks = {base64.b64decode(e["token_bytes"]): i for i, e in enumerate(entries)}
        words = str(config["pattern"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise SurgeryError(f"{file.name} is no vocabulary of Mistral's", _AGAIN) from None
    _require_dense(ranks, file)
    special = {name: i for i, name in enumerate(names)}
    moved = {token: rank + count for token, rank in ranks.items()}
    if not {"<s>", "</s>"} <= set(special):
        raise SurgeryError(f"{file.name} has no <s> and </s>", _AGAIN)
    made = _made(
        file,
        store,
        lambda: tokenizer_json.of_ranks(moved, special, words, "<s>"),
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    )
    return Tokenizer(bos=special["<s>"], eos=special["</s>"], files=made)


def _require_dense(ranks: Mapping[bytes, int], file: File) -> None:
    """Raise SurgeryError unless the ranks are 0, 1, 2, … and each byte is a token."""
    absent = [b for b in range(256) if bytes([b]) not in ranks]
    if absent or sorted(ranks.values()) != list(range(len(ranks))):
        what = f"no token for the byte {absent[0]}" if absent else "ranks that leave holes"
        raise SurgeryError(f"{file.name} has {what}", _AGAIN)
    if (longest := max(map(len, ranks))) > _MOST_BYTES:
        raise SurgeryError(f"{file.name} has a token of {longest:,} bytes", _AGAIN)
