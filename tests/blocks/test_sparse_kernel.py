"""The kernel gives what the dense MLP gives, with every instruction set of this machine, and
nothing is loaded that another user could have made."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sparse_mlp import SPECS
from torch import Tensor

from surgery.blocks import block_config, sparse_kernel
from surgery.blocks.block_config import Sparse
from surgery.blocks.sparse_mlp import SparseMLP
from surgery.families import known

HIDDEN, WIDTH = 203, 300  # a row ends in whole registers, in a part of one, and in single numbers
needs_kernel = pytest.mark.skipif(not sparse_kernel.available(), reason="needs a C compiler")


def levels() -> list[int]:
    """Return the instruction sets that this machine has."""
    best = sparse_kernel.best_level()
    return [0, best] if sparse_kernel.LEVELS[best] == "NEON" else list(range(best + 1))


class Base(torch.nn.Module):
    """The MLP of a Llama, or of a GPT-NeoX."""

    def __init__(self, gated: bool, bias: bool) -> None:
        super().__init__()
        names = ("gate_proj", "up_proj") if gated else ("dense_h_to_4h",)
        for name in names:
            self.add_module(name, torch.nn.Linear(HIDDEN, WIDTH, bias=bias))
        down = "down_proj" if gated else "dense_4h_to_h"
        self.add_module(down, torch.nn.Linear(WIDTH, HIDDEN, bias=bias))


def make(spec: str, gated: bool = True, bias: bool = True, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    family = known()["llama" if gated else "gpt_neox"]
    options = Sparse(rule=spec.split(",")[0], **SPECS[spec])
    mlp = SparseMLP(Base(gated, bias), block_config.sparse_entry(family, [0], options)).eval()
    for name, t in mlp.state_dict().items():
        small = torch.rand(t.shape) * 0.3
        t.copy_(small if "threshold" in name else torch.randn(t.shape) / HIDDEN**0.5)
    mlp.sparse_decode = True
    mlp.requires_grad_(False)
    for parameter in mlp.parameters():
        parameter.data = parameter.data.to(dtype)  # and thresholds stay in fp32
    return mlp


def tokens(count: int, dtype: Any = torch.float32) -> Tensor:
    seed = torch.Generator().manual_seed(count)
    return torch.randn(count, 1, HIDDEN, generator=seed).to(dtype)


def both(mlp: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel's result and the dense one."""
    with torch.no_grad():
        assert mlp._has_kernel(x)
        fast = mlp(x)
        mlp.sparse_decode = False
        slow = mlp(x)
        mlp.sparse_decode = True
    return fast, slow


@pytest.fixture(params=levels(), ids=lambda level: sparse_kernel.LEVELS[level])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Compute with this instruction set instead of the best one."""
    found: int = request.param
    monkeypatch.setattr("surgery.blocks.sparse_mlp.live_mlp", _at(found))
    return found


def _at(level: int) -> Any:
    return lambda *arguments: sparse_kernel.compute(*arguments, level=level)


@needs_kernel
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_it_is_dense_to_rounding(spec: str, gated: bool, level: int) -> None:
    """Also where the rule jumps: none of these gates is within rounding of its threshold."""
    if spec.startswith("drelu") and not gated:
        return
    fast, slow = both(make(spec, gated), tokens(1))
    assert slow.std() > 0.05
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", ["shifted", "fatrelu", "cats", "drelu"])
def test_in_half_precision_it_rounds_where_torch_does(spec: str, dtype: Any, level: int) -> None:
    """So the difference is one of the last rounding, and no neuron falls on the other side."""
    fast, slow = both(make(spec, dtype=dtype), tokens(3, dtype))
    assert fast.dtype == dtype
    off = (fast - slow).float().norm() / slow.float().norm()
    assert off < 2 * torch.finfo(dtype).eps


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", range(1, 9))
def test_tokens_share_the_rows_of_their_union(count: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fast, slow = both(make("shifted"), tokens(count))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)


@needs_kernel
@torch.no_grad()
def test_nine_tokens_are_dense() -> None:
    mlp = make("shifted")
    assert mlp._has_kernel(tokens(8)) and not mlp._has_kernel(tokens(9))


@needs_kernel
@torch.no_grad()
def test_rows_that_are_dead_for_every_token_are_not_read() -> None:
    mlp, x = make("fatrelu"), tokens(3)
    want = mlp(x)
    dead = (mlp._product(x) == 0).all(0).all(0)
    assert 0.1 < dead.float().mean() < 0.5
    mlp.up_proj.weight[dead] = torch.nan
    mlp.down_proj.weight.T[dead] = torch.nan
    assert torch.equal(mlp(x), want)


@needs_kernel
@torch.no_grad()
def test_nan_is_not_hidden() -> None:
    x = tokens(1)
    x[0, 0, 5] = torch.nan
    assert make("plain")(x).isnan().all() and make("shifted")(x).isnan().all()


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_rounds_to_the_nearest_and_ties_to_even(dtype: Any) -> None:
    """a + b / 64 fits fp32 exactly, for every a of the dtype, subnormal and infinite ones too,
    and a b of its size."""
    bits, mantissa = torch.arange(2**16), 2**7 if dtype == torch.bfloat16 else 2**10
    a = bits.to(torch.int16).view(dtype)
    b = (bits // mantissa * mantissa + bits * 7919 % mantissa).to(torch.int16).view(dtype)
    up, x = torch.zeros(2, 2**16, dtype=dtype), torch.zeros(2**16, dtype=dtype)
    up[0, 0] = up[1, 1] = x[0] = 1
    x[1] = 1 / 64
    found = sparse_kernel.compute(
        x, None, up, torch.stack([a, b]), None, None, None, None, None, "plain", "linear"
    )
    want = (a.float() + b.float() / 64).to(dtype)
    assert ((want != a) & want.isfinite()).sum() > 10_000
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


# --- compile and export ---------------------------------------------------------------------------


@needs_kernel
@torch.no_grad()
def test_compile_keeps_it() -> None:
    mlp, x, graphs = make("shifted"), tokens(1), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    assert "live_mlp" not in _compiled(mlp, x, backend, graphs)  # down has no row for a neuron yet
    want = mlp(x)
    assert "live_mlp" in _compiled(mlp, x, backend, graphs)
    torch.testing.assert_close(torch.compile(mlp, backend="aot_eager")(x), want)


def _compiled(mlp: Any, x: Tensor, backend: Any, graphs: list[Any]) -> str:
    torch.compiler.reset()
    torch.compile(mlp, backend=backend, fullgraph=True)(x)
    return str(graphs[-1].graph)


@needs_kernel
@torch.no_grad()
def test_export_keeps_it() -> None:
    mlp, x = make("fatrelu"), tokens(2)
    want = mlp(x)
    program = torch.export.export(mlp, (x,))
    assert "live_mlp" in str(program.graph)
    torch.testing.assert_close(program.module()(x), want)


@needs_kernel
@torch.no_grad()
def test_a_copy_with_another_checkpoint_shares_the_operator(tmp_path: Path) -> None:
    """And leaves it, when it is forgotten."""
    path = tmp_path / "copied_kernel.py"
    path.write_bytes(Path(sparse_kernel.__file__).read_bytes())
    spec: Any = importlib.util.spec_from_file_location("copied_kernel", path)
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    assert copied.live_mlp is sparse_kernel.live_mlp
    del copied
    gc.collect()
    fast, slow = both(make("plain"), tokens(1))
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)


# --- compiling and loading ------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty cache folder, with nothing loaded from anywhere yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
    sparse_kernel.compiled.cache_clear()
    yield tmp_path / "cache" / "surgery"
    monkeypatch.undo()
    sparse_kernel.compiled.cache_clear()


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list that each compilation adds to."""
    made: list[Path] = []
    compile_it = sparse_kernel._compile

    def counted(path: Path, compiler: list[str], flags: tuple[str, ...]) -> None:
        made.append(path)
        compile_it(path, compiler, flags)

    monkeypatch.setattr(sparse_kernel, "_compile", counted)
    return made


@needs_kernel
def test_it_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = compilations(monkeypatch)
    for _ in range(2):
        sparse_kernel.compiled.cache_clear()
        assert sparse_kernel.compiled() is not None
    (path,) = made
    assert list(cache.iterdir()) == [path] and cache.stat().st_mode & 0o777 == 0o700


@needs_kernel
def test_a_damaged_library_is_made_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a power cut may leave it, before anything has loaded it."""
    made: list[Path] = []

    def cut_short(path: Path, *arguments: Any) -> None:
        made.append(path)
        path.write_bytes(b"")
        path.chmod(0o700)

    with monkeypatch.context() as patch:
        patch.setattr(sparse_kernel, "_compile", cut_short)
        assert sparse_kernel.compiled() is None and made[0].exists()
    sparse_kernel.compiled.cache_clear()
    assert sparse_kernel.compiled() is not None


@needs_kernel
def test_another_source_is_another_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = compilations(monkeypatch)
    assert sparse_kernel.compiled() is not None
    sparse_kernel.compiled.cache_clear()
    monkeypatch.setattr(sparse_kernel, "SOURCE", sparse_kernel.SOURCE + "\n")
    assert sparse_kernel.compiled() is not None and len(set(made)) == 2


@needs_kernel
def test_what_others_could_have_written_is_not_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compilations(monkeypatch)
    assert sparse_kernel.compiled() is not None
    made[0].chmod(0o722)
    sparse_kernel.compiled.cache_clear()
    assert sparse_kernel.compiled() is not None and len(made) == 2
    assert made[0].stat().st_mode & 0o777 == 0o700  # made anew
    cache.chmod(0o720)
    sparse_kernel.compiled.cache_clear()
    assert sparse_kernel.compiled() is None and len(made) == 2
    cache.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # the folder is another user's
    sparse_kernel.compiled.cache_clear()
    assert sparse_kernel.compiled() is None and len(made) == 2


def test_a_link_is_not_followed(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache.parent.mkdir()
    cache.symlink_to(tmp_path / "elsewhere")
    assert sparse_kernel.compiled() is None


@pytest.mark.parametrize("why", ["switch", "compiler", "broken compiler"])
@torch.no_grad()
def test_without_it_rows_are_gathered_in_torch(
    why: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    if why == "switch":
        monkeypatch.setenv(sparse_kernel.SWITCH, "0")
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    if why == "broken compiler":
        (tmp_path / "cc").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "cc").chmod(0o700)
    mlp, x = make("shifted"), tokens(1)
    assert not mlp._has_kernel(x) and mlp._gathers(x)
    skipping = mlp(x)
    mlp.sparse_decode = False
    torch.testing.assert_close(skipping, mlp(x), rtol=1e-5, atol=1e-5)


@needs_kernel
def test_it_has_no_openmp_of_its_own() -> None:
    """A second runtime's threads would spin on the cores of torch's."""
    code = (
        "import torch; from surgery.blocks import sparse_kernel as k; k.compiled()\n"
        "maps = open('/proc/self/maps').read().splitlines()\n"
        "print(len({m.split()[-1] for m in maps if 'omp' in m.rpartition('/')[2]}))"
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) <= 1


def test_an_environment_that_means_nothing_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quote left open in CC, and a home that is not known: the others are tried."""
    monkeypatch.setenv("CC", "gcc '")
    found = sparse_kernel._compilers()
    monkeypatch.delenv("CC")
    assert found == sparse_kernel._compilers()
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-has-this-name/cache")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert [f.parent for f in sparse_kernel._folders()] == [tmp_path]
