"""A walk in fp64 computes nothing in fp32, on every route, in transformers 4.57 as in 5.

What could break it: a norm, router, softmax, rope or mask that stock code computes in fp32 by
another way of asking, and experts computed by a kernel that has no fp64.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import RELUFIED, UPCYCLED, sample_ids
from torch.utils._python_dispatch import TorchDispatchMode

from surgery.calibration.fp64 import arithmetic
from surgery.calibration.walk import Walk
from surgery.storage import open_checkpoint

IN_4 = (
    "llama",
    "llama with llama3 rope",
    "llama tied, k=1",
    "llama into granitemoe",
    "mistral",
    "mistral with yarn",
    "qwen2",
    "qwen3, two layers",
    "phi3 with window, k=E",
    "phi3 with longrope",
    "granite",
    "olmo2",
    "gemma",
)
NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Narrow(TorchDispatchMode):
    """Collects the operations that return a tensor narrower than fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = out if isinstance(out, tuple) else (out,)
        if any(isinstance(t, torch.Tensor) and t.dtype in NARROW for t in tensors):
            self.found.add(str(func))
        return out


@torch.no_grad()
def walked(folder: Path) -> tuple[torch.Tensor, set[str]]:
    """Return the logits in fp64, and the operations of layers and head that computed in less."""
    walk, narrow = Walk(open_checkpoint(folder), sample_ids(), dtype=torch.float64), Narrow()
    for layer in walk:
        with narrow:
            layer.run()
    walk._load_outer(without=walk.model.get_input_embeddings())
    with narrow:
        (logits,) = (walk._head(hidden) for hidden in walk.hidden)
    return logits, narrow.found


def limit_of(conversion: Any) -> float:
    """Return the tolerance: weights that are folded or scaled are rounded to fp32, copies not."""
    return 1e-6 if any(t.inputs for t in conversion.checkpoint.tensors.values()) else 1e-13


@pytest.mark.parametrize("name", UPCYCLED)
def test_every_route_is_exact_in_fp64(name: str, workshop: Any) -> None:
    """An upcycled model is the function of its source to 1e-13 where weights are copies."""
    c = workshop.convert(name)
    (source, a), (output, b) = walked(c.source), walked(c.output)
    assert a == b == set() and source.dtype == output.dtype == torch.float64
    assert (source - output).abs().max().item() <= limit_of(c)
    assert (source - c.logits).abs().max().item() <= 1e-4  # the same function as in fp32


@pytest.mark.parametrize("name", [n for n in RELUFIED if n.split(",")[0] not in UPCYCLED])
def test_no_family_computes_in_less(name: str, workshop: Any) -> None:
    """Also in families that cannot be upcycled."""
    c = workshop.convert(name)
    logits, narrow = walked(c.output)
    assert narrow == set() and (logits - c.logits).abs().max().item() <= 1e-4


@pytest.fixture(scope="module")
def in_4(workshop: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Walk the outputs with transformers 4.57 in one process, and the sources with this one."""
    packages = os.environ.get("SURGERY_TRANSFORMERS_4")
    if not packages:
        pytest.skip("SURGERY_TRANSFORMERS_4 names no folder with transformers 4.57")
    job = {}
    for i, name in enumerate(IN_4):
        c, expected = workshop.convert(name), tmp_path_factory.getbasetemp() / f"fp64-{i}.pt"
        torch.save(walked(c.source)[0], expected)
        job[name] = [str(c.output), str(expected)]
    path = os.pathsep.join([str(Path(packages).expanduser()), str(Path(__file__).parent.parent)])
    variables = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command, piped = [sys.executable, __file__], {"capture_output": True, "text": True}
    done = subprocess.run(command, input=json.dumps(job), env=variables, **piped)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    assert result.pop("version").startswith("4.57.")
    return result


@pytest.mark.parametrize("name", IN_4)
def test_transformers_4_is_exact_in_fp64_too(
    name: str, in_4: dict[str, Any], workshop: Any
) -> None:
    """Its models ask for fp32 in other places."""
    delta, narrow = in_4[name]
    assert narrow == [] and delta <= limit_of(workshop.convert(name))


def test_only_fp32_is_widened_and_only_where_asked_for() -> None:
    """Other dtypes, and views of bits, stay what they are."""
    x = torch.arange(8, dtype=torch.uint8)
    with arithmetic(torch.float64):
        asked = (
            x.float(),
            x.to(torch.float32),
            x.type(torch.float32),
            x.softmax(0, dtype=torch.float32),
            x / 3,
            torch.zeros(1, dtype=torch.float32),
            torch.tensor(0.1),
            torch.nn.functional.softmax(x, 0, dtype=torch.float32),
        )
        kept = (x.half(), x.to(torch.bfloat16), x.long(), x.view(torch.float32))
    assert {t.dtype for t in asked} == {torch.float64}
    assert [t.dtype for t in kept] == [torch.float16, torch.bfloat16, torch.int64, torch.float32]
    assert (x.float().dtype, torch.tensor(0.1).dtype) == (torch.float32, torch.float32)
    with arithmetic(torch.float32):
        assert (x.float().dtype, torch.tensor(0.1).dtype) == (torch.float32, torch.float32)


def main() -> None:
    import transformers

    result: dict[str, Any] = {"version": transformers.__version__}
    for name, (folder, expected) in json.load(sys.stdin).items():
        logits, narrow = walked(Path(folder))
        result[name] = [(logits - torch.load(expected)).abs().max().item(), sorted(narrow)]
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
