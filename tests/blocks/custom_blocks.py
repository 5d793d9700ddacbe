"""Tiny checkpoints with sparse blocks, and what they must compute: the stock model of the source
with hooks on it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from models import LAYERS, greedy, logits_of, sample_ids, save_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from surgery.blocks import block_config, custom_code
from surgery.blocks.block_config import Sparse
from surgery.checkpoint.compat import complete
from surgery.families import known

# Where the stock classes keep things: layers, gate, up, down. Not from surgery's own table.
NAMES = {
    "llama": ("model.layers", "gate_proj", "up_proj", "down_proj"),
    "phi3": ("model.layers", None, "gate_up_proj", "down_proj"),
    "gpt2": ("transformer.h", None, "c_fc", "c_proj"),
    "falcon": ("transformer.h", None, "dense_h_to_4h", "dense_4h_to_h"),
    "gpt_neox": ("gpt_neox.layers", None, "dense_h_to_4h", "dense_4h_to_h"),
    "nemotron": ("model.layers", None, "up_proj", "down_proj"),
}
NORMS = {
    "gemma3_text": ("input_layernorm", "pre_feedforward_layernorm"),
    "falcon": ("ln_attn", "ln_mlp"),
    "gpt2": ("ln_1", "ln_2"),
}
ACT = {
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu_new": torch.nn.functional.gelu,
    "gelu_pytorch_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}

DEFAULT: dict[str, dict[str, Any]] = {
    "plain": {"activation": "relu", "correction": True},
    "fatrelu": {"activation": "relu", "per_neuron": True},
    "shifted": {"activation": "relu", "per_neuron": True, "correction": True},
    "drelu": {"activation": "relu", "per_neuron": True},
    "cats": {"activation": "silu"},
    "teal": {"activation": "gelu_pytorch_tanh", "inputs": True},
}
WITH_GATE = ("llama", "llama tied", "qwen2", "qwen3", "gemma3_text", "phi3")
WITHOUT = ("gpt2", "falcon", "gpt_neox", "nemotron")
CASES = (
    {
        f"{name}, {rule}": (name, {"rule": rule, **spec})
        for name in (*WITH_GATE, *WITHOUT)
        for rule, spec in DEFAULT.items()
        if rule != "drelu" or name in WITH_GATE
    }
    | {
        f"{name}, stage 2": (
            name,
            {
                "rule": "plain",
                "activation": "relu",
                "relu_after": NORMS.get(name, ("input_layernorm", "post_attention_layernorm")),
            },
        )
        for name in ("llama", "gemma3_text", "falcon", "gpt2")
    }
    | {"llama, drelu, one threshold": ("llama", {"rule": "drelu", "activation": "relu"})}
)


def names_of(name: str) -> tuple[str, str | None, str, str]:
    return NAMES.get(name.split()[0], NAMES["llama"])


def family_of(name: str) -> Any:
    return known()[name.split()[0]]


def write(
    folder: Path, source: Path, entries: list[dict[str, Any]], tensors: Mapping[str, Tensor]
) -> None:
    """A converted checkpoint in `folder`: the source's files, `tensors` beside its weights, our
    code.
    """
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    base = config["model_type"]
    config = complete(config)
    config |= block_config.config_changes(config, entries)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {**load_file(folder / "model.safetensors"), **tensors},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    for file, data in custom_code.files(base, block_config.kinds(config)).items():
        (folder / file).write_bytes(data)


def added(
    name: str, entry: Mapping[str, Any], source: Path, layers: range = range(LAYERS)
) -> dict[str, Tensor]:
    """Random thresholds around the quantiles of a tiny model, and corrections, by their names on
    disk.
    """
    draw, weights = torch.Generator().manual_seed(2), load_file(source / "model.safetensors")
    stack = f"{entry['stack']}.0."
    prefix = next(n.split(stack)[0] for n in weights if stack in n) + entry["stack"]
    down = weights[f"{prefix}.0.{entry['mlp']}.{entry['down']}.weight"]
    hidden, width = reversed(down.shape) if entry["transposed"] else down.shape
    shapes = block_config.sparse_tensors(entry, hidden, width)
    return {
        f"{prefix}.{i}.{path}": torch.rand(shape, generator=draw) * 0.4
        for i in layers
        for path, shape in shapes.items()
    }


class Workshop:
    """Makes each source and each case once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def source(self, name: str) -> Path:
        folder = self.folder / "sources" / name
        if not folder.exists():
            save_model(name, folder)
        return folder

    def case(self, case: str) -> Path:
        """The folder of the checkpoint; beside it what it must give, "<folder>.pt" with ids, logits
        and tokens.
        """
        name, spec = CASES[case]
        folder = self.folder / case.replace(", ", "-").replace(" ", "-")
        if folder.exists():
            return folder
        source = self.source(name)
        entry = block_config.sparse_entry(family_of(name), range(LAYERS), Sparse(**spec))
        tensors = added(name, entry, source)
        write(folder, source, [entry], tensors)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32
        ).eval()
        hook(model, name, spec, tensors)
        torch.save(
            {"ids": sample_ids(), "logits": logits_of(model), "tokens": greedy(model)},
            f"{folder}.pt",
        )
        return folder

    def expected(self, case: str) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(f"{self.case(case)}.pt")
        return found


# --- the rules, by hooks on a stock model ---------------------------------------------------------


def hook(model: Any, name: str, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Make the stock model of the source compute what `spec` says."""
    stack, gate, up, down = names_of(name)
    for i, layer in enumerate(model.get_submodule(stack)):
        own = {n.split(".")[-1]: t for n, t in tensors.items() if f".{i}." in f".{n}"}
        _hook_mlp(layer.mlp, gate, up, down, spec, own)
        for norm in spec.get("relu_after", ()):
            getattr(layer, norm).register_forward_hook(lambda module, args, y: y * (y > 0))


def _hook_mlp(
    mlp: Any,
    gate: str | None,
    up: str,
    down: str,
    spec: Mapping[str, Any],
    own: Mapping[str, Tensor],
) -> None:
    seen: dict[str, Tensor] = {}

    def keep(part: str) -> Callable[..., None]:
        return lambda module, args, y: seen.update({part: y})

    def product(module: Any, args: Any) -> tuple[Tensor]:
        g, u = seen.get("gate"), seen["up"]
        if up == "gate_up_proj":
            g, u = u.chunk(2, dim=-1)
        return (direct(spec, own, u, None) if g is None else direct(spec, own, g, u),)

    if gate:
        getattr(mlp, gate).register_forward_hook(keep("gate"))
    getattr(mlp, up).register_forward_hook(keep("up"))
    getattr(mlp, down).register_forward_pre_hook(product)
    if "threshold_inputs" in own:
        t = own["threshold_inputs"]
        mlp.register_forward_pre_hook(
            lambda module, args: (torch.where(args[0].abs() < t, 0.0, args[0]),)
        )
    if "correction" in own:
        mlp.register_forward_hook(lambda module, args, y: y + own["correction"])


def direct(
    spec: Mapping[str, Any], own: Mapping[str, Tensor], g: Tensor, u: Tensor | None
) -> Tensor:
    """h by the formulas of sparse_mlp.py's docstring."""
    act, rule, t = ACT[spec["activation"]], spec["rule"], own.get("threshold")
    if rule == "fatrelu":
        opened = torch.where(g >= t, act(g), 0.0)
    elif rule == "drelu":
        opened = torch.where(g >= t, act(g), 0.0)
        u = torch.where(u >= own["threshold_up"], act(u), 0.0)  # type: ignore[operator,arg-type]
    elif rule == "shifted":
        opened = act(g - t)
    elif rule == "cats":
        opened = torch.where(act(g).abs() >= t, act(g), 0.0)
    else:
        opened = act(g)
    h = opened if u is None else opened * u
    return torch.where(h.abs() >= t, h, 0.0) if rule == "teal" else h
