"""The Python API, `surgery.NAME`: the same as the commands, in pieces that compose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.checkpoint import Checkpoint, parse_size
from surgery.errors import UsageError
from surgery.files import expanded, is_url
from surgery.operations.carve import carve
from surgery.operations.cast import cast
from surgery.operations.fold import fold
from surgery.operations.memory import memory
from surgery.operations.prune import prune
from surgery.operations.relufy import relufy
from surgery.operations.splinify import splinify
from surgery.operations.upcycle import upcycle
from surgery.proof.require import Require
from surgery.storage import open_checkpoint
from surgery.workflow.convert import convert_alone
from surgery.workflow.record import read_record
from surgery.workflow.request import Demands
from surgery.workflow.settle import settle
from surgery.workflow.verify import recorded_texts, verify_folder

if TYPE_CHECKING:
    from surgery.analysis.analyze import Analysis
    from surgery.analysis.weigh import Weights
    from surgery.proof.verification import Verification
    from surgery.workflow.export import Exported

__all__ = [
    "analyze",
    "carve",
    "cast",
    "export",
    "fold",
    "inspect",
    "memory",
    "open",
    "prune",
    "relufy",
    "sparse_decode",
    "splinify",
    "upcycle",
    "verify",
    "write",
]


def open(
    location: str | Path,
    *,
    revision: str | None = None,
    strip_prefix: str | None = None,
    dequantize: bool = False,
) -> Checkpoint:
    """Open a checkpoint: a folder, a .safetensors file, a Hub id or a URL. Reads headers alone.

    Args:
        location: like "./my-model", "Qwen/Qwen3-8B", "Qwen/Qwen3-8B@main" or "s3://bucket/model".
        revision: branch, tag or commit of a Hub id.
        strip_prefix: what to strip from names of tensors, like the "module." of a wrapped model.
        dequantize: open weights in fp8 or mxfp4 as bf16.

    Raises SurgeryError for what is no checkpoint, or not a whole one.

    Example:
        >>> source = surgery.open("Qwen/Qwen3-8B")
        >>> source.parameters
        8190735360
    """
    return open_checkpoint(
        location, revision=revision, strip_prefix=strip_prefix, dequantize=dequantize
    )


def inspect(checkpoint: Checkpoint) -> Weights:
    """Weigh a checkpoint: parameters by role and layer, active ones, bytes, FLOPs of a token.

    Reads no weight.

    Example:
        >>> weights = surgery.inspect(surgery.open("Qwen/Qwen3-8B"))
        >>> weights.parameters(), weights.active(), weights.flops()
    """
    from surgery.analysis.weigh import weigh

    return weigh(checkpoint, checkpoint.config)


def analyze(
    checkpoint: Checkpoint,
    *,
    text: str | Path | Sequence[str | Path] = (),
    tokens: int = 16384,
    sequence_length: int = 512,
    device: str | None = None,
    dtype: str | None = None,
) -> Analysis:
    """Measure what the MLPs do on text, in one walk with a layer in memory at a time.

    The checkpoint may be the result of operations that was never written.

    Args:
        text: a file, a folder or a .jsonl, or several, perhaps with weights ("notes.txt=2"); by
            default the built-in text of all domains.
        tokens: how many tokens to measure on.
        sequence_length: tokens of a window.
        device: "cuda", "mps" or "cpu"; by default the fastest there is.
        dtype: "bf16", "fp16" or "fp32"; by default the fastest there is.

    Raises SurgeryError where the model or the text cannot be read.

    Example:
        >>> found = surgery.analyze(surgery.open("./my-model"), tokens=4096)
        >>> [layer.mlp.gate.zero for layer in found.layers]
    """
    from surgery.analysis import analyze as analysis
    from surgery.calibration.data import sample_ids
    from surgery.calibration.texts import choose
    from surgery.calibration.walk import choose_device, choose_dtype

    checkpoint, place = settle(checkpoint), choose_device(device)
    texts = [str(t) for t in ([text] if isinstance(text, str | Path) else text)]
    sample = sample_ids(
        checkpoint,
        tokens=tokens,
        sequence_length=sequence_length,
        part="all" if texts else "fit",
        texts=choose(texts, mix=0.0 if texts else None),
    )
    return analysis.analyze(checkpoint, sample, dtype=choose_dtype(dtype, place), device=place)


def sparse_decode(model: Any, on: bool = True) -> None:
    """Let a loaded model of transformers skip the zeros of its MLPs as it decodes, or not.

    It is for models of any checkpoint that `relufy` made, and for stock ones with ReLU. On a CPU a
    kernel in C does it, where there is a C compiler: it is compiled once, and kept in the user's
    cache folder. Whether decoding is faster depends on the size of the MLPs and on the share of
    zeros; `surgery bench` measures it.

    Args:
        model: like `AutoModelForCausalLM.from_pretrained(…)`; its MLPs are replaced in place.
        on: False puts the dense computation back.

    Raises SurgeryError where the activation gives no zeros, or no MLP is a module of its own.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("Qwen3-8B-relu")
        >>> surgery.sparse_decode(model)
        >>> model.generate(…)
    """
    from surgery.blocks.decoding import set_sparse_decode

    set_sparse_decode(model, on)


def write(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    max_shard_size: int | str | None = None,
    hardlink: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Write a checkpoint to the folder `out`, one tensor at a time, and return the folder.

    An interrupted output of the same checkpoint is gone on with. Calibrations run here.

    Args:
        max_shard_size: bytes, or text like "5GB" (the default).
        hardlink: link to source files that stay as they are, instead of copying them.
        trust_remote_code: let code that comes with the source run.

    Raises SurgeryError, before the first byte, for a folder that is not ours to write or a disk
    that is too small.

    Example:
        >>> source = surgery.open("Qwen/Qwen3-8B")
        >>> surgery.write(surgery.upcycle(source, experts=8), "Qwen3-8B-moe")
    """
    size = parse_size(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    result = convert_alone(
        checkpoint,
        checkpoint,
        _folder(out),
        max_shard_size=size,
        hardlink=hardlink,
        verify=False,
        trust_remote_code=trust_remote_code,
    )
    return result.folder


def verify(
    source: Checkpoint,
    out: str | Path,
    *,
    trust_remote_code: bool = False,
    allow_nonfinite: bool = False,
    max_perplexity: float | None = None,
    texts: Sequence[str | Path] = (),
) -> Verification:
    """Prove the output in the folder `out` against the source it was made from.

    The result also goes into its surgery.json.

    Args:
        trust_remote_code: let code that comes with the checkpoints run.
        allow_nonfinite: let a source pass whose logits are NaN or Inf, although nothing can be
            compared with it.
        max_perplexity: how many times the source's perplexity that of the output may be, in the
            geometric mean over all domains; by default what the output was made with.
        texts: further texts to measure on, files or folders that nothing was fitted on.

    Raises SurgeryError for a folder that surgery did not write.

    Example:
        >>> surgery.verify(surgery.open("Qwen/Qwen3-8B"), "Qwen3-8B-moe").passed
        True
    """
    folder = _folder(out)
    demands = Demands(
        trust_remote_code=trust_remote_code,
        allow_nonfinite=allow_nonfinite,
        require=None if max_perplexity is None else Require(max_perplexity=max_perplexity),
        texts=recorded_texts(read_record(folder), folder, list(map(str, texts))),
    )
    return verify_folder(source, folder, demands)


def export(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    format: str = "gguf",
    type: str = "bf16",
    dry_run: bool = False,
) -> Exported:
    """Write a relufied Llama, Mistral or Qwen2 as a file that llama.cpp runs.

    Args:
        out: the file.
        format: "gguf".
        type: how matrices are stored: "f32", "f16", "bf16", "q8_0" or "q4_0".
        dry_run: check everything and write nothing.

    Raises SurgeryError for what llama.cpp cannot hold, with the reason.

    Example:
        >>> relufied = surgery.open("Qwen2.5-0.5B-relu")
        >>> surgery.export(relufied, "qwen-relu.gguf", type="q8_0").nbytes
    """
    from surgery.workflow import export as exporting

    path = expanded(out) if not is_url(str(out)) else _folder(out)
    return exporting.export(checkpoint, path, format=format, type=type, dry_run=dry_run)


def _folder(out: str | Path) -> Path:
    """Return the folder that an output is in. Raises UsageError for a URL."""
    if is_url(str(out)):
        raise UsageError(
            f"{out} is a URL", "write to a folder on this disk; `surgery … --out URL` sends it"
        )
    return expanded(out)
