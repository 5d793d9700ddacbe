"""Skipping neurons gives what the dense computation gives, reads nothing of the dead ones, and
steps back where it would bypass something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from surgery.blocks import block_config, rules, sparse_kernel, sparse_mlp
from surgery.blocks.block_config import Sparse
from surgery.blocks.sparse_mlp import SparseMLP
from surgery.families import known

HIDDEN, WIDTH = 16, 40
FAMILIES = ("llama", "phi3", "gpt2", "falcon")
SPECS: dict[str, dict[str, Any]] = {
    "plain": {"activation": "relu"},
    "fatrelu": {"activation": "relu", "per_neuron": True},
    "shifted": {"activation": "relu", "correction": True},
    "drelu": {"activation": "relu", "per_neuron": True},
    "drelu, one threshold": {"activation": "relu2"},
    "cats": {"activation": "silu", "per_neuron": True, "inputs": True},
    "teal": {"activation": "gelu"},
    "fatrelu, bypass": {"activation": "relu", "bypass": 4},
    "shifted, full bypass": {"activation": "relu", "bypass": HIDDEN},
}


class Base(nn.Module):
    """The children of a family's MLP."""

    def __init__(self, family: Any, bias: bool) -> None:
        super().__init__()
        linear = (
            (lambda i, o: Conv1D(o, i))
            if family.transposed
            else (lambda i, o: nn.Linear(i, o, bias=bias))
        )
        gate, up, down = (p and p.split(".")[-1] for p in (family.gate, family.up, family.down))
        if gate != up and gate:
            self.add_module(gate, linear(HIDDEN, WIDTH))
        self.add_module(up, linear(HIDDEN, WIDTH * (2 if family.fused_gate_up else 1)))
        self.add_module(down, linear(WIDTH, HIDDEN))
        self.act_fn = nn.SiLU()


@pytest.fixture(
    autouse=True,
    params=[
        pytest.param(
            "kernel",
            marks=pytest.mark.skipif(not sparse_kernel.available(), reason="needs a C compiler"),
        ),
        "gather",
    ],
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How rows are skipped: in torch alone, as where there is no compiler, or by the kernel."""
    found: str = request.param
    if found == "gather":
        monkeypatch.setattr(sparse_mlp, "fits", lambda x, rule, act: False)
    return found


def make(
    name: str = "llama",
    spec: str = "fatrelu",
    *,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Return a block that skips, with random weights, biases and thresholds."""
    torch.manual_seed(0)
    options = Sparse(rule=spec.split(",")[0], **SPECS[spec])
    entry = block_config.sparse_entry(known()[name], [0], options)
    mlp = SparseMLP(Base(known()[name], bias), entry).eval()
    for tensor_name, t in mlp.state_dict().items():
        t.copy_(
            torch.rand(t.shape) * 0.3 if "threshold" in tensor_name else torch.randn(t.shape) * 0.5
        )
    mlp.to(dtype).sparse_decode = True
    return mlp


def token(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(1, 1, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_the_rules_as_data_are_those_that_are_computed() -> None:
    """rules.py is planned with and sparse_mlp.py is saved: neither can import the other."""
    computed = {
        name: (("threshold", "threshold_up")[: rule.thresholds], rule.cuts_product)
        for name, rule in sparse_mlp.RULES.items()
    }
    planned = {name: (r.thresholds, r.cuts == "product") for name, r in rules.RULES.items()}
    assert computed == planned


# Where a rule makes a zero, by what its thresholds are compared with.
CUT: dict[str, Callable[[Any, Tensor, Tensor, float, float], Tensor]] = {
    "": lambda act, g, u, t, t_up: act(g) == 0,
    "gate": lambda act, g, u, t, t_up: g < t,
    "activated": lambda act, g, u, t, t_up: act(g).abs() < t,
    "product": lambda act, g, u, t, t_up: (act(g) * u).abs() < t,
    "both": lambda act, g, u, t, t_up: (g < t) | (u < t_up),
}


@pytest.mark.parametrize("name", rules.RULES)
def test_a_rule_cuts_what_its_data_say(name: str) -> None:
    """Thresholds are fitted to `cuts`, and neurons are skipped before up if `foreseen` says so."""
    rule = rules.RULES[name]
    draw = torch.Generator().manual_seed(2)
    gate, up, other = torch.randn(3, 64, WIDTH, generator=draw, dtype=torch.float64)
    published = [ACT2FN[a.act] for a in rules.ACTIVATIONS.values() if a.rule == name and a.act]
    for act in published or [ACT2FN["silu"]]:
        t, t_up = torch.tensor(0.4), torch.tensor(0.2)

        def dead(u: Tensor, act: Any = act, t: Tensor = t, t_up: Tensor = t_up) -> Tensor:
            return sparse_mlp.RULES[name].multiply(act, gate, u, t, t_up) == 0

        assert torch.equal(dead(up), CUT[rule.cuts](act, gate, up, t.item(), t_up.item()))
        assert 0.1 < dead(up).double().mean() < 0.9
        assert torch.equal(dead(up), dead(other)) == rule.foreseen


@torch.no_grad()
def both(mlp: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Skipping and dense."""
    assert mlp._has_kernel(x) or mlp._gathers(x)
    skipping = mlp(x)
    mlp.sparse_decode = False
    return skipping, mlp(x)


CASES = [
    (name, spec)
    for name in FAMILIES
    for spec in SPECS
    if known()[name].gated or not spec.startswith("drelu")
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("name", "spec"), CASES)
def test_skipping_is_dense_to_rounding(
    name: str, spec: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are gathered three at a time, whatever their number."""
    monkeypatch.setattr(sparse_mlp, "SCRATCH", 3 * HIDDEN * 4)
    monkeypatch.setattr(sparse_mlp, "_local", type(sparse_mlp._local)())
    skipping, dense = both(make(name, spec, bias=bias), token())
    torch.testing.assert_close(skipping, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
def test_in_half_precision_too(dtype: torch.dtype, rtol: float, threads: int) -> None:
    """Several threads add up several bags."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        skipping, dense = both(make(dtype=dtype), token(dtype))
    finally:
        torch.set_num_threads(before)
    assert skipping.dtype == dtype
    torch.testing.assert_close(skipping, dense, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_the_weights_of_dead_neurons_are_not_read(name: str) -> None:
    """NaN in their rows reaches a dense output, as 0 · NaN is NaN, and not one that skips."""
    mlp, x = make(name), token()
    product = mlp._product(x)[0, 0]
    dead = product == 0
    assert 0.3 < dead.float().mean() < 1
    want = mlp(x)
    down = mlp._part("down").weight
    (down if known()[name].transposed else down.T)[dead] = torch.nan
    if known()[name].gated:
        up = mlp._part("up").weight
        up[up.shape[0] - WIDTH :][dead] = torch.nan
    assert torch.equal(mlp(x), want)
    mlp.sparse_decode = False
    assert mlp(x).isnan().any()


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_no_neuron_live_leaves_the_bias(name: str) -> None:
    mlp = make(name)
    mlp.threshold.fill_(1e9)
    torch.testing.assert_close(mlp(token())[0, 0], mlp._part("down").bias)


def test_all_neurons_live() -> None:
    """Then all rows of up are read at once."""
    mlp = make("llama", "teal")
    mlp.threshold.zero_()
    skipping, dense = both(mlp, token())
    torch.testing.assert_close(skipping, dense, rtol=1e-5, atol=1e-5)
    mlp = make("llama", "plain")
    with torch.no_grad():
        mlp.gate_proj.bias.fill_(100)
    skipping, dense = both(mlp, token())
    torch.testing.assert_close(skipping, dense, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("rule", "activation"), [("fatrelu", "relu"), ("cats", "linear"), ("teal", "linear")]
)
@torch.no_grad()
def test_what_is_at_the_threshold_is_kept(rule: str, activation: str) -> None:
    """up is 2 everywhere and the gates are 0, 1, 2, …: h is gate · up."""
    mlp = SparseMLP(
        Base(known()["llama"], True),
        block_config.sparse_entry(known()["llama"], [0], Sparse(rule=rule, activation=activation)),
    )
    for linear, bias in ((mlp.gate_proj, torch.arange(WIDTH) * 1.0), (mlp.up_proj, 2.0)):
        linear.weight.zero_()
        linear.bias[:] = bias
    mlp.threshold.fill_(6.0)
    kept = mlp._product(token())[0, 0].nonzero()[:, 0].tolist()
    assert kept == list(range(3 if rule == "teal" else 6, WIDTH))


def test_models_of_two_widths_do_not_share_scratch_memory() -> None:
    wide = SparseMLP(Base(known()["llama"], True), make().entry)
    wide.up_proj, wide.hidden = nn.Linear(2 * HIDDEN, WIDTH), 2 * HIDDEN
    wide.gate_proj, wide.down_proj = nn.Linear(2 * HIDDEN, WIDTH), nn.Linear(WIDTH, 2 * HIDDEN)
    wide.sparse_decode = True
    for mlp, x in ((make(), token()), (wide, torch.randn(1, 1, 2 * HIDDEN)), (make(), token())):
        skipping, dense = both(mlp, x)
        torch.testing.assert_close(skipping, dense, rtol=1e-5, atol=1e-5)


def test_under_inference_mode_and_trained_after() -> None:
    """The layout of down and the scratch memory are made in inference mode, and stay of use out of
    it.
    """
    mlp, x = make(), token()
    with torch.inference_mode():
        mlp(x)
    with torch.no_grad():
        mlp(x)
    mlp(x).sum().backward()
    assert mlp.down_proj.weight.grad.abs().max() > 0


def test_it_follows_changed_weights() -> None:
    """Nothing that it laid out goes stale."""
    mlp, x = make(), token()
    with torch.no_grad():
        before = mlp(x)
        mlp.down_proj.weight.data.mul_(3)
        mlp.down_proj.bias.mul_(3)
        torch.testing.assert_close(mlp(x), 3 * before)


def test_what_skipping_would_bypass_is_dense(way: str) -> None:
    mlp, x = make(), token()

    def skips(x: Tensor) -> bool:
        return bool(mlp._has_kernel(x) if way == "kernel" else mlp._gathers(x))

    seen: list[Tensor] = []
    with torch.no_grad():
        assert skips(x) and not skips(x.half())
        assert skips(torch.cat([x, x])) == (way == "kernel")
        hook = mlp.up_proj.register_forward_hook(lambda module, args, y: seen.append(y))
        mlp(x)
        hook.remove()
        assert len(seen) == 1 and seen[0].shape == (1, 1, WIDTH)
        up = mlp.up_proj
        mlp.up_proj = nn.Sequential(up)
        mlp.up_proj.weight = up.weight  # an adapter shows the weight that it changes
        assert not skips(x)
        mlp.up_proj = up
        mlp.down_proj.to("meta")
        assert not skips(x)
    assert not skips(x)  # with gradients


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_its_state_is_the_base_s_and_what_the_entry_promises(name: str, spec: str) -> None:
    mlp, family = make(name, spec), known()[name]
    promised = block_config.sparse_tensors(mlp.entry, HIDDEN, WIDTH)
    own = {n.removeprefix("mlp."): shape for n, shape in promised.items()}
    of_base = {n: tuple(t.shape) for n, t in Base(family, True).state_dict().items()}
    assert {n: tuple(t.shape) for n, t in mlp.state_dict().items()} == of_base | own
    assert not hasattr(mlp, "act_fn")  # the activation of the source


def test_compiled_it_is_dense() -> None:
    mlp, x = make(), token()
    with torch.no_grad():
        compiled = torch.compile(mlp, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), mlp(x), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "spec"), CASES)
def test_on_a_gpu(name: str, spec: str) -> None:
    skipping, dense = both(make(name, spec).cuda(), token().cuda())
    torch.testing.assert_close(skipping, dense, rtol=1e-4, atol=1e-4)
