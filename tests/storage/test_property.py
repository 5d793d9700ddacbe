"""What is written is what was planned, whatever the shapes, dtypes, shard sizes and derivations;
and what is killed between two writes goes on to the same bytes.

Expected values are computed here by torch from the tensors that went into the source, not by the
code under test.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import files_of, write_shards

from surgery.checkpoint import Checkpoint, LazyTensor, concatenate, constant, make_plan, normal
from surgery.proof.integrity import damaged_shards
from surgery.storage import open_checkpoint, write

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FLOATS = ("F64", "F32", "F16", "BF16")
RUNS = settings(max_examples=40, deadline=None, derandomize=True)  # the same in every run

Value = tuple[torch.Tensor, LazyTensor]  # what it must be, and how it is planned


def bits(t: torch.Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw: Any) -> dict[str, torch.Tensor]:
    """A few tensors of any dtype and of rank 0 to 3, some of them without elements, of random
    bits.
    """
    found = {}
    for i in range(draw(st.integers(1, 6))):
        shape = draw(
            st.lists(st.integers(0, 9) if draw(st.booleans()) else st.integers(1, 9), max_size=3)
        )
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        raw = torch.randint(
            0,
            256,
            (*shape, torch.empty(0, dtype=dtype).element_size()),
            generator=random,
            dtype=torch.uint8,
        )
        found[f"layers.{i}.w"] = (
            (raw[..., 0] > 127)
            if dtype == torch.bool
            else raw.contiguous().view(dtype).reshape(shape)
        )
    return found


def derivations(values: list[Value]) -> list[tuple[str, Callable[[], Value]]]:
    """Everything that can be done with the last value, and with all that fit to it."""
    expected, lazy = values[-1]
    found: list[tuple[str, Callable[[], Value]]] = [("as it is", lambda: (expected, lazy))]
    if lazy.shape and lazy.shape[0] > 1:
        middle = lazy.shape[0] // 2
        found.append(("rows", lambda: (expected[middle:], lazy.rows(middle, lazy.shape[0]))))
    alike = [
        (e, t)
        for e, t in values
        if t.shape and lazy.shape and (t.dtype, t.shape[1:]) == (lazy.dtype, lazy.shape[1:])
    ]
    if alike:
        found.append(
            (
                "concatenate",
                lambda: (torch.cat([e for e, _ in alike]), concatenate([t for _, t in alike])),
            )
        )
    found.append(("reshape", lambda: (expected.reshape(-1), lazy.reshape(lazy.numel))))
    if len(lazy.shape) == 2:
        found.append(("transpose", lambda: (expected.T, lazy.transpose())))
    if lazy.dtype in FLOATS:
        found.append(("cast", lambda: (expected.to(torch.bfloat16), lazy.cast("BF16"))))
        found.append(
            (
                "map",
                lambda: (
                    (expected.float() * -2).to(expected.dtype),
                    lazy.map("times -2", lambda t: t * -2),
                ),
            )
        )
        found.append(
            (
                "constant",
                lambda: (
                    torch.full(expected.shape, 0.5, dtype=expected.dtype),
                    constant(0.5, lazy.shape, lazy.dtype),
                ),
            )
        )
    return found


@st.composite
def outputs(
    draw: Any,
) -> tuple[dict[str, torch.Tensor], int, Callable[[Checkpoint], dict[str, Value]]]:
    """Tensors of a source, in how many files they lie, and derivations of them, up to three on top
    of each other.
    """
    source = draw(tensors())
    choices = draw(st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=8))

    def derive(checkpoint: Checkpoint) -> dict[str, Value]:
        values: list[Value] = [(source[n], t) for n, t in checkpoint.tensors.items()]
        found = {}
        for i, chain in enumerate(choices):
            value = values[i % len(source)]
            for choice in chain:
                options = derivations([*values, value])
                value = options[choice % len(options)][1]()
            found[f"out.{i}"] = value
        return found

    return source, draw(st.integers(1, min(3, len(source)))), derive


def opened(folder: Path, source: dict[str, torch.Tensor], files: int) -> Checkpoint:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "any"}')
    write_shards(folder, source, files)
    return open_checkpoint(folder)


@RUNS
@given(output=outputs(), limit=st.one_of(st.none(), st.integers(1, 2000)))
def test_what_is_written_is_read(output: Any, limit: int | None) -> None:
    """read(write(x)) == x, bit for bit; and the digests that were taken while writing are those of
    the files.
    """
    source, files, derive = output
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = opened(Path(temporary, "m"), source, files)
        values = derive(checkpoint)
        plan = make_plan(checkpoint.replace(tensors={n: t for n, (_, t) in values.items()}), limit)
        written = write(plan, Path(temporary, "out"), source=checkpoint)
        again = open_checkpoint(Path(temporary, "out"))
        assert set(again.tensors) == set(values)
        for name, (expected, _) in values.items():
            found = again.tensors[name]
            assert (DTYPES[found.dtype], found.shape) == (expected.dtype, tuple(expected.shape)), (
                name
            )
            assert bits(found.read()) == bits(expected), name
        shards = {s.name: {"bytes": s.nbytes, "sha256": None} for s in plan.shards}
        assert damaged_shards(Path(temporary, "out"), shards) == ([], written.digests)


class Killed(Exception):  # noqa: N818
    """As SIGKILL would: nothing of ours runs after it."""


@RUNS
@given(output=outputs(), limit=st.integers(1, 600), data=st.data())
def test_killed_anywhere_it_goes_on(output: Any, limit: int, data: Any) -> None:
    """Killed again and again, each time after some more writes: never a config.json before all is
    there, and at the end the bytes of an unbroken run."""
    source, files, derive = output
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = opened(Path(temporary, "m"), source, files)
        plan = make_plan(
            checkpoint.replace(tensors={n: t for n, (_, t) in derive(checkpoint).items()}), limit
        )
        whole, out = Path(temporary, "whole"), Path(temporary, "out")
        write(plan, whole, source=checkpoint)
        for _ in range(4):
            left = data.draw(st.integers(1, 12))

            def tell(n: int) -> None:
                nonlocal left
                left -= 1
                if not left:
                    raise Killed

            try:
                write(plan, out, source=checkpoint, progress=tell)
                break
            except Killed:
                assert not (out / "config.json").exists()
        write(plan, out, source=checkpoint)
        kept = {n: d for n, d in files_of(out).items() if not n.startswith(".")}
        assert kept == files_of(whole)


@RUNS
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    seed=st.integers(0, 9),
    rows=st.data(),
)
def test_random_values_depend_on_their_name_alone(shape: list[int], seed: int, rows: Any) -> None:
    """Whatever was drawn before, and whichever rows are asked for."""
    value = normal("a", seed, 0.02, tuple(shape), "BF16")
    normal("b", seed, 0.02, (7,), "F32").read()
    start = rows.draw(st.integers(0, shape[0] - 1))
    again = normal("a", seed, 0.02, tuple(shape), "BF16")
    assert torch.equal(value.read()[start:], again.rows(start, shape[0]).read())
    assert (
        seed == 5
        or value.numel < 8
        or not torch.equal(value.read(), normal("a", 5, 0.02, tuple(shape), "BF16").read())
    )
