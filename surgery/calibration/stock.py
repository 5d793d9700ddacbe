"""The bridge to transformers: build a checkpoint's class, load weights into it by name, drop them.

The class is built on the meta device from the config as `from_pretrained` parses it. On-disk names
go through transformers' own loader, so that fused experts, prefixes and renamed layers mean what
they mean there. Nothing else in the project touches the internals of transformers.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

from surgery import files
from surgery.calibration.fp64 import arithmetic
from surgery.checkpoint import Checkpoint, LazyTensor
from surgery.checkpoint.tensors import DTYPES
from surgery.errors import SurgeryError, first_line
from surgery.families import Blocks
from surgery.families.classes import named_after
from surgery.families.roles import TOWERS

# Fields that a config may have for transformers 4 or 5, whether or not its class knows them.
WRITTEN_FOR_BOTH = (
    "dtype",
    "torch_dtype",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "tokenizer_class",
    "transformers_version",
    "auto_map",
    "architectures",
    "model_type",
)
ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
# transformers 5 renames and fuses tensors as it loads them.
CONVERTS = int(transformers.__version__.split(".")[0]) >= 5


@dataclass(frozen=True, kw_only=True, slots=True)
class NameReport:
    """How a checkpoint's names and shapes differ from its model class; empty where they agree."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]  # "name: shape on disk, shape in the class"


def parse_config(checkpoint: Checkpoint) -> Any:
    """Return the `PretrainedConfig` that stock loading would build, with all defaults filled in."""
    with _folder(checkpoint) as folder:
        return _parse(checkpoint, folder)


def unknown_fields(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the fields of config.json that its config class does not know, sorted."""
    config = parse_config(checkpoint)
    try:
        known = set(type(config)().to_dict()) | set(type(config).attribute_map)
    except Exception:  # a class without defaults cannot say what it knows
        return ()
    known |= set(WRITTEN_FOR_BOTH)
    return tuple(sorted(k for k in checkpoint.config if k not in known))


def meta_model(
    checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Any:
    """Build the CausalLM class of the checkpoint in eval mode.

    Parameters are on the meta device, buffers are real. Attention is what `from_pretrained`
    chooses, but eager if scores are soft-capped, since sdpa leaves the cap out. Experts are eager
    too in fp64 (see `calibration/fp64.py`), which grouped_mm lacks, and in odd sizes, which it
    refuses.

    Raises SurgeryError if transformers cannot build the model.
    """
    from accelerate import init_empty_weights

    with _folder(checkpoint) as folder, init_empty_weights(include_buffers=False), _quiet():
        config = _parse(checkpoint, folder)
        auto = _auto_class(config)
        if getattr(config.get_text_config(), "attn_logit_softcapping", None):
            config._attn_implementation = "eager"
        options = {"dtype": dtype, "trust_remote_code": runs_custom_code(checkpoint)}
        try:
            with arithmetic(dtype):
                model = auto.from_config(config, **options)
        except Exception as e:  # what it raises for a wrong value depends on the class
            raise SurgeryError(
                f"transformers {transformers.__version__} cannot build the model of config.json: "
                f"{first_line(e)}",
                _remedy(checkpoint),
            ) from e
    if dtype == torch.float64 or _has_odd_experts(model):
        model.config._experts_implementation = "eager"
    # The auxiliary loss would want router logits of layers that are not there.
    model.config.output_router_logits = False
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else buffer.to(device)
    return model.eval()


def _has_odd_experts(model: Any) -> bool:
    """Return whether the rows of some fused experts [E, A, B] are no multiple of 16 bytes.

    torch's grouped_mm refuses such strides: "strides should be multiple of 16 bytes".
    """
    fused = (p for p in model.parameters() if p.ndim == 3)
    return any(size * p.element_size() % 16 for p in fused for size in p.shape[1:])


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Let models say that they are on this device, as some ask of themselves.

    They answer with where their first parameter is, which for a tower that is not loaded is meta.
    """
    transformers.PreTrainedModel.device = property(lambda model: torch.device(device))
    try:
        yield
    finally:
        del transformers.PreTrainedModel.device


def decoder_layers(model: Any, blocks: Blocks) -> tuple[str, nn.ModuleList]:
    """Return the name of the ModuleList of the language model's decoder layers, and the ModuleList.

    Raises SurgeryError if the model has no such list of `blocks.count` layers.
    """
    wanted = blocks.family.layers
    for name, module in model.named_modules():
        named = isinstance(module, nn.ModuleList) and f".{name}".endswith(f".{wanted}")
        if named and len(module) == blocks.count and not TOWERS.search(name):
            return name, module
    raise SurgeryError(
        f"{type(model).__name__} has no list of {blocks.count} decoder layers named {wanted}",
        "check the number of layers in config.json: the model class builds another",
    )


def load(model: Any, tensors: Mapping[str, LazyTensor], device: str = "cpu") -> None:
    """Load tensors by on-disk name into the model, in its own dtype.

    They are renamed and converted as in stock loading. If head and embeddings are tied, whichever
    of the two is there serves both.

    Raises SurgeryError if the shape of a tensor differs from the class's.
    """
    if CONVERTS:
        with _quiet(), _one_by_one():
            info = _convert(model, {name: _Deferred(t) for name, t in tensors.items()}, device)
        problems = _mismatches(info)
    else:
        problems = _load_plain(model, tensors, device)
    if problems:
        raise SurgeryError(problems[0], "the tensors do not belong to this config.json")
    _tie(model)


def unload(module: nn.Module) -> None:
    """Move parameters back to the meta device; buffers stay."""
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None:
                empty = torch.empty_like(p, device="meta")
                m._parameters[name] = nn.Parameter(empty, requires_grad=False)
    _trim()


def check_names(checkpoint: Checkpoint) -> NameReport:
    """Compare every name and shape of the checkpoint with its model class. Reads no weight.

    Names are renamed as the loader would rename them.
    """
    model = meta_model(checkpoint)
    compare = _compare_converted if CONVERTS else _compare_plain
    info = compare(model, checkpoint.tensors)
    missing = set(info.missing_keys) - _tied(model, set(info.missing_keys))
    return NameReport(
        missing=_without(missing, model._keys_to_ignore_on_load_missing),
        unexpected=_without(info.unexpected_keys, _ignored(model)),
        mismatched=tuple(_mismatches(info)),
    )


# --- config ---------------------------------------------------------------------------------------


@contextmanager
def _folder(checkpoint: Checkpoint) -> Iterator[Path]:
    """Give transformers a folder to look at, with the config and any custom code in it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, str(checkpoint.config.get("model_type", "model")))
        config = json.dumps(dict(checkpoint.config)).encode()
        files.write(folder, "config.json", config, sync=False)
        for file in checkpoint.files:
            if runs_custom_code(checkpoint) and file.name.endswith(".py"):
                files.write(folder, file.name, files.content(file.path()), sync=False)
        yield folder


def _parse(checkpoint: Checkpoint, folder: Path) -> Any:
    try:
        trust = runs_custom_code(checkpoint)
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    except Exception as e:  # what it raises for a wrong value depends on the class
        raise SurgeryError(
            f"transformers {transformers.__version__} cannot read config.json: {first_line(e)}",
            _remedy(checkpoint),
        ) from None


def _remedy(checkpoint: Checkpoint) -> str:
    """Return what to do about a config that transformers refuses: a newer one may know the type."""
    kind = checkpoint.config.get("model_type")
    if kind in transformers.CONFIG_MAPPING or checkpoint.custom_code:
        return "mend config.json: this transformers knows the model_type, and not these values"
    return f"upgrade transformers: this one does not know the model_type {kind!r}"


def _auto_class(config: Any) -> Any:
    """Return the class of transformers that builds a language model, alone or in a wrapper.

    Raises SurgeryError for a model that transformers knows, but not as a language model.
    """
    autos = [transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText]
    if hasattr(config, "text_config"):  # the whole model, where a class of text would take a part
        autos.reverse()
    if usual := [a for a in autos if type(config) in a._model_mapping]:
        return usual[0]
    if config.model_type not in transformers.CONFIG_MAPPING:  # code of its own
        named = getattr(config, "auto_map", None) or {}
        return next((a for a in autos if a.__name__ in named), transformers.AutoModelForCausalLM)
    if found := named_after(config):
        return found
    raise SurgeryError(
        f"{config.model_type} is no language model to transformers: it has no class for "
        "causal text of that model_type",
        "give a text-only model; `surgery families` lists what is supported",
    )


def runs_custom_code(checkpoint: Checkpoint) -> bool:
    """Return whether to run the checkpoint's own code.

    That is so only if transformers has no code for its model_type.
    """
    known = checkpoint.config.get("model_type") in transformers.CONFIG_MAPPING
    return checkpoint.custom_code and not known


# --- loading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A stand-in for a slice of a safetensors file, which the loader reads by indexing it."""

    tensor: LazyTensor

    def __getitem__(self, index: object) -> torch.Tensor:
        return self.tensor.read()


def _convert(model: Any, state: Mapping[str, Any], device: str) -> Any:
    """Load as transformers 5 does: names renamed, experts fused, dtypes as planned."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    options = LoadStateDictConfig(
        dtype=model.dtype,
        dtype_plan=model._get_dtype_plan(model.dtype),
        device_map={"": device},
        weight_mapping=get_model_conversion_mapping(model),
    )
    info, _ = convert_and_load_state_dict_in_model(model, dict(state), options)
    return info


def _load_plain(model: Any, tensors: Mapping[str, LazyTensor], device: str) -> list[str]:
    """Load as transformers 4 does: names as they are, one tensor at a time."""
    info = _compare_plain(model, tensors)
    if not info.mismatched_keys:
        expected = model.state_dict()
        named = {_plain_name(model, name, expected): t for name, t in tensors.items()}
        known = {n: t for n, t in named.items() if n in expected}
        state = {n: t.read().to(device, expected[n].dtype) for n, t in known.items()}
        model.load_state_dict(state, strict=False, assign=True)
    return _mismatches(info)


def _plain_name(model: Any, name: str, expected: Mapping[str, Any]) -> str:
    for pattern, replacement in model._checkpoint_conversion_mapping.items():
        name, changed = re.subn(pattern, replacement, name)
        if changed:
            break
    prefixed = f"{model.base_model_prefix}.{name}"
    return prefixed if name not in expected and prefixed in expected else name


def _tie(model: Any) -> None:
    """Tie parameters as stock loading does, to whichever of the two the checkpoint has."""
    for one, other in _tied_pairs(model):
        a, b = model.get_parameter(one), model.get_parameter(other)
        for name, p, source in ((one, a, b), (other, b, a)):
            if p.is_meta and not source.is_meta:
                place, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(place), leaf, source)


def _tied_pairs(model: Any) -> list[tuple[str, str]]:
    """Return the names of parameters that are one and the same, as the head and the embeddings."""
    if (known := getattr(model, "all_tied_weights_keys", None)) is not None:
        return list(known.items())
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or not model.config.get_text_config().tie_word_embeddings:
        return []
    return [(f"{module_name(model, head)}.weight", f"{module_name(model, embeddings)}.weight")]


def _trim() -> None:
    """Give freed memory back to the system.

    glibc keeps what is below its threshold, and a walk would grow to the size of the model.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim:
        trim(0)


@contextmanager
def _one_by_one() -> Iterator[None]:
    """Make the loader read each tensor when its turn comes.

    Its threads would read all at once, and hold a layer twice: as on the disk and as computed.
    """
    before = os.environ.get(ONE_BY_ONE)
    os.environ[ONE_BY_ONE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ONE_BY_ONE]
        else:
            os.environ[ONE_BY_ONE] = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' own progress bar, which would appear once for every layer."""
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


# --- names ----------------------------------------------------------------------------------------


def _compare_converted(model: Any, tensors: Mapping[str, LazyTensor]) -> Any:
    """Run transformers 5's loader itself, on tensors without data."""
    with _quiet():
        return _convert(model, {name: _empty(t) for name, t in tensors.items()}, "meta")


def _compare_plain(model: Any, tensors: Mapping[str, LazyTensor]) -> Any:
    """Compare names and shapes as transformers 4 would load them."""
    expected = model.state_dict()
    named = {_plain_name(model, name, expected): t for name, t in tensors.items()}
    shapes = {(n, t.shape, tuple(expected[n].shape)) for n, t in named.items() if n in expected}
    return SimpleNamespace(
        missing_keys=set(expected) - set(named),
        unexpected_keys=set(named) - set(expected),
        mismatched_keys={s for s in shapes if s[1] != s[2]},
        conversion_errors={},
    )


def _empty(t: LazyTensor) -> torch.Tensor:
    return torch.empty(t.shape, dtype=getattr(torch, DTYPES[t.dtype][1]), device="meta")


def _mismatches(info: Any) -> list[str]:
    shapes = [
        f"{n}: {tuple(found)} on disk, {tuple(wanted)} in the class"
        for n, found, wanted in info.mismatched_keys
    ]
    failed = [f"{n}: {text.strip().splitlines()[-1]}" for n, text in info.conversion_errors.items()]
    return sorted(shapes) + sorted(failed)


def _tied(model: Any, missing: set[str]) -> set[str]:
    """Return those of the missing that are tied to one that is there."""
    return {
        name
        for pair in _tied_pairs(model)
        for name in pair
        if name in missing and not set(pair) <= missing
    }


def module_name(model: nn.Module, module: nn.Module) -> str:
    """Return the name of a module in its model."""
    return next(name for name, m in model.named_modules() if m is module)


def _ignored(model: Any) -> list[str]:
    """Return patterns of the names that the class drops silently.

    They are its own patterns, and the buffers that it computes.
    """
    computed = {n for n, _ in model.named_buffers()}
    buffers = computed | {n.removeprefix(model.base_model_prefix + ".") for n in computed}
    patterns = [rf"^{re.escape(n)}$" for n in buffers] + [r"rotary_emb\.inv_freq"]
    return [*patterns, *(model._keys_to_ignore_on_load_unexpected or ())]


def _without(names: Iterable[str], patterns: Iterable[str] | None) -> tuple[str, ...]:
    patterns = list(patterns or ())
    return tuple(sorted(n for n in names if not any(re.search(p, n) for p in patterns)))


def outer_names(blocks: Blocks) -> list[str]:
    """Return the on-disk names outside the decoder layers that text passes through.

    They are those of embeddings, final norm and head.
    """
    layer = re.compile(rf"{re.escape(blocks.prefix)}[0-9]+\.")
    return [n for n in blocks.checkpoint.tensors if not layer.match(n) and not TOWERS.search(n)]


def without_weights(model: Any, skip: Iterable[nn.Module]) -> list[str]:
    """Return the parameters outside `skip` that text passes through and that are still on meta."""
    skipped = {id(p) for module in skip for p in module.parameters()}
    missing = [n for n, p in model.named_parameters() if p.is_meta and id(p) not in skipped]
    return [n for n in missing if not TOWERS.search(n)]
