"""Reading and writing checkpoints: folders on this disk, the Hub, URLs."""

from surgery.storage.reader import open_checkpoint
from surgery.storage.writer import (
    Transfer,
    Written,
    add,
    check_place,
    check_space,
    check_target,
    enter,
    finish,
    is_finished,
    write,
)

__all__ = [
    "Transfer",
    "Written",
    "add",
    "check_place",
    "check_space",
    "check_target",
    "enter",
    "finish",
    "is_finished",
    "open_checkpoint",
    "write",
]
