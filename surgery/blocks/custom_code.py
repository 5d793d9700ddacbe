"""The code that is saved with a checkpoint whose function no class of transformers computes.

`modeling_surgery.py` is the shell: the source's model class with blocks put in. Each kind of block
is a file beside it. Both are copied as they are, except for three lines of the shell: the blocks it
imports, BASE and BLOCKS. They import transformers and torch alone, and name no architecture:
config.json says where things are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from importlib import resources
from typing import Any

from surgery.blocks import block_config
from surgery.blocks.block_config import AUTO_MAPS
from surgery.blocks.preconditions import require_plain
from surgery.checkpoint import Checkpoint, GeneratedFile
from surgery.checkpoint.config import BLOCKS
from surgery.families import locate
from surgery.families.family import flat

NEEDS_TRUST = (
    "loads with trust_remote_code=True: its code is saved with the checkpoint; "
    "other runtimes (llama.cpp, vLLM) cannot run it"
)
SHELL = "modeling_surgery.py"
# Kinds whose file imports from another's, and files that no kind is made from, each with what to
# import of it. The shell must import them too, because transformers 4 copies only what the shell
# imports itself.
NEEDS = {"experts": "sparse"}
HELPERS = {"sparse": (("sparse_kernel", "live_mlp as live_mlp"),)}


def files(base: str, kinds: Collection[str]) -> dict[str, bytes]:
    """Return the files of code that are saved beside the weights, by name."""
    needed = {*kinds, *(NEEDS[kind] for kind in kinds if kind in NEEDS)}
    modules = [module for module, _ in _imports(sorted(needed))]
    return {SHELL: _shell(base, sorted(needed))} | {f"{m}.py": _read(f"{m}.py") for m in modules}


def _imports(kinds: Iterable[str]) -> list[tuple[str, str]]:
    """Return the modules that these kinds consist of, each with what to import of it."""
    pairs = (pair for kind in kinds for pair in (*HELPERS.get(kind, ()), BLOCKS[kind]))
    return sorted(set(pairs))


def _shell(base: str, kinds: Iterable[str]) -> bytes:
    """Return the shell for a model_type and these kinds of block."""
    blocks = ", ".join(f'"{kind}": {BLOCKS[kind][1]}' for kind in kinds)
    lines = {
        r"(from \.\w+ import \w+( as \w+)?\n)+": "".join(
            f"from .{module} import {name}\n" for module, name in _imports(kinds)
        ),
        r"BASE = .*\n": f'BASE = "{base}"\n',
        r"(BLOCKS: .* = ).*\n": rf"\g<1>{{{blocks}}}" + "\n",
    }
    text = _read(SHELL).decode()
    for pattern, replacement in lines.items():
        text, found = re.subn(f"^{pattern}", replacement, text, flags=re.MULTILINE)
        assert found == 1, f"{SHELL} has {found} times {pattern}"
    return text.encode()


def _read(name: str) -> bytes:
    return (resources.files("surgery.blocks") / name).read_bytes()


def is_ours(name: str, data: bytes) -> bool:
    """Return whether a file of code is, byte for byte, what `files` gives."""
    if name != SHELL:
        known = {f"{module}.py" for module, _ in _imports(BLOCKS)}
        return name in known and data == _read(name)
    base = re.search(rb'^BASE = "([\w.-]+)"$', data, re.MULTILINE)
    modules = [m.decode() for m in re.findall(rb"^from \.(\w+) import", data, re.MULTILINE)]
    found = [kind for kind, (module, _) in BLOCKS.items() if module in modules]
    return base is not None and data == _shell(base[1].decode(), sorted(found))


def runs_only_ours(configs: Iterable[Mapping[str, Any]], code: Mapping[str, bytes]) -> bool:
    """Return whether nothing but our code would run.

    Every file of code must be ours, and so must every class that auto_map names in a config
    (config.json, tokenizer_config.json, …): it could name one of another repository.
    """
    maps = [c["auto_map"] for c in configs if c.get("auto_map")]
    return all(m in AUTO_MAPS for m in maps) and all(
        is_ours(name, data) for name, data in code.items()
    )


def with_blocks(checkpoint: Checkpoint, entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of a checkpoint that change when these blocks are put in.

    They are its config, and its files with the code that is saved with it. Raises SurgeryError
    where the checkpoint cannot have code of ours.
    """
    config = dict(checkpoint.config) | block_config.config_changes(checkpoint.config, entries)
    code = files(block_config.base_type(config), block_config.kinds(config))
    kept = (f for f in checkpoint.files if f.name not in code)
    side_files = (*kept, *(GeneratedFile(n, data) for n, data in code.items()))
    return {"config": config, "files": side_files, "custom_code": True}


def with_gathered_mlps(checkpoint: Checkpoint) -> Checkpoint:
    """Return the same model with its MLPs in modules, whose place a block can take.

    This is for classes that keep the parts of an MLP in the layer itself (OPT). The code that
    gathers them is saved with the checkpoint. Raises SurgeryError as `require_plain` does.
    """
    require_plain(checkpoint)
    blocks = locate(checkpoint)
    if not blocks.family.loose:
        return checkpoint
    entry = block_config.gathered_entry(blocks.family, blocks.dense)
    names = {
        f"{blocks.layer(i)}{part}.{kind}": f"{blocks.layer(i)}{entry['mlp']}.{flat(part)}.{kind}"
        for i in blocks.dense
        for part in entry["parts"]
        for kind in ("weight", "bias")
    }
    tensors = {names.get(name, name): t for name, t in checkpoint.tensors.items()}
    return checkpoint.replace(tensors=tensors, **with_blocks(checkpoint, [entry]))
