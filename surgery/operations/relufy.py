"""Relufication: the MLP's activation becomes ReLU, so that most of its products are exact zeros.

This is stage 1 of ReLU Strikes Back (Mirzadeh et al. 2023, arXiv 2310.04564): config only, the weights stay. The swap
alone ruins a SiLU or GELU model; it is where fine-tuning starts from.
"""

from __future__ import annotations

from surgery.checkpoint import Checkpoint, Step
from surgery.errors import SurgeryError, UsageError
from surgery.families import locate
from surgery.operations.sound import config_with, require_plain, require_whole

ACTIVATIONS = ("relu", "relu2")  # relu2: ReLU(x)², Primer (So et al. 2021, arXiv 2109.08668)


def relufy(checkpoint: Checkpoint, *, activation: str = "relu") -> Checkpoint:
    """The same weights with `activation` ("relu" or "relu2") in every MLP.

    Raises SurgeryError where the activation is already that, the family's activation is not in its config, or a dense
    MLP is incomplete.
    """
    if activation not in ACTIVATIONS:
        raise UsageError(f"unknown activation {activation!r}", f"one of: {', '.join(ACTIVATIONS)}")
    require_plain(checkpoint)
    blocks = locate(checkpoint)
    require_whole(blocks)
    family = blocks.family
    if not family.activation_key:
        raise SurgeryError(f"the activation of {family.model_type} is fixed in its code, no config field changes it",
                           "`surgery families` lists where relufy works")  # fmt: skip
    before = str(checkpoint.text_config.get(family.activation_key) or family.activation)
    if before == activation:
        raise SurgeryError(
            f"the activation of this {family.model_type} is {activation} already", "there is nothing to do"
        )
    step = Step(
        operation="relufy",
        parameters={"activation": activation},
        exact=False,
        layers=tuple(range(blocks.count)),
        notes=(f"{before} became {activation}; the weights are the source's own, so quality drops until it is trained",
               "runtimes that hard-code the activation (llama.cpp, vLLM for llama and qwen) ignore this field or refuse it"),
    )  # fmt: skip
    return checkpoint.replace(step=step, config=config_with(checkpoint, {family.activation_key: activation}))
