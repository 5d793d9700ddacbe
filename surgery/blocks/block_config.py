"""The entries of `surgery_blocks` in config.json, which say which layers have a custom-code block,
and of which kind and size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgery.blocks.rules import RULES
from surgery.errors import SurgeryError
from surgery.families import OPERATED, Family

ROUTERS = ("linear", "mlp", "neurons")
ROUTING_WEIGHTS = ("renormalised", "one", "scaled")
AUTO_MAP = {
    "AutoConfig": "modeling_surgery.SurgeryConfig",
    "AutoModel": "modeling_surgery.SurgeryModel",
    "AutoModelForCausalLM": "modeling_surgery.SurgeryForCausalLM",
}
# Of a multimodal model, whose language model is operated on inside it.
WRAPPER_MAP = {
    **{name: place for name, place in AUTO_MAP.items() if name != "AutoModelForCausalLM"},
    "AutoModelForImageTextToText": "modeling_surgery.SurgeryForImageTextToText",
}
BOTH_MAP = AUTO_MAP | WRAPPER_MAP
AUTO_MAPS = (AUTO_MAP, WRAPPER_MAP, BOTH_MAP)


def base_type(config: Mapping[str, Any]) -> str:
    """Return the model_type that the code of a config builds on.

    That is "llama" both for "llama" and for "surgery_llama".
    """
    return str(config.get("model_type")).removeprefix(OPERATED)


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kinds of block in a config, each once."""
    return list(dict.fromkeys(entry["kind"] for entry in config.get("surgery_blocks") or ()))


def changed(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries of a config that change what its layers compute.

    Entries that only gather the parts of MLPs into a module are left out.
    """
    return [entry for entry in config.get("surgery_blocks") or () if entry["kind"] != "gathered"]


def sparse_entry_of(config: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Return the entry of the sparse block of layer `index`, empty where it has none."""
    return next((e for e in changed(config) if e["kind"] == "sparse" and index in e["layers"]), {})


def shared_modules(config: Mapping[str, Any], index: int | None = None) -> list[str]:
    """Return the names of the modules that blocks of layer `index` read and the body owns.

    With None they are those of all layers.
    """
    blocks = config.get("surgery_blocks") or ()
    return [
        f"{entry['stack'].rpartition('.')[0]}.{entry['shared']}".removeprefix(".")
        for entry in blocks
        if "shared" in entry and (index is None or index in entry["layers"])
    ]


def config_changes(
    config: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the fields of config.json that make a checkpoint load with our code.

    `entries` come after those that it has. Experts of a sparse MLP compute the products of its
    sparse block themselves, so their entry takes the place of that block's. Raises SurgeryError for
    a config with code of its own, a class that ours cannot extend, and a layer whose block the new
    one cannot join.
    """
    base, blocks = base_type(config), list(config.get("surgery_blocks") or ())
    if config.get("auto_map", AUTO_MAP) not in AUTO_MAPS:
        raise SurgeryError(
            f"this {base} brings code of its own, which ours would replace", "give a model without"
        )
    for entry in map(dict, entries):
        if entry["kind"] == "experts" and "rule" in entry:
            blocks = _less_sparse(blocks, entry["layers"])
        for old in (b for b in blocks if b["kind"] != "gathered"):
            _require_joinable(old, entry)
        blocks.append(entry)
    auto_map = _auto_map(config, base)
    head = "ForImageTextToText" if "AutoModelForImageTextToText" in auto_map else "ForCausalLM"
    changes = {
        "model_type": OPERATED + base,
        "architectures": [f"Surgery{head}"],
        "auto_map": dict(auto_map),
        "surgery_blocks": blocks,
    }
    return changes | _tokenizer(config, base)


def _auto_map(config: Mapping[str, Any], base: str) -> Mapping[str, str]:
    """Return the classes that load the model: those that load its source.

    Raises SurgeryError where transformers has no class of the body alone, which ours extends.
    """
    from transformers.models.auto import modeling_auto

    text = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(base)
    whole = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(base)
    if (text or whole) and base not in modeling_auto.MODEL_MAPPING_NAMES:
        raise SurgeryError(
            f"transformers has no body of a {base} without its head, which custom code extends",
            "`surgery families` says what works on it",
        )
    if not text and not whole:
        raise SurgeryError(
            f"no Auto class of transformers loads a {base}, as custom code must be",
            "operate on the whole model that it is a part of",
        )
    if text == whole:
        return BOTH_MAP
    wrapped = whole and (not text or config.get("text_config"))
    return WRAPPER_MAP if wrapped else AUTO_MAP


def _require_joinable(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Require that no layer of the entry `old` has a block that `new` cannot join.

    Raises SurgeryError.
    """
    again = sorted(set(old["layers"]) & set(new["layers"]))
    if again and old["kind"] == new["kind"]:
        raise SurgeryError(
            f"layer {again[0]} has a {new['kind']} block already", "leave that layer out"
        )
    # Experts are built from a stock MLP, and no other block can be built from experts. A block
    # built from a spline or a memory would lose what those added, unless it is a memory.
    experts = "experts" in (old["kind"], new["kind"])
    loses = old["kind"] in ("spline", "memory") and new["kind"] != "memory"
    if again and (experts or loses):
        raise SurgeryError(
            f"layer {again[0]} has a {old['kind']} block, and cannot have one of {new['kind']} too",
            "leave that layer out, or operate on the model that it was made of",
        )


def _less_sparse(blocks: Iterable[Mapping[str, Any]], layers: Collection[int]) -> list[Any]:
    """Return `blocks` without the sparse ones of these layers."""
    left = (
        {**b, "layers": [i for i in b["layers"] if b["kind"] != "sparse" or i not in layers]}
        for b in blocks
    )
    return [b for b in left if b["layers"]]


def _tokenizer(config: Mapping[str, Any], base: str) -> dict[str, str]:
    """Return the field that names the tokenizer class of the source's model_type.

    transformers knows no tokenizer for our model_type, and the tokenizer's own files need not name
    one (gpt2's do not). The result is empty where the config names one or transformers knows none.
    """
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    names = TOKENIZER_MAPPING_NAMES.get(base)  # transformers 4: a pair, slow and fast
    name = str((names[0] or names[1]) if isinstance(names, tuple) else names).removesuffix("Fast")
    known_to_both = not config.get("tokenizer_class") and name not in ("None", "TokenizersBackend")
    return {"tokenizer_class": name} if known_to_both else {}


def entry(family: Family, kind: str, layers: Iterable[int], **spec: Any) -> dict[str, Any]:
    """Return an entry of `surgery_blocks`.

    It says where the family keeps its MLP, and has `spec`, which the block reads. Raises
    SurgeryError where the MLP is no module of its own.
    """
    family.require_dense()
    if family.extra:
        raise SurgeryError(
            f"no {kind} block can take the place of the MLP of {family.model_type}: {family.extra}",
            "`surgery families` lists dense families",
        )
    if not family.mlp:
        raise SurgeryError(
            f"{family.model_type} keeps its MLP's matrices in the layer itself, in no module: "
            f"no {kind} block can take its place",
            "`surgery families` lists dense families",
        )
    gate, up, down = (
        (path or "").removeprefix(family.mlp + ".")
        for path in (family.gate, family.up, family.down)
    )
    return {
        "kind": kind,
        "layers": sorted(layers),
        "stack": family.layers,
        "mlp": family.mlp,
        "gate": gate,
        "up": up,
        "down": down,
        "fused": family.fused_gate_up,
        "transposed": family.transposed,
        **spec,
        **_activation(family, spec),
    }


def _activation(family: Family, spec: Mapping[str, Any]) -> dict[str, str]:
    """Return how a block names the activation, where its own words do not say it rightly.

    "" stands for the module that the MLP has.
    """
    stated = spec.get("activation")
    if family.own_activation and stated == family.activation:
        return {"activation": ""}
    return {} if stated or family.act_module else {"activation": family.activation}


def gathered_entry(family: Family, layers: Iterable[int]) -> dict[str, Any]:
    """Return an entry for the block of gathered_mlp.py.

    The family is one whose layers have the parts of their MLP in themselves, in no module.
    """
    return {**entry(family.gathered, "gathered", layers), "parts": list(family.loose)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparse:
    """Options of the block of sparse_mlp.py, where they are explained.

    A ReLU follows the norms `relu_after` (paths in a decoder layer), which is stage 2 of ReLU
    Strikes Back.
    """

    rule: str
    activation: str
    per_neuron: bool = False
    inputs: bool = False
    correction: bool = False
    bypass: int = 0
    relu_after: Sequence[str] = ()


def sparse_entry(family: Family, layers: Iterable[int], options: Sparse) -> dict[str, Any]:
    """Return an entry for the block of sparse_mlp.py.

    Raises SurgeryError for a rule that the family's MLP cannot have.
    """
    rule = options.rule
    if rule not in RULES:
        raise SurgeryError(f"no rule {rule!r} is known", f"one of: {', '.join(RULES)}")
    if RULES[rule].gated and not family.gated:
        raise SurgeryError(
            f"{family.model_type} has no gate, and {rule} is about gate and up",
            "choose another rule",
        )
    spec = dataclasses.asdict(options) | {"relu_after": list(options.relu_after)}
    return entry(family, "sparse", layers, **spec)


def sparse_tensors(entry: Mapping[str, Any], hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what a sparse block has beside the weights, by path in a decoder layer.

    Thresholds are F32, correction and bypass have the dtype of the weights.
    """
    neurons = (width,) if entry["per_neuron"] else (1,)
    shapes = {
        **dict.fromkeys(RULES[entry["rule"]].thresholds, neurons),
        "threshold_inputs": (1,) if entry["inputs"] else None,
        "correction": (hidden,) if entry["correction"] else None,
    }
    found = {f"{entry['mlp']}.{name}": shape for name, shape in shapes.items() if shape}
    return found | bypass_tensors(entry, hidden)


def bypass_tensors(entry: Mapping[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a linear map beside the MLP, by path in a decoder layer.

    Its tensors have the dtype of the weights.
    """
    rank = entry.get("bypass", 0)
    shapes = {"bypass_in": (rank, hidden), "bypass_out": (hidden, rank)}
    return {
        f"{entry['mlp']}.{name}": shape
        for name, shape in shapes.items()
        if rank and (name == "bypass_out" or rank < hidden)
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Options of the block of experts_mlp.py.

    Args:
        experts: how many there are.
        width: neurons of each.
        shared_neurons: neurons that are always active; they come first.
        top_k: experts that are active.
        activation: a name of transformers' ACT2FN; "" is that of the MLP.
        router: how the logits come about; one of ROUTERS, explained in experts_mlp.py.
        weights: what the chosen experts are multiplied by; one of ROUTING_WEIGHTS, explained there.
        group: how many neighbouring experts are chosen together.
        factor: what renormalised weights are multiplied by.
        router_bias: whether the router has biases.
        router_width: rows of the first matrix of the router "mlp".
        router_activation: the function in the router "mlp".
        bypass: rank of a linear map beside the MLP.
    """

    experts: int
    width: int
    shared_neurons: int = 0
    top_k: int
    activation: str = ""
    router: str = "linear"
    weights: str = "renormalised"
    group: int = 1
    factor: float = 1.0
    router_bias: bool = False
    router_width: int = 0
    router_activation: str = "tanh"
    bypass: int = 0

    @property
    def possible(self) -> bool:
        """Return whether the numbers fit together."""
        wide = (self.router == "mlp") == bool(self.router_width)
        counted = 1 <= self.top_k <= self.experts
        return wide and counted and not (self.experts % self.group or self.top_k % self.group)


def experts_entry(
    family: Family,
    layers: Iterable[int],
    options: Experts,
    sparse: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return an entry for the block of experts_mlp.py.

    `sparse` is the entry of a sparse block whose products the experts have. Raises SurgeryError
    where no block can take the MLP's place.
    """
    o = options
    if o.router not in ROUTERS or o.weights not in ROUTING_WEIGHTS:
        raise SurgeryError(
            f"no router {o.router!r} with weights {o.weights!r} is known",
            f"routers: {', '.join(ROUTERS)}; weights: {', '.join(ROUTING_WEIGHTS)}",
        )
    if not o.possible:
        raise SurgeryError(
            f"{o.top_k} of {o.experts} experts, {o.group} at a time, "
            f"behind a router of width {o.router_width}",
            "all at least 1, multiples of those chosen together; a width for the router mlp alone",
        )
    keys = ("activation", "rule", "per_neuron", "correction", "relu_after")
    kept = {key: sparse[key] for key in keys} if sparse else {}
    return entry(family, "experts", layers, **dataclasses.asdict(options)) | kept


def router_tensors(entry: Mapping[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the router of an experts block, by path in a decoder layer; all F32.

    The MLP's own tensors keep their names. They have shared + experts · width neurons: the shared
    ones, then those of each expert.
    """
    e, kind = entry["experts"], entry["router"]
    first = (
        entry["router_width"] if kind == "mlp" else e if kind == "neurons" and entry["gate"] else 0
    )
    shapes = {
        "weight_in": (first, hidden) if first else None,
        "bias_in": (first,) if first and entry["router_bias"] else None,
        "weight": (e, first if kind == "mlp" else hidden),
        "bias": (e,) if entry["router_bias"] else None,
        "scale": (e,) if entry["weights"] == "scaled" else None,
    }
    return {f"{entry['mlp']}.router.{name}": shape for name, shape in shapes.items() if shape}
