"""Models of the Hub, against a server on localhost and the real `huggingface_hub`: what is fetched,
and what fails how.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub import FakeHub
from hub_writes import TOKEN
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from support import Ran, assert_two_lines, environment, files_of, surgery, write_llama

from surgery.errors import SurgeryError
from surgery.storage.hub import hub_errors
from surgery.storage.writer import SLACK

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
NAME = "tiny/llama"
UNNEEDED = ("original/consolidated.pth", "pytorch_model.bin", "README.md", "flax_model.msgpack")
SIZES = {"layers": 4, "hidden": 128, "ff": 512, "vocab": 2000}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3.5 MB of weights in two shards, and beside them what must stay where it is."""
    folder = write_llama(tmp_path_factory.mktemp("hub") / "model", shards=2, **SIZES)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    (folder / "original").mkdir()
    for name in UNNEEDED:
        (folder / name).write_bytes(bytes(2_000_000))
    return folder


@pytest.fixture
def hub(model: Path) -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add(NAME, model)
        yield hub


def on(
    hub: FakeHub | str, home: Path, *arguments: object, cwd: Path | None = None, **variables: str
) -> Ran:
    """The command line against this Hub, with its cache below `home`."""
    endpoint = hub if isinstance(hub, str) else hub.endpoint
    defaults = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"}
    return surgery(*arguments, cwd=cwd, **{**defaults, **variables})


def weights_served(hub: FakeHub) -> int:
    return sum(hub.served[f"{NAME}/{shard}"] for shard in SHARDS)


def test_inspect_reads_headers_alone(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    """70B models are weighed on a laptop: per shard one request of 256 kB, and no file of weights
    in the cache.
    """
    ran = on(hub, tmp_path, "inspect", NAME, "--json")
    assert ran.code == 0, ran.err
    local = surgery("inspect", model, "--json")
    assert ran.json == local.json
    assert (
        weights_served(hub) <= 2 * 256 * 1024 < sum((model / s).stat().st_size for s in SHARDS) / 5
    )
    assert [hub.requests[f"GET {s}"] for s in SHARDS] == [1, 1]
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
    assert not any(hub.served[f"{NAME}/{n}"] for n in UNNEEDED)


def test_upcycle_fetches_what_it_needs(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    """Each shard once; neither a second format nor the original weights. The output is that of a
    local source, and its record names the commit, not the branch."""
    commit = hub.repositories[NAME].refs["main"]
    ran = on(hub, tmp_path, "upcycle", f"{NAME}@main", "--no-verify", "--json", cwd=tmp_path)
    assert ran.code == 0, ran.err
    out = tmp_path / "llama-mixtral-8x-top2"
    assert ran.json["source"] == {"location": NAME, "revision": commit}
    for shard in SHARDS:
        size = (model / shard).stat().st_size
        assert (
            size <= hub.served[f"{NAME}/{shard}"] <= size + 256 * 1024
        )  # the header, then the file
    assert not any(
        hub.served[f"{NAME}/{n}"] for n in UNNEEDED if n != "README.md"
    )  # of which the metadata is needed
    assert surgery("upcycle", model, "--no-verify", "--out", tmp_path / "local").code == 0
    ours, local = files_of(out), files_of(tmp_path / "local")
    assert set(ours) == set(local) and {"tokenizer.json", "generation_config.json"} <= set(ours)
    differ = {"surgery.json", "README.md", "recipe.yaml"}  # which name the source
    assert {n: d for n, d in ours.items() if n not in differ} == {
        n: d for n, d in local.items() if n not in differ
    }


def test_a_dry_run_fetches_no_weights(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    ran = on(hub, tmp_path, "upcycle", NAME, "--dry-run", "--json", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert ran.json["out"] == "llama-mixtral-8x-top2" and ran.json["bytes"] > 10_000_000
    assert (
        ran.json["download"]
        == ran.json["download_disk"]
        == sum((model / s).stat().st_size for s in SHARDS)
    )
    assert weights_served(hub) <= 2 * 256 * 1024
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


MOST = """
import pathlib, sys, threading, time, surgery.cli
most, folder = 0, pathlib.Path(sys.argv.pop(1))
def watch():
    global most
    while True:
        found = [p.stat().st_size for p in folder.rglob("*.safetensors")] if folder.exists() else []
        most = max(most, sum(found))
        time.sleep(0.001)
threading.Thread(target=watch, daemon=True).start()
code = surgery.cli.run()
print(most)
sys.exit(code)
"""


def test_streaming_keeps_no_copy(
    hub: FakeHub, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Five shards, two at most on the disk at a time, none afterwards; the output is the same. The
    plan says how much is
    downloaded: some twice, as the norms stand in the last shard, and twice more to be verified."""
    model = write_llama(tmp_path_factory.mktemp("many") / "model", shards=5, **SIZES)
    sizes = sorted(p.stat().st_size for p in model.glob("*.safetensors"))
    hub.add("tiny/many", model)
    dry = ("upcycle", "tiny/many", "--experts", "2", "--stream", "--dry-run", "--json")
    verified, plan = (on(hub, tmp_path, *dry, *more).json for more in ((), ("--no-verify",)))
    assert plan["download_disk"] == sum(sizes[-2:]) and sum(sizes) < plan["download"] < 2 * sum(
        sizes
    )
    assert verified["download"] == plan["download"] + 2 * sum(sizes)
    variables = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [
        sys.executable,
        "-c",
        MOST,
        str(tmp_path / "hf"),
        "upcycle",
        "tiny/many",
        "--experts",
        "2",
        "--stream",
        "--no-verify",
        "--quiet",
        "--out",
        str(tmp_path / "out"),
    ]
    hub.forget()
    done = subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert sizes[-1] <= int(done.stdout) <= sum(sizes[-2:])
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
    served = sum(n for name, n in hub.served.items() if name.endswith(".safetensors"))
    assert served == plan["download"] + sum(min(s, 256 * 1024) for s in sizes)  # and the headers
    assert (
        surgery("upcycle", model, "--experts", "2", "--no-verify", "--out", tmp_path / "local").code
        == 0
    )
    ours, local = ((tmp_path / f / "model.safetensors").read_bytes() for f in ("out", "local"))
    assert ours == local


def test_a_revision_is_pinned(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    """`owner/name@branch`, `--revision tag` and a commit: each gets its own weights, though main
    has moved on.
    """
    first = hub.repositories[NAME].refs["main"]
    other = {
        n: d for n, d in hub.repositories[NAME].commits[first].items() if not n.startswith("model")
    }
    config = json.loads(other["config.json"]) | {"rms_norm_eps": 0.5}
    moved = hub.add(
        NAME,
        {**hub.repositories[NAME].commits[first], "config.json": json.dumps(config).encode()},
        ref="v2/next",
    )
    hub.repositories[NAME].refs["main"] = moved
    commands = (
        (NAME, moved, ()),
        (f"{NAME}@{first}", first, ()),
        (NAME, moved, ("--revision", "v2/next")),
    )
    for i, (name, commit, more) in enumerate(commands):
        ran = on(
            hub,
            tmp_path,
            "relufy",
            name,
            "--repair",
            "none",
            *more,
            "--no-verify",
            "--json",
            "--out",
            tmp_path / f"out{i}",
        )
        assert ran.code == 0, ran.err
        assert ran.json["source"]["revision"] == commit
        eps = json.loads((tmp_path / f"out{i}" / "config.json").read_text())["rms_norm_eps"]
        assert eps == (1e-5 if commit == first else 0.5)


def test_offline_with_a_cache(hub: FakeHub, tmp_path: Path) -> None:
    """What a run has fetched serves the next without the Hub, by the branch's name too, though the
    cache lacks the formats that were never needed. The output goes on being the same one: it is
    pinned to the same commit."""
    first = on(
        hub, tmp_path, "relufy", NAME, "--repair", "none", "--no-verify", "--out", tmp_path / "out"
    )
    assert first.code == 0, first.err
    hub.forget()
    again = on(
        hub,
        tmp_path,
        "relufy",
        NAME,
        "--repair",
        "none",
        "--no-verify",
        "--out",
        tmp_path / "out",
        HF_HUB_OFFLINE="1",
    )
    assert again.code == 0 and "was there already" in again.out, again
    pinned = f"{NAME}@{hub.repositories[NAME].refs['main']}"
    assert on(hub, tmp_path, "inspect", pinned, HF_HUB_OFFLINE="1").code == 0
    assert not hub.requests


def test_offline_with_half_a_cache(hub: FakeHub, tmp_path: Path) -> None:
    """`inspect` has left the config and no weights: that is said, and what to do."""
    assert on(hub, tmp_path, "inspect", NAME).code == 0
    ran = on(
        hub,
        tmp_path,
        "relufy",
        NAME,
        "--repair",
        "none",
        "--no-verify",
        cwd=tmp_path,
        HF_HUB_OFFLINE="1",
    )
    assert_two_lines(ran, "2 of 2 shards are absent")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(("part", "status"), [("config.json", 429), (SHARDS[1], 503)])
def test_a_hub_that_is_busy_for_a_moment_is_asked_again(
    part: str, status: int, hub: FakeHub, model: Path, tmp_path: Path
) -> None:
    hub.busy, hub.busy_at = [status], part
    ran = on(hub, tmp_path, "upcycle", NAME, "--no-verify", "--out", tmp_path / "out")
    assert ran.code == 0 and "Traceback" not in ran.err and hub.busy == []
    assert surgery("upcycle", model, "--no-verify", "--out", tmp_path / "local").code == 0
    weights = [
        (tmp_path / folder / "model.safetensors").read_bytes() for folder in ("out", "local")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_is_busy_at_the_first_question(
    status: int, hub: FakeHub, tmp_path: Path
) -> None:
    """huggingface_hub asks what a repository holds once."""
    hub.busy, hub.busy_at = [status], f"/api/models/{NAME}"
    ran = on(hub, tmp_path, "upcycle", NAME, "--no-verify", cwd=tmp_path)
    assert_two_lines(ran, f"the Hub answers with error {status} for {NAME}", "try again later")


def test_a_hub_that_stays_busy_is_not_a_missing_cache() -> None:
    """Downloading gives up with "not in the cache", whose cause is the answer of the Hub, or that
    there is none.
    """
    causes = (
        (
            HfHubHTTPError(
                "busy", response=SimpleNamespace(status_code=504, headers={}, request=None)
            ),
            "answers with error 504",
        ),
        (ConnectionError("refused"), "cannot reach the Hub for a/b"),
        (ValueError("something else"), "a/b is not in the cache at main"),
    )
    for cause, words in causes:
        with pytest.raises(SurgeryError, match=words), hub_errors("a/b"):
            raise LocalEntryNotFoundError("not in the cache") from cause


SMALL_DISK = """
import os, shutil, surgery.cli
usage = shutil._ntuple_diskusage
shutil.disk_usage = lambda path: usage(10**12, 0, int(os.environ["CACHE" if "/hf" in str(path) else "FREE"]))
surgery.cli.main()
"""


def upcycle_with_space(
    hub: FakeHub, home: Path, out: Path, free: int, cache: int | None = None
) -> Ran:
    """`upcycle` where the disk has `free` bytes free, and that of the cache `cache` where it is
    another.
    """
    variables = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "FREE": str(free),
        "CACHE": str(free if cache is None else cache),
    }
    command = [sys.executable, "-c", SMALL_DISK, "upcycle", NAME, "--no-verify", "--out", str(out)]
    done = subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, timeout=120
    )
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def sizes(model: Path) -> tuple[int, int]:
    """Bytes of weights of the model, and of what `upcycle` makes of it."""
    plan = surgery("upcycle", model, "--dry-run", "--json").json
    return sum((model / s).stat().st_size for s in SHARDS), sum(s["bytes"] for s in plan["shards"])


def test_downloads_need_space_too(hub: FakeHub, sizes: tuple[int, int], tmp_path: Path) -> None:
    """Output and downloads on one disk: a byte less than both, both, and the output alone once the
    cache has them.
    """
    source, output = sizes
    ran = upcycle_with_space(hub, tmp_path, tmp_path / "out", source + output + SLACK - 1)
    both = f"needs {(source + output) / 1e9:.2f} GB with {source / 1e9:.2f} GB of downloads"
    assert_two_lines(ran, both, "--out")
    assert weights_served(hub) <= 2 * 256 * 1024 and not (tmp_path / "out").exists()
    assert upcycle_with_space(hub, tmp_path, tmp_path / "out", source + output + SLACK).code == 0
    moved = {
        **hub.repositories[NAME].commits[hub.repositories[NAME].refs["main"]],
        "README.md": b"new",
    }
    hub.add(NAME, moved)  # another commit of the same weights
    ran = upcycle_with_space(hub, tmp_path, tmp_path / "again", output + SLACK)
    assert ran.code == 0, ran.err


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second file system")
def test_a_cache_on_another_disk_is_its_own_question(
    hub: FakeHub, sizes: tuple[int, int], tmp_path: Path
) -> None:
    source, output = sizes
    with tempfile.TemporaryDirectory(dir="/dev/shm") as home:
        if Path(home).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("both are one file system")
        ran = upcycle_with_space(
            hub, Path(home), tmp_path / "out", output + SLACK, source + SLACK - 1
        )
        assert_two_lines(
            ran, f"{home}/hf/hub needs {source / 1e9:.2f} GB of downloads", "HF_HUB_CACHE"
        )
        assert (
            upcycle_with_space(
                hub, Path(home), tmp_path / "out", output + SLACK, source + SLACK
            ).code
            == 0
        )


def closed_port() -> str:
    with FakeHub() as hub:
        return hub.endpoint


@pytest.mark.parametrize(
    ("name", "variables", "words"),
    [
        ("tiny/gated", {}, ("tiny/gated is gated", "HF_TOKEN")),
        ("tiny/absent", {}, ("no model tiny/absent on the Hub, and no such folder", "HF_TOKEN")),
        ("absent", {}, ("no model absent on the Hub, and no such folder",)),
        (f"{NAME}@v9", {}, (f"{NAME} has no revision 'v9'", "branch, tag or commit")),
        (NAME, {"HF_ENDPOINT": closed_port()}, (f"cannot reach the Hub for {NAME}", "network")),
        (NAME, {"HF_HUB_OFFLINE": "1"}, (f"{NAME} is not in the cache", "HF_HUB_OFFLINE")),
        ("bad..name/x", {}, ("bad..name/x",)),
        ("tiny/empty", {}, ("no config.json in tiny/empty",)),
        ("tiny/gguf", {}, ("no config.json in tiny/gguf", "GGUF is an inference format")),
        ("tiny/lost", {}, ("lacks a file that its listing names",)),
    ],
)
def test_what_can_fail(
    name: str,
    variables: dict[str, str],
    words: tuple[str, ...],
    hub: FakeHub,
    model: Path,
    tmp_path: Path,
) -> None:
    """Two lines that say which of them it was, quickly, and nothing written."""
    hub.add("tiny/gated", {"config.json": b"{}"}, gated=True)
    hub.add("tiny/empty", {"README.md": b""})
    hub.add("tiny/gguf", {"model.gguf": b""})
    hub.add("tiny/lost", {"config.json": b"{}", "model.safetensors": b""})
    hub.repositories["tiny/lost"].lost = "config.json"
    ran = on(hub, tmp_path, "upcycle", name, "--no-verify", cwd=tmp_path, **variables)
    assert_two_lines(ran, *words)
    assert not [p for p in tmp_path.iterdir() if p.name != "hf"]


@pytest.mark.parametrize("kind", ["gated", "private"])
def test_a_token_opens_what_is_closed(kind: str, hub: FakeHub, model: Path, tmp_path: Path) -> None:
    """HF_TOKEN goes with every request: the listing, the headers by ranges, the files."""
    hub.add("tiny/closed", model)
    setattr(hub.repositories["tiny/closed"], kind, True)
    dry = ("upcycle", "tiny/closed", "--dry-run", "--quiet")
    assert_two_lines(on(hub, tmp_path, *dry, HF_TOKEN="hf_wrong"), "tiny/closed", "HF_TOKEN")
    assert on(hub, tmp_path, *dry, HF_TOKEN=TOKEN).code == 0


def test_two_revisions_are_one_too_many(hub: FakeHub, tmp_path: Path) -> None:
    ran = on(hub, tmp_path, "inspect", f"{NAME}@main", "--revision", "v2")
    assert_two_lines(ran, f"{NAME}@main and --revision v2", code=2)
    assert not hub.requests


def test_a_path_is_never_asked_for(hub: FakeHub, tmp_path: Path) -> None:
    """The names of folders on this disk are nobody's business."""
    assert_two_lines(
        on(hub, tmp_path, "inspect", "./absent/folder"), "no file or folder ./absent/folder"
    )
    assert not hub.requests


def test_never_into_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    out = tmp_path / "hf" / "hub" / "models--tiny--llama" / "out"
    assert_two_lines(
        on(hub, tmp_path, "relufy", NAME, "--repair", "none", "--no-verify", "--out", out),
        "inside",
        "--out",
    )
    assert not out.exists()
