"""Open a checkpoint: its config, lazy tensors from the headers alone, and side files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from surgery.checkpoint.checkpoint import Checkpoint, Source
from surgery.checkpoint.config import check
from surgery.checkpoint.header import read_header
from surgery.checkpoint.parsing import read_json as parse_json
from surgery.checkpoint.tensors import LazyTensor, SourceFile
from surgery.errors import SurgeryError
from surgery.files import JSON_LIMIT, SIDE_LIMIT, content, require_size
from surgery.storage.dequantised import dequantised
from surgery.storage.kinds import refuse, require_fetched, require_no_disguise
from surgery.storage.local import LocalFile
from surgery.storage.location import open_store
from surgery.storage.originals import is_original, is_part_of_original, open_original
from surgery.storage.pickled import read_pickled
from surgery.storage.prefixes import require_plain_names, stripped
from surgery.storage.store import File, Store

INDEX = "model.safetensors.index.json"
# These are copied byte for byte. Everything else (other weights, optimizer states, the source's own
# card) stays behind.
SIDE_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "*LICENSE*",
    "*LICENCE*",
    "*USE_POLICY*",
    "NOTICE*",
    "*.py",
)


def open_checkpoint(
    location: str | Path,
    *,
    revision: str | None = None,
    stream: bool = False,
    strip_prefix: str | None = None,
    dequantize: bool = False,
) -> Checkpoint:
    """Open a checkpoint without reading a weight.

    Args:
        location: a folder, a single .safetensors file, a Hub id ("owner/name" or
            "owner/name@revision") or a URL (s3://…).
        revision: a branch, tag or commit of a Hub id.
        stream: whether downloaded shards are removed again, except for the last few that were read.
        strip_prefix: what to strip from the names of tensors, like "module.".
        dequantize: whether weights in fp8 or mxfp4 are opened as bf16.

    Raises SurgeryError for what is missing, damaged or not a Hugging Face checkpoint.

        checkpoint = open_checkpoint("Qwen/Qwen3-8B")
        checkpoint.tensors["model.norm.weight"].read()
    """
    store = open_store(str(location), revision, stream)
    require_fetched(f for n, f in store.files.items() if _is_read(n))
    require_no_disguise(store)
    notes = list[str]()
    found = _opened(store, notes)
    tensors, shards = found.tensors, found.shards
    if strip_prefix:
        notes.append(f"{strip_prefix} was stripped from the names of the source's tensors")
        # A shard whose names change cannot be copied as a whole.
        tensors, shards = stripped(tensors, strip_prefix), {}
    config = found.config
    if dequantize:
        notes.append("the source's quantised weights were dequantised to bf16")
        config, tensors = dequantised(config, tensors)
        shards = {}
    require_plain_names(tensors)
    _require_gathered(tensors)
    folder = None if store.folder is None else str(store.folder.resolve())
    return Checkpoint(
        config=config,
        tensors=tensors,
        files=found.files,
        source=Source(
            location=store.location,
            revision=store.revision,
            folder=folder,
            strip_prefix=strip_prefix,
            dequantize=dequantize,
        ),
        shards=shards,
        custom_code=bool(found.config.get("auto_map")),
        card=_whole(store.files["README.md"], store) if "README.md" in store.files else None,
        notes=tuple(notes),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opened:
    """What a source holds: the config, the tensors, their shards and the side files."""

    config: dict[str, Any]
    tensors: dict[str, LazyTensor]
    shards: dict[str, File]
    files: tuple[SourceFile, ...]


def _opened(store: Store, notes: list[str]) -> _Opened:
    """Return what a source holds, in whichever form; what the user should know goes into `notes`.

    Where a source has both forms, the original one is left alone.
    """
    if is_original(store, bool(_models(store))):
        return _opened_original(store, notes)
    config = read_config(store, notes)
    tensors, shards = _read_tensors(store)
    notes += _ignored(store, {file.name for file in shards.values()})
    if original := sorted(filter(is_part_of_original, store.files)):
        notes.append(f"the source holds its original form as well, which is ignored: {original[0]}")
    return _Opened(config=config, tensors=tensors, shards=shards, files=_side_files(store))


def _opened_original(store: Store, notes: list[str]) -> _Opened:
    """Return what a source in the form of its maker holds."""
    # What is made of these files gets into the output, so they must be the checkpoint's own.
    own = {n: _whole(f, store) for n, f in store.files.items() if _is_small(n)}
    original = open_original(replace(store, files=store.files | own), _read_file)
    notes += original.notes
    kept = (f for f in _side_files(store) if f.name not in original.left)
    return _Opened(
        config=check(original.config, f"params.json of {store.location}"),
        tensors=original.tensors,
        shards={},
        files=(*kept, *original.files),
    )


def _is_small(name: str) -> bool:
    return name == "params.json" or _is_side_file(name)


def _side_files(store: Store) -> tuple[File, ...]:
    return tuple(_whole(f, store) for name, f in store.files.items() if _is_side_file(name))


def _read_file(file: File) -> dict[str, LazyTensor]:
    """Return the tensors of a file of weights by name."""
    if isinstance(file, LocalFile):
        file.path()  # Weights may be links to anywhere, but to a file.
    safe = file.name.endswith(".safetensors")
    return read_header(file, file.read) if safe else read_pickled(file)


def _models(store: Store) -> list[str]:
    """Return the names of the files that are weights of a Hugging Face checkpoint."""
    weights = (n for n in store.files if n.endswith((".safetensors", ".bin")) and "/" not in n)
    return [n for n in weights if not n.startswith(_NOT_MODELS)]


def _is_side_file(name: str) -> bool:
    """Return whether a file is copied along, by its name and depth.

    The depth counts because the `*` of fnmatch crosses folders, and original/tokenizer.model must
    stay behind.
    """
    return any(fnmatch(name, p) and name.count("/") == p.count("/") for p in SIDE_FILES)


def _whole(file: File, store: Store, limit: int = SIDE_LIMIT) -> File:
    """Return a file that is going to be read as a whole.

    Raises SurgeryError where it is too large, and where it is on this disk and is no regular file
    of the checkpoint's own: an output is published, so nothing else may get into it.
    """
    if isinstance(file, LocalFile) and store.root is not None:
        file = file.enclosed(store.root)
    require_size(f"{file.name} of {store.location}", file.size, limit)
    return file


def _is_read(name: str) -> bool:
    """Return whether a file is read or copied: the config, the weights or a side file."""
    return (
        _is_side_file(name)
        or name in ("config.json", "params.json")
        or fnmatch(name, "*.index.json")
        or ("/" not in name and is_part_of_original(name))
        or ("/" not in name and name.endswith((".safetensors", ".bin")))
    )


def read_config(store: Store, notes: list[str]) -> dict[str, Any]:
    """Return config.json, parsed and checked; a key that is in it twice goes into `notes`.

    Raises SurgeryError where it is absent or wrong.
    """
    if "config.json" not in store.files:
        hint = "give the folder that holds config.json and the .safetensors files"
        raise refuse(store, f"no config.json in {store.location}", hint)
    repeated = list[str]()
    config = read_json(store.files["config.json"], store, repeated)
    notes += [f"config.json has {key} more than once: the last one counts" for key in repeated]
    return check(config, f"config.json of {store.location}")


_REPAIR = "download it again, or repair it"


def read_json(file: File, store: Store, repeated: list[str]) -> dict[str, Any]:
    """Return the JSON object in a file of the checkpoint.

    Keys that an object in it has more than once are added to `repeated`; JSON takes the last.
    Raises SurgeryError if it is no object.
    """
    where = f"{file.name} of {store.location}"
    data = content(_whole(file, store, JSON_LIMIT).path(), JSON_LIMIT)
    value = parse_json(data, where, _REPAIR, repeated)
    if not isinstance(value, dict):
        raise SurgeryError(f"{where} is not a JSON object", _REPAIR)
    return value


def _read_tensors(store: Store) -> tuple[dict[str, LazyTensor], dict[str, File]]:
    """Return every tensor by name, and the safetensors file of each; legacy files do not count."""
    for index, single, safe in (
        (INDEX, "model.safetensors", True),
        ("pytorch_model.bin.index.json", "pytorch_model.bin", False),
    ):
        files = _weight_files(store, index, single, safe)
        if files is None:
            continue
        tensors: dict[str, LazyTensor] = {}
        shards: dict[str, File] = {}
        for file, expected in files:
            found = _read_file(file)
            _merge(tensors, found, file, expected)
            shards |= dict.fromkeys(found, file) if safe else {}
        return tensors, shards
    hint = "give a folder with model.safetensors, or shards and their index"
    raise refuse(store, f"no weights in {store.location}", hint)


def _merge(
    tensors: dict[str, LazyTensor], found: Mapping[str, LazyTensor], file: File, expected: set[str]
) -> None:
    """Add the tensors found in a file to `tensors`, after checking them against the index."""
    if absent := sorted(expected - set(found)):
        raise SurgeryError(
            f"{file.name} lacks {absent[0]}, which the index says it holds "
            f"({len(absent)} such tensors)",
            "download the checkpoint again: it is incomplete, or its files are of different models",
        )
    if twice := sorted(set(tensors) & set(found)):
        raise SurgeryError(
            f"{twice[0]} is in two shards, the second being {file.name} "
            f"({len(twice)} such tensors)",
            "remove the shards of another model from the folder",
        )
    tensors |= found


def _weight_files(
    store: Store, index: str, single: str, safe: bool
) -> list[tuple[File, set[str]]] | None:
    """Return the weight files, each with the tensors that the index promises in it.

    Args:
        store: the files of the checkpoint.
        index: the name of the index.
        single: the name of the one file of a checkpoint without an index.
        safe: whether safetensors files are wanted, or legacy ones.

    Returns None where there are none of this kind.
    """
    if single in store.files:  # As in transformers, it comes before the index.
        return [(store.files[single], set())]
    if index in store.files:
        return _indexed(store, index)
    suffix = ".safetensors" if safe else ".bin"
    others = [n for n in _models(store) if n.endswith(suffix)]
    if len(others) > 1:
        raise SurgeryError(
            f"{len(others)} {suffix} files in {store.location} and no {index}",
            f"name one of the files, or restore {index}",
        )
    return [(store.files[others[0]], set())] if others else None


# The beginnings of names of files that are not a model's weights.
_NOT_MODELS = (
    "adapter_model",
    "training_args",
    "optimizer",
    "scheduler",
    "rng_state",
    "consolidated",
    "sentencepiece",
)


def _indexed(store: Store, index: str) -> list[tuple[File, set[str]]]:
    """Return the files that an index names, each with the tensors that it promises in it."""
    repeated = list[str]()
    weight_map = read_json(store.files[index], store, repeated).get("weight_map")
    if repeated:
        raise SurgeryError(
            f"{index} of {store.location} has {repeated[0]} more than once "
            f"({len(repeated)} such keys)",
            "restore the index of the checkpoint: two places of a tensor cannot both be right",
        )
    if not isinstance(weight_map, dict) or not weight_map:
        raise SurgeryError(
            f"{index} of {store.location} has no weight_map", "restore the index of the checkpoint"
        )
    names: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or _is_outside(PurePosixPath(file)):
            raise SurgeryError(
                f"{index} names a file outside the checkpoint: {str(file)[:200]!r}",
                "do not use this checkpoint: its index is broken or hostile",
            )
        names.setdefault(file, set()).add(tensor)
    if absent := sorted(set(names) - set(store.files)):
        raise SurgeryError(
            f"{index} names {absent[0]}, which is not in {store.location} "
            f"({len(absent)} of {len(names)} shards are absent)",
            "download the missing shards",
        )
    return [(store.files[file], tensors) for file, tensors in sorted(names.items())]


def _require_gathered(tensors: Mapping[str, LazyTensor]) -> None:
    """Raise SurgeryError for weights of no values, which ZeRO-3 leaves in the place of its own."""
    kinds = (".weight", ".bias")
    if empty := [n for n, t in tensors.items() if t.shape == (0,) and n.endswith(kinds)]:
        raise SurgeryError(
            f"{empty[0]} has the shape [0] ({len(empty)} such tensors): the model was saved under "
            "DeepSpeed ZeRO-3 without gathering its weights",
            'save it again with "stage3_gather_16bit_weights_on_model_save": true, or run '
            "zero_to_fp32.py of the training checkpoint",
        )


def _ignored(store: Store, read: set[str]) -> list[str]:
    """Return notes on weights of the folder that are not among the files that were read.

    Of two models in a folder transformers loads one without a word, and so do we, with a word.
    """
    if not read:
        return []
    others = [n for n in _models(store) if n.endswith(".safetensors") and n not in read]
    if "model.safetensors" in read and INDEX in store.files:
        others.insert(0, INDEX)
    if not others:
        return []
    what = others[0] if len(others) == 1 else f"{others[0]} and {len(others) - 1} more files"
    beside = "model.safetensors" if "model.safetensors" in read else f"the {len(read)} shards"
    return [
        f"of the source's weights these are ignored, as by transformers, which reads {beside}: "
        f"{what}"
    ]


def _is_outside(path: PurePosixPath) -> bool:
    return path.is_absolute() or ".." in path.parts
