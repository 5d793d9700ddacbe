"""What can be checked without a model: that shards are what was written, and values are finite."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from surgery.checkpoint import Progress
from surgery.checkpoint.tensors import DTYPES, LazyTensor
from surgery.storage.digest import Digest, differing, of_file

_PIECE = 8 << 20  # bytes read at a time
# The exponent bits; all set means Inf or NaN.
_EXPONENT = {"F64": 0x7FF << 52, "F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}


def damaged_shards(
    folder: Path,
    shards: Mapping[str, Any],
    trusted: Iterable[str] = (),
    progress: Progress = lambda n: None,
) -> tuple[list[str], dict[str, Digest]]:
    """Compare the shards in a folder with what was recorded when they were written.

    Args:
        folder: of the output.
        shards: "bytes", and "sha256" and "crc32" where they were taken, by file name.
        trusted: names of shards that this very run hashed while it wrote them.
        progress: is told of each piece that was read.

    Returns a line for each shard that is missing or differs, which names the tensors that differ,
    and the digests of the others.
    """
    damaged: list[str] = []
    found: dict[str, Digest] = {}
    for name, recorded in shards.items():
        path, expected = folder / name, recorded.get("sha256")
        if not path.is_file() or path.stat().st_size != recorded.get("bytes"):
            length = f"{path.stat().st_size:,} bytes long" if path.is_file() else "missing"
            damaged.append(f"{name} is {length}")
            continue
        if not (name in trusted and expected):
            digest = of_file(path, progress)
            if expected not in (None, digest["sha256"]):
                damaged.append(_difference(path, recorded, digest))
                continue
            found[name] = digest
        if refused := _refused(path):
            damaged.append(f"{name} cannot be read by the safetensors library: {refused}")
    return damaged, found


def _difference(path: Path, recorded: Mapping[str, Any], digest: Digest) -> str:
    """Return the line of a shard whose digest is not the recorded one."""
    where = differing(path, recorded.get("crc32") or "", digest["crc32"])
    named = ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
    hashes = f"sha256 {digest['sha256'][:12]}…, recorded {recorded['sha256'][:12]}…"
    return f"{path.name} has {hashes}: {named} differs"


def _refused(path: Path) -> str:
    """Return why the safetensors library does not open a shard, or an empty text where it does."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as shard:
            shard.keys()
    except (OSError, SafetensorError) as e:
        return str(e)[:200]
    return ""


def stray_weights(folder: Path, known: Collection[str]) -> list[str]:
    """Return the weight files in the folder that are not among the `known` ones."""
    return sorted(
        p.name
        for p in folder.iterdir()
        if p.suffix in (".safetensors", ".bin") and p.name not in known
    )


def nonfinite(tensors: Mapping[str, LazyTensor], progress: Progress = lambda n: None) -> list[str]:
    """Return the names of the tensors that hold NaN or Inf; they are read piece by piece."""
    return [
        name for name, t in tensors.items() if t.dtype in _EXPONENT and _has_nonfinite(t, progress)
    ]


def _has_nonfinite(tensor: LazyTensor, progress: Progress) -> bool:
    import numpy

    size = DTYPES[tensor.dtype][0]
    mask = numpy.array(_EXPONENT[tensor.dtype], dtype=f"<u{size}")
    found = False
    for piece in _pieces(tensor):
        found = found or bool(
            (numpy.frombuffer(piece, dtype=f"<u{size}") & mask).max(initial=0) == mask
        )
        progress(len(piece))
    return found


def _pieces(tensor: LazyTensor) -> Iterator[bytes]:
    for part in tensor.inputs if tensor.compute is None else ():
        yield from _pieces(part)
    if tensor.compute is not None:
        import torch

        yield tensor.read().reshape(-1).view(torch.uint8).numpy().tobytes()
    for e in tensor.extents:
        with e.file.path().open("rb", buffering=0) as f:
            f.seek(e.offset)
            left = e.length
            while left and (piece := f.read(min(left, _PIECE))):
                left -= len(piece)
                yield piece
