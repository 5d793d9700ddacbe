"""Facts about architectures as data: where each family keeps its MLP, and what its config calls it.

A family is a row in `dense.py` or `moe.py`, or it is derived from its model class by discovery.py.
"""

from surgery.families.family import ALWAYS_OPEN, OPERATED, Family
from surgery.families.lookup import find, known, layers_beyond, locate
from surgery.families.mlp import Blocks, Mlp

__all__ = [
    "ALWAYS_OPEN",
    "OPERATED",
    "Blocks",
    "Family",
    "Mlp",
    "find",
    "known",
    "layers_beyond",
    "locate",
]
