"""The file of a SentencePiece model, read without the library: a message of protocol buffers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from surgery.errors import SurgeryError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BPE = 2
# Numbers of fields in sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _UNK, _BOS, _EOS = 3, 40, 41, 42
_DUMMY_PREFIX = 3
_MOST = 1_000_000  # pieces


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the vocabulary: its text, the logarithm of how likely it is, and its type."""

    text: str
    score: float
    type: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What a SentencePiece file holds, of what a tokenizer is made of.

    Args:
        pieces: the vocabulary; a piece's place is its id.
        type: BPE, or 1 for a unigram model.
        unk, bos, eos: ids, -1 where there is none.
        dummy_prefix: whether a space is put before a text.
    """

    pieces: tuple[Piece, ...]
    type: int
    unk: int
    bos: int
    eos: int
    dummy_prefix: bool


def parse(data: bytes, where: str) -> Model:
    """Return the model in the bytes of a file. Raises SurgeryError where it holds none."""
    pieces: list[Piece] = []
    trainer: dict[int, int] = {}
    normalizer: dict[int, int] = {}
    try:
        for number, value in _fields(data):
            if number == _PIECES and isinstance(value, bytes):
                pieces.append(_piece(value))
            elif number in (_TRAINER, _NORMALIZER) and isinstance(value, bytes):
                numbers = trainer if number == _TRAINER else normalizer
                numbers |= {n: v for n, v in _fields(value) if isinstance(v, int)}
    except (ValueError, IndexError, struct.error) as e:
        raise _unreadable(where, str(e)) from None
    if not 0 < len(pieces) <= _MOST:
        raise _unreadable(where, f"it holds {len(pieces)} pieces")
    return Model(
        pieces=tuple(pieces),
        type=trainer.get(_MODEL_TYPE, 1),
        unk=_signed(trainer.get(_UNK, 0)),
        bos=_signed(trainer.get(_BOS, 1)),
        eos=_signed(trainer.get(_EOS, 2)),
        dummy_prefix=bool(normalizer.get(_DUMMY_PREFIX, 1)),
    )


def _unreadable(where: str, reason: str) -> SurgeryError:
    return SurgeryError(
        f"{where} is no SentencePiece model: {reason[:160]}", "download the tokenizer again"
    )


def _piece(data: bytes) -> Piece:
    found = dict(_fields(data))
    text, score, kind = found.get(_TEXT, b""), found.get(_SCORE, b"\0" * 4), found.get(_TYPE, 1)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or not isinstance(kind, int):
        raise ValueError("a piece has fields of other types")
    return Piece(text.decode(), struct.unpack("<f", score)[0], kind)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a message."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        kind = key & 7
        if kind == 0:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        length = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            length, position = _varint(data, position)
        if length is None or position + length > len(data):
            raise ValueError(f"a field at byte {position:,} is cut or unknown")
        yield key >> 3, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
    raise ValueError(f"a number at byte {position:,} does not end")


def _signed(value: int) -> int:
    """Return a 64-bit number as a signed one: an id of -1 stands for none."""
    return value - 2**64 if value >= 2**63 else value
