"""Run a script with FSDP2 over two processes without a GPU.

accelerate shards on accelerators only, so the CPU is passed off as one. Run with:

  accelerate launch --config_file fsdp2.yaml fsdp_on_gloo.py finetune.py …
"""

from __future__ import annotations

import os
import runpy
import sys

os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import distributed

PartialState._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_GPU)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
distributed.barrier()  # rank 0 may still be writing
sys.stdout.flush()
os._exit(0)  # gloo's threads outlive the interpreter and would make it exit with an error
