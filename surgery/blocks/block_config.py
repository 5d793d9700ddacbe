"""The entries of `surgery_blocks` in config.json: which layers have a custom-code block, of which
kind and size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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


def base_type(config: Mapping[str, Any]) -> str:
    """The model_type that the code of a config builds on: "llama" of a "llama" and of a
    "surgery_llama".
    """
    return str(config.get("model_type")).removeprefix(OPERATED)


def kinds(config: Mapping[str, Any]) -> list[str]:
    """The kinds of block in a config, each once."""
    return list(dict.fromkeys(entry["kind"] for entry in config.get("surgery_blocks") or ()))


def changed(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The entries of a config but for those that only gather the parts of MLPs, and change
    nothing.
    """
    return [entry for entry in config.get("surgery_blocks") or () if entry["kind"] != "gathered"]


def sparse_entry_of(config: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """The entry of layer `index`'s sparse block; empty where it has none."""
    return next((e for e in changed(config) if e["kind"] == "sparse" and index in e["layers"]), {})


def shared_modules(config: Mapping[str, Any], index: int | None = None) -> list[str]:
    """The modules that blocks of layer `index` (None: of any) read and the body owns: names in the
    body.
    """
    blocks = config.get("surgery_blocks") or ()
    return [
        entry["shared"]
        for entry in blocks
        if "shared" in entry and (index is None or index in entry["layers"])
    ]


def config_changes(
    config: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """The fields of config.json that make it load with our code, `entries` after those that it has;
    one that computes what a sparse block does, in parts, takes its place.

    Raises SurgeryError for a multimodal config, one with code of its own, or a layer that has a
    block of the kind.
    """
    base, blocks = base_type(config), list(config.get("surgery_blocks") or ())
    if config.get("text_config"):
        raise SurgeryError(
            f"{base} is multimodal: its other towers have no place in the code that goes along",
            "give its language model as a checkpoint of its own",
        )
    if config.get("auto_map", AUTO_MAP) != AUTO_MAP:
        raise SurgeryError(
            f"this {base} brings code of its own, which ours would replace", "give a model without"
        )
    for entry in map(dict, entries):
        blocks = (
            _less_sparse(blocks, entry["layers"])
            if entry["kind"] == "experts" and "rule" in entry
            else blocks
        )
        for old in (b for b in blocks if b["kind"] != "gathered"):
            same, both = old["kind"] == entry["kind"], {old["kind"], entry["kind"]}
            again = sorted(set(old["layers"]) & set(entry["layers"]))
            if again and same:
                raise SurgeryError(
                    f"layer {again[0]} has a {entry['kind']} block already", "leave that layer out"
                )
            rebuilt = (
                old["kind"] in ("spline", "memory") and entry["kind"] != "memory"
            )  # which would lose what they added
            if again and (
                "experts" in both or rebuilt
            ):  # built from a stock MLP, and read by nothing that wants one
                raise SurgeryError(
                    f"layer {again[0]} has a {old['kind']} block, and cannot have one of {entry['kind']} too",
                    "leave that layer out, or operate on the model that it was made of",
                )
        blocks.append(entry)
    changes = {
        "model_type": OPERATED + base,
        "architectures": ["SurgeryForCausalLM"],
        "auto_map": dict(AUTO_MAP),
        "surgery_blocks": blocks,
    }
    return changes | _tokenizer(config, base)


def _less_sparse(blocks: Iterable[Mapping[str, Any]], layers: Collection[int]) -> list[Any]:
    """`blocks` without the sparse ones of these layers."""
    left = (
        {**b, "layers": [i for i in b["layers"] if b["kind"] != "sparse" or i not in layers]}
        for b in blocks
    )
    return [b for b in left if b["layers"]]


def _tokenizer(config: Mapping[str, Any], base: str) -> dict[str, str]:
    """The tokenizer that transformers takes for the model_type of the source: it has none for ours,
    and the tokenizer's own files need not say (gpt2's do not)."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    names = TOKENIZER_MAPPING_NAMES.get(base)  # transformers 4: a pair, slow and fast
    name = str((names[0] or names[1]) if isinstance(names, tuple) else names).removesuffix("Fast")
    known_to_both = not config.get("tokenizer_class") and name not in ("None", "TokenizersBackend")
    return {"tokenizer_class": name} if known_to_both else {}


def entry(family: Family, kind: str, layers: Iterable[int], **spec: Any) -> dict[str, Any]:
    """An entry of `surgery_blocks`: where the family keeps its MLP, and `spec`, which the block
    reads.

    Raises SurgeryError where the MLP is no module of its own.
    """
    family.require_dense()
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
    }


def gathered_entry(family: Family, layers: Iterable[int]) -> dict[str, Any]:
    """An entry for the block of gathered_mlp.py, of a family whose MLPs stand in the layer
    itself.
    """
    return {**entry(family.gathered, "gathered", layers), "parts": list(family.loose)}


def sparse_entry(
    family: Family,
    layers: Iterable[int],
    *,
    rule: str,
    activation: str,
    per_neuron: bool = False,
    inputs: bool = False,
    correction: bool = False,
    bypass: int = 0,
    relu_after: Iterable[str] = (),
) -> dict[str, Any]:
    """An entry for the block of sparse_mlp.py, where `rule` and the options are explained; a ReLU
    follows the norms `relu_after` (paths in a decoder layer): stage 2 of ReLU Strikes Back.

    Raises SurgeryError for a rule that the family's MLP cannot have.
    """
    if rule not in RULES:
        raise SurgeryError(f"no rule {rule!r} is known", f"one of: {', '.join(RULES)}")
    if RULES[rule].gated and not family.gated:
        raise SurgeryError(
            f"{family.model_type} has no gate, and {rule} is about gate and up",
            "choose another rule",
        )
    return entry(
        family,
        "sparse",
        layers,
        rule=rule,
        activation=activation,
        per_neuron=per_neuron,
        inputs=inputs,
        correction=correction,
        bypass=bypass,
        relu_after=list(relu_after),
    )


def sparse_tensors(entry: Mapping[str, Any], hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """The shapes of what such a block has beside the weights, by path in a decoder layer.
    Thresholds are F32, correction and bypass have the dtype of the weights."""
    neurons = (width,) if entry["per_neuron"] else (1,)
    shapes = {
        **dict.fromkeys(RULES[entry["rule"]].thresholds, neurons),
        "threshold_inputs": (1,) if entry["inputs"] else None,
        "correction": (hidden,) if entry["correction"] else None,
    }
    found = {f"{entry['mlp']}.{name}": shape for name, shape in shapes.items() if shape}
    return found | bypass_tensors(entry, hidden)


def bypass_tensors(entry: Mapping[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a linear map beside the MLP, by path in a decoder layer, in the dtype of the
    weights.
    """
    rank = entry.get("bypass", 0)
    shapes = {"bypass_in": (rank, hidden), "bypass_out": (hidden, rank)}
    return {
        f"{entry['mlp']}.{name}": shape
        for name, shape in shapes.items()
        if rank and (name == "bypass_out" or rank < hidden)
    }


def experts_entry(
    family: Family,
    layers: Iterable[int],
    *,
    experts: int,
    width: int,
    top_k: int,
    activation: str = "",
    shared: int = 0,
    router: str = "linear",
    weights: str = "renormalised",
    group: int = 1,
    factor: float = 1.0,
    router_bias: bool = False,
    router_width: int = 0,
    router_activation: str = "tanh",
    bypass: int = 0,
    sparse: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """An entry for the block of experts_mlp.py: `experts` of `width` neurons, `top_k` of them
    active, after `shared` neurons that always are. `router`, `weights`, `group` and `factor` are
    explained there; `activation` "" is that of the MLP; `router_width` and `router_activation` are
    of the router "mlp"; `bypass` is the rank of a linear map beside the MLP; `sparse` is the entry
    of a sparse block whose products the experts have.

    Raises SurgeryError where no block can take the MLP's place.
    """
    if router not in ROUTERS or weights not in ROUTING_WEIGHTS:
        raise SurgeryError(
            f"no router {router!r} with weights {weights!r} is known",
            f"routers: {', '.join(ROUTERS)}; weights: {', '.join(ROUTING_WEIGHTS)}",
        )
    if (
        not 1 <= top_k <= experts
        or experts % group
        or top_k % group
        or (router == "mlp") != bool(router_width)
    ):
        raise SurgeryError(
            f"{top_k} of {experts} experts, {group} at a time, behind a router of width {router_width}",
            "all at least 1, multiples of those chosen together; a width for the router mlp alone",
        )
    kept = (
        {
            key: sparse[key]
            for key in ("activation", "rule", "per_neuron", "correction", "relu_after")
        }
        if sparse
        else {}
    )
    made = entry(
        family,
        "experts",
        layers,
        experts=experts,
        width=width,
        shared_neurons=shared,
        top_k=top_k,
        activation=activation,
        router=router,
        weights=weights,
        group=group,
        factor=factor,
        router_bias=router_bias,
        router_width=router_width,
        router_activation=router_activation,
        bypass=bypass,
    )
    return made | kept


def router_tensors(entry: Mapping[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    """The shapes of such a block's router, by path in a decoder layer; F32. The MLP's own tensors
    keep their names and have shared + experts · width neurons: the shared ones, then those of each
    expert."""
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
