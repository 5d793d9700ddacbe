"""What a card says of each operation: what it did and why, which papers it is from, and what it
cannot do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surgery.fitting.expert_split import average

Parameters = Mapping[str, Any]

# arXiv number: first author, title, year
PAPERS: dict[str, tuple[str, str, int]] = {
    "2212.05055": (
        "Komatsuzaki, Aran",
        "Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints",
        2022,
    ),
    "2410.07524": ("He, Ethan", "Upcycling Large Language Models into Mixture of Experts", 2024),
    "2401.06066": (
        "Dai, Damai",
        "DeepSeekMoE: Towards Ultimate Expert Specialization in Mixture-of-Experts Language Models",
        2024,
    ),
    "2502.19261": (
        "Nakamura, Taishi",
        "Drop-Upcycling: Training Sparse Mixture of Experts with Partial Re-initialization",
        2025,
    ),
    "2403.07816": (
        "Sukhbaatar, Sainbayar",
        "Branch-Train-MiX: Mixing Expert LLMs into a Mixture-of-Experts LLM",
        2024,
    ),
    "2310.04564": (
        "Mirzadeh, Iman",
        "ReLU Strikes Back: Exploiting Activation Sparsity in Large Language Models",
        2023,
    ),
    "2109.08668": (
        "So, David R.",
        "Primer: Searching for Efficient Transformers for Language Modeling",
        2021,
    ),
    "2402.13516": (
        "Song, Chenyang",
        "ProSparse: Introducing and Enhancing Intrinsic Activation Sparsity within Large Language Models",
        2024,
    ),
    "2406.05955": (
        "Song, Yixin",
        "Turbo Sparse: Achieving LLM SOTA Performance with Minimal Activated Parameters",
        2024,
    ),
    "2404.08763": (
        "Lee, Donghyun",
        "CATS: Contextually-Aware Thresholding for Sparsity in Large Language Models",
        2024,
    ),
    "2408.14690": (
        "Liu, James",
        "Training-Free Activation Sparsity in Large Language Models",
        2024,
    ),
    "2110.01786": (
        "Zhang, Zhengyan",
        "MoEfication: Transformer Feed-forward Layers are Mixtures of Experts",
        2021,
    ),
    "2406.16554": (
        "Zhu, Tong",
        "LLaMA-MoE: Building Mixture-of-Experts from LLaMA with Continual Pre-training",
        2024,
    ),
    "2502.04416": (
        "Pei, Zehua",
        "CMoE: Converting Mixture-of-Experts from Dense to Accelerate LLM Inference",
        2025,
    ),
    "1907.05242": ("Lample, Guillaume", "Large Memory Layers with Product Keys", 2019),
    "2412.09764": ("Berges, Vincent-Pierre", "Memory Layers at Scale", 2024),
    "2404.19756": ("Liu, Ziming", "KAN: Kolmogorov-Arnold Networks", 2024),
}
_ACTIVATIONS = {
    "relu": "2310.04564",
    "relu2": "2109.08668",
    "shifted": "2310.04564",
    "fatrelu": "2402.13516",
    "drelu": "2406.05955",
    "cats": "2404.08763",
    "teal": "2408.14690",
}
_PARTITIONS = {"kmeans": "2406.16554", "coactivation": "2110.01786", "cmoe": "2502.04416"}

_WHY = {
    "upcycle": "A dense model that was paid for already is the cheapest beginning of a mixture of experts: capacity grows with the "
    "experts, the work of a token with those that are active.",
    "relufy": "With an activation that gives exact zeros, most neurons of a token need no rows of up_proj and down_proj: what is zero "
    "need not be read, and reading weights is what decoding spends its time on.",
    "carve": "The neurons that one token needs stand together in experts of their own, so that a router can leave the others unread.",
    "memory": "A memory layer looks few values up in a large table: parameters that cost next to no work per token.",
    "splinify": "The activation becomes learnable: a function of zeros beside it, or straight lines in its place, which training can shape.",
    "cast": "The weights are stored in another dtype.",
    "finetune": "Training gives back what the conversion cost, or makes use of what it added.",
}
_TAGS = {
    "upcycle": ("mixture-of-experts", "upcycling"),
    "relufy": ("activation-sparsity", "relufication"),
    "carve": ("mixture-of-experts", "moefication"),
    "memory": ("memory-layers",),
    "splinify": ("kan",),
}
_LIMITS = {
    "upcycle": "It was not trained after the conversion: it is where training starts from, larger and not better than its source.",
    "relufy": "It was not trained after the conversion, and is worse than its source, more so outside the domains that it was "
    "calibrated on. Zeros save time only in a runtime that skips them.",
    "carve": "It was not trained after the conversion: tokens that a router sends elsewhere lose what the other neurons computed.",
    "memory": "It was not trained after the conversion: new memory holds nothing yet.",
    "splinify": "It was not trained after the conversion: it gains nothing over its source yet.",
}


def what(operation: str, p: Parameters, layers: int) -> str:
    """One phrase, as in "every MLP became 8 experts, 2 of them active per token"."""
    where = "every MLP" if not p.get("layers") else f"the MLP of {len(p['layers'])} layers"
    bypass = f", with a linear bypass of rank {p['bypass']}" if p.get("bypass") else ""
    if operation == "upcycle":
        shared = (
            f", beside {p['shared']} shared part{'s' if p['shared'] > 1 else ''}"
            if p.get("shared")
            else ""
        )
        return f"{where} became {p['experts']} experts, {p['top_k']} of them active for a token{shared} ({p['target']})"
    if operation == "relufy":
        zeros = f" at {p['sparsity']:.0%} zeros" if p.get("sparsity") else ""
        repair = {
            "ridge": ", down_proj refitted to what it should give",
            "reconstruct": ", gate, up and down optimised",
        }
        return f"{where} got the activation {p['activation']}{zeros}{bypass}{repair.get(str(p.get('repair')), ', nothing was repaired')}"
    if operation == "cast":
        return f"the weights are stored in {p['dtype']}"
    if operation == "carve":
        mean = "" if isinstance(p["active"], int) else " in the mean of the layers"
        return f"{where} was cut into {p['experts']} experts of its own neurons, {average(p['active']):.3g} of them active for a token{mean}{bypass}"
    if operation == "memory":
        place = (
            "got a memory beside it"
            if p.get("place") != "replace"
            else "gave its place to a memory"
        )
        return f"{where} {place}"
    if operation == "finetune":
        return "it was trained"
    verbs = {"splinify": f"got a learnable activation ({p.get('kind')})"}
    return f"{where} {verbs.get(operation, 'was changed by ' + operation)}"


def why(operation: str) -> str:
    return _WHY.get(operation, "")


def limits(operations: Sequence[str]) -> list[str]:
    """What is to be known of a model that was not trained since; a fine-tune makes it another."""
    if "finetune" in operations:
        return []
    return [_LIMITS[o] for o in dict.fromkeys(operations) if o in _LIMITS]


def tags(operations: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(tag for o in operations for tag in _TAGS.get(o, ())))


def papers(operation: str, p: Parameters) -> list[str]:
    """The arXiv numbers of the methods that the operation used."""
    found: list[str] = []
    if operation == "upcycle":
        found += ["2212.05055"]
        found += ["2410.07524", "2401.06066"] if (p.get("granularity") or 1) > 1 else []
        found += ["2502.19261"] if p.get("drop") else []
        found += ["2403.07816"] if p.get("expert_models") else []
    if operation == "relufy":
        found += list(dict.fromkeys(["2310.04564", _ACTIVATIONS[p["activation"]]]))
    if operation == "carve":
        found += list(
            dict.fromkeys(
                ["2110.01786", *(_PARTITIONS[v] for v in p.values() if v in list(_PARTITIONS))]
            )
        )
    return found + {"memory": ["1907.05242", "2412.09764"], "splinify": ["2404.19756"]}.get(
        operation, []
    )


def bibtex(number: str) -> str:
    author, title, year = PAPERS[number]
    key = f"{author.partition(',')[0].lower()}{year}"
    return (
        f"@misc{{{key},\n  title = {{{title}}},\n  author = {{{author} and others}},\n  year = {{{year}}},\n"
        f"  eprint = {{{number}}},\n  archivePrefix = {{arXiv}}\n}}"
    )
