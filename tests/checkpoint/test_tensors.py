"""Lazy tensors: their views equal torch's, whether they are extents of files or computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from surgery.checkpoint import (
    Checkpoint,
    LazyTensor,
    Source,
    concatenate,
    constant,
    make_plan,
    normal,
)
from surgery.checkpoint.header import read_header
from surgery.errors import SurgeryError
from surgery.storage import open_checkpoint, write
from surgery.storage.local import LocalFile

A = torch.arange(24, dtype=torch.float32).reshape(6, 4).to(torch.bfloat16)
B = (torch.arange(12, dtype=torch.float32).reshape(3, 4) * -0.5).to(torch.bfloat16)


def headers(path: Path) -> dict[str, LazyTensor]:
    """Return the lazy tensors of a safetensors file."""
    file = LocalFile(path.name, path.stat().st_size, "1", path)
    return read_header(file, file.read)


@pytest.fixture(params=["extents", "computed"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[LazyTensor, LazyTensor]:
    """A and B as extents of a file, or as functions of such extents."""
    save_file({"a": A, "b": B}, tmp_path / "x.safetensors")
    found = headers(tmp_path / "x.safetensors")
    if request.param == "extents":
        return found["a"], found["b"]
    return tuple(found[n].map("negate", torch.neg).map("negate", torch.neg) for n in "ab")  # type: ignore[return-value]


def check(lazy: LazyTensor, value: torch.Tensor) -> None:
    assert (lazy.dtype, lazy.shape, lazy.nbytes) == ("BF16", tuple(value.shape), value.numel() * 2)
    assert torch.equal(lazy.read(), value)


def test_views_equal_torchs(pair: tuple[LazyTensor, LazyTensor], tmp_path: Path) -> None:
    """Views are equal when they are read, and when they are written and read again."""
    a, b = pair
    views = {
        "rows": (a.rows(1, 4), A[1:4]),
        "rows of rows": (a.rows(1, 5).rows(2, 4), A[3:5]),
        "joined": (concatenate([a, b]), torch.cat([A, B])),
        "rows across the seam": (concatenate([a, b]).rows(4, 8), torch.cat([A, B])[4:8]),
        "one row of a join of slices": (
            concatenate([a.rows(0, 2), b, a.rows(5, 6)]).rows(4, 6),
            torch.cat([A[0:2], B, A[5:6]])[4:6],
        ),
        "reshaped": (a.reshape(2, 12), A.reshape(2, 12)),
        "rows of a reshape": (a.reshape(3, 2, 4).rows(1, 2), A.reshape(3, 2, 4)[1:2]),
        "reshaped join": (concatenate([a, b]).reshape(3, 3, 4), torch.cat([A, B]).reshape(3, 3, 4)),
        "transposed": (a.transpose(), A.T),
        "rows of a transpose": (a.transpose().rows(1, 3), A.T[1:3]),
        "joined with a computed one": (
            concatenate([a, b.transpose().transpose()]),
            torch.cat([A, B]),
        ),
    }
    for lazy, value in views.values():
        check(lazy, value)
    checkpoint = Checkpoint(
        config={}, tensors={n: lazy for n, (lazy, _) in views.items()}, source=Source(location="x")
    )
    write(make_plan(checkpoint), tmp_path / "out", source=checkpoint)
    written = open_checkpoint(tmp_path / "out").tensors
    for name, (_, value) in views.items():
        check(written[name], value)


def test_only_functions_take_memory(pair: tuple[LazyTensor, LazyTensor]) -> None:
    """The kernel copies extents, so their peak memory is 0 whatever their size."""
    a, b = pair
    for lazy in (a, a.rows(0, 2), concatenate([a, b]), a.reshape(24)):
        assert (lazy.peak_memory == 0) == (a.compute is None)
    cast = a.cast("F32")
    assert cast.peak_memory >= a.nbytes + cast.nbytes
    there_and_back = b.cast("F32").cast(b.dtype)
    joined = concatenate([a, there_and_back, a])
    assert joined.peak_memory == max(a.peak_memory, there_and_back.peak_memory)
    assert joined.peak_memory < 2 * joined.nbytes + cast.peak_memory
    checkpoint = Checkpoint(
        config={}, tensors={"a": a, "b": b.rows(0, 1)}, source=Source(location="x")
    )
    assert (make_plan(checkpoint).peak_memory == 0) == (a.compute is None)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 2), (3, 1), (0, 7)])
def test_rows_outside_are_refused(
    pair: tuple[LazyTensor, LazyTensor], start: int, stop: int
) -> None:
    """Rows past the end are refused: such an extent would copy the bytes of the next tensor."""
    with pytest.raises(ValueError, match="rows"):
        pair[0].rows(start, stop)


def test_what_does_not_fit_is_refused(pair: tuple[LazyTensor, LazyTensor]) -> None:
    a, b = pair
    with pytest.raises(ValueError, match="view"):
        a.reshape(5, 5)
    with pytest.raises(ValueError, match="join"):
        concatenate([a, b.reshape(4, 3)])
    with pytest.raises(ValueError, match="join"):
        concatenate([a, b.cast("F32")])


def test_reading_gives_memory_of_its_own(pair: tuple[LazyTensor, LazyTensor]) -> None:
    """A function that works in place must change neither the source nor what is read next."""
    lazy = pair[0]
    lazy.read().zero_()
    assert torch.equal(lazy.read(), A)


def test_casts_round_to_nearest_even(tmp_path: Path) -> None:
    # The second value is a tie that goes to 1.0, the third a tie that goes to 1.015625.
    values = torch.tensor([1.0, 1.00390625, 1.01171875, 3.3895314e38, -0.0])
    save_file({"a": values}, tmp_path / "x.safetensors")
    cast = headers(tmp_path / "x.safetensors")["a"].cast("BF16").read()
    assert cast.view(torch.int16).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x7F7F, -0x8000]


def test_random_values_depend_on_seed_and_name_alone() -> None:
    """A resumed run and another process draw the same bytes.

    The numbers are pinned, because outputs of earlier versions contain them.
    """
    first = normal("model.layers.0.router", 0, 0.02, (4, 3), "F32").read()
    normal("something else", 0, 1.0, (100,), "F32").read()
    assert torch.equal(normal("model.layers.0.router", 0, 0.02, (4, 3), "F32").read(), first)
    assert not torch.equal(normal("model.layers.1.router", 0, 0.02, (4, 3), "F32").read(), first)
    assert not torch.equal(normal("model.layers.0.router", 1, 0.02, (4, 3), "F32").read(), first)
    assert first[0].tolist() == pytest.approx(
        [0.01594357006251812, -0.013828151859343052, -0.006099271588027477], rel=1e-6
    )
    many = normal("x", 0, 0.02, (200_000,), "F32").read().double()
    assert abs(many.mean()) < 2e-4 and abs(many.std() - 0.02) < 2e-4


def test_identity_changes_with_every_constant() -> None:
    """A computed tensor is identified by its recipe, which must contain every constant.

    Otherwise the fingerprints of two commands could be equal, and one would continue from the
    shards of the other.
    """
    tensors = [
        constant(1.0, (2,), "F32"),
        constant(2.0, (2,), "F32"),
        constant(1.0, (2,), "BF16"),
        constant(1.0, (1, 2), "F32"),
        normal("a", 0, 1.0, (2,), "F32"),
        normal("a", 1, 1.0, (2,), "F32"),
        normal("b", 0, 1.0, (2,), "F32"),
        normal("a", 0, 2.0, (2,), "F32"),
        normal("a", 0, 1.0, (2,), "F32").cast("BF16"),
        normal("a", 1, 1.0, (2,), "F32").cast("BF16"),
        normal("a", 0, 1.0, (4,), "F32").rows(0, 2),
        normal("a", 0, 1.0, (4,), "F32").rows(2, 4),
    ]
    assert len({t.identity() for t in tensors}) == len(tensors)


def test_a_source_that_shrank_is_one_error(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "x.safetensors")
    path = tmp_path / "x.safetensors"
    last = max(headers(path).values(), key=lambda t: t.extents[0].offset)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(SurgeryError, match=r"x\.safetensors ended early"):
        last.read()
