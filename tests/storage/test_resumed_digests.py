"""A shard that changes between two runs is found: its digest is the one of its first writing.

The digest of a changed file would say that the change is right, and the logits need not show it:
one bit of a weight moves them by less than the limit.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from support import files_of, write_llama

from surgery.checkpoint import Checkpoint, make_plan
from surgery.errors import SurgeryError
from surgery.operations.relufy import relufy
from surgery.operations.upcycle import upcycle
from surgery.storage import open_checkpoint, writer
from surgery.storage.record import changed, read_record
from surgery.storage.writer import digest_name
from surgery.workflow.convert import Result, convert_alone
from surgery.workflow.verify import verify_folder

LIMIT = 20_000  # bytes of a shard


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_llama(tmp_path / "m", layers=2, hidden=32, ff=64, vocab=300))


def run(source: Checkpoint, out: Path, kind: str = "relufy", **options: Any) -> Result:
    made = upcycle(source, experts=2) if kind == "upcycle" else relufy(source, repair="none")
    return convert_alone(source, made, out, max_shard_size=LIMIT, **options)


def interrupted(
    source: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch, kind: str = "relufy"
) -> list[str]:
    """Run until two shards are finished, and return their names."""
    finished, stream = [], writer.stream

    def failing(shard: Any, *rest: Any) -> Any:
        if len(finished) == 2:
            raise OSError(5, "Input/output error")
        finished.append(shard.name)
        return stream(shard, *rest)

    with monkeypatch.context() as patched, pytest.raises(SurgeryError, match="cannot write"):
        patched.setattr(writer, "stream", failing)
        run(source, out, kind)
    assert [p.name for p in sorted(out.glob("model-*.safetensors"))] == finished
    return finished


def flip(path: Path, position: int = -3) -> None:
    """Flip the lowest bit of a byte; the size and the time of the file stay."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["relufy", "upcycle"])
def test_a_flipped_bit_in_a_resumed_shard_fails_the_verification(
    kind: str, source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    names = interrupted(source, out, monkeypatch, kind)
    before = hashlib.sha256((out / names[0]).read_bytes()).hexdigest()
    flip(out / names[0])
    found = run(source, out, kind)
    assert found.resumed == 2 and found.verification and not found.verification.passed
    damaged = next(r for r in found.verification.rows if r.key == "shards_damaged")
    assert damaged.value == 1 and damaged.detail[0].startswith(f"{names[0]} has sha256 ")
    assert found.record["shards"][names[0]]["sha256"] == before


def test_a_resumed_output_equals_an_uninterrupted_one(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file of a digest is left, and the record holds the digests of every shard."""
    out = tmp_path / "a" / "out"
    interrupted(source, out, monkeypatch)
    again = run(source, out)
    assert again.verification and again.verification.passed
    whole = run(source, tmp_path / "b" / "out")
    assert files_of(out) == files_of(whole.folder)
    for name, shard in read_record(out)["shards"].items():
        assert shard["sha256"] == hashlib.sha256((out / name).read_bytes()).hexdigest()
    assert not [p.name for p in out.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("digest", [None, b"", b"{}", b'{"sha256": 3}', b"[" * 2000])
def test_without_its_digest_a_shard_is_written_again(
    digest: bytes | None, source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of `--no-verify` takes none, and a machine may fail between the two files."""
    out = tmp_path / "out"
    first, second = interrupted(source, out, monkeypatch)
    whole = (out / first).read_bytes()
    flip(out / first)
    kept = out / digest_name(first)
    kept.unlink() if digest is None else kept.write_bytes(digest)
    found = run(source, out)
    assert found.resumed == 1 and found.verification and found.verification.passed
    assert (out / first).read_bytes() == whole and (out / second).is_file()


def test_without_a_verification_a_resumed_shard_is_kept(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later `surgery verify` compares it with its first digest all the same."""
    out = tmp_path / "out"
    first, _ = interrupted(source, out, monkeypatch)
    before = hashlib.sha256((out / first).read_bytes()).hexdigest()
    flip(out / first)
    found = run(source, out, verify=False)
    assert found.resumed == 2 and found.record["shards"][first]["sha256"] == before


def test_the_digests_of_a_finished_output_outlive_a_lost_shard(
    source: Checkpoint, tmp_path: Path
) -> None:
    """The record has them, and the run that writes the lost shard again keeps them."""
    out = tmp_path / "out"
    names = list(run(source, out).record["shards"])
    flip(out / names[0])
    (out / names[1]).unlink()
    found = run(source, out)
    assert found.resumed == len(names) - 1 and found.verification
    damaged = next(r for r in found.verification.rows if r.key == "shards_damaged")
    assert not found.verification.passed and damaged.detail[0].startswith(f"{names[0]} has sha256")


def test_a_shard_that_the_library_cannot_read_is_damaged(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one that this run has just hashed: the check asks the safetensors library."""
    from safetensors import SafetensorError

    from surgery.proof.integrity import damaged_shards

    plan = make_plan(source)
    written = writer.write(plan, tmp_path / "out", source=source)
    (name,) = written.fresh
    shards = {name: {"bytes": plan.shards[0].nbytes, **(written.digests[name] or {})}}
    assert damaged_shards(tmp_path / "out", shards, written.fresh) == ([], {})

    def refuse(*_: Any) -> None:
        raise SafetensorError("InvalidHeaderStart")

    monkeypatch.setattr("safetensors.safe_open", refuse)
    (line,), _ = damaged_shards(tmp_path / "out", shards, written.fresh)
    assert line == f"{name} cannot be read by the safetensors library: InvalidHeaderStart"


def test_a_shard_that_was_not_hashed_when_it_was_written_is_named(
    source: Checkpoint, tmp_path: Path
) -> None:
    """Nothing says whether it has changed between `--no-verify` and its first verification."""
    out = tmp_path / "out"
    names = list(run(source, out, verify=False).record["shards"])
    flip(out / names[0])
    found = verify_folder(source, out)
    first = next(r for r in found.rows if r.key == "shards_first_hashed")
    assert first.value == len(names) and list(first.detail) == names
    assert all(r.key != "shards_first_hashed" for r in verify_folder(source, out).rows)
    flip(out / names[0])
    assert not verify_folder(source, out).passed


def test_a_missing_file_is_changed_whatever_the_record_says(tmp_path: Path) -> None:
    """An empty text is no hash that a missing file has."""
    (tmp_path / "there").write_bytes(b"")
    empty = hashlib.sha256(b"").hexdigest()
    files = {"absent": "", "there": empty, "folder/absent": "", "other": empty}
    assert changed(tmp_path, {"files": files}) == ["absent", "folder/absent", "other"]
