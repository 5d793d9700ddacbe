"""Properties of writing, for any shapes, dtypes, shard sizes and derivations.

What is written is what was planned, and a run that was killed between two writes is finished with
the same bytes. Expected values are computed here by torch from the tensors of the source, not by
the code under test.
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
RUNS = settings(max_examples=40, deadline=None, derandomize=True)  # the same examples in every run

Value = tuple[torch.Tensor, LazyTensor]  # the expected value, and how it is planned


def bits(t: torch.Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw: Any) -> dict[str, torch.Tensor]:
    """Draw a few tensors of random bits, of any dtype, of rank 0 to 3, some without elements."""
    found = {}
    for i in range(draw(st.integers(1, 6))):
        size = st.integers(0 if draw(st.booleans()) else 1, 9)
        shape = draw(st.lists(size, max_size=3))
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        in_bytes = (*shape, torch.empty(0, dtype=dtype).element_size())
        raw = torch.randint(0, 256, in_bytes, generator=random, dtype=torch.uint8)
        value = raw[..., 0] > 127 if dtype == torch.bool else raw.view(dtype).reshape(shape)
        found[f"layers.{i}.w"] = value
    return found


def derivations(values: list[Value]) -> list[tuple[str, Callable[[], Value]]]:
    """Return everything that can be done with the last value, and with those that fit to it."""
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
        joined = [list(part) for part in zip(*alike, strict=True)]
        found.append(("concatenate", lambda: (torch.cat(joined[0]), concatenate(joined[1]))))
    found.append(("reshape", lambda: (expected.reshape(-1), lazy.reshape(lazy.numel))))
    if len(lazy.shape) == 2:
        found.append(("transpose", lambda: (expected.T, lazy.transpose())))
    if lazy.dtype in FLOATS:
        found.append(("cast", lambda: (expected.to(torch.bfloat16), lazy.cast("BF16"))))
        doubled, half = (expected.float() * -2).to(expected.dtype), torch.full_like(expected, 0.5)
        found.append(("map", lambda: (doubled, lazy.map("times -2", lambda t: t * -2))))
        found.append(("constant", lambda: (half, constant(0.5, lazy.shape, lazy.dtype))))
    return found


Output = tuple[dict[str, torch.Tensor], int, Callable[[Checkpoint], dict[str, Value]]]


@st.composite
def outputs(draw: Any) -> Output:
    """Draw the tensors of a source, the number of its files, and derivations of the tensors.

    Up to three derivations are on top of each other.
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
    """Write tensors into some files and open them."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "any"}')
    write_shards(folder, source, files)
    return open_checkpoint(folder)


@RUNS
@given(output=outputs(), limit=st.one_of(st.none(), st.integers(1, 2000)))
def test_what_is_written_is_read(output: Any, limit: int | None) -> None:
    """What is written is read bit for bit, and the digests computed while writing are right."""
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
            assert DTYPES[found.dtype] == expected.dtype, name
            assert found.shape == tuple(expected.shape), name
            assert bits(found.read()) == bits(expected), name
        shards = {s.name: {"bytes": s.nbytes, "sha256": None} for s in plan.shards}
        assert damaged_shards(Path(temporary, "out"), shards) == ([], written.digests)


class Killed(Exception):  # noqa: N818
    """Stands for SIGKILL: nothing of ours runs after it."""


@RUNS
@given(output=outputs(), limit=st.integers(1, 600), data=st.data())
def test_killed_anywhere_it_goes_on(output: Any, limit: int, data: Any) -> None:
    """A run that is killed several times is finished with the bytes of an uninterrupted one.

    Each kill comes after some more writes, and config.json is never there before the rest.
    """
    source, files, derive = output
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = opened(Path(temporary, "m"), source, files)
        derived = {n: t for n, (_, t) in derive(checkpoint).items()}
        plan = make_plan(checkpoint.replace(tensors=derived), limit)
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
    """Values do not depend on what was drawn before, nor on which rows are asked for."""
    value = normal("a", seed, 0.02, tuple(shape), "BF16")
    normal("b", seed, 0.02, (7,), "F32").read()
    start = rows.draw(st.integers(0, shape[0] - 1))
    again = normal("a", seed, 0.02, tuple(shape), "BF16")
    assert torch.equal(value.read()[start:], again.rows(start, shape[0]).read())
    if seed != 5 and value.numel >= 8:
        other = normal("a", 5, 0.02, tuple(shape), "BF16")
        assert not torch.equal(value.read(), other.read())
