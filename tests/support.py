"""A llama checkpoint written without transformers, and the command line as a user calls it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from safetensors.torch import save_file

COMMAND = (sys.executable, "-m", "surgery")


def llama_tensors(
    *,
    layers: int = 2,
    hidden: int = 32,
    ff: int = 64,
    vocab: int = 64,
    heads: int = 4,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, torch.Tensor]:
    """Return weights from N(0, 0.05²) under the names of a llama."""
    draw = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(layers):
        start = f"model.layers.{i}."
        shapes |= {f"{start}self_attn.{p}_proj.weight": (hidden, hidden) for p in "qkvo"}
        shapes |= {f"{start}mlp.{p}_proj.weight": (ff, hidden) for p in ("gate", "up")}
        shapes |= {f"{start}mlp.down_proj.weight": (hidden, ff)}
    tensors = {n: (torch.randn(s, generator=draw) * 0.05).to(dtype) for n, s in shapes.items()}
    norms = [
        f"model.layers.{i}.{p}_layernorm.weight"
        for i in range(layers)
        for p in ("input", "post_attention")
    ]
    return tensors | {n: torch.ones(hidden, dtype=dtype) for n in (*norms, "model.norm.weight")}


def llama_config(
    *,
    layers: int = 2,
    hidden: int = 32,
    ff: int = 64,
    vocab: int = 64,
    heads: int = 4,
    **fields: Any,
) -> dict[str, Any]:
    """Return the config.json of a llama with these sizes; `fields` override entries."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ff,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    } | fields


def write_llama(
    folder: Path,
    *,
    shards: int = 1,
    tensors: Mapping[str, torch.Tensor] | None = None,
    fields: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> Path:
    """Write a llama checkpoint with the safetensors library and return its folder.

    Args:
        folder: where it is written.
        shards: the number of safetensors files.
        tensors: the weights; by default random ones.
        fields: entries of config.json that differ from the usual ones.
        sizes: the arguments of `llama_tensors`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(tensors or llama_tensors(**sizes))
    sizes.pop("dtype", None)
    config = llama_config(**sizes, **(fields or {}))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_shards(folder, tensors, shards)
    return folder


def write_shards(
    folder: Path, tensors: Mapping[str, torch.Tensor], shards: int = 1
) -> dict[str, str]:
    """Write tensors into `shards` files, with an index if several; return the weight map."""
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return dict.fromkeys(tensors, "model.safetensors")
    files = [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)]
    weight_map = {name: files[i * shards // len(tensors)] for i, name in enumerate(tensors)}
    for file in files:
        content = {n: t for n, t in tensors.items() if weight_map[n] == file}
        save_file(content, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weight_map


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Call = Callable[..., Ran]  # the type of the fixture `call` of tests/cli


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment, without what would change a test's outcome."""
    ours = ("HF_", "SURGERY_", "TRANSFORMERS_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return kept | {"OMP_NUM_THREADS": "1", **variables}


def surgery(*arguments: object, cwd: Path | None = None, **variables: str) -> Ran:
    """Run the command line in a process of its own."""
    return Ran(*forked.Process(arguments, cwd, environment(**variables)).finish())


def port() -> str:
    """Return a port that is free now; the launcher binds it a moment later."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def together(command: Sequence[str], folders: Sequence[Path]) -> list[Ran]:
    """Run the command in one process for each folder, its working directory, without a launcher."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port(), "WORLD_SIZE": str(len(folders))}

    def start(rank: int, folder: Path) -> forked.Process:
        folder.mkdir(exist_ok=True)
        return forked.Process(command, folder, environment(RANK=str(rank), **where))

    started = [start(rank, folder) for rank, folder in enumerate(folders)]
    return [Ran(*process.finish()) for process in started]


STAGE = re.compile(r"[\w: -]+: done in [\d.]+ s")  # a line of a log, for each stage


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, by its path.

    Digests, which `write` keeps beside shards until the record has them, are left out.
    A card names its folder, and is compared without that name and the hashes of its text.
    """
    every = (p for p in folder.rglob("*") if p.is_file() and p.suffix != ".digest")
    files = {p.relative_to(folder).as_posix(): p for p in every}
    found = {name: files[name].read_bytes() for name in sorted(files)}
    if (card := found.get("README.md", b"").decode()).rstrip().endswith("-->"):
        text = card.rpartition("<!--")[0]
        for named in (r"^# .*$", r"^name = .*$", r"pretrained=[^, ]+"):
            text = re.sub(named, "NAMED", text, count=1, flags=re.MULTILINE)
        digest = hashlib.sha256(found["README.md"]).hexdigest().encode()
        found["README.md"] = text.encode()
        if "surgery.json" in found:
            found["surgery.json"] = found["surgery.json"].replace(digest, b"NAMED")
    return found


def assert_two_lines(ran: Ran, *words: str, code: int = 1) -> None:
    """Assert that a command printed one error: an `error:` and a `hint:` line on stderr.

    Nothing may be on stdout, and each of `words` must be in the two lines.
    """
    lines = [line for line in ran.err.splitlines() if not STAGE.fullmatch(line)]
    assert ran.code == code, ran
    assert [line.partition(": ")[0] for line in lines] == ["error", "hint"], ran.err
    assert ran.out == ""
    for word in words:
        assert word in ran.err, ran.err


def found_by_transformers_4(outputs: Mapping[str, Path], modules: Path) -> dict[str, Any]:
    """Return how transformers 4.57 loads outputs, compared with what is expected of them.

    One process of blocks/load_in_transformers_4.py loads all of them, because importing
    transformers takes longer than the models do.

    Args:
        outputs: folders by name; the values that are expected of each are beside it in FOLDER.pt.
        modules: where transformers keeps its copies of custom code.
    """
    folder = os.environ.get("SURGERY_TRANSFORMERS_4")
    if not folder:
        pytest.skip("SURGERY_TRANSFORMERS_4 names no folder with transformers 4.57")
    job = {n: {"folder": str(path), "expected": f"{path}.pt"} for n, path in outputs.items()}
    variables = {
        **os.environ,
        "PYTHONPATH": str(Path(folder).expanduser()),
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(modules),
    }
    script = Path(__file__).parent / "blocks" / "load_in_transformers_4.py"
    done = subprocess.run(
        [sys.executable, script],
        input=json.dumps(job),
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["version"].startswith("4.57."), result["version"]
    return result
