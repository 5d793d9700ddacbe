"""Calibration text that the model writes itself, sampled from its own distribution.

A text of one domain repairs a model for that domain. What a model says when nothing is asked of it
is spread as its training was (Williams et al. 2024, arXiv 2410.17170, for quantisation and
pruning), and is there for every model.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GenerationConfig

from surgery.calibration import stock
from surgery.checkpoint import Checkpoint
from surgery.errors import SurgeryError

TOGETHER = 64  # sequences


def generate(
    checkpoint: Checkpoint,
    *,
    sequences: int,
    length: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Tensor:
    """[sequences, length] ids that follow the beginning-of-sequence token at temperature 1; another
    text follows where one ends. The model is in memory whole, unlike in a walk.

    Raises SurgeryError where the config names no token to begin with.
    """
    start = _start(checkpoint)
    model = stock.meta_model(checkpoint, dtype, device)
    stock.load(model, checkpoint.tensors, device)
    own = model.generation_config  # which generate() takes what is None from
    own.eos_token_id = own.pad_token_id = None
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=length,
        min_new_tokens=length,
        eos_token_id=None,
        pad_token_id=None,
    )
    parts = []
    with (
        torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []),
        torch.inference_mode(),
    ):
        torch.manual_seed(seed)
        for first in range(0, sequences, TOGETHER):
            ids = torch.full((min(TOGETHER, sequences - first), 1), start, device=device)
            parts.append(
                model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[
                    :, 1:
                ].cpu()
            )
    return torch.cat(parts)


def _start(checkpoint: Checkpoint) -> int:
    for key in ("bos_token_id", "eos_token_id"):
        found = checkpoint.text_config.get(key)
        if found is not None:
            return int(found[0] if isinstance(found, list) else found)
    raise SurgeryError(
        "config.json has neither bos_token_id nor eos_token_id, so nothing can begin a text",
        "give a text with --text, and leave --generated out",
    )
