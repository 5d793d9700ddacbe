"""Folders that are no Hugging Face checkpoint: how each kind is recognised, and what to say.

Training frameworks, other engines and version control leave folders that look like a model and hold
none. Each kind is one row of `KINDS`, so that the error says what the folder is and which command
makes a checkpoint of it. Most rows are asked only where config.json or the weights are missing;
those of `DISGUISED` have both, and are asked always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from surgery.checkpoint.parsing import read_json
from surgery.errors import SurgeryError
from surgery.files import JSON_LIMIT, content
from surgery.storage.hub import HubFile
from surgery.storage.store import File, Store

LFS = b"version https://git-lfs.github.com/spec/"
MOST_OF_A_POINTER = 1024  # bytes; the specification allows no more
SHOWN = 3  # names in a hint


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of folder.

    Args:
        what: completes "FOLDER is …"; `{found}` is what `seen` returned.
        hint: what to do; it may hold `{found}` and `{location}`.
        seen: what tells a folder of this kind, such as a file's name; "" where it is none.
    """

    what: str
    hint: str
    seen: Callable[[Store], str]


def refuse(store: Store, message: str, hint: str) -> SurgeryError:
    """Return the error for a folder that lacks something: by its kind, or as given.

    Args:
        store: the files of the folder.
        message: what is missing, for a folder of no known kind.
        hint: what to do about that.
    """
    for kind in KINDS:
        if found := kind.seen(store):
            names = {"found": found, "location": store.location}
            return SurgeryError(
                f"{message}: it is {kind.what.format(**names)}", kind.hint.format(**names)
            )
    return SurgeryError(message, hint)


def require_no_disguise(store: Store) -> None:
    """Raise SurgeryError for another engine's model that has a config.json and weights."""
    for kind in DISGUISED:
        if found := kind.seen(store):
            what = kind.what.format(found=found)
            raise SurgeryError(f"{store.location} is {what}", kind.hint)


def require_fetched(files: Iterable[File]) -> None:
    """Raise SurgeryError for a file whose content Git LFS has not fetched.

    A clone without Git LFS holds a text of three lines in the place of each large file. The Hub
    itself never sends one.
    """
    for file in files:
        if isinstance(file, HubFile) or not len(LFS) <= file.size <= MOST_OF_A_POINTER:
            continue
        if file.read(0, len(LFS)) == LFS:
            raise SurgeryError(
                f"{file.name} is a pointer of Git LFS, and not the file itself",
                "run `git lfs install`, then `git lfs pull` in the clone",
            )


# --- how the kinds are told -----------------------------------------------------------------------


def _any(*patterns: str) -> Callable[[Store], str]:
    """Return a function that finds the first file that matches one of the patterns."""

    def seen(store: Store) -> str:
        return next((n for p in patterns for n in sorted(store.files) if fnmatch(n, p)), "")

    return seen


def _folder_of(*patterns: str) -> Callable[[Store], str]:
    """Return a function that finds the folder of the first such file, below the location."""
    found = _any(*patterns)

    def seen(store: Store) -> str:
        name = found(store)
        return f"{store.location}/{name}".rpartition("/")[0] if name else ""

    return seen


def _listed(names: Iterable[str]) -> str:
    """Return the first few names in one text."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _below(store: Store, pattern: str) -> list[Path]:
    """Return the folders below a source on this disk; none for any other source."""
    local = store.folder if store.revision is None else None
    return sorted(p for p in local.glob(pattern) if p.is_dir()) if local else []


def _snapshots(store: Store) -> str:
    return _listed(map(str, _below(store, "snapshots/*")))


def _cached_models(store: Store) -> str:
    found = (p.name.removeprefix("models--") for p in _below(store, "models--*"))
    return _listed(name.replace("--", "/") for name in found)


def _models_inside(store: Store) -> str:
    """Return the folders inside that hold a config.json, like the checkpoints of a training."""
    inside = (n.rpartition("/")[0] for n in store.files if fnmatch(n, "*/config.json"))
    return _listed(f"{store.location.rstrip('/')}/{name}" for name in sorted(inside))


def _adapter(store: Store) -> str:
    """Return the base model of an adapter."""
    if "adapter_config.json" in store.files:
        base = _read(store.files["adapter_config.json"]).get("base_model_name_or_path")
        return str(base)[:200] if base else "its base model"
    return "its base model" if _any("adapter_model.*")(store) else ""


def _mlx(store: Store) -> str:
    """Return the form of MLX's quantised weights, which its config calls `quantization`."""
    config = _read(store.files["config.json"]) if "config.json" in store.files else {}
    found = config.get("quantization")
    bits = found.get("bits") if isinstance(found, dict) and "group_size" in found else None
    return f"{bits} bits" if bits else ""


def _read(file: File) -> dict[str, Any]:
    """Return the JSON object in a small file, empty where it holds none."""
    try:
        value = read_json(content(file.path(), JSON_LIMIT), file.name, "")
    except (OSError, SurgeryError):
        return {}
    return value if isinstance(value, dict) else {}


# --- the table ------------------------------------------------------------------------------------

_ADAPTER = (
    "load {found} and the adapter with peft, call merge_and_unload() and save_pretrained(), and "
    "give that folder"
)
DISGUISED = (
    Kind(
        what="a quantised MLX model ({found})",
        hint="give the Hugging Face checkpoint that it was made from",
        seen=_mlx,
    ),
)
# The first row that fits is taken: training frameworks leave files of several kinds.
KINDS = (
    Kind(
        what="a model in the cache of the Hub",
        hint="give a snapshot of it: {found}",
        seen=_snapshots,
    ),
    Kind(
        what="a cache of the Hub",
        hint="give a Hub id, like {found}",
        seen=_cached_models,
    ),
    Kind(
        what="an adapter (LoRA or the like) for {found}",
        hint=_ADAPTER,
        seen=_adapter,
    ),
    Kind(
        what="a DeepSpeed ZeRO checkpoint, whose weights are in pieces ({found})",
        hint="run `python zero_to_fp32.py . merged --safe_serialization` in that folder, and give "
        "merged with the config.json",
        seen=_any("zero_to_fp32.py", "global_step*/*", "*zero_pp_rank_*", "*mp_rank_*_states.pt"),
    ),
    Kind(
        what="a checkpoint of torch.distributed.checkpoint, whose weights are in pieces",
        hint="join them: `python -m torch.distributed.checkpoint.format_utils dcp_to_torch {found} "
        "model.pt` (dcp_to_torch_save), load that into the model, and save_pretrained()",
        seen=_folder_of("*.distcp"),
    ),
    Kind(
        what="a Megatron checkpoint ({found})",
        hint="convert it to a Hugging Face checkpoint with the tools of Megatron",
        seen=_any("latest_checkpointed_iteration.txt", "iter_*/*", "*.nemo"),
    ),
    Kind(
        what="the state of a training ({found}) without the weights",
        hint="give a folder that save_pretrained() wrote, or another checkpoint of the training",
        seen=_any("optimizer*.pt", "optimizer*.bin", "trainer_state.json", "scheduler.pt"),
    ),
    Kind(
        what="a part of a model in the original form of Meta or Mistral ({found})",
        hint="give a folder with all of it (consolidated.*.pth or consolidated*.safetensors, "
        "params.json and the tokenizer), or the Hugging Face version of the model",
        seen=_any("consolidated*.safetensors", "consolidated*.pth", "params.json", "*.pth"),
    ),
    Kind(
        what="a GGUF file ({found})",
        hint="GGUF is an inference format: give the Hugging Face checkpoint that it was made from",
        seen=_any("*.gguf"),
    ),
    Kind(
        what="an MLX model ({found})",
        hint="give the Hugging Face checkpoint that it was made from",
        seen=_any("weights*.npz", "*.npz"),
    ),
    Kind(
        what="TensorFlow weights ({found})",
        hint="convert them with transformers first",
        seen=_any("*.h5"),
    ),
    Kind(
        what="Flax weights ({found})",
        hint="convert them with transformers first",
        seen=_any("*.msgpack"),
    ),
    Kind(
        what="an ONNX model ({found})",
        hint="give the Hugging Face checkpoint that it was made from",
        seen=_any("*.onnx", "*/*.onnx"),
    ),
    Kind(
        what="a pipeline of diffusers ({found})",
        hint="give the folder of a language model inside it, if it has one",
        seen=_any("model_index.json"),
    ),
    Kind(
        what="a folder with models inside",
        hint="give one of them: {found}",
        seen=_models_inside,
    ),
)
