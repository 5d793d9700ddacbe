"""Links and folders that somebody else has put where surgery writes, and what must become of them.

A link is replaced or refused, and what it leads to keeps every byte; a folder without our mark is
neither filled nor removed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support import Call, assert_two_lines, files_of, write_llama

from surgery import files
from surgery.checkpoint import Checkpoint
from surgery.errors import SurgeryError
from surgery.operations.upcycle import upcycle
from surgery.storage import open_checkpoint
from surgery.storage.lock import HELD, LOCK, held
from surgery.storage.scratch import MARK, claim, remove
from surgery.storage.staging import Staging
from surgery.storage.writer import MARKER
from surgery.workflow.convert import convert_alone

MINE = b"mine\n"
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_llama(tmp_path / "m"))


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_bytes(MINE)
    return path


def convert(source: Checkpoint, out: Path) -> None:
    convert_alone(source, upcycle(source, experts=2), out, max_shard_size=60_000, verify=False)


def unfinished(source: Checkpoint, out: Path) -> None:
    """Leave a folder as a run that was killed has, after its mark was written."""
    convert(source, out)
    fingerprint = json.loads((out / "surgery.json").read_text())["fingerprint"]
    for path in [p for p in out.rglob("*") if p.is_file()]:
        path.unlink()
    (out / MARKER).write_text(json.dumps({"fingerprint": fingerprint}))


def test_a_recipe_that_is_a_link_gets_into_no_card(
    source: Checkpoint, tmp_path: Path, victim: Path, call: Call
) -> None:
    """The card quotes the recipe, and is published. A record need not list the recipe."""
    out = tmp_path / "out"
    convert(source, out)
    (out / "recipe.yaml").unlink()
    (out / "recipe.yaml").symlink_to(victim)
    record = json.loads((out / "surgery.json").read_text())
    del record["files"]["recipe.yaml"]
    (out / "surgery.json").write_text(json.dumps(record))
    ran = call("verify", tmp_path / "m", out)
    assert_two_lines(ran, "recipe.yaml is a link to")
    assert MINE not in (out / "README.md").read_bytes()


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["symbolic", "hard", "dangling"])
def test_a_link_in_the_place_of_a_file_is_replaced(
    kind: str, source: Checkpoint, victim: Path, tmp_path: Path
) -> None:
    """Under the final names and under the temporary ones, of shards and of small files."""
    out = tmp_path / "out"
    unfinished(source, out)
    whole = tmp_path / "whole"
    convert(source, whole)
    names = [n for n in files_of(whole) if "/" not in n]
    assert SHARD in names and "surgery.json" in names and "README.md" in names
    absent = tmp_path / "absent"
    for name in [m for n in names for m in (n, files.partial_name(n))]:
        if kind != "hard":
            (out / name).symlink_to(victim if kind == "symbolic" else absent)
        elif name != "README.md":  # A regular one is a card that somebody has edited.
            os.link(victim, out / name)
    convert(source, out)
    assert victim.read_bytes() == MINE and not absent.exists()
    assert files_of(out) == files_of(whole)
    assert not any(p.is_symlink() or p.stat().st_nlink > 1 for p in out.rglob("*") if p.is_file())


def test_a_link_to_a_file_of_the_right_size_is_no_shard(source: Checkpoint, tmp_path: Path) -> None:
    """Neither a run that goes on nor one that finds everything finished takes it for its own."""
    out, other = tmp_path / "out", tmp_path / "other"
    convert(source, out)
    whole = files_of(out)
    other.write_bytes(bytes(len(whole[SHARD])))
    (out / SHARD).unlink()
    (out / SHARD).symlink_to(other)
    convert(source, out)
    assert files_of(out) == whole and not (out / SHARD).is_symlink()
    assert other.read_bytes() == bytes(len(whole[SHARD]))


def test_a_link_in_the_place_of_a_folder_is_refused(source: Checkpoint, tmp_path: Path) -> None:
    """finetune/ leads elsewhere: nothing is written there, and the error names the link."""
    elsewhere, out = tmp_path / "elsewhere", tmp_path / "out"
    elsewhere.mkdir()
    unfinished(source, out)
    (out / "finetune").rmdir()
    (out / "finetune").symlink_to(elsewhere)
    with pytest.raises(SurgeryError, match=f"finetune is a link to {elsewhere}"):
        convert(source, out)
    assert not list(elsewhere.iterdir())


def test_the_output_may_be_a_link_that_the_user_names(source: Checkpoint, tmp_path: Path) -> None:
    """Somebody keeps models on another disk; only what is below the folder is not followed."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    convert(source, tmp_path / "out")
    assert (tmp_path / "disk" / "config.json").is_file()
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    with pytest.raises(SurgeryError, match="which is not there"):
        convert(source, tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["symbolic", "dangling", "hard", "pipe"])
def test_a_planted_lock_is_refused(kind: str, victim: Path, tmp_path: Path) -> None:
    """The lock is truncated and written: through a link that would be the victim's file."""
    out = tmp_path / "out"
    out.mkdir()
    if kind == "pipe":
        os.mkfifo(out / LOCK)
    elif kind == "hard":
        os.link(victim, out / LOCK)
    else:
        (out / LOCK).symlink_to(victim if kind == "symbolic" else tmp_path / "absent")
    with pytest.raises(SurgeryError, match=LOCK), held(out):
        raise AssertionError
    assert victim.read_bytes() == MINE and not (tmp_path / "absent").exists()


def test_a_planted_file_of_a_holder_is_not_written_through(
    victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without kernel locks, a file that must be new says who holds the folder."""
    import errno
    import fcntl

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / HELD).symlink_to(victim)
    with pytest.raises(SurgeryError, match="another process"), held(tmp_path / "out"):
        raise AssertionError
    assert victim.read_bytes() == MINE


def test_later_commands_follow_no_link(
    source: Checkpoint, victim: Path, tmp_path: Path, call: Call
) -> None:
    """finetune-script and analyze write into folders that may come from anywhere."""
    out, report = tmp_path / "out", tmp_path / "report"
    convert(source, out)
    script = out / "finetune" / "finetune.py"
    whole = script.read_bytes()
    script.unlink()
    script.symlink_to(victim)
    assert call("finetune-script", out).code == 0
    assert script.read_bytes() == whole and not script.is_symlink()
    report.mkdir()
    for name in ("analysis.json", "analysis.safetensors", "report.html", "savings.png"):
        (report / name).symlink_to(tmp_path / "absent")
    ran = call("analyze", tmp_path / "m", "--tokens", 64, "--out", report, "--quiet")
    assert ran.code == 0, ran
    assert (report / "report.html").read_text().startswith("<!")
    assert not (report / "report.html").is_symlink()
    assert victim.read_bytes() == MINE and not (tmp_path / "absent").exists()


def test_a_name_that_leads_out_of_the_folder(tmp_path: Path) -> None:
    for name in ("../x", "a/../../x", "/etc/x", ""):
        with pytest.raises(SurgeryError, match="is outside"):
            files.write(tmp_path / "out", name, b"")
    assert not (tmp_path / "x").exists()


# --- folders --------------------------------------------------------------------------------------

CARVE = ("carve", "m", "--tokens", 64, "--no-verify", "--out", "out")


def test_a_folder_of_the_users_is_not_taken_for_scratch(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NAME.calibration keeps results for a while; a folder without our mark stays as it is."""
    monkeypatch.chdir(tmp_path)
    write_llama(tmp_path / "m")
    own = tmp_path / "out.calibration"
    own.mkdir()
    (own / "thesis.txt").write_bytes(MINE)
    for more in ((), ("--dry-run",)):
        ran = call(*CARVE, *more)
        assert_two_lines(ran, "out.calibration is in the way", "move it away")
    assert files_of(own) == {"thesis.txt": MINE} and not (tmp_path / "out").exists()
    relufy = ("relufy", "m", "--repair", "none", "--no-verify", "--out", "out")
    assert call(*relufy).code == 0  # This one needs no scratch folder.
    assert files_of(own) == {"thesis.txt": MINE}


def test_scratch_is_removed_at_the_end(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_llama(tmp_path / "m")
    assert call(*CARVE).code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]


@pytest.mark.parametrize("what", ["link", "link to ours", "file", "mark is a link"])
def test_only_what_has_our_mark_is_claimed_and_removed(what: str, tmp_path: Path) -> None:
    folder, other = tmp_path / "out.calibration", tmp_path / "other"
    claim(other)
    (other / "kept").write_bytes(MINE)
    if what.startswith("link"):
        if what == "link":
            (other / MARK).unlink()
        folder.symlink_to(other)
    elif what == "file":
        folder.write_bytes(MINE)
    else:
        folder.mkdir()
        (folder / MARK).symlink_to(other / MARK)
    with pytest.raises(SurgeryError, match="in the way"):
        claim(folder)
    remove(folder)
    assert folder.exists() and (other / "kept").read_bytes() == MINE


def test_downloads_pass_over_a_folder_that_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of the cache that bears our name but not our mark keeps its weights."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    own, linked = tmp_path / "surgery" / "a--b", tmp_path / "weights"
    own.mkdir(parents=True)
    linked.mkdir()
    (own / "model.safetensors").write_bytes(MINE)
    (linked / "model.safetensors").write_bytes(MINE)
    (own.parent / "a--b.1").symlink_to(linked)
    staging = Staging("a/b", keep=2)
    assert staging.folder.name == "a--b.2"
    assert (own / "model.safetensors").read_bytes() == MINE
    assert (linked / "model.safetensors").read_bytes() == MINE


@pytest.mark.parametrize("name", ["report.html", "analysis.json", "hot_cold.png"])
def test_an_analysis_writes_over_no_file_of_another(
    name: str, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_llama(tmp_path / "m")
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / name).write_bytes(MINE)
    analyze = ("analyze", "m", "--tokens", 64, "--quiet", "--out")
    assert_two_lines(call(*analyze, "thesis"), f"thesis has a {name}", "move")
    assert files_of(folder) == {name: MINE}
    for _ in range(2):  # The second one writes over the first.
        assert call(*analyze, "report").code == 0
