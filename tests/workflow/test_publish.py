"""Push: the real client, in a process of its own, against a Hub on localhost that speaks the real
protocol.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub import FakeHub
from hub_writes import TOKEN
from support import COMMAND, Ran, assert_two_lines, environment, files_of, surgery, write_llama

from surgery.operations.upcycle import upcycle
from surgery.storage import open_checkpoint
from surgery.workflow.convert import convert_alone

REPO = "me/llama-moe"


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An upcycled llama of several shards, verified, with a licence and a card of its source."""
    folder = tmp_path_factory.mktemp("push")
    model = write_llama(folder / "llama", layers=2)
    (model / "LICENSE").write_text("do as you like")
    (model / "README.md").write_text(
        "---\nlicense: mit\nlanguage: [en, de]\nbase_model: big/llama\n---\n# Llama\nIt is great.\n"
    )
    source = open_checkpoint(model)
    result = convert_alone(
        source, upcycle(source, experts=2), folder / "out", max_shard_size=30_000
    )
    assert result.verification is not None and result.verification.passed
    return folder / "out"


@pytest.fixture
def out(verified: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(verified, tmp_path / "out"))


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        yield hub


@pytest.fixture
def hub(server: FakeHub) -> FakeHub:
    """Without a repository, and with its counts at zero."""
    server.repositories.clear()
    server.large.clear()
    server.forget()
    server.busy, server.held = [], ""
    return server


def variables(hub: FakeHub, home: Path, **more: str) -> dict[str, str]:
    own = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": TOKEN,
    }
    return {k: v for k, v in (own | more).items() if v}


def push(hub: FakeHub, out: Path, *arguments: object, **more: str) -> Ran:
    return surgery("push", out, REPO, *arguments, **variables(hub, out.parent, **more))


def raw(folder: Path) -> dict[str, bytes]:
    """Return the files of an output as they are, its card's name included."""
    return {name: (folder / name).read_bytes() for name in files_of(folder)}


def main_of(hub: FakeHub) -> dict[str, bytes]:
    repository = hub.repositories[REPO]
    return repository.commits[repository.refs["main"]]


def sent(hub: FakeHub) -> int:
    return sum(n for request, n in hub.requests.items() if request.startswith("PUT /lfs/"))


def test_push_and_push_again(hub: FakeHub, out: Path) -> None:
    """All files through a pull request that is merged; again, nothing is sent and nothing
    opened.
    """
    ran = push(hub, out)
    assert ran.code == 0 and "pull request 1 merged" in ran.out, ran
    ours = {n: d for n, d in main_of(hub).items() if n != ".gitattributes"}
    assert ours == raw(out) and {
        "LICENSE",
        "README.md",
        "recipe.yaml",
        "surgery.json",
        "config.json",
    } <= set(ours)
    shards = [n for n in ours if n.endswith(".safetensors")]
    assert sent(hub) == len(shards) > 2
    assert f'name = "{REPO}"' in ours["README.md"].decode()
    hub.forget()
    again = push(hub, out, "--json")
    assert (
        again.code == 0
        and again.json["pull_request"] is None
        and not any(f["send"] for f in again.json["files"])
    )
    assert not [r for r in hub.requests if not r.startswith("GET")], hub.requests


def test_a_pull_request_may_stay_open(hub: FakeHub, out: Path) -> None:
    """--pr: main is as it was; the same push later merges what is there, and sends nothing."""
    hub.add(
        REPO,
        {"README.md": b"mine", "model-00009-of-00009.safetensors": b"old", "notes.txt": b"kept"},
    )
    ran = push(hub, out, "--pr", "--json")
    assert (
        ran.code == 0
        and ran.json["merged"] is False
        and ran.json["url"].endswith(f"/{REPO}/discussions/1")
    )
    assert ran.json["delete"] == ["model-00009-of-00009.safetensors"]
    assert (
        main_of(hub)["README.md"] == b"mine" and hub.repositories[REPO].pulls[0]["status"] == "open"
    )
    count = sent(hub)
    assert push(hub, out).code == 0
    assert sent(hub) == count and len(hub.repositories[REPO].pulls) == 1
    # The old weights would have been loaded too.
    assert set(main_of(hub)) == {*raw(out), "notes.txt"}


def test_an_interrupted_push_goes_on(hub: FakeHub, out: Path) -> None:
    """Killed while a shard is sent: main is empty, and the next run sends what is missing to the
    same pull request.
    """
    record = json.loads((out / "surgery.json").read_text())
    shards = [s["sha256"] for s in record["shards"].values()]
    hub.held = shards[1]
    hub.hanging.clear()
    hub.release.clear()
    process = subprocess.Popen(
        [*COMMAND, "push", str(out), REPO],
        env=environment(**variables(hub, out.parent)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert hub.hanging.wait(60)
    others = [s for s in shards if s != hub.held]
    while not all(s in hub.large for s in others):
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    hub.held = ""
    assert set(main_of(hub)) == {".gitattributes"}
    hub.forget()
    assert push(hub, out).code == 0
    assert [r for r in hub.requests if r.startswith("PUT")] == [f"PUT /lfs/{shards[1]}"]
    assert len(hub.repositories[REPO].pulls) == 1 and {"config.json"} <= set(main_of(hub))
    hub.release.set()


def test_a_dry_run_sends_nothing(hub: FakeHub, out: Path) -> None:
    """With a token the files are compared with those of the Hub, and nothing else is asked."""
    ran = push(hub, out, "--dry-run", "--json")
    sizes = {f["name"]: f["bytes"] for f in ran.json["files"]}
    assert sizes == {n: len(d) for n, d in raw(out).items()} and ran.json["compared"]
    assert ran.json["bytes"] == sum(sizes.values()) and REPO not in hub.repositories
    hub.add(REPO, {"LICENSE": (out / "LICENSE").read_bytes()})
    shown = push(hub, out, "--dry-run").out
    assert f"in {len(sizes) - 1} files" in shown and "is there already" in shown
    assert "Checked: the verification passed" in shown


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"HF_TOKEN": ""}, "there is no token"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot reach the Hub"),
        ({"HF_HUB_OFFLINE": "1"}, "offline"),
    ],
)
def test_a_dry_run_needs_no_network(
    variables: dict[str, str], why: str, hub: FakeHub, out: Path
) -> None:
    """It lists files and sizes, and says that it did not compare."""
    ran = push(hub, out, "--dry-run", "--json", **variables)
    assert ran.code == 0, ran
    assert not ran.json["compared"] and all(f["send"] for f in ran.json["files"])
    assert "not compared" in ran.json["notes"][0] and why.lower() in ran.json["notes"][0].lower()
    assert not hub.requests


def test_private(hub: FakeHub, out: Path) -> None:
    """It is created as a private one; into one that is public already nothing private goes."""
    assert push(hub, out, "--private").code == 0
    assert hub.repositories[REPO].private
    hub.repositories[REPO].private = False
    (out / "README.md").write_text("edited")
    assert_two_lines(push(hub, out, "--private"), f"{REPO} is there and public", "--private")


def test_what_is_not_proved_is_not_published(hub: FakeHub, out: Path) -> None:
    """No verification, a failed one, a shard of another size, a shard of other bytes."""
    record = json.loads((out / "surgery.json").read_text())
    for verification, words in (
        (None, "is not verified"),
        ({"passed": False, "rows": []}, "has not passed"),
    ):
        (out / "surgery.json").write_text(json.dumps(record | {"verification": verification}))
        assert_two_lines(push(hub, out), words, "surgery verify")
    (out / "surgery.json").write_text(json.dumps(record))
    shard = out / next(iter(record["shards"]))
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    assert_two_lines(push(hub, out), f"{shard.name} is not what was verified")
    assert REPO not in hub.repositories
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert_two_lines(
        push(hub, out),
        f"another {shard.name} than was verified",
        "nothing was merged",
        "surgery verify",
    )
    assert set(main_of(hub)) == {".gitattributes"}


@pytest.mark.parametrize(
    ("token", "words"), [("", ("needs a token", "HF_TOKEN")), ("hf_wrong", (REPO, "may not write"))]
)
def test_no_right_to_write(token: str, words: tuple[str, ...], hub: FakeHub, out: Path) -> None:
    assert_two_lines(push(hub, out, HF_TOKEN=token), *words)
    assert REPO not in hub.repositories


@pytest.mark.parametrize(
    ("path", "statuses"),
    [
        ("/lfs/", [500]),
        ("/preupload/", [503]),
        ("/objects/batch", [429]),
        ("/commit/", [500, 502]),
        ("/tree/", [429, 429]),
    ],
)
def test_a_busy_hub_is_asked_again(path: str, statuses: list[int], hub: FakeHub, out: Path) -> None:
    hub.busy, hub.busy_at = statuses, path
    ran = push(hub, out)
    assert ran.code == 0 and hub.busy == [], ran


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/preupload/", 403, (f"may not write to {REPO}: its token has no right to", "role write")),
        ("/lfs/", 413, (f"a file for {REPO} is too large", "--max-shard-size")),
    ],
)
def test_what_the_hub_refuses_to_take(
    path: str, status: int, words: tuple[str, ...], hub: FakeHub, out: Path
) -> None:
    """It is not asked again, and says what is to be done."""
    hub.busy, hub.busy_at = [status] * 50, path
    assert_two_lines(push(hub, out), *words)
    hub.busy = []


def test_a_hub_that_gives_up_on_the_commit(hub: FakeHub, out: Path) -> None:
    """After a few tries it is two lines, and main is not touched; the next run goes on."""
    hub.busy, hub.busy_at = [500] * 50, "/commit/"
    assert_two_lines(push(hub, out), f"the Hub answers with error 500 for {REPO}", "several times")
    assert 0 < len(hub.busy) < 50
    hub.busy = []
    assert set(main_of(hub)) == {".gitattributes"}
    assert push(hub, out).code == 0 and "config.json" in main_of(hub)
    assert len(hub.repositories[REPO].pulls) == 1


def test_a_conversion_pushes(hub: FakeHub, tmp_path: Path) -> None:
    """--push after the verification, --json in one document; the card names the source and its
    commit.
    """
    commit = hub.add("tiny/llama", write_llama(tmp_path / "llama"))
    shared = variables(hub, tmp_path)
    ran = surgery(
        "upcycle",
        "tiny/llama",
        "--experts",
        "2",
        "--push",
        REPO,
        "--json",
        "--out",
        tmp_path / "out",
        **shared,
    )
    assert ran.code == 0 and ran.json["push"]["merged"] and ran.json["verification"]["passed"], ran
    card = main_of(hub)["README.md"].decode()
    assert (
        "\nbase_model: tiny/llama\n" in card
        and "\nbase_model_relation: finetune\n" in card
        and commit[:12] in card
    )
    for arguments, words in (
        (("--push", REPO, "--no-verify"), "--push with --no-verify"),
        (("--private",), "--private and --pr"),
        (("--push", REPO, "--out", "s3://a/b"), "both --push and a URL"),
    ):
        assert_two_lines(surgery("upcycle", "tiny/llama", *arguments, **shared), words, code=2)


# --- what is sent: what the record lists, and nothing else ----------------------------------------


SECRETS = ("id_rsa", "credentials.json", "secrets.env", "notes.md", "__pycache__/a.pyc")


def test_only_what_the_record_lists_is_sent(hub: FakeHub, out: Path, tmp_path: Path) -> None:
    """A stranger's file, link or folder stays here, and is named."""
    (tmp_path / "elsewhere").write_text("mine")
    for name in (*SECRETS, "private/key.pem", "finetune/wandb.key", ".env"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("secret")
    (out / "LINK").symlink_to(tmp_path / "elsewhere")
    (out / "finetune/__pycache__").mkdir()
    for command in (("--dry-run", "--json"), ("--json",)):
        ran = push(hub, out, *command)
        assert ran.code == 0, ran
        (note,) = (n for n in json.loads(ran.out)["notes"] if n.startswith("not sent"))
        for name in (
            *SECRETS[:4],
            "__pycache__/",
            "private/",
            "finetune/wandb.key",
            "LINK",
            ".env",
        ):
            assert name in note, name
        files = {f["name"] for f in json.loads(ran.out)["files"]}
        assert not files & {*SECRETS, "private/key.pem", "LINK", "finetune/wandb.key"}
    ours = {n for n in main_of(hub) if n != ".gitattributes"}
    record = json.loads((out / "surgery.json").read_text())
    assert ours == {*record["shards"], *record["files"], "surgery.json"}
    assert {"config.json", "LICENSE", "README.md", "finetune/finetune.py"} <= ours


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("config.json", "restore it"),
        ("LICENSE", "restore it"),
        ("model.safetensors.index.json", "restore it"),
        ("finetune/finetune.py", "surgery finetune-script"),
    ],
)
def test_a_file_that_was_edited_is_not_sent(name: str, word: str, hub: FakeHub, out: Path) -> None:
    (out / name).write_bytes((out / name).read_bytes() + b" ")
    for option in ((), ("--dry-run",)):
        assert_two_lines(push(hub, out, *option), f"{name} is not what was written", word)
    assert not hub.repositories


def test_a_link_or_nothing_in_the_place_of_a_file(hub: FakeHub, out: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes((out / "config.json").read_bytes())
    (out / "config.json").unlink()
    assert_two_lines(push(hub, out), "config.json is missing")
    (out / "config.json").symlink_to(tmp_path / "other")
    assert_two_lines(push(hub, out), "config.json is a link to ")
    assert not hub.repositories


def test_the_card_and_the_recipe_may_be_completed(hub: FakeHub, out: Path) -> None:
    """Push itself asks for that."""
    for name in ("README.md", "recipe.yaml"):
        (out / name).write_bytes(b"# edited\n" + (out / name).read_bytes())
    assert push(hub, out).code == 0
    assert main_of(hub)["README.md"].startswith(b"# edited\n")
    assert main_of(hub)["recipe.yaml"].startswith(b"# edited\n")


def test_a_card_that_is_not_utf_8_is_refused(hub: FakeHub, out: Path) -> None:
    (out / "README.md").write_bytes(b"caf\xe9")
    assert_two_lines(push(hub, out), "README.md is not UTF-8", "save it in UTF-8")
    assert not hub.repositories


def test_what_later_commands_write_is_sent(hub: FakeHub, out: Path) -> None:
    """The report of an analysis and the figures, and a script that was written again."""
    report = surgery("analyze", out, "--tokens", 64, "--out", out / "report", "-q")
    assert report.code == 0, report
    assert surgery("inspect", out, "--plot", out / "shares.svg").code == 0
    (out / "finetune/finetune.py").write_text("broken")
    assert surgery("finetune-script", out, "-q").code == 0
    ran = push(hub, out, "--json")
    assert ran.code == 0, ran
    assert {"report/report.html", "report/analysis.json", "shares.svg"} <= set(main_of(hub))
    assert not [n for n in json.loads(ran.out)["notes"] if n.startswith("not sent")]


def test_a_record_without_its_files_is_refused(hub: FakeHub, out: Path) -> None:
    record = json.loads((out / "surgery.json").read_text())
    del record["files"]
    (out / "surgery.json").write_text(json.dumps(record))
    assert_two_lines(push(hub, out), "does not list its files", "convert the model again")
    for name in ("../id_rsa", "/etc/passwd", "a/../../b", ".git/config", "a//b", ""):
        (out / "surgery.json").write_text(json.dumps(record | {"files": {name: "0"}}))
        assert_two_lines(push(hub, out), "names a file outside its folder")


def test_an_edited_config_fails_the_verification(out: Path, verified: Path) -> None:
    """The logits need not show it: a limit on positions moves none of those that are compared."""
    config = json.loads((out / "config.json").read_text())
    config["max_position_embeddings"] += 1
    (out / "config.json").write_text(json.dumps(config))
    ran = surgery("verify", verified.parent / "llama", out)
    assert ran.code == 1 and "files changed since they were written" in ran.out + ran.err
    record = json.loads((out / "surgery.json").read_text())
    row = next(r for r in record["verification"]["rows"] if r["key"] == "files_changed")
    assert row["detail"] == ["config.json"] and not row["passed"]
