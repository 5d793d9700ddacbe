"""Checkpoints in memory: a config, lazy tensors and side files, and the plan of writing them."""

from surgery.checkpoint.checkpoint import Checkpoint, Pending, Source, Step, natural_key
from surgery.checkpoint.generated_file import BuiltFile, GeneratedFile
from surgery.checkpoint.plan import Plan, Shard, make_plan, parse_size
from surgery.checkpoint.tensors import (
    Extent,
    LazyTensor,
    SourceFile,
    concatenate,
    constant,
    derive,
    normal,
)
from surgery.checkpoint.work import Progress, Work

__all__ = [
    "BuiltFile",
    "Checkpoint",
    "Extent",
    "GeneratedFile",
    "LazyTensor",
    "Pending",
    "Plan",
    "Progress",
    "Shard",
    "Source",
    "SourceFile",
    "Step",
    "Work",
    "concatenate",
    "constant",
    "derive",
    "make_plan",
    "natural_key",
    "normal",
    "parse_size",
]
