"""Token ids to measure with, tokenized by the checkpoint's own tokenizer.

The text is the one that comes with the package, files and folders, data sets of the Hub, or a mix
of them (calibration/texts.py). Each sequence is a window of one text, behind the
beginning-of-sequence token (BOS) if the tokenizer adds one, and knows its domain. Without a
tokenizer the ids are random, which is enough to compare two models and useless for perplexity; the
sample says which it is.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from surgery import files
from surgery.calibration import texts as sources
from surgery.calibration.stock import parse_config, runs_custom_code
from surgery.calibration.texts import Part, Text
from surgery.checkpoint import Checkpoint
from surgery.checkpoint.edit import EMBEDDINGS
from surgery.errors import SurgeryError

CHARACTERS = 4  # of a token, about: a piece of a built-in text is as long as a window
# Tables of learned positions: a model that has one cannot read further.
_POSITIONS = ("wpe.weight", "embed_positions.weight", "position_embeddings.weight")
# Files that a tokenizer may consist of.
SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Token ids, `input_ids` [B, T].

    `text` is False if they are random; `source` says in words where they come from. `row_domains`
    names the domain of each sequence; without it all of them are of one domain.
    """

    input_ids: Tensor
    source: str
    text: bool
    row_domains: tuple[str, ...] = ()

    @property
    def mask(self) -> Tensor:
        """Return a mask [B, T] that is False where statistics leave a token out.

        That is the first token of each sequence, BOS or whatever stands there. It is an attention
        sink, whose norm can be a hundred times that of the other tokens.
        """
        return (torch.arange(self.input_ids.shape[1]) > 0).expand(self.input_ids.shape)

    @property
    def domains(self) -> tuple[str, ...]:
        """Return the names of the domains, in the order in which they first come."""
        return tuple(dict.fromkeys(self.row_domains)) or (self.source,)

    @property
    def domain_of_row(self) -> Tensor:
        """Return the domain of each sequence [B], as a place in `domains`."""
        if not self.row_domains:
            return torch.zeros(len(self.input_ids), dtype=torch.long)
        return torch.tensor([self.domains.index(name) for name in self.row_domains])

    @property
    def domain_of_token(self) -> Tensor:
        """Return the domain of each token that counts, [n], in the order of `ids[mask]`."""
        return self.domain_of_row[:, None].expand(self.input_ids.shape)[self.mask]

    def rows(self, wanted: slice) -> Sample:
        """Return some of the sequences, with their domains."""
        kept = self.row_domains[wanted]
        return replace(self, input_ids=self.input_ids[wanted], row_domains=kept)

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the ids as little-endian int64, row by row."""
        return hashlib.sha256(self.input_ids.numpy().astype("<i8").tobytes()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Return the sample's source, shape, domains and hash, for JSON."""
        sequences, length = self.input_ids.shape
        domains = {"domains": dict(Counter(self.row_domains))} if self.row_domains else {}
        return {
            "source": self.source,
            "sequences": sequences,
            "length": length,
            **domains,
            "sha256": self.sha256,
        }


def sample_ids(
    checkpoint: Checkpoint,
    *,
    tokens: int,
    sequence_length: int,
    part: Part = "held_out",
    texts: Sequence[Text] = (),
    seed: int = 0,
) -> Sample:
    """Return max(1, tokens // sequence_length) sequences of `sequence_length` tokens of text.

    By default the texts are the built-in ones of all domains, in turn: the next sequence is of the
    text that lacks most of its share. See `draw`.

    Example:
        sample = sample_ids(open_checkpoint("Qwen/Qwen3-0.6B"), tokens=4096, sequence_length=512)
    """
    chosen = texts or sources.choose()
    rows = max(1, tokens // sequence_length)
    windows = Windows(rows=rows, length=sequence_length)
    return draw(checkpoint, chosen, windows, part=part, seed=seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """How much to read: `rows` sequences of `length` tokens, `each` of one text at most."""

    rows: int
    length: int
    each: int | None = None


def draw(
    checkpoint: Checkpoint,
    texts: Sequence[Text],
    windows: Windows,
    *,
    part: Part,
    seed: int = 0,
) -> Sample:
    """Return sequences of tokens from a part of the texts.

    Each comes behind BOS if the tokenizer adds it, and holds one text only. No more is read than
    needed. A text shorter than one sequence is repeated; texts that hold too little in all give
    fewer. Without a tokenizer the ids are random, drawn with `seed`.

    Raises SurgeryError if a text cannot be read, if it holds nothing although it is to be fitted on
    or measured in whole, or if one is given and the checkpoint has no tokenizer.
    """
    tokenizer, reason = _load_tokenizer(checkpoint)
    if tokenizer is None:
        if own := [t.domain for t in texts if not t.built_in]:
            hint = "add the tokenizer's files to the checkpoint"
            raise SurgeryError(f"{own[0]} cannot be tokenized: {reason}", hint)
        rows = min(windows.rows, windows.each or windows.rows)
        return _random(checkpoint, rows, windows.length, reason, seed)
    streams = [_Stream(t, tokenizer, part, windows.length) for t in texts]
    found = list(_in_turn(streams, windows.rows, windows.each))
    if not found:
        name = ", ".join(t.domain for t in texts)
        raise SurgeryError(f"{name}: no text is held out", "give more text")
    ids = torch.tensor([window for _, window in found], dtype=torch.long)
    bos = torch.tensor(_bos(tokenizer), dtype=torch.long).expand(len(ids), -1)
    ids = torch.cat([bos, ids], dim=1)
    require_ids(checkpoint, ids, "the tokenizer")
    _require_positions(checkpoint, ids.shape[1])
    return Sample(
        input_ids=ids,
        source=_described({id(s): s for s, _ in found}.values(), part),
        text=True,
        row_domains=tuple(s.text.domain for s, _ in found),
    )


class _Stream:
    """The windows of one text, as far as they were taken."""

    def __init__(self, text: Text, tokenizer: Any, part: Part, length: int) -> None:
        self.text, self.taken, self.repeated = text, 0, False
        self._windows = self._cut(tokenizer, part, length)
        self._may_be_empty = part == "held_out" and not text.built_in

    def take(self) -> list[int] | None:
        """Return the next window; None where the text has no more."""
        window = next(self._windows, None)
        if window is None and not self.taken and not self._may_be_empty:
            hint = "give a file of plain text in UTF-8"
            raise SurgeryError(f"{self.text.domain} holds no text", hint)
        self.taken += window is not None
        return window

    def _cut(self, tokenizer: Any, part: Part, length: int) -> Iterator[list[int]]:
        """Yield windows of `length` ids; what is shorter than one is repeated."""
        ids: list[int] = []
        for piece in self.text.pieces(part, CHARACTERS * length):
            ids += tokenizer(piece, add_special_tokens=False, verbose=False).input_ids
            whole = len(ids) // length * length
            yield from (ids[i : i + length] for i in range(0, whole, length))
            ids = ids[whole:]
        if ids and not self.taken:
            self.repeated = True
            yield (ids * -(-length // len(ids)))[:length]


def _in_turn(
    streams: Sequence[_Stream], rows: int, each: int | None
) -> Iterator[tuple[_Stream, list[int]]]:
    """Yield up to `rows` windows, always of the stream that lacks most of its share.

    Streams of equal weight come in their order. They begin at different places between two of their
    turns, so that a light one is not far from a heavy one.
    """
    begin = {id(s): (i + 0.5) / len(streams) for i, s in enumerate(streams)}
    waiting, found = [s for s in streams if s.text.weight], 0
    while waiting and found < rows:
        stream = min(waiting, key=lambda s: (s.taken + begin[id(s)]) / s.text.weight)
        window = None if stream.taken == each else stream.take()
        if window is None:
            waiting.remove(stream)
        else:
            found += 1
            yield stream, window


def _described(streams: Iterable[_Stream], part: Part) -> str:
    """Return in words what the streams read."""
    kind = "held-out " if part == "held_out" else ""
    names = [f"{s.text.domain}{', repeated' * s.repeated}" for s in streams if not s.text.built_in]
    built_in = [s.text.domain for s in streams if s.text.built_in]
    if len(built_in) == 1:
        names.append(f"built-in {kind}{built_in[0]}")
    elif built_in:
        names.append(f"built-in {kind}text of {len(built_in)} domains")
    return " and ".join(names)


def _random(
    checkpoint: Checkpoint, rows: int, sequence_length: int, reason: str, seed: int
) -> Sample:
    """Return random ids, where there is no tokenizer."""
    vocab_size = parse_config(checkpoint).get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (rows, sequence_length), generator=generator)
    _require_positions(checkpoint, sequence_length)
    return Sample(
        input_ids=ids,
        source=f"random ids, seed {seed} ({reason})",
        text=False,
        row_domains=("random ids",) * rows,
    )


def require_ids(checkpoint: Checkpoint, ids: Tensor, what: str) -> None:
    """Raise SurgeryError for ids that the embedding has no row for; `what` gave them."""
    tables = (t for n, t in checkpoint.tensors.items() if n.endswith(EMBEDDINGS))
    rows = max((t.shape[0] for t in tables if t.shape), default=None)
    if rows is not None and int(ids.max()) >= rows:
        raise SurgeryError(
            f"{what} gives the id {int(ids.max())}, and the model's embedding has {rows} rows "
            f"({int((ids >= rows).sum())} of {ids.numel()} ids are beyond it)",
            "restore the tokenizer that belongs to the model, or enlarge the model with "
            "resize_token_embeddings()",
        )


def _require_positions(checkpoint: Checkpoint, length: int) -> None:
    """Raise SurgeryError for sequences that are longer than a learned table of positions."""
    if not any(n.endswith(_POSITIONS) for n in checkpoint.tensors):
        return
    positions = parse_config(checkpoint).get_text_config().max_position_embeddings
    if length > positions:
        raise SurgeryError(
            f"sequences of {length} tokens, and the model has {positions} positions",
            f"give --sequence-length {positions - 1} or less",
        )


def _load_tokenizer(checkpoint: Checkpoint) -> tuple[Any, str]:
    """Return the checkpoint's tokenizer, or None and the reason why there is none."""
    found = [f for f in checkpoint.files if f.name.endswith(SUFFIXES) and "/" not in f.name]
    starts, ends = ("tokenizer", "vocab", "tekken"), (".model", ".tiktoken")
    if not any(f.name.startswith(starts) or f.name.endswith(ends) for f in found):
        return None, "the checkpoint has no tokenizer"
    with tempfile.TemporaryDirectory() as folder:
        for f in found:
            files.write(Path(folder), f.name, files.content(f.path()), sync=False)
        trust = runs_custom_code(checkpoint)
        try:
            return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust), ""
        except Exception as e:  # whatever the tokenizer's library raises
            # Random ids are still good enough to compare two models.
            return None, f"the tokenizer does not load: {type(e).__name__}: {str(e)[:200]}"


def _bos(tokenizer: Any) -> list[int]:
    """Return [the BOS id] if the tokenizer puts it in front of a text, else []."""
    first = tokenizer("a").input_ids[:1]
    return first if tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id] else []
