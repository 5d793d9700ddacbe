"""Models on the Hub: what is downloaded, and how failures are reported.

The real `huggingface_hub` talks to a server on localhost.
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
from originals import write_original
from support import Ran, assert_two_lines, environment, files_of, surgery, write_llama

from surgery.errors import SurgeryError
from surgery.storage.hub import hub_errors
from surgery.storage.patience import LONGEST, TRIES, patiently
from surgery.storage.writer import SLACK

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
NAME = "tiny/llama"
RELUFY = ("relufy", NAME, "--repair", "none", "--no-verify")
UNNEEDED = ("original/consolidated.pth", "pytorch_model.bin", "README.md", "flax_model.msgpack")
SIZES = {"layers": 4, "hidden": 128, "ff": 512, "vocab": 2000}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3.5 MB of weights in two shards, and beside them files that must not be downloaded."""
    folder = write_llama(tmp_path_factory.mktemp("hub") / "model", shards=2, **SIZES)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    (folder / "original").mkdir()
    for name in UNNEEDED:
        (folder / name).write_bytes(bytes(2_000_000))
    return folder


@pytest.fixture
def hub(model: Path) -> Iterator[FakeHub]:
    """A Hub that has the model."""
    with FakeHub() as hub:
        hub.add(NAME, model)
        yield hub


def on(
    hub: FakeHub | str, home: Path, *arguments: object, cwd: Path | None = None, **variables: str
) -> Ran:
    """Run the command line against a Hub, with its cache below `home`."""
    return surgery(*arguments, cwd=cwd, **{**variables_of(hub, home), **variables})


def variables_of(hub: FakeHub | str, home: Path) -> dict[str, str]:
    """Return the environment variables that make `huggingface_hub` use this Hub and cache."""
    endpoint = hub if isinstance(hub, str) else hub.endpoint
    return {"HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"}


def weights_served(hub: FakeHub) -> int:
    return sum(hub.served[f"{NAME}/{shard}"] for shard in SHARDS)


def test_inspect_reads_headers_alone(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    """Inspecting takes one request of 256 kB per shard and leaves no weights in the cache.

    Only so can a 70B model be inspected on a laptop.
    """
    ran = on(hub, tmp_path, "inspect", NAME, "--json")
    assert ran.code == 0, ran.err
    local = surgery("inspect", model, "--json")
    assert ran.json == local.json
    weights = sum((model / s).stat().st_size for s in SHARDS)
    assert weights_served(hub) <= 2 * 256 * 1024 < weights / 5
    assert [hub.requests[f"GET {s}"] for s in SHARDS] == [1, 1]
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
    assert not any(hub.served[f"{NAME}/{n}"] for n in UNNEEDED)


def test_upcycle_fetches_what_it_needs(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    """Each shard is downloaded once, and neither another format nor the original weights.

    The output equals that of a local source, and its record names the commit, not the branch.
    """
    commit = hub.repositories[NAME].refs["main"]
    ran = on(hub, tmp_path, "upcycle", f"{NAME}@main", "--no-verify", "--json", cwd=tmp_path)
    assert ran.code == 0, ran.err
    out = tmp_path / "llama-mixtral-8x-top2"
    assert ran.json["source"] == {"location": NAME, "revision": commit}
    for shard in SHARDS:
        size = (model / shard).stat().st_size
        # The header is read first, then the whole file.
        assert size <= hub.served[f"{NAME}/{shard}"] <= size + 256 * 1024
    # The card takes over the metadata of README.md.
    assert not any(hub.served[f"{NAME}/{n}"] for n in UNNEEDED if n != "README.md")
    assert surgery("upcycle", model, "--no-verify", "--out", tmp_path / "local").code == 0
    ours, local = files_of(out), files_of(tmp_path / "local")
    assert set(ours) == set(local) and {"tokenizer.json", "generation_config.json"} <= set(ours)
    for name in set(ours) - {"surgery.json", "README.md", "recipe.yaml"}:  # These name the source.
        assert ours[name] == local[name], name


def test_a_dry_run_fetches_no_weights(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    ran = on(hub, tmp_path, "upcycle", NAME, "--dry-run", "--json", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert ran.json["out"] == "llama-mixtral-8x-top2" and ran.json["bytes"] > 10_000_000
    weights = sum((model / s).stat().st_size for s in SHARDS)
    assert ran.json["download"] == ran.json["download_disk"] == weights
    assert weights_served(hub) <= 2 * 256 * 1024
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


# The command line, and then the most bytes of weights that were below a folder at one time.
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
    """Of five shards two at most are on the disk at a time, and none afterwards.

    The output is the same as without streaming. The plan says how much is downloaded: some shards
    twice, because the norms are in the last one, and all of them twice more for the verification.
    """
    model = write_llama(tmp_path_factory.mktemp("many") / "model", shards=5, **SIZES)
    sizes = sorted(p.stat().st_size for p in model.glob("*.safetensors"))
    hub.add("tiny/many", model)
    dry = ("upcycle", "tiny/many", "--experts", "2", "--stream", "--dry-run", "--json")
    verified, plan = (on(hub, tmp_path, *dry, *more).json for more in ((), ("--no-verify",)))
    assert plan["download_disk"] == sum(sizes[-2:])
    assert sum(sizes) < plan["download"] < 2 * sum(sizes)
    assert verified["download"] == plan["download"] + 2 * sum(sizes)
    upcycle = (*dry[:5], "--no-verify", "--quiet", "--out")
    script = [sys.executable, "-c", MOST, str(tmp_path / "hf")]
    hub.forget()
    done = subprocess.run(
        [*script, *upcycle, str(tmp_path / "out")],
        env=environment(**variables_of(hub, tmp_path)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert sizes[-1] <= int(done.stdout) <= sum(sizes[-2:])
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
    served = sum(n for name, n in hub.served.items() if name.endswith(".safetensors"))
    headers = sum(min(s, 256 * 1024) for s in sizes)
    assert served == plan["download"] + headers
    ran = surgery("upcycle", model, "--experts", "2", "--no-verify", "--out", tmp_path / "local")
    assert ran.code == 0
    ours, local = ((tmp_path / f / "model.safetensors").read_bytes() for f in ("out", "local"))
    assert ours == local


def test_a_revision_is_pinned(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    """A commit, a branch and main each give their own files, after main has moved on."""
    repository = hub.repositories[NAME]
    first = repository.refs["main"]
    files = repository.commits[first]
    config = json.loads(files["config.json"]) | {"rms_norm_eps": 0.5}
    changed = {**files, "config.json": json.dumps(config).encode()}
    moved = hub.add(NAME, changed, ref="v2/next")
    repository.refs["main"] = moved
    commands = (
        (NAME, moved, ()),
        (f"{NAME}@{first}", first, ()),
        (NAME, moved, ("--revision", "v2/next")),
    )
    for i, (name, commit, more) in enumerate(commands):
        relufy = ("relufy", name, *RELUFY[2:], *more, "--json", "--out", tmp_path / f"out{i}")
        ran = on(hub, tmp_path, *relufy)
        assert ran.code == 0, ran.err
        assert ran.json["source"]["revision"] == commit
        eps = json.loads((tmp_path / f"out{i}" / "config.json").read_text())["rms_norm_eps"]
        assert eps == (1e-5 if commit == first else 0.5)


def test_offline_with_a_cache(hub: FakeHub, tmp_path: Path) -> None:
    """What one run has downloaded serves the next one without the Hub, also by a branch's name.

    The cache may lack the formats that were never needed. The output is recognised as the same one,
    because it is pinned to the same commit.
    """
    command = (*RELUFY, "--out", tmp_path / "out")
    first = on(hub, tmp_path, *command)
    assert first.code == 0, first.err
    hub.forget()
    again = on(hub, tmp_path, *command, HF_HUB_OFFLINE="1")
    assert again.code == 0 and "was there already" in again.out, again
    pinned = f"{NAME}@{hub.repositories[NAME].refs['main']}"
    assert on(hub, tmp_path, "inspect", pinned, HF_HUB_OFFLINE="1").code == 0
    assert not hub.requests


def test_the_original_form_on_the_hub_and_offline(hub: FakeHub, tmp_path: Path) -> None:
    """A repository without a config.json is known by its params.json, also to the cache."""
    hub.add("tiny/original", write_original("llama", tmp_path))
    command = ("upcycle", "tiny/original", "--no-verify", "--out", tmp_path / "out")
    first = on(hub, tmp_path, *command)
    assert first.code == 0, first.err
    hub.forget()
    again = on(hub, tmp_path, *command, HF_HUB_OFFLINE="1")
    assert again.code == 0 and "was there already" in again.out, again
    assert not hub.requests


def test_offline_with_half_a_cache(hub: FakeHub, tmp_path: Path) -> None:
    """After `inspect` the cache has the config but no weights, and the error says so."""
    assert on(hub, tmp_path, "inspect", NAME).code == 0
    ran = on(hub, tmp_path, *RELUFY, cwd=tmp_path, HF_HUB_OFFLINE="1")
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
    ours, local = ((tmp_path / f / "model.safetensors").read_bytes() for f in ("out", "local"))
    assert ours == local


@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_is_busy_at_the_first_question(
    status: int, hub: FakeHub, tmp_path: Path
) -> None:
    """huggingface_hub does not repeat the request for a listing, so that is done here."""
    hub.busy, hub.busy_at = [status] * 2, f"/api/models/{NAME}"
    assert on(hub, tmp_path, "inspect", NAME).code == 0 and hub.busy == []
    hub.busy = [status] * 50
    ran = on(hub, tmp_path, "upcycle", NAME, "--no-verify", cwd=tmp_path)
    assert_two_lines(ran, f"the Hub answers with error {status} for {NAME}", "try again later")
    assert len(hub.busy) == 50 - TRIES


def answer_of(status: int, method: str = "GET", **headers: str) -> HfHubHTTPError:
    """Return what huggingface_hub raises for an answer of this status."""
    request = SimpleNamespace(method=method)
    response = SimpleNamespace(status_code=status, headers=headers, request=request)
    return HfHubHTTPError("no", response=response)


class Busy:
    """A call that fails with these exceptions before it returns."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def test_the_waits_grow_unless_the_hub_says_how_long() -> None:
    waits: list[float] = []
    call = Busy(*(answer_of(s) for s in (429, 500, 502, 503)))
    assert patiently(call, waits.append) == "done" and waits == [1, 2, 4, 8]
    waits.clear()
    told = [{"Retry-After": text} for text in ("7", "3600", "Wed, 21 Oct 2026 07:28:00 GMT")]
    assert patiently(Busy(*(answer_of(429, **t) for t in told)), waits.append) == "done"
    assert waits == [7, LONGEST, 4]


def test_a_hub_that_is_busy_for_good_is_not_asked_for_ever() -> None:
    waits: list[float] = []
    call = Busy(*(answer_of(503) for _ in range(50)))
    with pytest.raises(HfHubHTTPError):
        patiently(call, waits.append)
    assert len(waits) == TRIES - 1 and len(call.errors) == 50 - TRIES


@pytest.mark.parametrize(
    "error", [answer_of(404), answer_of(403), answer_of(413), ValueError("no")]
)
def test_what_will_not_change_is_not_asked_again(error: Exception) -> None:
    waits: list[float] = []
    with pytest.raises(type(error)):
        patiently(Busy(error), waits.append)
    assert not waits


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (answer_of(401), "does not know the token that a/b was asked for with", "hf auth login"),
        (answer_of(403), "this account may not read a/b", "accept its terms"),
        (answer_of(404), "nothing at the address asked for a/b", "check the name"),
        (answer_of(413, "PUT"), "a file for a/b is too large for the Hub", "--max-shard-size"),
        (answer_of(401, "POST"), "may not write to a/b: there is no valid token", "may write"),
        (answer_of(403, "POST"), "may not write to a/b: its token has no right", "role write"),
        (answer_of(429), "answers with error 429 for a/b", "asked several times"),
        (answer_of(503, "PUT"), "answers with error 503 for a/b", "asked several times"),
    ],
)
def test_an_answer_says_what_is_missing(error: Exception, message: str, hint: str) -> None:
    with pytest.raises(SurgeryError) as caught, hub_errors("a/b"):
        raise error
    assert message in caught.value.message and hint in caught.value.hint


def test_a_hub_that_stays_busy_is_not_a_missing_cache() -> None:
    """A failed download raises "not in the cache"; the reason is the cause of that exception."""
    answer = SimpleNamespace(status_code=504, headers={}, request=None)
    causes = (
        (HfHubHTTPError("busy", response=answer), "answers with error 504"),
        (ConnectionError("refused"), "cannot reach the Hub for a/b"),
        (ValueError("something else"), "a/b is not in the cache at main"),
    )
    for cause, words in causes:
        with pytest.raises(SurgeryError, match=words), hub_errors("a/b"):
            raise LocalEntryNotFoundError("not in the cache") from cause


# The command line on a disk with FREE bytes free, and on a disk of the cache with CACHE bytes free.
SMALL_DISK = """
import os, shutil, surgery.cli
def disk_usage(path):
    free = int(os.environ["CACHE" if "/hf" in str(path) else "FREE"])
    return shutil._ntuple_diskusage(10**12, 0, free)
shutil.disk_usage = disk_usage
surgery.cli.main()
"""


def upcycle_with_space(
    hub: FakeHub, home: Path, out: Path, free: int, cache: int | None = None
) -> Ran:
    """Run `upcycle` with `free` bytes free on the disk.

    `cache` is the free space of the cache's disk, by default the same.
    """
    space = {"FREE": str(free), "CACHE": str(free if cache is None else cache)}
    variables = variables_of(hub, home) | space
    command = [sys.executable, "-c", SMALL_DISK, "upcycle", NAME, "--no-verify", "--out", str(out)]
    done = subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, timeout=120
    )
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def sizes(model: Path) -> tuple[int, int]:
    """The bytes of the model's weights, and of the weights that `upcycle` makes of it."""
    plan = surgery("upcycle", model, "--dry-run", "--json").json
    return sum((model / s).stat().st_size for s in SHARDS), sum(s["bytes"] for s in plan["shards"])


def test_downloads_need_space_too(hub: FakeHub, sizes: tuple[int, int], tmp_path: Path) -> None:
    """Output and downloads must fit on the disk together; a cached source needs no room again."""
    source, output = sizes
    ran = upcycle_with_space(hub, tmp_path, tmp_path / "out", source + output + SLACK - 1)
    both = f"needs {(source + output) / 1e9:.2f} GB with {source / 1e9:.2f} GB of downloads"
    assert_two_lines(ran, both, "--out")
    assert weights_served(hub) <= 2 * 256 * 1024 and not (tmp_path / "out").exists()
    assert upcycle_with_space(hub, tmp_path, tmp_path / "out", source + output + SLACK).code == 0
    repository = hub.repositories[NAME]
    files = repository.commits[repository.refs["main"]]
    hub.add(NAME, {**files, "README.md": b"new"})  # another commit with the same weights
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
        out, free, cache = tmp_path / "out", output + SLACK, source + SLACK
        ran = upcycle_with_space(hub, Path(home), out, free, cache - 1)
        needs = f"{home}/hf/hub needs {source / 1e9:.2f} GB of downloads"
        assert_two_lines(ran, needs, "HF_HUB_CACHE")
        assert upcycle_with_space(hub, Path(home), out, free, cache).code == 0


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
    """Each failure is two lines that say what it was, and nothing is written."""
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
    """HF_TOKEN is sent with every request: for the listing, for headers by range, and for files."""
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
    """A path is never sent to the Hub: the names of folders are private."""
    ran = on(hub, tmp_path, "inspect", "./absent/folder")
    assert_two_lines(ran, "no file or folder ./absent/folder")
    assert not hub.requests


def test_never_into_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    out = tmp_path / "hf" / "hub" / "models--tiny--llama" / "out"
    assert_two_lines(on(hub, tmp_path, *RELUFY, "--out", out), "inside", "--out")
    assert not out.exists()
