"""Checkpoints: read lazily, planned before the first byte, written as a stream."""

from surgery.checkpoint.checkpoint import Checkpoint, Source, Step, natural_key
from surgery.checkpoint.deferred import Work
from surgery.checkpoint.inline import InlineFile
from surgery.checkpoint.plan import Plan, Shard, make_plan, parse_size
from surgery.checkpoint.reader import open_checkpoint
from surgery.checkpoint.tensors import Extent, LazyTensor, SourceFile, concatenate, constant, derive, normal
from surgery.checkpoint.writer import Written, add, check_space, check_target, finish, is_finished, write

__all__ = [
    "Checkpoint", "Extent", "InlineFile", "LazyTensor", "Plan", "Shard", "Source", "SourceFile", "Step", "Work", "Written", "add", "check_space", "check_target",
    "concatenate", "constant", "derive", "finish", "is_finished", "make_plan", "natural_key", "normal",
    "open_checkpoint", "parse_size", "write",
]  # fmt: skip
