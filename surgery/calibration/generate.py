"""Calibration text that the model writes itself, sampled from its own distribution.

A text of one domain repairs a model for that domain only. What a model writes unprompted is as
broad as its training data (Williams et al. 2024, arXiv 2410.17170, for quantisation and pruning),
and every model can provide it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GenerationConfig

from surgery.calibration import stock
from surgery.calibration.data import require_ids
from surgery.checkpoint import Checkpoint
from surgery.errors import SurgeryError

TOGETHER = 64  # sequences generated at once


def generate(
    checkpoint: Checkpoint,
    *,
    sequences: int,
    length: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Tensor:
    """Return ids [sequences, length] that follow the beginning-of-sequence token at temperature 1.

    Where a text ends, another follows. The whole model is in memory, unlike in a walk.

    Raises SurgeryError if the config names no token to begin with.
    """
    start = first_id(checkpoint)
    model = stock.meta_model(checkpoint, dtype, device)
    stock.load(model, checkpoint.tensors, device)
    own = model.generation_config  # generate() takes from it whatever is None in `config`
    own.eos_token_id = own.pad_token_id = None
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(**sampling, max_new_tokens=length, min_new_tokens=length)
    parts = []
    random = torch.random.fork_rng(devices=[device] if device.startswith("cuda") else [])
    with random, torch.inference_mode():
        torch.manual_seed(seed)
        for first in range(0, sequences, TOGETHER):
            ids = torch.full((min(TOGETHER, sequences - first), 1), start, device=device)
            mask = torch.ones_like(ids)
            out = model.generate(ids, attention_mask=mask, generation_config=config)
            parts.append(out[:, 1:].cpu())
    return torch.cat(parts)


def first_id(checkpoint: Checkpoint) -> int:
    """Return the id that begins a text: BOS, or else the end-of-sequence token.

    Raises SurgeryError if the config names neither, or one without an embedding.
    """
    for key in ("bos_token_id", "eos_token_id"):
        found = checkpoint.text_config.get(key)
        if found is not None:
            start = int(found[0] if isinstance(found, list) else found)
            require_ids(checkpoint, torch.tensor([[start]]), f"the {key} of config.json")
            return start
    raise SurgeryError(
        "config.json has neither bos_token_id nor eos_token_id to begin a text with",
        "give a text with --text, and leave --generated out",
    )
