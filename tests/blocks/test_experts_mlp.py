"""A block of experts computes what its formulas say, in every family, however the tokens are
sorted.

What could break it: neurons that are columns in one family and rows in another, gate and up in one
matrix, biases that are added for each expert, a gradient that a slice drops, an order that is not
undone, and a fast way that forgets a hook.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from models import MODELS, config_of
from torch import Tensor, nn

from surgery.blocks import block_config
from surgery.blocks.block_config import Experts, Sparse
from surgery.blocks.experts_mlp import ExpertsMLP
from surgery.errors import SurgeryError
from surgery.families import known

FAMILIES = ("llama", "gemma3_text", "phi3", "gpt2", "falcon", "gpt_neox", "nemotron", "smollm3")
EXPERTS, WIDTH, HIDDEN = 4, 9, 32
X = torch.randn(2, 11, HIDDEN, generator=torch.Generator().manual_seed(3))


def mlp_of(name: str, neurons: int = EXPERTS * WIDTH + 5, **config: Any) -> Any:
    """A stock MLP of that many neurons with random weights and, where it has them, biases."""
    family = known()[name]
    widths = {family.width_key: neurons} | (
        {"mlp_bias": True} if family.bias_key == "mlp_bias" else {}
    )
    model = transformers.AutoModelForCausalLM.from_config(config_of(name, **widths, **config))
    layers = next(m for n, m in model.named_modules() if n.split(".")[-1] == family.layers)
    draw = torch.Generator().manual_seed(5)
    for p in layers[0].mlp.parameters():
        nn.init.normal_(p, std=0.4, generator=draw)
    return layers[0].mlp.eval()


def block_of(
    name: str, mlp: nn.Module | None = None, *, top_k: int = 2, shared: int = 5, **spec: Any
) -> Any:
    sparse = spec.pop("sparse", None)
    options = Experts(experts=EXPERTS, width=WIDTH, shared_neurons=shared, top_k=top_k, **spec)
    entry = block_config.experts_entry(known()[name], [0], options, sparse)
    block = ExpertsMLP(mlp or mlp_of(name), entry).eval()
    draw = torch.Generator().manual_seed(7)
    for p in block.router.parameters():
        nn.init.normal_(p, std=0.5, generator=draw)
    found = {
        f"{entry['mlp']}.router.{n}": tuple(p.shape) for n, p in block.router.named_parameters()
    }
    assert found == block_config.router_tensors(entry, HIDDEN)
    return block


SPECS: tuple[dict[str, Any], ...] = (
    {},
    {"weights": "one"},
    {"router": "neurons", "weights": "scaled"},
    {"router": "neurons", "router_bias": True, "weights": "one"},
    {"router": "mlp", "router_width": 6, "weights": "one"},
    {"router_bias": True, "factor": 2.0, "group": 2},
    {"router": "mlp", "router_width": 6, "router_activation": "relu", "router_bias": True},
    {"shared": 0},
)


def directly(block: Any, mlp: Any, spec: Mapping[str, Any], x: Tensor) -> Tensor:
    """One token [H] after the formulas of the block's docstring, the source's MLP on products that
    were masked.
    """
    r, act = block.router, block.act
    v = x if r.weight_in is None else r.weight_in @ x + (0 if r.bias_in is None else r.bias_in)
    bias = 0 if r.bias is None else r.bias
    if spec.get("router") == "mlp":
        logits = (
            r.weight @ (torch.relu(v) if spec.get("router_activation") == "relu" else torch.tanh(v))
            + bias
        )
    elif spec.get("router") == "neurons":
        w = r.weight @ x + bias
        logits = (act(w) if r.weight_in is None else act(v) * w).abs()
    else:
        logits = r.weight @ x + bias
    group = spec.get("group", 1)
    best = logits.view(-1, group).mean(1).topk(2 // group).indices
    chosen = [int(g) * group + i for g in best for i in range(group)]
    p = logits[chosen].softmax(0) * spec.get("factor", 1.0)
    if spec.get("weights") == "one":
        p = torch.ones(2)
    elif spec.get("weights") == "scaled":
        p = 1 + (r.scale * logits.softmax(0))[chosen]
    shared = spec.get("shared", 5)
    scale = torch.zeros(shared + EXPERTS * WIDTH)
    scale[:shared] = 1
    for e, weight in zip(chosen, p, strict=True):
        scale[shared + e * WIDTH : shared + (e + 1) * WIDTH] = weight
    down = getattr(mlp, block.entry["down"])
    with times(down, scale):
        y: Tensor = mlp(x[None, None])[0, 0]
    return y


@contextmanager
def times(module: nn.Module, scale: Tensor) -> Iterator[None]:
    """What the module reads is multiplied by a scale."""
    hook = module.register_forward_pre_hook(lambda m, args: (args[0] * scale,))
    yield
    hook.remove()


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_it_computes_its_formulas(name: str, spec: dict[str, Any]) -> None:
    mlp = mlp_of(name, EXPERTS * WIDTH + spec.get("shared", 5))
    block = block_of(name, mlp, **spec)
    want = torch.stack([directly(block, mlp, spec, x) for x in X.flatten(0, 1)]).view(X.shape)
    limit = 1e-5 * max(1.0, want.std().item())
    flat, (_, weights, chosen) = X.flatten(0, 1), block.router(X.flatten(0, 1), block.act)
    for way in (block._sorted, block._masked):
        torch.testing.assert_close(
            way(flat, weights, chosen).view(X.shape), want, rtol=0, atol=limit
        )
    torch.testing.assert_close(block(X), want, rtol=0, atol=limit)
    torch.testing.assert_close(block(X[:1, :1]), want[:1, :1], rtol=0, atol=limit)


@pytest.mark.parametrize("rank", [3, HIDDEN])
@torch.no_grad()
def test_a_bypass_is_a_linear_map_beside_it(rank: int) -> None:
    mlp = mlp_of("llama")
    plain, block = block_of("llama", mlp), block_of("llama", mlp, bypass=rank)
    assert torch.equal(block(X), plain(X))  # it begins as none
    nn.init.normal_(block.bypass_out)
    matrix = block.bypass_out
    if rank < HIDDEN:
        nn.init.normal_(block.bypass_in)
        matrix = matrix @ block.bypass_in
    assert (block.bypass_in is None) == (rank == HIDDEN)
    torch.testing.assert_close(block(X), plain(X) + X @ matrix.T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_all_experts_of_weight_one_are_the_mlp(name: str) -> None:
    mlp = mlp_of(name)
    assert torch.equal(block_of(name, mlp, top_k=EXPERTS, weights="one")(X), mlp(X))
    # The block shares the parameters: nothing is copied for it.
    assert any(p is q for p in mlp.parameters() for q in block_of(name, mlp).parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_the_masked_mlp(name: str) -> None:
    """Of split and unbind, in the sorted way: of weights, biases, router and input."""
    block = block_of(name)
    x = X.flatten(0, 1).clone().requires_grad_()
    found = []
    for way in (block._sorted, block._masked):
        _, weights, chosen = block.router(x, block.act)
        loss = way(x, weights, chosen).square().mean()
        found.append(torch.autograd.grad(loss, [x, *block.parameters()]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1.0, b.abs().max().item()))
        assert b.abs().max() > 1e-4


@pytest.mark.parametrize(
    ("weights", "learns"), [("renormalised", True), ("scaled", True), ("one", False)]
)
def test_the_router_learns_where_its_weights_say_how_much(weights: str, learns: bool) -> None:
    block = block_of("llama", weights=weights)
    block(X).square().sum().backward()
    assert (
        block.router.weight.grad is not None and bool(block.router.weight.grad.abs().max() > 0)
    ) == learns


def test_only_the_chosen_experts_are_read() -> None:
    """One token: the weights of the others may be anything."""
    block = block_of("llama", weights="one")
    x = X[:1, :1]
    want = block(x)
    chosen = block.router(x[0], block.act)[2][0].tolist()
    for part in ("gate_proj", "up_proj"):
        rows = getattr(block, part).weight.data[5:].view(EXPERTS, WIDTH, HIDDEN)
        for e in set(range(EXPERTS)) - set(chosen):
            rows[e] = torch.nan
    assert torch.equal(block(x), want)


@torch.no_grad()
def test_what_slices_would_bypass_goes_through_the_submodules() -> None:
    block = block_of("llama")
    want = block(X)
    seen: list[int] = []
    hook = block.up_proj.register_forward_hook(lambda m, args, out: seen.append(out.shape[-1]))
    torch.testing.assert_close(block(X), want, rtol=0, atol=1e-5)
    hook.remove()
    assert seen == [EXPERTS * WIDTH + 5]
    torch.nn.utils.parametrize.register_parametrization(block.down_proj, "weight", _Twice())
    torch.testing.assert_close(block(X), 2 * want - block.down_proj.bias, rtol=0, atol=5e-5)


class _Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@torch.no_grad()
def test_autocast_keeps_the_router_in_fp32() -> None:
    block = block_of("llama")
    exact = block.router(X[0], block.act)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(block.router(X[0], block.act)[0], exact)
        y = block(X)
    assert (y - block(X)).abs().mean() < 0.02 * block(X).std()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_is_as_near_as_rounding_lets_it(dtype: torch.dtype) -> None:
    block = block_of("llama")
    want = block(X)
    y = block.to(dtype)(X.to(dtype))
    assert y.dtype == dtype and (y.float() - want).abs().mean() < 0.02 * want.std()


def test_a_hook_on_the_router_sees_what_a_balancing_loss_needs() -> None:
    """Logits with their gradient, weights and choices; in training as elsewhere."""
    block, seen = block_of("llama").train(), []
    block.router.register_forward_hook(lambda m, args, out: seen.append(out))
    block(X)
    ((logits, weights, chosen),) = seen
    load = torch.bincount(chosen.flatten(), minlength=EXPERTS) / chosen.numel()
    loss = EXPERTS * (load * logits.softmax(-1).mean(0)).sum()  # Switch Transformer's
    loss.backward()
    assert block.router.weight.grad.abs().max() > 0 and weights.shape == chosen.shape == (22, 2)


def test_the_compiler_sees_fixed_shapes() -> None:
    block = block_of("llama")
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), block(X), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("opt", {}, "opt keeps its MLP's matrices in the layer itself"),
        ("mixtral", {}, "mixtral has experts"),
        ("llama", {"router": "hash"}, "no router 'hash'"),
        ("llama", {"weights": "sigmoid"}, "weights 'sigmoid'"),
        ("llama", {"top_k": 5}, "5 of 4 experts"),
        ("llama", {"group": 3}, "4 experts, 3 at a time"),
        ("llama", {"router": "mlp"}, "behind a router of width 0"),
    ],
)
def test_blocks_that_there_are_none_of(name: str, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(SurgeryError, match=message):
        options = Experts(**{"experts": EXPERTS, "width": WIDTH, "top_k": 2, **spec})
        block_config.experts_entry(known()[name], [0], options)


def test_no_other_block_stands_on_experts_or_under_them() -> None:
    """One that is built from the MLP's submodules would leave the router out without a word."""
    family = known()["llama"]
    cats, few = (
        Sparse(rule="cats", activation="silu"),
        Experts(experts=EXPERTS, width=WIDTH, top_k=2),
    )
    sparse = block_config.sparse_entry(family, [0, 1], cats)
    experts = block_config.experts_entry(family, [1, 2], few)
    for first, second in ((sparse, experts), (experts, sparse)):
        config = {"model_type": "llama"} | block_config.config_changes(
            {"model_type": "llama"}, [first]
        )
        with pytest.raises(SurgeryError, match=r"layer 1 has a .* block, and cannot have one of"):
            block_config.config_changes(config, [second])
        apart = second | {"layers": [3]}
        assert block_config.config_changes(config, [apart])["surgery_blocks"] == [first, apart]


def test_every_family_with_a_module_has_one() -> None:
    names = {n.split()[0] for n in MODELS} - {"opt"}
    assert {n for n in names if known()[n].mlp} == names
