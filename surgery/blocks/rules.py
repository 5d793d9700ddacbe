"""The activations that give exact zeros, as data: planning with them needs no torch.

A rule says how the zeros come about. Its function is in sparse_mlp.py, which is saved with the
checkpoint. An activation is a rule together with the function in it. The rest of the project knows
them from these tables alone, so a new one is a row here and a function there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from surgery.blocks.paper import Paper

RELU_STRIKES_BACK = Paper(
    "2310.04564",
    "Mirzadeh, Iman",
    "ReLU Strikes Back: Exploiting Activation Sparsity in Large Language Models",
    2023,
)
PRIMER = Paper(
    "2109.08668",
    "So, David R.",
    "Primer: Searching for Efficient Transformers for Language Modeling",
    2021,
)
PROSPARSE = Paper(
    "2402.13516",
    "Song, Chenyang",
    "ProSparse: Introducing and Enhancing Intrinsic Activation Sparsity "
    "within Large Language Models",
    2024,
)
TURBO_SPARSE = Paper(
    "2406.05955",
    "Song, Yixin",
    "Turbo Sparse: Achieving LLM SOTA Performance with Minimal Activated Parameters",
    2024,
)
CATS = Paper(
    "2404.08763",
    "Lee, Donghyun",
    "CATS: Contextually-Aware Thresholding for Sparsity in Large Language Models",
    2024,
)
TEAL = Paper(
    "2408.14690", "Liu, James", "Training-Free Activation Sparsity in Large Language Models", 2024
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How an MLP gets its zeros.

    Args:
        thresholds: the thresholds that a layer has, by name.
        cuts: what a threshold is compared with: the "gate" before the activation, the "activated"
            gate |act(gate)|, the "product" |act(gate) ⊙ up|, "both" gate and up, or "" nothing.
        least: the smallest threshold that makes sense, None where any does.
        gated: whether the rule needs an MLP with a gate.
        foreseen: whether the gate alone tells which products are zero.
    """

    thresholds: tuple[str, ...] = ("threshold",)
    cuts: str = "gate"
    least: float | None = None
    gated: bool = False
    foreseen: bool = True

    @property
    def plain(self) -> bool:
        """Return whether there is no threshold, so that stock transformers can compute it."""
        return not self.thresholds


RULES: Mapping[str, Rule] = {
    "plain": Rule(thresholds=(), cuts=""),
    "fatrelu": Rule(least=0.0),
    "shifted": Rule(),
    "drelu": Rule(
        thresholds=("threshold", "threshold_up"), cuts="both", gated=True, foreseen=False
    ),
    "cats": Rule(cuts="activated"),
    "teal": Rule(cuts="product", foreseen=False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """A published activation.

    Args:
        rule: a key of RULES.
        act: the function in it, a name of transformers' ACT2FN; "" is the source's own.
        sparsity: the fraction of zeros by default; None is what a threshold of 0 gives.
        paper: where it was published.
        form: where it loads without code of its own: "stock" or "with code".
        text: what it does, in one line of help.
    """

    rule: str
    act: str
    sparsity: float | None = None
    paper: Paper
    form: str = "with code"
    text: str

    @property
    def how(self) -> Rule:
        """Return the rule."""
        return RULES[self.rule]


ACTIVATIONS: Mapping[str, Activation] = {
    "relu": Activation(
        rule="plain", act="relu", paper=RELU_STRIKES_BACK, form="stock", text="ReLU of the gate"
    ),
    "relu2": Activation(rule="plain", act="relu2", paper=PRIMER, form="stock", text="its square"),
    "shifted": Activation(
        rule="shifted",
        act="relu",
        sparsity=0.8,
        paper=RELU_STRIKES_BACK,
        form="stock",
        text="ReLU of the gate less a threshold",
    ),
    "fatrelu": Activation(
        rule="fatrelu",
        act="relu",
        sparsity=0.8,
        paper=PROSPARSE,
        text="the gate where it reaches a threshold",
    ),
    "drelu": Activation(
        rule="drelu", act="relu", paper=TURBO_SPARSE, text="ReLU of gate and up (TurboSparse)"
    ),
    "cats": Activation(
        rule="cats",
        act="",
        sparsity=0.65,
        paper=CATS,
        text="the source's activation where it is large",
    ),
    "teal": Activation(
        rule="teal", act="", sparsity=0.7, paper=TEAL, text="the product where it is large"
    ),
}
