"""The plan: every file of the output, its header, its size and its sources, known before the first
byte is written.

`--dry-run` prints it, the free-space check uses it, a resumed run is recognised by its fingerprint.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surgery.checkpoint.checkpoint import Checkpoint, natural_key
from surgery.checkpoint.compat import complete, dump, side_file
from surgery.checkpoint.header import make_header
from surgery.checkpoint.tensors import DTYPES, LazyTensor, SourceFile
from surgery.errors import UsageError

DEFAULT_SHARD_SIZE = 5_000_000_000
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One output file: its header, then the tensors one after another. `verbatim`: a source file
    copied as it is.
    """

    name: str
    header: bytes
    tensors: tuple[tuple[str, LazyTensor], ...]
    verbatim: SourceFile | None = None

    @property
    def nbytes(self) -> int:
        if self.verbatim:
            return self.verbatim.size
        return len(self.header) + sum(t.nbytes for _, t in self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """`small` holds the content of every other file of the output, config.json included."""

    shards: tuple[Shard, ...]
    small: Mapping[str, bytes]
    fingerprint: str
    parameters: int

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.shards) + sum(map(len, self.small.values()))

    @property
    def peak_memory(self) -> int:
        """Bytes that computing the largest tensor holds, beyond the interpreter and torch
        themselves.
        """
        return max((t.peak_memory for s in self.shards for _, t in s.tensors), default=0)


def parse_size(text: str) -> int:
    """Bytes in "5GB", "500MB", "1.5GiB" or a plain number. Raises UsageError for anything else."""
    units = {
        "": 1,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "KIB": 2**10,
        "MIB": 2**20,
        "GIB": 2**30,
        "TIB": 2**40,
    }
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if (
        not match
        or match[2].upper() not in units
        or not (size := int(float(match[1]) * units[match[2].upper()]))
    ):
        raise UsageError(f"{text!r} is not a size", "write it like 5GB, 500MB or 2GiB")
    return size


def make_plan(checkpoint: Checkpoint, max_shard_size: int | None = None) -> Plan:
    """The plan of writing `checkpoint` in shards of at most `max_shard_size` bytes (default 5 GB; a
    tensor larger than that has a shard of its own). Where the tensors are the source's own, its
    shards are kept as they are."""
    shards = (_verbatim(checkpoint) if max_shard_size is None else None) or _pack(
        checkpoint.tensors, max_shard_size or DEFAULT_SHARD_SIZE
    )
    small = {f.name: side_file(f.name, f.path().read_bytes()) for f in checkpoint.files}
    if (
        shards[0].name != "model.safetensors"
    ):  # one file of another name is found through an index alone
        small[INDEX] = _index(checkpoint, shards)
    small["config.json"] = dump(_config(checkpoint.config, checkpoint.tensors))
    return Plan(
        shards=shards,
        small=small,
        fingerprint=_fingerprint(shards, small),
        parameters=checkpoint.parameters,
    )


def _config(config: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """The config complete for transformers 4 and 5; without a dtype 4 loads fp32, so the commonest
    one is written.
    """
    if not (config.get("dtype") or config.get("torch_dtype") or config.get("text_config")):
        sizes: dict[str, int] = {}
        for t in tensors.values():
            sizes[t.dtype] = sizes.get(t.dtype, 0) + t.numel
        config = {**config, "dtype": DTYPES[max(sizes, key=lambda d: sizes[d])][1]}
    return complete(config)


def _verbatim(checkpoint: Checkpoint) -> tuple[Shard, ...] | None:
    """The source's own shards, where the output holds exactly their tensors, untouched."""
    files: dict[str, SourceFile] = {}
    for name, t in checkpoint.tensors.items():
        file = checkpoint.shards.get(name)
        if file is None or len(t.extents) != 1 or t.extents[0].file is not file:
            return None
        files[file.name] = file
    if len(checkpoint.tensors) != len(checkpoint.shards) or not all(_standard(n) for n in files):
        return None
    return tuple(
        Shard(
            name=name,
            header=b"",
            verbatim=files[name],
            tensors=tuple(
                (n, t) for n, t in checkpoint.tensors.items() if checkpoint.shards[n].name == name
            ),
        )
        for name in sorted(files)
    )


def _standard(name: str) -> bool:
    """Whether transformers finds a weight file of this name."""
    return (
        name == "model.safetensors"
        or re.fullmatch(r"model-\d+-of-\d+\.safetensors", name) is not None
    )


def _pack(tensors: Mapping[str, LazyTensor], limit: int) -> tuple[Shard, ...]:
    """Tensors in the order of their names, layer after layer, cut into shards of at most `limit`
    bytes.
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name in sorted(tensors, key=natural_key):
        if groups[-1] and size + tensors[name].nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensors[name].nbytes
    shards = []
    for i, names in enumerate(groups, 1):
        # Wide dtypes first: torch cannot view an fp32 tensor that begins at an odd multiple of two
        # bytes.
        names.sort(key=lambda n: -DTYPES[tensors[n].dtype][0])
        pairs = tuple((n, tensors[n]) for n in names)
        file = (
            "model.safetensors"
            if len(groups) == 1
            else f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        )
        shards.append(Shard(name=file, header=make_header(pairs), tensors=pairs))
    return tuple(shards)


def _index(checkpoint: Checkpoint, shards: tuple[Shard, ...]) -> bytes:
    weight_map = {name: s.name for s in shards for name, _ in s.tensors}
    metadata = {"total_parameters": checkpoint.parameters, "total_size": checkpoint.nbytes}
    return dump({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})


def _fingerprint(shards: tuple[Shard, ...], small: Mapping[str, bytes]) -> str:
    """sha256 of everything that decides an output byte."""
    h = hashlib.sha256()
    for s in shards:
        h.update(f"{s.name}\n".encode() + s.header)
        for name, t in s.tensors:
            h.update(f"{name}|{t.identity()}\n".encode())
    for name in sorted(small):
        h.update(name.encode() + hashlib.sha256(small[name]).digest())
    return h.hexdigest()
