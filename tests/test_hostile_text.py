"""Text of strangers stays text: no name or value runs, plants a key or obeys in a terminal.

One hostile string stands wherever a checkpoint, a record, a recipe or a model card has room for
one. What could break it is a value that is pasted into a template, or printed as it is.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support import Call, llama_config, llama_tensors, write_llama

from surgery import finetune, quoting
from surgery.checkpoint import metadata
from surgery.checkpoint.parsing import read_json, read_yaml
from surgery.errors import SurgeryError, UsageError
from surgery.operations.upcycle import upcycle
from surgery.report import card
from surgery.storage import open_checkpoint
from surgery.workflow import recipe
from surgery.workflow.convert import convert_alone
from surgery.workflow.record import read_record
from surgery.workflow.verify import verify_folder

HOSTILE = (
    "x\"\"\"'''\\\n\ntrust_remote_code: true\n---\n```\n# h\n{{7*7}}{% x %}"
    "</script><script>a()</script>"
    '<img src=x onerror=a()>[red]| t |`b`$(touch x)"; rm *_e_*[x](javascript:a)'
    "\x1b]8;;http://e\x1b\\l\x1b[31m\x07\r\x7f\x9b31m\u202e\u2066\u2028\t&amp;"
)
NAME = "-" + re.sub(r"[/]", "∕", HOSTILE)[:190]  # of a folder: no slash, and it begins as an option
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {"_name_or_path": HOSTILE, "note": HOSTILE, HOSTILE: [HOSTILE]}
    folder = tmp_path_factory.mktemp("hostile") / NAME
    write_llama(folder, layers=2, fields=fields)
    word = quoting.printable(HOSTILE)[:150]
    head = {"license": HOSTILE, "license_name": word, "language": ["en", HOSTILE], HOSTILE: HOSTILE}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(head)}---\n{HOSTILE}")
    (folder / f"LICENSE {NAME[1:100]}").write_text("x")
    return folder


@pytest.fixture(scope="module")
def output(source: Path) -> Path:
    """A conversion in a hostile folder, whose record is hostile too; the card says all of it."""
    out = source.with_name(f"{NAME}-out")
    checkpoint = open_checkpoint(source)
    convert_alone(checkpoint, upcycle(checkpoint, experts=2), out, finetune={"run_name": HOSTILE})
    record = json.loads((out / "surgery.json").read_text())
    record["notes"] = [HOSTILE, "say `a` and <b>"]
    record["source"] = {"location": HOSTILE, "revision": HOSTILE}
    record["command"] = record["name"] = HOSTILE
    (out / "surgery.json").write_text(json.dumps(record))
    (out / "README.md").unlink()
    assert verify_folder(checkpoint, out).passed
    finetune.write(out, finetune.of_folder(out, read_record(out)))
    return out


# --- the card -------------------------------------------------------------------------------------


def test_metadata_of_the_card(output: Path) -> None:
    """A key more, and the Hub would take the card's word for it."""
    _, head, body = (output / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "transformers",
        "license_name": quoting.printable(HOSTILE)[:150],
        "language": ["en"],
        "pipeline_tag": "text-generation",
        "tags": ["mixture-of-experts", "upcycling", "surgery"],
    }
    assert body.startswith("\n# ") and not CONTROL.search(body)


def test_the_card_has_the_lines_and_tags_of_ours(output: Path) -> None:
    """Headings, HTML, links and blocks of code are those of the template, and of nothing else."""
    body = (output / "README.md").read_text().split("---\n", 2)[2]
    outside = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", body, flags=re.DOTALL | re.MULTILINE)
    assert [line for line in outside.splitlines() if line.startswith("#")][1:] == [
        "## What was done, and why",
        "## Before and after",
        "## Verification",
        "## How to load it",
        "## How to evaluate it",
        "## How to fine-tune it",
        "## Limits",
        "## Licence",
    ] + ["## Citations"] * ("## Citations" in outside)
    assert {tag for tag, _ in tags(without_code(outside))} == {"details", "summary"}
    links = re.findall(r"(?<!\\)\]\(([^)]*)\)", without_code(outside))
    assert all(link.startswith(("https://github.com/", "#", "layers.svg")) for link in links), links
    assert "- say `a` and &lt;b&gt;\n" in outside
    for line in without_code(outside).splitlines():
        if line.startswith("| "):
            assert len(re.findall(r"(?<!\\)\|", line)) == 4, line


def test_the_code_of_the_card(output: Path) -> None:
    """The snippet assigns the very name of the folder; the command has it as one word."""
    body = (output / "README.md").read_text()
    code = re.search(r"^```python\n(.*?)^```$", body, re.DOTALL | re.MULTILINE)
    assert code
    assigned = ast.parse(code[1]).body[1]
    assert isinstance(assigned, ast.Assign)
    assert ast.literal_eval(assigned.value) == output.name
    assert len(ast.parse(code[1]).body) == 6
    line = next(line for line in body.splitlines() if line.startswith("lm_eval --model hf"))
    words = in_bash(line)
    assert words[4] == f"pretrained={output.name},dtype=auto" and len(words) == 9
    assert card.is_ours(output)
    pushed = card.renamed(output, "me/moe")["README.md"].decode()
    assert 'name = "me/moe"\n' in pushed and "pretrained=me/moe,dtype" in pushed


# --- finetune/ ------------------------------------------------------------------------------------


def test_the_script_is_ours(output: Path) -> None:
    """It parses, and differs from the script of a harmless conversion in values alone."""
    script = ast.parse((output / "finetune/finetune.py").read_text())
    assigned = {
        node.targets[0].id: node.value
        for node in script.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert ast.literal_eval(assigned["GIVEN"]) == [f"--run_name={HOSTILE}"]
    start = "Train the checkpoint in the folder above this one (upcycle).\n"
    assert (ast.get_docstring(script) or "").startswith(start)
    record = {**read_record(output), "finetune": {"run_name": "x"}}
    record["source"] = {"location": "me/x", "revision": "0" * 40}
    plain = finetune.of_folder(output, record)["finetune/finetune.py"].decode()
    assert shape(script) == shape(ast.parse(plain))


def test_scripts_of_hostile_values() -> None:
    """Every value that a template has: the source, its commit, the tables of a memory."""
    record = {
        "recipe": [{"operation": "relufy", "repair": "none"}],
        "source": {"location": HOSTILE, "revision": HOSTILE},
    }
    files = finetune.files(record, llama_config())
    script = ast.parse(files["finetune/finetune.py"])
    source = next(
        node.value
        for node in ast.walk(script)
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "source"
    )
    assert source is not None and ast.literal_eval(source) == HOSTILE
    tables = [{"kind": "memory", "shared": HOSTILE, "slots": 4}, {"kind": "memory", "slots": 1}]
    tables[1] |= {"shared": "a", "slots": "neurons"}
    hostile = {**llama_config(), "surgery_blocks": tables}
    files = finetune.files({**record, "recipe": []}, hostile)
    ast.parse(files["finetune/finetune.py"])
    axolotl = yaml.safe_load(files["finetune/axolotl.yaml"])
    assert axolotl["lr_groups"][0]["modules"] == [f"{HOSTILE}."]
    assert "trust_remote_code" not in axolotl
    for name in ("fsdp2.yaml", "zero3.yaml", "requirements.txt"):
        plain = finetune.files({**record, "recipe": []}, llama_config())
        assert files[f"finetune/{name}"] == plain[f"finetune/{name}"]


def test_a_step_of_no_operation(output: Path, call: Call) -> None:
    """A step's name chooses a module, and stands in titles and docstrings."""
    for step, seen in (
        ({"operation": HOSTILE}, "unknown operation"),
        ({"operation": "operation"}, "unknown operation 'operation'"),
        ({"operation": "../x"}, "unknown operation '../x'"),
        ({"operation": "upcycle"}, "a step of upcycle has other parameters"),
        ({"operation": "relufy", "layers": 3}, "a step of relufy has other parameters"),
    ):
        folder = output.with_name("record")
        folder.mkdir(exist_ok=True)
        record = json.loads((output / "surgery.json").read_text()) | {"recipe": [step]}
        (folder / "surgery.json").write_text(json.dumps(record))
        with pytest.raises(SurgeryError, match=re.escape(seen)):
            read_record(folder)
        ran = call("finetune-script", folder)
        assert ran.code == 1 and seen in ran.err and len(ran.err.splitlines()) == 2


# --- HTML -----------------------------------------------------------------------------------------


def test_the_report_has_the_tags_of_ours(tmp_path: Path, call: Call) -> None:
    """A page of a hostile model has the elements and attributes of a harmless one."""
    pages = {}
    for name in ("plain", NAME):
        folder = write_llama(tmp_path / name, layers=2)
        out = tmp_path / f"report-{len(pages)}"
        ran = call("analyze", folder, "--tokens", 64, "--out", out)
        assert ran.code == 0 and not CONTROL.search(ran.out), ran.err
        pages[name] = (out / "report.html").read_text()
    assert not CONTROL.search(pages[NAME])
    assert list(tags(pages[NAME])) == list(tags(pages["plain"]))


# --- the terminal ---------------------------------------------------------------------------------


def test_no_output_obeys_a_stranger(source: Path, output: Path, call: Call) -> None:
    """Control characters of folders and records are visible, in tables, notes and errors."""
    for arguments in (
        ["inspect", source],
        ["inspect", source, "--json"],
        ["upcycle", source, "--experts", 2, "--dry-run"],
        ["upcycle", source, "--experts", 2, "--print-recipe"],
        ["relufy", source, "--analysis", output, "--sparsity", 0.5, "--activation", "teal"],
        ["verify", source, output],
        ["verify", source, source],
        ["finetune-script", output],
        ["push", output, "me/x", "--dry-run"],
        ["run", source / HOSTILE],
        ["run", "demo-upcycle", "--set", HOSTILE],
        [HOSTILE],
        ["inspect", f"no/{NAME}"],
    ):
        ran = call(*(f"./{a}" if str(a).startswith("-out") else a for a in arguments))
        assert not CONTROL.search(ran.out + ran.err), (
            arguments,
            CONTROL.findall(ran.out + ran.err),
        )
        assert "Traceback" not in ran.err and "this is a bug" not in ran.err, ran.err
    assert ran.code


def test_json_is_the_same_value(source: Path, call: Call) -> None:
    """`--json` is valid, and its text is not the visible form of anything."""
    shown = call("upcycle", source, "--experts", 2, "--dry-run", "--json")
    assert shown.code == 0 and not CONTROL.search(shown.out)
    assert NAME in shown.json["out"]


def test_recipes_hold_any_value(source: Path, tmp_path: Path, call: Call) -> None:
    shown = call("upcycle", source, "--experts", 2, "--print-recipe").out
    assert yaml.safe_load(shown)["source"] == str(source.resolve()) and not CONTROL.search(shown)


def test_commands_are_copied_as_they_are(source: Path, output: Path, call: Call) -> None:
    """bash reads the very path out of a command that is shown."""
    ran = call("verify", source, output)
    found = [line for line in ran.out.splitlines() if line.strip().startswith("fine-tune")]
    words = in_bash(found[0].strip().removeprefix("fine-tune").strip())
    assert words == ["python", str(output / "finetune/finetune.py"), "--smoke"]
    ran = call("relufy", source, "--analysis", output, "--sparsity", 0.5, "--activation", "teal")
    hint = next(line for line in ran.err.splitlines() if line.startswith("hint"))
    assert in_bash(hint.partition("surgery ")[2])[-1] == str(output)


def test_tensors_of_hostile_names(tmp_path: Path, call: Call) -> None:
    name = "model.layers.[red]`|$(x)<b>.weight"
    tensors = {**llama_tensors(), name: torch.ones(2)}
    folder = write_llama(tmp_path / "names", tensors=tensors)
    ran = call("upcycle", folder, "--experts", 2, "--out", tmp_path / "out")
    assert ran.code == 0 and name in open_checkpoint(tmp_path / "out").tensors
    index = {"weight_map": {HOSTILE: HOSTILE}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    ran = call("upcycle", folder, "--dry-run")
    assert ran.code == 1 and len(ran.err.splitlines()) == 2 and not CONTROL.search(ran.err)


# --- what is read ---------------------------------------------------------------------------------

BOMB = "a: &a [x, x]\n" + "".join(
    f"b{i}: &b{i} [*{'a' if i == 0 else f'b{i - 1}'}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    ("head", "kept", "noted"),
    [
        (BOMB, {}, "aliases"),
        ("license: mit\nwhen: 2024-01-01\ndate: 2024-01-01 10:00:00", {"license": "mit"}, ""),
        ("license: 2024-01-01", {"license": "2024-01-01"}, ""),
        ("license: [a, {b: c}, 3, d]", {"license": ["a", "d"]}, ""),
        ("license: mit\nx: " + "y" * 100_000, {}, "no end"),
        ("- " * 20_000, {}, "inside more than"),
        ("[" * 20_000, {}, "brackets"),
        ("license: mit\nx: !!python/object/apply:os.system [ls]", {}, "the tag"),
        ("license: mit\nn: " + "9" * 5000, {}, "not YAML"),
        ("license: 'a", {}, "not YAML"),
        ("just words", {}, ""),
    ],
    ids=[
        "bomb",
        "dates",
        "date",
        "list",
        "long",
        "deep",
        "open",
        "tag",
        "number",
        "quote",
        "words",
    ],
)
def test_metadata_never_stops_a_conversion(
    head: str, kept: dict[str, Any], noted: str, tmp_path: Path
) -> None:
    """What cannot be read is dropped with a note, in little time."""
    folder = write_llama(tmp_path / "model")
    (folder / "README.md").write_text(f"---\n{head}\n---\n# x\n")
    checkpoint, start = open_checkpoint(folder), time.monotonic()
    assert metadata.metadata_of(checkpoint) == kept
    note = metadata.unread(checkpoint)
    assert (noted in note and note) if noted else note == ""
    assert time.monotonic() - start < 5


def test_the_note_is_in_the_record(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    (folder / "README.md").write_text("---\na: &a 1\n---\n")
    checkpoint = open_checkpoint(folder)
    made = upcycle(checkpoint, experts=2)
    result = convert_alone(checkpoint, made, tmp_path / "out", verify=False)
    assert any("aliases and anchors are not read" in note for note in result.record["notes"])


def test_keys_that_stand_twice() -> None:
    """An error, unless somebody is told of them: then the last counts, as for transformers."""
    text, seen = '{"a": 1, "b": {"c": 1, "c": 2}, "a": 3}', list[str]()
    with pytest.raises(SurgeryError, match="'c' stands in it twice"):
        read_json(text, "x", "")
    assert read_json(text, "x", "", seen) == {"a": 3, "b": {"c": 2}} and seen == ["c", "a"]


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("[" * 900 + "]" * 900, "more than 50 deep"),
        ("[" * 100_000, "more than 50 deep"),
        ('{"a": NaN}', "NaN"),
        ('{"a": ' + "1" * 5000 + "}", "a number of 5,000 digits"),
        ('{"a": 1e999}', "too large"),
        ('{"a": "\\ud800"}', "surrogates"),
    ],
)
def test_json_beyond_limits(text: str, seen: str, tmp_path: Path, call: Call) -> None:
    """In a config, an index, a record and a tokenizer's config: one error, and no traceback."""
    with pytest.raises(SurgeryError, match=re.escape(seen)):
        read_json(text, "x", "")
    folder = write_llama(tmp_path / "model")
    for name, arguments in (
        ("surgery.json", ["finetune-script", folder]),
        ("config.json", ["inspect", folder]),
        ("model.safetensors.index.json", ["upcycle", folder, "--dry-run"]),
    ):
        (folder / name).write_text(text)
        if "index" in name:
            write_llama(folder)
            (folder / "model.safetensors").unlink()
        ran = call(*arguments)
        assert ran.code == 1 and seen in ran.err and name in ran.err, ran.err
    write_llama(folder)
    (folder / "tokenizer_config.json").write_text(text.replace("{", '{"TokenizersBackend": 1, ', 1))
    ran = call("upcycle", folder, "--experts", 2, "--out", tmp_path / "out")
    assert ran.code == 0 and (tmp_path / "out/tokenizer_config.json").is_file(), ran.err


def test_infinity_is_a_number_of_configs() -> None:
    """State-space models have it in time_step_limit."""
    assert read_json('{"time_step_limit": [0.0, Infinity]}', "x", "")["time_step_limit"][1] > 1e300


@pytest.mark.parametrize(
    "fields",
    [
        {"num_labels": 10**9},
        {"num_hidden_layers": 2**31 - 1},
        {"num_hidden_layers": 10**12},
        {"num_experts": 10**12},
        {"num_experts": 10**6},
        {"vocab_size": -1},
        {"vocab_size": True},
        {"vocab_size": 64.0},
        {"vocab_size": 2**40},
        {"vision_config": {"depth": 10**9}},
        {"towers": [{"num_layers": [2, 10**9]}]},
        {"text_config": {"num_labels": 10**9}},
    ],
    ids=str,
)
def test_counts_beyond_limits(fields: dict[str, Any], tmp_path: Path) -> None:
    """Refused before anything is made one by one."""
    folder, start = write_llama(tmp_path / "model", fields={}), time.monotonic()
    (folder / "config.json").write_text(json.dumps(llama_config() | fields))
    with pytest.raises(SurgeryError, match=r"num_|vocab_size|depth"):
        open_checkpoint(folder)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "change", ["operations.²=1", "operations.٣=1", "operations.0.experts=&a 1"]
)
def test_digits_are_ascii(change: str) -> None:
    text = "operations: [{operation: upcycle}]\n"
    with pytest.raises(UsageError):
        recipe.parse(text, "x.yaml", [change])
    with pytest.raises(UsageError):
        recipe.parse_layers("٣")


def test_yaml_has_plain_values() -> None:
    found = read_yaml("a: 1e-3\nb: 2024-01-01\nc: [x, true, null]", "x", "")
    assert found == {"a": 1e-3, "b": "2024-01-01", "c": ["x", True, None]}


# --- quoting --------------------------------------------------------------------------------------


def test_each_way_of_quoting() -> None:
    assert quoting.printable("a\x1b\n\u202e\udc80b") == r"a\x1b\n\u202e\udc80b"
    assert quoting.printable("a\n\tb", lines=True) == "a\n\\tb"
    assert (
        ast.literal_eval(quoting.python(HOSTILE + "\udc80\U000e0001"))
        == HOSTILE + "\udc80\U000e0001"
    )
    assert quoting.python(HOSTILE).isprintable()
    assert json.loads(quoting.printable_json(json.dumps(HOSTILE, ensure_ascii=False))) == HOSTILE
    assert in_bash(quoting.command("a", HOSTILE, Path("-rf"))) == ["a", HOSTILE, "./-rf"]
    assert shlex.split(quoting.command("a b", "$(x)")) == ["a b", "$(x)"]
    assert quoting.code("a``b`") == "``` a``b` ```" and quoting.code("") == "`  `"
    assert quoting.fenced("````\n", "yaml") == "`````yaml\n````\n\n`````"


def in_bash(command: str) -> list[str]:
    """Return the words that bash reads in a command."""
    show = [sys.executable, "-c", "import sys, json; print(json.dumps(sys.argv[1:]))"]
    line = f"{shlex.join(show)} {command}"
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    words: list[str] = json.loads(ran.stdout)
    return words


def without_code(text: str) -> str:
    """Return Markdown without its code spans."""
    return re.sub(r"(?<![\\`])(`+)(?!`)(.*?)(?<!`)\1(?!`)", "", text)


def tags(page: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the elements of a page, each with the names of its attributes."""
    found: list[tuple[str, tuple[str, ...]]] = []

    class Page(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, tuple(name for name, _ in attrs)))

    parser = Page()
    parser.feed(page)
    parser.close()
    yield from found


def shape(script: ast.AST) -> list[str]:
    """Return the kinds of nodes of a script."""
    return [type(node).__name__ for node in ast.walk(script)]
