"""Checkpoints at URLs, on fsspec's file system in memory: read, converted and delivered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support import files_of, write_llama

from surgery.checkpoint import Checkpoint
from surgery.errors import SurgeryError
from surgery.operations.upcycle import upcycle
from surgery.storage import open_checkpoint, remote
from surgery.storage.downloads import bytes_on_disk, bytes_to_fetch
from surgery.storage.staging import Staging
from surgery.workflow.convert import convert_alone
from surgery.workflow.delivery import deliver, is_delivered
from surgery.workflow.dry_run import describe
from surgery.workflow.request import Request

SOURCE, OUT = "memory://bucket/llama", "memory://bucket/moe"


class Nobody:
    """An observer that shows nothing."""

    def stage(self, title: str, total: int, unit: str) -> Any:
        return nullcontext(lambda n: None)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A file system with a llama of two shards; the cache on this disk is a temporary folder."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    system = fsspec.filesystem("memory")
    model = write_llama(tmp_path / "model", shards=2)
    (model / "LICENSE").write_text("do as you like")
    for name, data in files_of(model).items():
        system.pipe_file(f"/bucket/llama/{name}", data)
    yield system
    system.rm("/bucket", recursive=True)


def at(system: Any, root: str) -> dict[str, bytes]:
    """Return the files below a path of the file system, by name."""
    return {p.removeprefix(f"{root}/"): system.cat_file(p) for p in system.find(root)}


def made(tmp_path: Path, source: Checkpoint | None = None) -> Any:
    """Return the result of an upcycling into a folder on this disk."""
    source = source or open_checkpoint(SOURCE)
    return convert_alone(source, upcycle(source, experts=2), tmp_path / "moe.staged", verify=False)


def test_from_a_url(store: Any, tmp_path: Path) -> None:
    """A source at a URL is downloaded once, and its output equals that of a local source."""
    source = open_checkpoint(SOURCE)
    files = at(store, "/bucket/llama")
    weights = sum(len(d) for n, d in files.items() if n.endswith(".safetensors"))
    plan = describe(source, upcycle(source, experts=2), Request(out=tmp_path / "moe", verify=False))
    assert plan["download"] == plan["download_disk"] == weights
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
    result = made(tmp_path, source)
    local = open_checkpoint(tmp_path / "model")
    convert_alone(local, upcycle(local, experts=2), tmp_path / "local", verify=False)
    ours, theirs = files_of(result.folder), files_of(tmp_path / "local")
    assert set(ours) == set(theirs) and "LICENSE" in ours
    assert ours["model.safetensors"] == theirs["model.safetensors"]
    assert result.record["source"] == {"location": SOURCE, "revision": None}
    assert f"source: {SOURCE}\n" in ours["recipe.yaml"].decode()


def test_streamed(store: Any) -> None:
    tensors = open_checkpoint(SOURCE, stream=True).tensors
    files = {e.file for t in tensors.values() for e in t.extents}
    sizes = sorted(f.size for f in files)
    assert bytes_to_fetch(files) == sum(sizes) and bytes_on_disk(files) == sum(sizes[-2:])


def test_to_a_url(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output is uploaded with config.json near the end, and its local folder is removed.

    A second run finds that there is nothing to do, and another command is refused.
    """
    order: list[str] = []
    put = type(store).put_file

    def watched(self: Any, local: str, path: str, **options: Any) -> None:
        order.append(path)
        put(self, local, path, **options)

    monkeypatch.setattr(type(store), "put_file", watched)
    result = made(tmp_path)
    files = {n: (result.folder / n).read_bytes() for n in files_of(result.folder)}
    deliver(result, OUT, Nobody())
    assert at(store, "/bucket/moe") == files and not result.folder.exists()
    assert [n.rpartition("/")[2] for n in order[-2:]] == ["config.json", "surgery.json"]
    output = upcycle(open_checkpoint(SOURCE), experts=2)
    assert is_delivered(output, None, OUT)
    assert open_checkpoint(OUT).config["model_type"] == "mixtral"
    with pytest.raises(SurgeryError, match="does not hold the output of this command"):
        is_delivered(upcycle(open_checkpoint(SOURCE), experts=4), None, OUT)


def test_only_what_the_record_lists_is_delivered(store: Any, tmp_path: Path) -> None:
    """A stranger's files stay on this disk, and so does a folder that holds them."""
    result = made(tmp_path)
    recorded = {n: (result.folder / n).read_bytes() for n in files_of(result.folder)}
    for name in ("id_rsa", "wandb/run.log", "finetune/key.pem", "other.safetensors"):
        (result.folder / name).parent.mkdir(exist_ok=True)
        (result.folder / name).write_text("mine")
    (result.folder / "LINK").symlink_to(tmp_path / "model" / "LICENSE")
    deliver(result, OUT, Nobody())
    assert at(store, "/bucket/moe") == recorded
    left = {p.relative_to(result.folder).as_posix() for p in result.folder.rglob("*")}
    mine = {"id_rsa", "wandb/run.log", "finetune/key.pem", "other.safetensors", "LINK"}
    assert left == mine | {"wandb", "finetune"}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "finetune/finetune.py"])
def test_a_link_or_nothing_is_not_delivered(name: str, store: Any, tmp_path: Path) -> None:
    """A recorded file that was replaced by a link is refused before the first byte is sent."""
    result = made(tmp_path)
    (result.folder / name).unlink()
    with pytest.raises(SurgeryError, match="is missing"):
        deliver(result, OUT, Nobody())
    (result.folder / name).symlink_to(tmp_path / "model" / "LICENSE")
    with pytest.raises(SurgeryError, match="is a link to"):
        deliver(result, OUT, Nobody())
    assert at(store, "/bucket/moe") == {}


def test_an_interrupted_delivery_goes_on(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted upload has no config.json, and is finished without sending shards again."""
    source = open_checkpoint(SOURCE)
    output = upcycle(source, experts=2)
    result = convert_alone(source, output, tmp_path / "staged", max_shard_size=30_000, verify=False)
    put, sent, broken = type(store).put_file, [], True

    def failing(self: Any, local: str, path: str, **options: Any) -> None:
        sent.append(path.rpartition("/")[2])
        if "model-00002-of-" in path and broken:
            raise OSError("connection reset")
        put(self, local, path, **options)

    monkeypatch.setattr(type(store), "put_file", failing)
    with pytest.raises(SurgeryError, match="connection reset"):
        deliver(result, OUT, Nobody())
    assert "config.json" not in at(store, "/bucket/moe") and result.folder.is_dir()
    assert not is_delivered(upcycle(open_checkpoint(SOURCE), experts=2), 30_000, OUT)
    first = [n for n in sent if n.endswith(".safetensors")]
    broken = bool(sent.clear())
    files = {n: (result.folder / n).read_bytes() for n in files_of(result.folder)}
    deliver(result, OUT, Nobody())
    assert [n[:11] for n in first] == ["model-00001", "model-00002"]
    assert first[0] not in sent and at(store, "/bucket/moe") == files


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memory://bucket/absent", "no files at memory://bucket/absent"),
        ("gs://bucket/model", "gs:// needs a package: "),
        ("nothing://bucket/model", "nothing:// is not supported"),
        ("memory://bucket/text", "no config.json in memory://bucket/text"),
    ],
)
def test_what_can_fail(url: str, words: str, store: Any) -> None:
    store.pipe_file("/bucket/text/a.txt", b"text")
    with pytest.raises(SurgeryError) as caught:
        open_checkpoint(url)
    assert words in caught.value.message


def test_a_folder_is_never_taken_over(store: Any) -> None:
    with pytest.raises(SurgeryError, match="is not empty and does not hold the output"):
        remote.has_output(SOURCE, "fingerprint")


def test_what_another_thread_is_about_to_open_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two shards the least recently used is removed first, but not one that is about to be read.

    A thread that was given a path has yet to open the file.
    """
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    staging = Staging("a/b@c", keep=2)

    def fetch(target: Path) -> None:
        target.write_bytes(b"x")

    def path(name: str) -> Path:
        return staging.path(f"{name}.safetensors", 1, "c", fetch)

    def there() -> set[str]:
        return {p.stem for p in staging.folder.rglob("*.safetensors")}

    path("a"), path("b"), path("a"), path("c")
    assert there() == {"a", "c"}
    given, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (path("a"), given.set(), go.wait(10)))
    thread.start()
    assert given.wait(10)
    path("d"), path("e")
    assert there() == {"a", "e"}
    go.set()
    thread.join()
    path("f"), path("g")
    assert there() == {"f", "g"}
    other = Staging("a/b@c", keep=2)
    assert other.folder != staging.folder  # The lock on the first one is held.
