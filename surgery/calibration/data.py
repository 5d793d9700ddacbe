"""Token ids to measure with, tokenized by the checkpoint's own tokenizer.

The text is the one that comes with the package, a file or folder, or a data set of the Hub. Each
sequence is a window of the text, behind the beginning-of-sequence token (BOS) if the tokenizer adds
one. Without a tokenizer the ids are random, which is enough to compare two models and useless for
perplexity; the sample says which it is.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from surgery import files
from surgery.calibration.stock import parse_config, runs_custom_code
from surgery.checkpoint import Checkpoint
from surgery.checkpoint.edit import EMBEDDINGS
from surgery.errors import SurgeryError

TEXT_SUFFIXES = (".txt", ".md", ".jsonl")  # files of a folder that are read
PIECE = 2**20  # characters tokenized at a time
# Tables of learned positions: a model that has one cannot read further.
_POSITIONS = ("wpe.weight", "embed_positions.weight", "position_embeddings.weight")
# Files that a tokenizer may consist of.
SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Token ids, `input_ids` [B, T].

    `text` is False if they are random; `source` says in words where they come from.
    """

    input_ids: Tensor
    source: str
    text: bool

    @property
    def mask(self) -> Tensor:
        """Return a mask [B, T] that is False where statistics leave a token out.

        That is the first token of each sequence, BOS or whatever stands there. It is an attention
        sink, whose norm can be a hundred times that of the other tokens.
        """
        return (torch.arange(self.input_ids.shape[1]) > 0).expand(self.input_ids.shape)

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the ids as little-endian int64, row by row."""
        return hashlib.sha256(self.input_ids.numpy().astype("<i8").tobytes()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Return the sample's source, shape and hash, for JSON."""
        sequences, length = self.input_ids.shape
        return {
            "source": self.source,
            "sequences": sequences,
            "length": length,
            "sha256": self.sha256,
        }


def sample_ids(
    checkpoint: Checkpoint,
    *,
    tokens: int,
    sequence_length: int,
    split: str = "evaluation",
    file: Path | None = None,
    dataset: str | None = None,
    seed: int = 0,
) -> Sample:
    """Return max(1, tokens // sequence_length) sequences of `sequence_length` tokens of text.

    Each comes behind BOS if the tokenizer adds it. The text is `split` ("calibration" or
    "evaluation") of the package; or `file`: plain text, a .jsonl with a "text" in every line, or a
    folder of such files; or `dataset`, the Hub id of a data set. No more is read than needed. A
    text shorter than one sequence is repeated; one shorter than `tokens` gives fewer sequences.
    Without a tokenizer the ids are random, drawn with `seed`.

    Raises SurgeryError if the text cannot be read or holds nothing, or if a text is given and the
    checkpoint has no tokenizer.

    Example:
        sample = sample_ids(open_checkpoint("Qwen/Qwen3-0.6B"), tokens=4096, sequence_length=512)
    """
    rows = max(1, tokens // sequence_length)
    tokenizer, reason = _load_tokenizer(checkpoint)
    if tokenizer is None and (file or dataset):
        raise SurgeryError(
            f"{file or dataset} cannot be tokenized: {reason}",
            "add the tokenizer's files to the checkpoint",
        )
    if tokenizer is None:
        vocab_size = parse_config(checkpoint).get_text_config().vocab_size
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocab_size, (rows, sequence_length), generator=generator)
        _require_positions(checkpoint, sequence_length)
        return Sample(input_ids=ids, source=f"random ids, seed {seed} ({reason})", text=False)
    texts, name = _read(split, file, dataset)
    ids = _tokenize(tokenizer, texts, rows * sequence_length)
    if not len(ids):
        raise SurgeryError(f"{name} holds no text", "give a file of plain text in UTF-8")
    if len(ids) < sequence_length:
        name = f"{name}, repeated"
        ids = ids.repeat(-(-sequence_length // len(ids)))
    rows = min(rows, len(ids) // sequence_length)
    ids = ids[: rows * sequence_length].view(rows, sequence_length)
    bos = torch.tensor(_bos(tokenizer), dtype=torch.long).expand(rows, -1)
    ids = torch.cat([bos, ids], dim=1)
    require_ids(checkpoint, ids, "the tokenizer")
    _require_positions(checkpoint, ids.shape[1])
    return Sample(input_ids=ids, source=name, text=True)


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


def _tokenize(tokenizer: Any, texts: Iterable[str], wanted: int) -> Tensor:
    """Return the ids of the texts, up to the first text that brings them to `wanted`."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if len(ids) >= wanted:
            break
    return torch.tensor(ids, dtype=torch.long)


# --- text -----------------------------------------------------------------------------------------


def _read(split: str, file: Path | None, dataset: str | None) -> tuple[Iterable[str], str]:
    """Return the text in pieces, and its name."""
    if dataset is not None:
        return _stream(dataset), dataset
    if file is None:
        built_in = resources.files("surgery.demo") / "text" / f"{split}.txt"
        return [built_in.read_text("utf-8")], f"built-in {split} text"
    texts = [file]
    if file.is_dir():
        texts = sorted(f for f in file.rglob("*") if f.suffix in TEXT_SUFFIXES)
        if not texts:
            raise SurgeryError(
                f"no {', '.join(TEXT_SUFFIXES)} in {file}",
                "give a file or a folder of plain text in UTF-8",
            )
    return (piece for f in texts for piece in _pieces(f)), file.resolve().name


def _pieces(file: Path) -> Iterator[str]:
    """Yield a text file in pieces that end at line ends, or the documents of a .jsonl."""
    try:
        with file.open(encoding="utf-8") as f:
            if file.suffix == ".jsonl":
                yield from (str(json.loads(line)["text"]) + "\n\n" for line in f if line.strip())
                return
            while lines := f.readlines(PIECE):
                yield "".join(lines)
    except (OSError, UnicodeDecodeError) as e:
        hint = "give a file of plain text in UTF-8"
        raise SurgeryError(f"cannot read {file}: {e}", hint) from None
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        hint = 'make every line like {"text": "..."}'
        raise SurgeryError(f'{file} has a line without "text": {e!r}', hint) from None


def _stream(name: str) -> Iterator[str]:
    """Return the documents of a data set's train split, streamed.

    `name` is OWNER/NAME or OWNER/NAME:CONFIGURATION.
    """
    try:
        load_dataset = importlib.import_module("datasets").load_dataset
    except ImportError:
        raise SurgeryError("--dataset needs the package datasets", "pip install datasets") from None
    path, _, configuration = name.partition(":")
    try:
        rows = load_dataset(path, configuration or None, split="train", streaming=True)
        first = next(iter(rows))
    except Exception as e:  # datasets raises whatever its readers raise
        raise SurgeryError(
            f"cannot read the data set {name}: {type(e).__name__}: {str(e).splitlines()[0]}",
            "give OWNER/NAME or OWNER/NAME:CONFIGURATION, or a file with --text",
        ) from None
    columns = [k for k, v in first.items() if isinstance(v, str)]
    column = "text" if "text" in first else next(iter(columns), None)
    if column is None:
        raise SurgeryError(
            f"the data set {name} has no column of text among {', '.join(first)}",
            "give another data set",
        )
    return (str(row[column]) + "\n\n" for row in rows)


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
