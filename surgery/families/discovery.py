"""Derive the facts of a family from its model class, where no row of a table has them.

1. The config is made small (shrink.py), and its class is built with random weights in fp64.
2. The model runs on a few tokens. What its MLPs compute is proved from the numbers (probe.py).
3. Config keys are found by changing one and building again: the key of the activation is the one
   that changes the activation.
4. Names on disk are those that transformers itself would save.

What cannot be proved is refused, with the module and what it does differently.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from surgery.checkpoint.edit import EMBEDDINGS, HEADS
from surgery.errors import SurgeryError, first_line
from surgery.families.classes import named_after
from surgery.families.family import Family
from surgery.families.roles import TOWERS
from surgery.families.shrink import EXPERTS, VOCAB, shrink

_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "top_k_experts",
)
_COUNT = re.compile(r"(num_|num_local_|n_routed_|moe_num_)experts")
_WHOLE = "`surgery inspect` weighs it all the same"
_MOST_PARAMETERS = 300_000_000  # of a small model
_WIDTHS = re.compile(r"n_inner|\w*(intermediate|ffn|feed_forward|inner)\w*|dff|dim_ff")


@dataclass(slots=True)
class _Small:
    """A small model that ran, and what was proved of its layers.

    `stacks` maps the name of each list of layers to the proofs of each of its layers.
    """

    model: Any
    text: Mapping[str, Any]
    trace: Any
    stacks: dict[str, list[list[Any]]]


def discover(config: Mapping[str, Any]) -> Family:
    """Return the family of a config whose class transformers has.

    Raises SurgeryError where no MLP of it is proved: the message says what was seen.
    """
    small = _shrunk(config)
    ran = _run(small)
    stack = _stack(ran)
    facts = _facts(ran, stack)
    keys = _keys(small, ran, stack, facts["activation"])
    return Family(**facts, **keys)


# --- a small model --------------------------------------------------------------------------------


def _shrunk(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the small config, with the defaults of its class."""
    import transformers

    kind = config.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        near = difflib.get_close_matches(str(kind), list(transformers.CONFIG_MAPPING), 3)
        raise SurgeryError(
            f"model_type {kind!r} is not supported: transformers {transformers.__version__} does "
            "not know it",
            (f"nearest: {', '.join(near)}; " if near else "")
            + "`surgery families` lists what is; upgrade transformers if it is new",
        )
    with _quiet(), _refusing(config):
        whole = transformers.CONFIG_MAPPING[kind].from_dict(_plain(config)).to_dict()
    whole.pop("quantization_config", None)
    return shrink(whole)


def _plain(value: Any) -> Any:
    """Return a value of a config.json, floats that JSON lacks tagged as transformers 5 does."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _run(small: Mapping[str, Any]) -> _Small:
    """Build the model of a small config, run it, and prove what its MLPs compute."""
    import torch

    from surgery.families import probe

    with _quiet(), _refusing(small), _doubles(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(small)
        probe.randomise(model)
        tokens = torch.randint(3, VOCAB - 8, (2, 17))
        found = probe.trace(model, lambda: model(input_ids=tokens, use_cache=False))
    text = model.config.get_text_config().to_dict()
    stated = [v for v in text.values() if isinstance(v, str)]
    stacks = {
        name: [list(probe.prove(layer, f"{name}.{i}", found, stated)) for i, layer in enumerate(m)]
        for name, m in stacks_of(model)
    }
    return _Small(model=model, text=text, trace=found, stacks=stacks)


def build(small: Mapping[str, Any]) -> Any:
    """Return the model of a config in fp64, with the class that transformers has for text."""
    import torch
    import transformers

    config = transformers.CONFIG_MAPPING[small["model_type"]].from_dict(dict(small))
    known = [transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText]
    if "text_config" in small:  # the whole model, where a class of text would take a part of it
        known.reverse()
    usual = next((a for a in known if type(config) in a._model_mapping), None)
    auto = usual or named_after(config) or known[0]
    with torch.device("meta"):
        count = sum(p.numel() for p in auto.from_config(config).parameters())
    if count > _MOST_PARAMETERS:
        raise SurgeryError(
            f"a small {config.model_type} has {count:,} parameters here, so nothing is proved",
            _WHOLE,
        )
    model = auto.from_config(config, dtype=torch.float64).eval()
    model.config._experts_implementation = "eager"
    return model


def stacks_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the lists of layers of the language model, without those inside layers."""
    from torch import nn

    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        if inside or TOWERS.search(name) or not isinstance(module, nn.ModuleList):
            continue
        if len(module):
            found.append(name)
            yield name, module


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what transformers warns of in configs that are not the user's."""
    import warnings

    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _doubles() -> Iterator[None]:
    """Make what classes build on the way fp64 too: masks, positions."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _refusing(small: Mapping[str, Any]) -> Iterator[None]:
    """Turn whatever a model class raises on a small config into a refusal."""
    try:
        yield
    except SurgeryError:
        raise
    except Exception as e:
        raise SurgeryError(
            f"a small {small.get('model_type')} does not run here, so nothing of it is proved: "
            f"{first_line(e)}",
            _WHOLE,
        ) from e


# --- what is proved -------------------------------------------------------------------------------


def _stack(ran: _Small) -> str:
    """Return the name of the list of layers with the language model's MLPs."""
    proved = {n: sum(map(bool, layers)) for n, layers in ran.stacks.items()}
    best = max(proved.values(), default=0)
    names = [n for n, count in proved.items() if count == best]
    mixtures = [n for n, m in stacks_of(ran.model) if _mixture(m[-1])]
    kind = ran.model.config.model_type
    if not best:
        if len(mixtures) == 1:
            return mixtures[0]
        raise SurgeryError(
            f"no MLP of {kind} is proved: none of its layers multiplies down · act(gate x) ⊙ up x "
            "or down · act(up x)",
            "`surgery inspect` weighs it; operations need an MLP",
        )
    if len(names) > 1:
        raise SurgeryError(
            f"{kind} has several stacks of layers with MLPs ({', '.join(names)})",
            "only models with one are operated on",
        )
    return names[0]


def _facts(ran: _Small, stack: str) -> dict[str, Any]:
    """Return the fields of the family that come from the small model."""
    layers, proofs = ran.model.get_submodule(stack), ran.stacks[stack]
    mixtures = [m for layer in layers if (m := _mixture(layer))]
    shared, dense = _sorted_out(proofs, layers)
    first = Counter(dense or shared).most_common(1)
    by_place = _saved_names(ran.model)
    place, disk = _on_disk(ran.model, stack, by_place)
    kind = str(ran.model.config.model_type)
    facts: dict[str, Any] = {
        "model_type": kind,
        "layers": _below_body(ran.model, stack),
        "body": stack.removesuffix(_below_body(ran.model, stack)).removesuffix("."),
        "layers_on_disk": place,
        "embedding": _embedding(ran.model, by_place),
        "unchained": _unchained(ran, stack),
        "uneven": len({frozenset(n for n, _ in m.named_parameters()) for m in layers}) > 1,
        "discovered": True,
    }
    if mixtures:
        facts |= _mixture_facts(mixtures[-1], shared, disk)
    if not first:
        return facts | {"activation": _expert_activation(ran, stack) or "unknown"}
    proof = first[0][0]
    if any(p.activation != proof.activation for p in (*dense, *shared)):
        raise SurgeryError(f"the MLPs of {kind} have several activations", _WHOLE)
    downs = [id(m.get_submodule(proof.down).weight) for m in layers if _has(m, proof.down)]
    if len(set(downs)) < len(downs):
        raise SurgeryError(f"layers of {kind} share one MLP", _WHOLE)
    for index, (layer, found) in enumerate(zip(layers, proofs, strict=True)):
        unproved = _has(layer, proof.down) and proof.down not in [p.down for p in found]
        if unproved and not _holds_unseen(ran, f"{stack}.{index}", layer, proof):
            raise SurgeryError(
                f"the MLP of layer {index} of {kind} computes something else than "
                f"{_formula(proof)}, which is proved of other layers",
                _WHOLE,
            )
        if len([p for p in found if p in dense]) > 1:
            raise SurgeryError(
                f"layer {index} of {kind} has {len(found)} MLPs",
                "only layers with one are operated on",
            )
    facts |= _mlp_facts(ran, stack, proof, shared=not dense, moe=bool(mixtures), disk=disk)
    return facts


def _holds_unseen(ran: _Small, name: str, layer: Any, proof: Any) -> bool:
    """Return whether text does not pass through a layer, and its MLP is one that was proved."""
    from surgery.families.probe import holds_alone

    rows = next((c.input for n, c in ran.trace.calls.items() if n.endswith(f".{proof.up}")), None)
    return rows is not None and name not in ran.trace.calls and holds_alone(layer, proof, rows)


def _unchained(ran: _Small, stack: str) -> str:
    """Return what keeps the layers from being run one after the other, "" where nothing does."""
    import torch

    from surgery.families.probe import same

    count = len(ran.stacks[stack])
    seen = [(i, c) for i in range(count) if (c := ran.trace.calls.get(f"{stack}.{i}"))]
    for (i, before), (j, after) in itertools.pairwise(seen):
        given = (t for t in (*after.args, *after.kwargs.values()) if isinstance(t, torch.Tensor))
        if not any(same(t, before.output) for t in given if t.is_floating_point()):
            return f"layer {j} reads something else than layer {i} gives"
    if not seen:
        return "its layers are not called as modules"
    again = next((i for i, _ in seen if ran.trace.times[f"{stack}.{i}"] > 1), None)
    return "" if again is None else f"layer {again} runs more than once"


def _embedding(model: Any, by_place: Mapping[int, Sequence[str]]) -> str:
    """Return the end of the name on disk of the embedding's tensor, "" where it is a usual one."""
    table = getattr(model.get_input_embeddings(), "weight", None)
    if table is None:
        return ""
    own = [n for n, p in model.named_parameters() if p is table]
    names = [n for n in by_place.get(table.data_ptr(), own) if not n.endswith(HEADS)]
    if not names or any(n.endswith(EMBEDDINGS) for n in names):
        return ""
    return ".".join(names[0].split(".")[-2:])


def _has(module: Any, path: str) -> bool:
    return any(name == path for name, _ in module.named_modules())


def _below_body(model: Any, stack: str) -> str:
    """Return the name of the list of layers in the body of the model."""
    found = _body(model)
    body = next(name for name, module in model.named_modules() if module is found)
    return stack.removeprefix(f"{body}.") if body else stack


def _body(model: Any) -> Any:
    """Return the body of a model, which modeling_surgery.py finds in the same way.

    Some classes name a base that they do not have.
    """
    import transformers

    kind = transformers.MODEL_MAPPING.get(type(model.config), None)
    if kind is None or model.base_model is not model:
        return model.base_model
    return next((m for m in model.modules() if isinstance(m, kind)), model)


def _formula(proof: Any) -> str:
    x = f"{proof.activation}({proof.gate or proof.up} x)"
    return f"{proof.down} · {x} ⊙ {proof.up} x" if proof.gate else f"{proof.down} · {x}"


def _sorted_out(proofs: Sequence[Sequence[Any]], layers: Any) -> tuple[list[Any], list[Any]]:
    """Return the shared experts, and the MLPs that no router stands beside."""
    shared, dense = list[Any](), list[Any]()
    for layer, found in zip(layers, proofs, strict=True):
        routed = _mixture(layer)
        for proof in found:
            beside = routed and (proof.home.startswith(routed[2]) if routed[2] else True)
            (shared if beside else dense).append(proof)
    return shared, dense


def _mlp_facts(
    ran: _Small, stack: str, proof: Any, *, shared: bool, moe: bool, disk: Mapping[str, str]
) -> dict[str, Any]:
    gate, up, down = proof.gate, proof.up, proof.down
    renamed = {p: disk[p] for p in (gate, up, down) if p and disk.get(p, p) != p}
    facts: dict[str, Any] = {
        "on_disk": renamed,
        "gate": gate,
        "up": up,
        "down": down,
        "fused_gate_up": proof.fused,
        "transposed": proof.transposed,
        "activation": proof.activation,
        "act_module": bool(proof.act and proof.act.startswith(f"{proof.home}.")),
        "own_activation": (proof.act or "") if proof.own else "",
    }
    if any("." in p.removeprefix(f"{proof.home}.") for p in (gate, up, down) if p and proof.home):
        facts["extra"] = f"{proof.home} keeps its matrices in modules inside it"
    if proof.up_first:
        raise SurgeryError(f"{proof.up} holds up before gate, which is not written yet", _WHOLE)
    if shared:  # the names of an expert's matrices, at the place of a dense layer's
        leaf = {n: p and p.split(".")[-1] for n, p in (("gate", gate), ("up", up), ("down", down))}
        place = proof.home.rpartition(".")[0] or proof.home
        return facts | {n: p and f"{place}.{p}" for n, p in leaf.items()}
    if not moe:
        facts["mlp"] = proof.home
    alone = bool(proof.home) and not proof.extra
    if not alone and not moe:
        facts["extra"] = proof.extra or "its matrices stand in the layer itself"
        if proof.gate is None and proof.act:
            loose = (proof.up, proof.act, proof.down)
            facts |= {"mlp": "", "loose": loose, "extra": "", "act_module": True}
    return facts | _norms(ran, stack, proof)


def _norms(ran: _Small, stack: str, proof: Any) -> dict[str, Any]:
    """Return the norms that feed the mixers and the MLP, and the one behind the MLP."""
    from surgery.families.probe import same

    index = next(i for i, found in enumerate(ran.stacks[stack]) if proof in found)
    layer, start = ran.model.get_submodule(stack)[index], f"{stack}.{index}."
    calls = {n.removeprefix(start): c for n, c in ran.trace.calls.items() if n.startswith(start)}
    norms = [
        n for n, m in layer.named_children() if "norm" in type(m).__name__.lower() and n in calls
    ]
    y = calls[proof.down].output
    read = [calls[proof.up].input]
    read += [
        c.input for n, c in calls.items() if n != proof.home and "." not in n and n not in norms
    ]
    before = [n for n in norms if any(same(t, calls[n].output) for t in read)]
    behind = [n for n in norms if same(calls[n].input, y)]
    return {"pre_norms": tuple(before), "post_norm": behind[0] if behind else None}


def _mixture(layer: Any) -> tuple[str, str, str] | None:
    """Return the paths of the experts and the router of a layer, and of the module with both."""
    import torch
    from torch import nn

    experts = ""
    for name, module in layer.named_modules():
        many = isinstance(module, nn.ModuleList) and len(module) == EXPERTS
        own = module.parameters(recurse=False)
        fused = any(p.ndim == 3 and len(p) == EXPERTS for p in own)
        if name and (many or fused):
            experts = name
            break
    if not experts:
        return None
    for name, module in layer.named_modules():
        weight: Any = getattr(module, "weight", None)
        inside = name.startswith(f"{experts}.")
        matrix = isinstance(weight, torch.Tensor) and weight.ndim == 2
        if matrix and weight.shape[0] == EXPERTS and not inside:
            a, b = experts.split("."), name.split(".")
            common = [x for x, y in zip(a, b, strict=False) if x == y]
            return experts, name, ".".join(common)
    return None


def _mixture_facts(
    found: tuple[str, str, str], shared: Sequence[Any], disk: Mapping[str, str]
) -> dict[str, Any]:
    experts, router, home = found
    place = disk.get(router, router)
    facts: dict[str, Any] = {"experts": experts, "router": place, "mlp": home}
    if place != router:  # the module that holds both has another name on disk
        parts = len(router.split(".")) - len(home.split("."))
        facts["mlp"] = ".".join(place.split(".")[: -parts or None])
        facts["experts"] = f"{facts['mlp']}{experts.removeprefix(home)}"
    if shared:
        facts["shared"] = disk.get(shared[0].up, shared[0].up).rpartition(".")[0]
    return facts


def _expert_activation(ran: _Small, stack: str) -> str | None:
    """Return the activation that is proved of all routed experts; None where none is."""
    from surgery.families.probe import prove_experts

    stated = [v for v in ran.text.values() if isinstance(v, str)]
    found = set()
    for index, layer in enumerate(ran.model.get_submodule(stack)):
        if mixture := _mixture(layer):
            name = f"{stack}.{index}.{mixture[0]}"
            found.add(prove_experts(layer.get_submodule(mixture[0]), name, ran.trace, stated))
    return found.pop() if len(found) == 1 else None


def _saved_names(model: Any) -> dict[int, list[str]]:
    """Return the names on disk of the tensors that are stored as they are, by their address.

    Tied ones have several, of which one is stored.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 stores what it has
        return {}
    state = {n: t for n, t in model.state_dict().items() if t.numel()}
    shapes = {t.data_ptr(): t.shape for t in state.values()}
    found = dict[int, list[str]]()
    for name, t in revert_weight_conversion(model, dict(state)).items():
        if shapes.get(t.data_ptr()) == t.shape:
            found.setdefault(t.data_ptr(), []).append(name)
    return found


def _on_disk(
    model: Any, stack: str, by_place: Mapping[int, Sequence[str]]
) -> tuple[str, dict[str, str]]:
    """Return the name on disk of a list of layers, and the paths of the matrices of a layer.

    The paths are by those in the model, of matrices that are stored as they are under whatever
    name. The name is "" where it is not renamed.
    """
    found, stacks = dict[str, str](), set[str]()
    for name, t in model.state_dict().items():
        match = re.match(rf"{re.escape(stack)}\.(?P<index>\d+)\.(?P<path>.+)\.weight$", name)
        stored = next(iter(by_place.get(t.data_ptr(), ())), "")
        if match is None or not stored:
            continue
        place, separator, path = stored.partition(f".{match['index']}.")
        if separator:
            found.setdefault(match["path"], path.removesuffix(".weight"))
            stacks.add(place)
    renamed = stacks.pop() if len(stacks) == 1 else ""
    return "" if renamed == stack else renamed, found


# --- config keys ----------------------------------------------------------------------------------


def _keys(small: Mapping[str, Any], ran: _Small, stack: str, activation: str) -> dict[str, Any]:
    """Return the keys of the config, each found by changing it and building again."""
    text = ran.text
    named = type(ran.model.config.get_text_config()).attribute_map
    count = len(ran.stacks[stack])
    proofs = [p for found in ran.stacks[stack] for p in found]

    def again(**changes: Any) -> _Small | None:
        try:
            return _run(_changed(small, changes))
        except SurgeryError:
            return None

    def first(ran: _Small | None) -> Any:
        return (
            next((p for found in ran.stacks.get(stack, []) for p in found), None) if ran else None
        )

    layers = [named.get("num_hidden_layers", "num_hidden_layers")]
    layers += [k for k, v in text.items() if v == count and "layer" in k and k not in layers]
    hidden = named.get("hidden_size", "hidden_size")
    keys: dict[str, Any] = {
        "hidden_key": hidden,
        "layers_key": next((k for k in layers if text.get(k) == count), layers[0]),
        "activation_key": _activation_key(ran, stack, activation, again),
    }
    if count_key := next((k for k in text if _COUNT.fullmatch(k)), None):
        keys["experts_key"] = count_key
        keys["top_k_key"] = next((k for k in _TOP_K if text.get(k)), "num_experts_per_tok")
    if proofs:
        width = proofs[0].width
        keys["width_key"] = _width_key(text, width, again, first)
        keys["bias_key"] = _bias_key(text, ran, proofs[0], again)
    return keys


def _changed(small: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    if small.get("text_config"):
        return {**small, "text_config": {**small["text_config"], **changes}}
    return {**small, **changes}


def _activation_key(ran: _Small, stack: str, now: str, again: Any) -> str:
    """Return the key that changes the activation of every MLP and expert, "" where none does."""
    from transformers.activations import ACT2FN

    other = "relu" if now != "relu" else "silu"
    for key, value in ran.text.items():
        if isinstance(value, str) and value in ACT2FN:
            changed = again(**{key: other})
            if changed is not None and _activations(changed, stack) == {other}:
                return key
    return ""


def _activations(ran: _Small, stack: str) -> set[str | None]:
    """Return the activations of all MLPs and experts; None among them for experts not proved."""
    found: set[str | None] = {p.activation for proofs in ran.stacks[stack] for p in proofs}
    routed = any(_mixture(layer) for layer in ran.model.get_submodule(stack))
    return found | ({_expert_activation(ran, stack)} if routed else set())


def _width_key(text: Mapping[str, Any], width: int, again: Any, first: Any) -> str:
    """Return the key that changes the width of the MLP, "" where none does."""
    stated = [k for k, v in text.items() if v == width and type(v) is int]
    unset = [k for k, v in text.items() if v is None]
    for key in filter(_WIDTHS.fullmatch, (*stated, *unset)):
        proof = first(again(**{key: width + 8}))
        if proof is not None and proof.width == width + 8:
            return key
    return ""


def _bias_key(text: Mapping[str, Any], ran: _Small, proof: Any, again: Any) -> str | None:
    """Return the key that gives the MLP biases, or takes them; None where none does."""

    def biased(ran: _Small) -> bool:
        return any(n.endswith(f"{proof.up}.bias") for n, _ in ran.model.named_parameters())

    for key, value in text.items():
        if isinstance(value, bool) and "bias" in key:
            other = again(**{key: not value})
            if other is not None and biased(other) is not biased(ran):
                return key
    return None
