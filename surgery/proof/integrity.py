"""What can be known of files without a model: are the shards what was written, are the values
finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from surgery.checkpoint import Progress
from surgery.checkpoint.tensors import DTYPES, LazyTensor
from surgery.storage.digest import Digest, differing, of_file

_PIECE = 8 << 20  # bytes looked at at a time
# The exponent bits; all set means Inf or NaN.
_EXPONENT = {"F64": 0x7FF << 52, "F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}


def damaged_shards(
    folder: Path,
    shards: Mapping[str, Any],
    trusted: Iterable[str] = (),
    progress: Progress = lambda n: None,
) -> tuple[list[str], dict[str, Digest]]:
    """Hash the recorded shards: those that are absent or not what was recorded, with the tensors
    that differ, and the digests of the others.

    `shards` maps names to {"bytes", "sha256", "crc32"} (the last two: where they have been taken);
    `trusted` were hashed by this very run.
    """
    damaged: list[str] = []
    found: dict[str, Digest] = {}
    for name, recorded in shards.items():
        path, expected = folder / name, recorded.get("sha256")
        if name in trusted and expected:
            continue
        if not path.is_file() or path.stat().st_size != recorded.get("bytes"):
            damaged.append(
                f"{name} is {'absent' if not path.is_file() else f'{path.stat().st_size:,} bytes long'}"
            )
            continue
        digest = of_file(path, progress)
        if expected in (None, digest["sha256"]):
            found[name] = digest
            continue
        where = differing(path, recorded.get("crc32") or "", digest["crc32"])
        named = ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
        damaged.append(
            f"{name} has sha256 {digest['sha256'][:12]}…, recorded {expected[:12]}…: {named} differs"
        )
    return damaged, found


def stray_weights(folder: Path, shards: Mapping[str, Any]) -> list[str]:
    """Weight files in the folder that the conversion did not write."""
    return sorted(
        p.name
        for p in folder.iterdir()
        if p.suffix in (".safetensors", ".bin") and p.name not in shards
    )


def nonfinite(tensors: Mapping[str, LazyTensor], progress: Progress = lambda n: None) -> list[str]:
    """Names of the floating-point tensors on disk that hold NaN or Inf; read piece by piece."""
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
