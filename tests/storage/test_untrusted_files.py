"""Sources whose files are not what their names say: links out of the folder, pipes, endless files.

An output is published, so nothing from outside the source may get into it.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from support import Ran, assert_two_lines, files_of, surgery, write_llama

from surgery.errors import SurgeryError
from surgery.files import JSON_LIMIT, SIDE_LIMIT
from surgery.operations.relufy import relufy
from surgery.storage import open_checkpoint
from surgery.workflow.convert import convert_alone

SECRET = b"-----BEGIN OPENSSH PRIVATE KEY-----\n"
WHOLE = (
    *("tokenizer.json", "tokenizer_config.json", "LICENSE", "NOTICE", "modeling_x.py"),
    *("generation_config.json", "README.md", "config.json", "model.safetensors.index.json"),
    "additional_chat_templates/rag.jinja",
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "source" / "m", shards=2)


def refused(folder: Path, *words: str) -> None:
    """Assert that a source does not open, by one error that has these words."""
    with pytest.raises(SurgeryError) as caught:
        open_checkpoint(folder)
    for word in words:
        assert word in caught.value.message, caught.value.message
    assert caught.value.hint


def put(folder: Path, name: str, make: Callable[[Path], None]) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)
    return path


@pytest.mark.parametrize("name", WHOLE)
def test_a_link_out_of_the_source_is_refused(name: str, model: Path, tmp_path: Path) -> None:
    """The error names the file and where it leads, by an absolute link and by a relative one."""
    secret = tmp_path / ".ssh" / "id_rsa"
    secret.parent.mkdir()
    secret.write_bytes(SECRET)
    for target in (secret, Path(os.path.relpath(secret, (model / name).parent))):
        put(model, name, lambda path, target=target: path.symlink_to(target))
        refused(model, name, "leads out of the checkpoint", str(secret))
    ran = surgery("relufy", model, "--repair", "none", "--no-verify", "--out", tmp_path / "out")
    assert_two_lines(ran, name, "leads out of the checkpoint")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["/proc/self/environ", "/proc/self/maps", "/etc/passwd"])
def test_files_of_the_system_are_refused(target: str, model: Path) -> None:
    put(model, "LICENSE", lambda path: path.symlink_to(target))
    refused(model, "LICENSE", "leads out of the checkpoint")


def test_a_folder_that_is_a_link_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "rag.jinja").write_bytes(SECRET)
    (model / "additional_chat_templates").symlink_to(tmp_path / "private")
    refused(model, "additional_chat_templates/rag.jinja", "leads out of the checkpoint")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bind(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # The name of a socket may have 107 bytes.
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (pipe, "is a pipe"),
    "socket": (bind, "is a socket"),
    "folder": (lambda path: path.mkdir(), "is a folder"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "leads to /dev/zero, which is a device"),
    "nowhere": (lambda path: path.symlink_to("absent"), "a link to absent, which cannot be read"),
    "circle": (lambda path: path.symlink_to(path.name), "which cannot be read"),
    "a folder's": (lambda path: path.symlink_to(".."), "which is a folder"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "config.json", "model-00001-of-00002.safetensors"]
)
def test_what_is_no_regular_file_is_refused_at_once(name: str, kind: str, model: Path) -> None:
    """Side files, JSON and weights; a pipe without a writer would be waited for for ever."""
    make, words = ODD[kind]
    put(model, name, make)
    refused(model, name, words)


def test_folders_by_the_names_of_side_files_are_left_out(model: Path, tmp_path: Path) -> None:
    for name in ("LICENSES", "tokenizer"):
        (model / name).mkdir()
        (model / name / "file.txt").write_text("x")
    assert open_checkpoint(model).files == ()


def test_links_inside_the_source_are_followed(model: Path, tmp_path: Path) -> None:
    (model / "original").mkdir()
    (model / "original" / "terms").write_text("do as you like")
    (model / "LICENSE").symlink_to("original/terms")
    (tmp_path / "link").symlink_to(model)  # The user may name the source by a link.
    source = open_checkpoint(tmp_path / "link")
    convert_alone(source, relufy(source, repair="none"), tmp_path / "out", verify=False)
    assert (tmp_path / "out" / "LICENSE").read_text() == "do as you like"


def test_weights_may_be_links_to_anywhere(model: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    for shard in model.glob("*.safetensors"):
        shard.rename(disk / shard.name)
        shard.symlink_to(disk / shard.name)
    source = open_checkpoint(model)
    convert_alone(source, relufy(source, repair="none"), tmp_path / "out", verify=False)
    assert files_of(tmp_path / "out").items() >= files_of(disk).items()


# --- the Hub's cache ------------------------------------------------------------------------------


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A snapshot as the Hub's client leaves it: links to blobs by the hash of their content."""
    repository = tmp_path / "hub" / "models--tiny--llama"
    folder = write_llama(repository / "snapshots" / "0123abcd", shards=2)
    (folder / "tokenizer.json").write_text("{}")
    (repository / "blobs").mkdir()
    for i, path in enumerate(sorted(folder.iterdir())):
        path.rename(repository / "blobs" / f"{i:040x}")
        path.symlink_to(f"../../blobs/{i:040x}")
    return folder


def test_a_snapshot_of_the_hubs_cache_is_read(snapshot: Path, tmp_path: Path) -> None:
    source = open_checkpoint(snapshot)
    convert_alone(source, relufy(source, repair="none"), tmp_path / "out", verify=False)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    "where", ["hub/models--other--llama/blobs", "hub/models--tiny--llama", "x"]
)
def test_a_snapshot_may_lead_to_its_own_blobs_alone(
    where: str, snapshot: Path, tmp_path: Path
) -> None:
    place = tmp_path / where
    place.mkdir(parents=True, exist_ok=True)
    (place / "secret").write_bytes(SECRET)
    put(snapshot, "NOTICE", lambda path: path.symlink_to(place / "secret"))
    refused(snapshot, "NOTICE", "leads out of the checkpoint", str(place / "secret"))


def test_blobs_that_are_a_link_are_refused(snapshot: Path, tmp_path: Path) -> None:
    """A hostile folder may have the shape of a snapshot, with blobs that are somebody's keys."""
    blobs = snapshot.parent.parent / "blobs"
    blobs.rename(tmp_path / "keys")
    blobs.symlink_to(tmp_path / "keys")
    refused(snapshot, "config.json", "leads out of the checkpoint", str(tmp_path / "keys"))


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokenizer.json", "LICENSE", "merges.txt"])
def test_a_sparse_terabyte_is_refused_unread(name: str, model: Path) -> None:
    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, 10**12)

    put(model, name, make)
    refused(model, name, "has 1,000,000 MB, and such a file has 256 MB at most")


def test_the_limits(model: Path) -> None:
    """A side file may have SIDE_LIMIT bytes, not one more; what is parsed has a smaller limit."""
    tokenizer = model / "tokenizer.json"
    tokenizer.touch()
    os.truncate(tokenizer, SIDE_LIMIT)
    assert [f.size for f in open_checkpoint(model).files] == [SIDE_LIMIT]
    os.truncate(tokenizer, SIDE_LIMIT + 1)
    refused(model, "tokenizer.json")
    tokenizer.unlink()
    for name in ("config.json", "model.safetensors.index.json"):
        before = (model / name).stat().st_size
        os.truncate(model / name, JSON_LIMIT + 1)
        refused(model, name, "64 MB at most")
        os.truncate(model / name, before)
    open_checkpoint(model)


def test_a_config_alone_is_no_way_out_either(tmp_path: Path) -> None:
    """`inspect` reads a bare config.json too, and its errors must quote nothing of a secret."""
    (tmp_path / "m").mkdir()
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "m" / "config.json").symlink_to(tmp_path / "secret")
    ran: Ran = surgery("inspect", tmp_path / "m")
    assert_two_lines(ran, "leads out of the checkpoint")
    assert not re.search("OPENSSH", ran.err)
