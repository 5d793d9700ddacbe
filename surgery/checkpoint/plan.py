"""The plan of an output: every file with its header, size and sources, before a byte is written.

`--dry-run` prints the plan, the check of free space uses it, and its fingerprint tells whether a
run continues an interrupted one.
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
from surgery.files import content

DEFAULT_SHARD_SIZE = 5_000_000_000
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One safetensors file of the output.

    Args:
        name: the file's name.
        header: its header, its length included; empty where `verbatim` is given.
        tensors: the tensors by name, in the order in which they lie in the file.
        verbatim: the source file that is copied as a whole, where the shard equals it.
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
    """Everything that is known of an output before it is written.

    Args:
        shards: the safetensors files.
        small: the content of every other file by name, config.json included.
        fingerprint: a sha256 that changes whenever a byte of the output may.
        parameters: the number of values in all tensors.
    """

    shards: tuple[Shard, ...]
    small: Mapping[str, bytes]
    fingerprint: str
    parameters: int

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.shards) + sum(map(len, self.small.values()))

    @property
    def peak_memory(self) -> int:
        """Return the bytes that computing the largest tensor needs, without Python and torch."""
        return max((t.peak_memory for s in self.shards for _, t in s.tensors), default=0)


_UNITS = {
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


def parse_size(text: str) -> int:
    """Return the bytes that "5GB", "500MB", "1.5GiB" or a plain number means.

    Raises UsageError for anything else, and for less than one byte.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if not size:
        raise UsageError(f"{text!r} is not a size", "write it like 5GB, 500MB or 2GiB")
    return size


def make_plan(checkpoint: Checkpoint, max_shard_size: int | None = None) -> Plan:
    """Return the plan of writing `checkpoint`.

    Args:
        checkpoint: what is to be written.
        max_shard_size: the most bytes of tensors in a shard; a larger tensor has a shard of its
            own. By default the source's own shards are kept where the output has exactly their
            tensors, and otherwise the limit is 5 GB.
    """
    shards = _verbatim(checkpoint) if max_shard_size is None else None
    shards = shards or _pack(checkpoint.tensors, max_shard_size or DEFAULT_SHARD_SIZE)
    small = {f.name: side_file(f.name, content(f.path())) for f in checkpoint.files}
    if shards[0].name != "model.safetensors":
        # transformers finds a single file of another name through an index only.
        small[INDEX] = _index(checkpoint, shards)
    small["config.json"] = dump(_config(checkpoint.config, checkpoint.tensors))
    return Plan(
        shards=shards,
        small=small,
        fingerprint=_fingerprint(shards, small),
        parameters=checkpoint.parameters,
    )


def _config(config: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """Return the config, complete for transformers 4 and 5.

    Where it has no dtype, the one that most values have is added, because transformers 4 would load
    the model in fp32.
    """
    if not (config.get("dtype") or config.get("torch_dtype") or config.get("text_config")):
        sizes: dict[str, int] = {}
        for t in tensors.values():
            sizes[t.dtype] = sizes.get(t.dtype, 0) + t.numel
        config = {**config, "dtype": DTYPES[max(sizes, key=lambda d: sizes[d])][1]}
    return complete(config)


def _verbatim(checkpoint: Checkpoint) -> tuple[Shard, ...] | None:
    """Return the source's own shards where the output has exactly their tensors, else None."""
    files: dict[str, SourceFile] = {}
    for name, t in checkpoint.tensors.items():
        file = checkpoint.shards.get(name)
        if file is None or len(t.extents) != 1 or t.extents[0].file is not file:
            return None
        files[file.name] = file
    if len(checkpoint.tensors) != len(checkpoint.shards) or not all(_standard(n) for n in files):
        return None
    contents: dict[str, list[tuple[str, LazyTensor]]] = {name: [] for name in sorted(files)}
    for name, t in checkpoint.tensors.items():
        contents[checkpoint.shards[name].name].append((name, t))
    return tuple(
        Shard(name=name, header=b"", verbatim=files[name], tensors=tuple(pairs))
        for name, pairs in contents.items()
    )


def _standard(name: str) -> bool:
    """Return whether transformers finds a weight file of this name."""
    return bool(re.fullmatch(r"model(-[0-9]+-of-[0-9]+)?\.safetensors", name))


def _pack(tensors: Mapping[str, LazyTensor], limit: int) -> tuple[Shard, ...]:
    """Return shards of at most `limit` bytes of tensors, in the order of the layers."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in sorted(tensors, key=natural_key):
        if groups[-1] and size + tensors[name].nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensors[name].nbytes
    shards, total = [], len(groups)
    for i, names in enumerate(groups, 1):
        # Wide dtypes come first, because torch cannot view an fp32 tensor whose offset is an odd
        # multiple of two bytes.
        names.sort(key=lambda n: -DTYPES[tensors[n].dtype][0])
        pairs = tuple((n, tensors[n]) for n in names)
        file = f"model-{i:05d}-of-{total:05d}.safetensors" if total > 1 else "model.safetensors"
        shards.append(Shard(name=file, header=make_header(pairs), tensors=pairs))
    return tuple(shards)


def _index(checkpoint: Checkpoint, shards: tuple[Shard, ...]) -> bytes:
    weight_map = {name: s.name for s in shards for name, _ in s.tensors}
    metadata = {"total_parameters": checkpoint.parameters, "total_size": checkpoint.nbytes}
    return dump({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})


def _fingerprint(shards: tuple[Shard, ...], small: Mapping[str, bytes]) -> str:
    """Return the sha256 of everything that decides a byte of the output."""
    h = hashlib.sha256()
    for s in shards:
        h.update(f"{s.name}\n".encode() + s.header)
        for name, t in s.tensors:
            h.update(f"{name}|{t.identity()}\n".encode())
    for name in sorted(small):
        h.update(name.encode() + hashlib.sha256(small[name]).digest())
    return h.hexdigest()
