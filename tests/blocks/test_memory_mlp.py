"""The lookup against the sum over every slot, whole and a chunk at a time, and its table sharded
over two processes.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surgery.blocks import block_config, memory_mlp
from surgery.blocks.memory_mlp import Memory, with_memory
from surgery.families import known

HIDDEN, KEYS, HEADS, KNN, KEY_DIM = 16, 8, 3, 4, 6
SPEC: dict[str, Any] = {
    "place": "beside",
    "slots": "pkm",
    "shared": "memory_values_0",
    "heads": HEADS,
    "keys": KEYS,
    "knn": KNN,
    "key_dim": KEY_DIM,
    "value_dim": HIDDEN,
    "query_norm": True,
    "gated": True,
    "activation": "gelu",
    "bypass": "",
    "width": 0,
    "sparse_gradients": False,
}


def make(**changes: Any) -> Any:
    """A memory of random weights that reads a table of its own."""
    torch.manual_seed(0)
    memory = Memory({**SPEC, **changes}, HIDDEN)
    memory.read_from(memory.make_shared())
    for p in (*memory.parameters(), *memory.values.parameters()):
        nn.init.normal_(p, std=0.5)
    return memory


def over_all_slots(memory: Any, x: Tensor) -> Tensor:
    """y [N, H] with the score of each of the n² slots."""
    q = memory.query(x).view(len(x), HEADS, 2, KEY_DIM // 2)
    q = memory.query_norm(q) if memory.query_norm is not None else q
    m = 0
    for head in range(HEADS):
        s, t = (q[:, head, side] @ memory.keys[head, side].T for side in (0, 1))
        scores = (s[:, :, None] + t[:, None, :]).flatten(1)
        least = scores.topk(KNN).values[:, -1:]
        weights = torch.where(scores >= least, scores, -torch.inf).softmax(-1)
        table = memory.values
        if memory.entry["slots"] == "peer":
            m = m + (weights * nn.functional.gelu(x @ table.down.T)) @ table.up
        else:
            m = m + weights @ table.weight
    if memory.gate is None:
        return m
    return memory.output(m * nn.functional.silu(memory.gate(x)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"slots": "peer", "gated": False},
        {"gated": False, "query_norm": False},
        {"value_dim": 5},
    ],
    ids=["pkm", "peer", "plain", "narrow"],
)
@pytest.mark.parametrize("scratch", [1, 5000, 2**24])
@torch.no_grad()
def test_it_reads_the_best_of_all_slots(
    changes: dict[str, Any], scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a chunk of tokens at a time it gives the same."""
    monkeypatch.setattr(memory_mlp, "SCRATCH", scratch)
    memory = make(**changes)
    x = torch.randn(2, 25, HIDDEN)
    torch.testing.assert_close(
        memory(x), over_all_slots(memory, x.view(-1, HIDDEN)).view(x.shape), rtol=1e-4, atol=1e-4
    )
    assert memory(x[:, :0]).shape == (2, 0, HIDDEN)


@torch.no_grad()
def test_scratch_is_bounded() -> None:
    """At a million slots a token scores 2 · 1024 keys and 32² sums in each of 4 heads: 16.8 million
    numbers are 1,365 tokens.
    """
    with torch.device("meta"):
        memory = Memory({**SPEC, "heads": 4, "keys": 1024, "knn": 32, "key_dim": 512}, HIDDEN)
    assert memory._chunk() == 2**24 // (4 * (2 * 1024 + 32**2) + 4 * 32) == 1351


@pytest.mark.parametrize("slots", ["pkm", "peer"])
def test_sparse_gradients_are_the_dense_ones(slots: str) -> None:
    found = {}
    for sparse in (False, True):
        memory = make(slots=slots, gated=slots == "pkm", sparse_gradients=sparse)
        memory(
            torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(1))
        ).square().sum().backward()
        found[sparse] = {
            n: p.grad for n, p in (*memory.named_parameters(), *memory.values.named_parameters())
        }
        assert all(p.grad.is_sparse == sparse for p in memory.values.parameters())
    for name, dense in found[False].items():
        torch.testing.assert_close(found[True][name].to_dense(), dense, rtol=1e-5, atol=1e-5)


NEURONS: dict[str, Any] = {
    "slots": "neurons",
    "heads": 1,
    "gated": False,
    "query_norm": False,
    "bypass": "bias",
    "parts": ["gate", "up", "down", "gate_bias", "up_bias"],
}


def neurons_of_all_slots(memory: Any, x: Tensor) -> Tensor:
    """y [N, H] with every neuron, times zero where it is not among the best."""
    q = memory.query(x).view(len(x), 2, KEY_DIM // 2)
    s, t = (q[:, side] @ memory.keys[0, side].T for side in (0, 1))
    scores = (s[:, :, None] + t[:, None, :]).flatten(1)
    read = scores >= scores.topk(memory.knn).values[:, -1:]
    weights = (1 + memory.scale * scores.masked_fill(~read, -torch.inf).softmax(-1)) * read
    table, linear = memory.values, nn.functional.linear
    up = linear(x, table.up, table.up_bias)
    h = nn.functional.gelu(up if table.gate is None else linear(x, table.gate, table.gate_bias))
    return (weights * (h if table.gate is None else h * up)) @ table.down + memory.bias


@pytest.mark.parametrize("knn", [3, 8, 30, 64])
@pytest.mark.parametrize("parts", [NEURONS["parts"], ["up", "down"]], ids=["gated", "plain"])
@pytest.mark.parametrize(("scratch", "tokens"), [(1, 2), (5000, 25), (2**24, 50)])
def test_neurons_are_read_where_they_are_found(
    knn: int, parts: list[str], scratch: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than there are keys, too; by rows and, where that is cheaper, by the whole table;
    gradients are the same.
    """
    monkeypatch.setattr(memory_mlp, "SCRATCH", scratch)
    x, found = torch.randn(tokens, HIDDEN), []
    for sparse in (False, True):
        memory = make(**NEURONS | {"parts": parts, "knn": knn, "sparse_gradients": sparse})
        for compute in (memory, lambda z, m=memory: neurons_of_all_slots(m, z)):
            for p in (*memory.parameters(), *memory.values.parameters()):
                p.grad = None
            y = compute(x)
            y.square().sum().backward()
            grads = {
                n: p.grad
                for n, p in (*memory.named_parameters(), *memory.values.named_parameters())
            }
            found.append(
                (y.detach(), {n: g.to_dense() if g.is_sparse else g for n, g in grads.items()})
            )
            if sparse and compute is memory:
                assert {n for n, g in grads.items() if g.is_sparse} == set(parts) - {
                    "gate_bias",
                    "up_bias",
                }
    for y, grads in found[1:]:
        torch.testing.assert_close(y, found[0][0], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(grads, found[0][1], rtol=1e-3, atol=1e-2)


@torch.no_grad()
def test_scratch_of_neurons_is_bounded() -> None:
    """3 products of 11,025 neurons, 2 · 105 keys and 105² sums."""
    with torch.device("meta"):
        memory = Memory({**SPEC, **NEURONS, "keys": 105, "knn": 5000, "key_dim": 32}, HIDDEN)
    assert memory._chunk() == 2**24 // (3 * 105**2 + 2 * 105 + 105**2 + 5000) == 340


@pytest.mark.parametrize("slots", ["pkm", "peer"])
def test_in_bf16_it_runs_and_learns(slots: str) -> None:
    exact, half = make(slots=slots, gated=False), make(slots=slots, gated=False)
    half.values.to(torch.bfloat16)
    half.to(torch.bfloat16)
    x = torch.randn(200, HIDDEN)
    y = half(x.bfloat16())
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and all(
        p.grad.isfinite().all() for p in half.values.parameters()
    )
    near = (y.float() - exact(x)).abs().mean(1) < 0.05 * exact(x).abs().mean()
    assert near.float().mean() > 0.7  # where rounding does not choose other slots


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
@torch.no_grad()
def test_what_is_left_of_the_mlp_is_narrow(family: str) -> None:
    from models import config_of

    from surgery.calibration.stock import transformers  # the class of a layer's MLP

    config = config_of(family)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    layer = next(m for m in model.modules() if type(m) is nn.ModuleList)[0]
    entry = block_config.entry(
        known()[family],
        "memory",
        [0],
        **{
            **SPEC,
            "place": "replace",
            "gated": False,
            "bypass": "bias",
            "width": 6,
            "value_dim": 32,
        },
    )
    old = layer.mlp
    x = torch.randn(3, 5, 32)
    block: Any = with_memory(old, entry, config)
    block.memory.read_from(block.memory.make_shared())
    shapes = {n: tuple(p.shape) for n, p in block.named_parameters() if "memory" not in n}
    both = 12 if family == "phi3" else 6
    names = known()[family]
    up, down = (f"{p.removeprefix('mlp.')}.weight" for p in (names.up, names.down))
    assert shapes[up] == ((32, both) if family == "gpt2" else (both, 32))
    assert shapes[down] == ((6, 32) if family == "gpt2" else (32, 6))
    block.memory.init_block_weights()
    nn.init.zeros_(block.memory.values.weight)
    block.memory.bias.fill_(2.0)
    torch.testing.assert_close(block(x) - 2, type(old).forward(block, x))


# --- two processes --------------------------------------------------------------------------------


def run_sharded(rank: int, port: int, folder: str) -> None:
    """One of two processes: a table sharded by FSDP2, half of the batch, one step of SGD."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2"
    )
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    memory = make(gated=False)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
    fully_shard(memory.values, mesh=mesh)
    fully_shard(memory, mesh=mesh)
    local = memory.values.weight.to_local()
    y = memory(batch()[rank * 10 : rank * 10 + 10])
    y.square().sum().backward()
    full = memory.values.weight.grad.full_tensor()
    torch.save(
        {"y": y.detach(), "rows": len(local), "grad": full, "keys": memory.keys.grad.full_tensor()},
        Path(folder, f"{rank}.pt"),
    )
    distributed.destroy_process_group()


def batch() -> Tensor:
    return torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(1))


def test_a_table_sharded_over_two_processes(tmp_path: Path) -> None:
    """Each holds half of its rows; outputs and averaged gradients are those of one process."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("fork")  # the parent has imported torch
    processes = [
        context.Process(target=run_sharded, args=(rank, port, str(tmp_path))) for rank in (0, 1)
    ]
    for p in processes:
        p.start()
    for p in processes:
        p.join(60)
    assert [p.exitcode for p in processes] == [0, 0]
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    memory = make(gated=False)
    y = memory(batch())
    (y.square().sum() / 2).backward()
    assert [f["rows"] for f in found] == [KEYS**2 // 2] * 2
    torch.testing.assert_close(torch.cat([f["y"] for f in found]), y)
    for f in found:
        torch.testing.assert_close(f["grad"], memory.values.weight.grad)
        torch.testing.assert_close(f["keys"], memory.keys.grad)
