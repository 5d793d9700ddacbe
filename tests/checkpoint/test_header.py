"""safetensors headers: we read the library's, it reads ours, and a hostile one is a clear error."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from surgery.checkpoint import Checkpoint, LazyTensor, Source, make_plan, natural_key
from surgery.checkpoint.header import FIRST_READ, read_header
from surgery.errors import SurgeryError
from surgery.storage import write
from surgery.storage.local import LocalFile

VALUES = {
    # 6 bytes, after which an fp32 tensor is not aligned.
    "odd": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
    "after": torch.tensor([[1e-3, -7.0]], dtype=torch.float32),
    "half": torch.tensor([0.1, 65504.0, -0.0], dtype=torch.float16),
    "double": torch.tensor([3.141592653589793], dtype=torch.float64),
    "ids": torch.tensor([[2**62, -1], [0, 1]], dtype=torch.int64),
    "small": torch.tensor([-128, 127, 0], dtype=torch.int8),
    "mask": torch.tensor([True, False, True]),
    "fp8": torch.tensor([1.0, -448.0, 0.5]).to(torch.float8_e4m3fn),
    "empty": torch.empty(0, 3, dtype=torch.float32),
    "scalar": torch.tensor(2.5, dtype=torch.float32),
}


def read(path: Path) -> dict[str, LazyTensor]:
    file = LocalFile(path.name, path.stat().st_size, "1", path)
    return read_header(file, file.read)


def file_of(entries: Any, data: int = 0, length: int | None = None) -> bytes:
    """Return a file with this header and `data` zero bytes; `length` may declare a wrong one."""
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(data)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_the_librarys_files_read_equal(tmp_path: Path) -> None:
    """Values of every dtype, an empty tensor and a scalar are read bit for bit.

    A wrong base offset or element size would shift the bits.
    """
    save_file(VALUES, tmp_path / "x.safetensors", metadata={"any": "thing"})
    found = read(tmp_path / "x.safetensors")
    assert set(found) == set(VALUES)
    for name, value in VALUES.items():
        assert_same_bits(found[name].read(), value)


def test_the_library_reads_our_files_equal(tmp_path: Path) -> None:
    """The library reads what we write, and every tensor is aligned to its element size.

    Wide dtypes must come first in a shard, because torch refuses a view at an unaligned offset.
    """
    save_file(VALUES, tmp_path / "x.safetensors")
    checkpoint = Checkpoint(
        config={}, tensors=read(tmp_path / "x.safetensors"), source=Source(location="x")
    )
    write(make_plan(checkpoint, 10**6), tmp_path / "out", source=checkpoint)
    ours = tmp_path / "out" / "model.safetensors"
    for name, value in load_file(ours).items():
        assert_same_bits(value, VALUES[name])
    with safe_open(ours, "pt") as f:
        assert f.metadata() == {"format": "pt"}  # Needed by transformers 4.
        assert set(f.keys()) == set(VALUES)
    assert int.from_bytes(ours.read_bytes()[:8], "little") % 8 == 0
    for name, lazy in read(ours).items():
        assert lazy.extents[0].offset % VALUES[name].element_size() == 0


def test_a_header_longer_than_the_first_read(tmp_path: Path) -> None:
    """A long header is read in two ranges, which must join without a gap or an overlap."""
    values = {f"layers.{i}.{'x' * 100}": torch.full((1,), float(i)) for i in range(3000)}
    save_file(values, tmp_path / "x.safetensors")
    assert int.from_bytes((tmp_path / "x.safetensors").read_bytes()[:8], "little") > FIRST_READ
    found = read(tmp_path / "x.safetensors")
    assert all(found[n].read() == v for n, v in list(values.items())[::500])


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.reshape(-1).view(torch.uint8).tolist() == b.reshape(-1).view(torch.uint8).tolist()


HOSTILE = {
    "shorter than the length": (b"\0" * 5, "5 bytes"),
    "empty": (b"", "0 bytes"),
    "header longer than the file": (file_of({}, length=1000), "1,000 bytes"),
    "header of exabytes": (file_of({}, length=2**63 + 7), "9,223,372,036,854,775,815 bytes"),
    "not JSON": (file_of(b"PK\x03\x04 pickle"), "not valid JSON"),
    "not UTF-8": (file_of(b'{"\xff\xfe": 1}'), "not UTF-8"),
    "UTF-16": (file_of(json.dumps({"a": entry()}).encode("utf-16-le"), 8), "not valid JSON"),
    "UTF-16 with its mark": (file_of(json.dumps({"a": entry()}).encode("utf-16"), 8), "not UTF-8"),
    "a byte order mark": (file_of(b"\xef\xbb\xbf{}"), "not valid JSON"),
    "an entry twice": (
        file_of(b'{"a": 1, "a": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8),
        "'a' stands in it twice",
    ),
    "a key of an entry twice": (
        file_of(b'{"a": {"dtype":"I32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8),
        "'dtype' stands in it twice",
    ),
    "metadata that is a list": (file_of({"__metadata__": ["pt"]}), "__metadata__"),
    "metadata that is a text": (file_of({"__metadata__": "pt"}), "__metadata__"),
    "metadata with a number": (file_of({"__metadata__": {"step": 3}}), "__metadata__"),
    "metadata with an object": (file_of({"__metadata__": {"a": {"b": "c"}}}), "__metadata__"),
    "Infinity beside an entry": (file_of({"a": entry() | {"x": float("inf")}}, 8), "Infinity"),
    "minus nought as an offset": (
        file_of(b'{"a": {"dtype":"F32","shape":[2],"data_offsets":[-0,8]}}', 8),
        "it holds -0",
    ),
    "nested 100,000 deep": (file_of(b"[" * 100_000), "not valid JSON"),
    "an integer of 5,000 digits": (file_of(b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "a list": (file_of([]), "not a JSON object"),
    "an entry that is a number": (file_of({"a": 1}), "malformed"),
    "no shape": (file_of({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8), "malformed"),
    "a shape that is a string": (file_of({"a": entry(shape="", offsets=[0, 4])}, 4), "malformed"),
    "three offsets": (file_of({"a": entry(offsets=[0, 4, 8])}, 8), "malformed"),
    "offsets as floats": (file_of({"a": entry(offsets=[0, 8.0])}, 8), "malformed"),
    "offsets as booleans": (file_of({"a": entry("U8", [1], [False, True])}, 1), "malformed"),
    "a negative dimension": (file_of({"a": entry(shape=[-1, -2])}, 8), "malformed"),
    "a negative offset": (file_of({"a": entry(offsets=[-8, 0])}, 8), "malformed"),
    "offsets in the wrong order": (file_of({"a": entry(offsets=[8, 0])}, 8), "malformed"),
    "a dimension past 64 bits": (file_of({"a": entry(shape=[2**64])}, 8), "malformed"),
    "a rank of 100,000": (file_of({"a": entry(shape=[2**62] * 100_000)}, 8), "malformed"),
    "a product past 64 bits": (file_of({"a": entry(shape=[2**62, 2**62])}, 8), "does not fit"),
    "an unknown dtype": (file_of({"a": entry("F4")}, 8), "'F4'"),
    "a dtype that is a list": (file_of({"a": entry(["F32"])}, 8), "malformed"),
    "another dtype than its bytes": (file_of({"a": entry("F64")}, 8), "does not fit"),
    "data past the end": (
        file_of({"a": entry(shape=[2000], offsets=[0, 8000])}, 8),
        "does not fit",
    ),
    "tensors that overlap": (file_of({"a": entry(), "b": entry(offsets=[4, 12])}, 12), "overlap"),
    "the same bytes twice": (file_of({"a": entry(), "b": entry()}, 8), "overlap"),
    "a hole": (file_of({"a": entry(), "b": entry(offsets=[12, 20])}, 20), "hole"),
    "a hole at the start": (file_of({"a": entry(offsets=[4, 12])}, 12), "hole"),
    "bytes that nothing describes": (file_of({"a": entry()}, 9), "describes"),
    "a name that moves the cursor": (file_of({"\x1b[2J": entry()}, 8), "malformed"),
    "half a surrogate pair as name": (
        file_of(b'{"\\ud800": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8),
        "surrogates not allowed",
    ),
    "a name of a megabyte": (file_of({"a" * 10**6: entry("F4")}, 8), "malformed"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_header_is_one_error(kind: str, tmp_path: Path) -> None:
    """The error names the file and what is wrong, in one line that fits on a screen.

    Nothing may be allocated only because the header asks for it.
    """
    data, word = HOSTILE[kind]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(SurgeryError) as caught:
        read(path)
    message = caught.value.message
    assert word in message and "bad.safetensors" in message and caught.value.hint
    assert len(message) < 500 and message.isprintable()


def test_mutated_headers_raise_only_surgery_errors(tmp_path: Path) -> None:
    """A mutated header is accepted or raises SurgeryError, and nothing else.

    In 4,000 files a few bytes, numbers or JSON values are changed. The tensors of an accepted
    header must lie within the file, and the safetensors library must read it too, because a shard
    may be copied as it is.
    """
    entries = {"a": entry(), "b": entry("BF16", [2, 3], [8, 20])}
    good = file_of({"__metadata__": {"format": "pt"}, **entries}, 20)
    draw = random.Random(0)
    accepted = 0
    for _ in range(4000):
        data = mutate(good, draw)
        file = LocalFile("fuzz.safetensors", len(data), "1", tmp_path)
        try:
            found = read_header(file, lambda start, stop, data=data: data[start:stop])
        except SurgeryError:
            continue
        accepted += 1
        path = tmp_path / "accepted.safetensors"
        path.write_bytes(data)
        with safe_open(path, "np") as shard:
            assert sorted(shard.keys()) == sorted(found)
        for t in found.values():
            assert t.nbytes == t.extents[0].length
            assert t.extents[0].offset + t.nbytes <= len(data)
    assert 100 < accepted < 3000  # Some mutations are accepted, others are refused.


ODD = (
    *(None, -1, 0, 1, 2**31, 2**63, 2**64, 1e308, float("nan"), True),
    *("", "F32", "BF16", [], [0], [0, 8], [2, [2]], {}, {"a": 1}),
)
NOISE = (b"0", b"9", b"-", b"[", b"}", b'"', b",", b"\\", b"e5", b"8" * 300)


def mutate(good: bytes, draw: random.Random) -> bytes:
    """Return the file with a few bytes changed, or with another value in an entry of its header."""
    if draw.random() < 0.5:
        data = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            i = draw.randrange(len(data))
            if draw.random() < 0.2:
                del data[i : i + draw.randint(1, 9)]
            elif draw.random() < 0.5:
                data[i] = draw.randrange(256)
            else:
                data[i : i + 1] = draw.choice(NOISE)
        return bytes(data)
    header = json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])
    target: Any = header[draw.choice(("a", "b", "__metadata__"))]
    key = draw.choice(list(target))
    if isinstance(target[key], list) and draw.random() < 0.5:
        target, key = target[key], draw.randrange(len(target[key]))
    target[key] = draw.choice(ODD)
    return file_of(header, draw.choice((20, 20, 0, 8, 19, 21)))


def test_natural_order_of_layers() -> None:
    """Layer 2 comes before layer 10.

    Numbers and words at the same place must not be compared as int and str, which would raise.
    """
    experts = ["layers.2.mlp.experts.9.w", "layers.2.mlp.experts.11.w"]
    in_order = ["2", "b", *experts, "layers.2.x", "layers.10.x", "layers.x"]
    shuffled = ["layers.10.x", "layers.2.x", "layers.x", "2", "b", *reversed(experts)]
    assert sorted(shuffled, key=natural_key) == in_order


def test_headers_need_no_torch() -> None:
    """Planning and `inspect` read headers in milliseconds; importing torch would take seconds."""

    heavy = ("torch", "transformers", "numpy")
    code = f"import sys, surgery.checkpoint; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
