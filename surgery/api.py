"""The Python API, `surgery.NAME`: the same as the commands, in pieces that compose."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from surgery.checkpoint import Checkpoint, parse_size
from surgery.operations.carve import carve
from surgery.operations.cast import cast
from surgery.operations.memory import memory
from surgery.operations.relufy import relufy
from surgery.operations.splinify import splinify
from surgery.operations.upcycle import upcycle
from surgery.storage import open_checkpoint
from surgery.workflow.convert import convert_alone
from surgery.workflow.verify import verify_folder

if TYPE_CHECKING:
    from surgery.analysis.analyze import Analysis
    from surgery.analysis.weigh import Weights
    from surgery.proof.verification import Verification

__all__ = [
    "analyze",
    "carve",
    "cast",
    "inspect",
    "memory",
    "open",
    "relufy",
    "splinify",
    "upcycle",
    "verify",
    "write",
]


def open(location: str | Path, *, revision: str | None = None) -> Checkpoint:
    """A checkpoint from a folder, a .safetensors file or a Hub id; reads headers alone."""
    return open_checkpoint(location, revision=revision)


def inspect(checkpoint: Checkpoint) -> Weights:
    """Where the weights are: parameters by role and layer, active parameters, FLOPs. Reads no
    weight.
    """
    from surgery.analysis.weigh import weigh

    return weigh(checkpoint, checkpoint.config)


def analyze(
    checkpoint: Checkpoint,
    *,
    text: str | Path | None = None,
    tokens: int = 16384,
    sequence_length: int = 512,
    device: str | None = None,
    dtype: str | None = None,
) -> Analysis:
    """What the MLPs do on text (docs/analyze.md): one walk, a layer in memory at a time. The
    checkpoint may be the result of operations that was never written.

    Args:
        text: a file, a folder or a .jsonl; the embedded calibration text by default.
        device, dtype: "cuda", "bf16", …; by default the fastest there is.
    """
    from surgery.analysis import analyze as analysis
    from surgery.calibration.data import sample_ids
    from surgery.calibration.walk import choose_device, choose_dtype

    place = choose_device(device)
    sample = sample_ids(
        checkpoint,
        tokens=tokens,
        sequence_length=sequence_length,
        split="calibration",
        file=None if text is None else Path(text),
    )
    return analysis.analyze(checkpoint, sample, dtype=choose_dtype(dtype, place), device=place)


def write(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    max_shard_size: int | str | None = None,
    hardlink: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Write a checkpoint to the folder `out`, one tensor at a time; goes on with an interrupted
    output of the same.

    Args:
        max_shard_size: bytes, or text like "5GB" (the default).
        hardlink: link to source files that stay as they are, instead of copying them.

    Raises SurgeryError, before the first byte, for a folder that is not ours to write or a disk
    that is too small.
    """
    size = parse_size(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    return convert_alone(
        checkpoint,
        checkpoint,
        Path(out),
        max_shard_size=size,
        hardlink=hardlink,
        verify=False,
        trust_remote_code=trust_remote_code,
    ).folder


def verify(source: Checkpoint, out: str | Path, *, trust_remote_code: bool = False) -> Verification:
    """Prove the output in the folder `out` against the source it was made from; the result goes
    into its surgery.json.
    """
    return verify_folder(source, Path(out), trust_remote_code)
