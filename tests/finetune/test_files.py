"""The files of finetune/ beside a conversion, before any of them runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from scripts import OPERATIONS, Converted
from support import Call, environment, files_of

from surgery import finetune

Convert = Callable[[str], Converted]
FILES = {"finetune.py", "fsdp2.yaml", "zero3.yaml", "axolotl.yaml", "requirements.txt", "smoke.txt"}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_script_is_short_enough_to_read(name: str, conversions: Convert) -> None:
    """A script has at most 215 lines of at most 100 columns.

    Nothing is left of the template either: no tag, no unused import, no run of blank lines.
    """
    text = conversions(name).script.read_text()
    lines = text.splitlines()
    assert len(lines) <= 215 and max(map(len, lines)) <= 100
    assert not re.search(r"{{|{%|\n\n\n\n|\n\n\n    ", text)
    for imported in re.findall(r"^ *(?:from \S+ )?import (.+)$", text, re.MULTILINE):
        for word in imported.split(", "):
            assert len(re.findall(rf"\b{word}\b", text)) > 1, word


def test_its_table_has_what_the_operation_needs(conversions: Convert) -> None:
    """The table of stages follows from the operations.

    L1 rises for a relufied model, thresholds rise unless a repair fitted the weights to them, and
    routers train alone at first. Mixing up the columns would train with the wrong weights in
    silence.
    """

    def stages(name: str) -> list[tuple[object, ...]]:
        found = re.search(r"^STAGES = (.*\])", conversions(name).script.read_text(), re.MULTILINE)
        return eval(found[1]) if found else []

    assert stages("copy") == stages("splines") == []
    assert stages("relufy") == [(0.1, 0.0), (0.4, 0.5), (0.7, 1.0), (1.0, 1.0)]
    assert [row[2] for row in stages("fatrelu")] == [0.0, 0.5, 1.0, 1.0]
    routers, everything = stages("mixtral")
    assert re.search(str(routers[1]), "model.layers.0.mlp.gate.weight") and everything == (1.0, "")
    assert not re.search(str(routers[1]), "model.layers.0.mlp.experts.gate_up_proj")
    assert stages("relufied mixtral") == stages("mixtral")


def test_launch_configs_are_accelerates(conversions: Convert) -> None:
    """accelerate itself reads the launch configurations."""
    folder = conversions("relufy").script.parent
    names = ("fsdp2.yaml", "zero3.yaml")
    fsdp, zero = (load_config_from_file(str(folder / name)) for name in names)
    assert fsdp.num_processes == zero.num_processes == 8
    assert fsdp.mixed_precision == zero.mixed_precision == "bf16"
    assert fsdp.fsdp_config["fsdp_version"] == 2 and zero.deepspeed_config["zero_stage"] == 3


def test_axolotls_config(conversions: Convert) -> None:
    """It gives a memory's values a learning rate of their own, and trains coefficients alone."""
    memory, splines = (
        yaml.safe_load(conversions(n).script.with_name("axolotl.yaml").read_text())
        for n in ("memory", "splines")
    )
    assert memory["lr_groups"][0]["modules"] == ["memory_values"]
    assert memory["lr_groups"][0]["lr"] == 10 * memory["learning_rate"]
    assert splines["unfrozen_parameters"] == [r"\.coefficients$"]
    assert memory["trust_remote_code"] and splines["trust_remote_code"]


def test_neurons_in_a_memory_have_no_rate_of_their_own(conversions: Convert) -> None:
    """A memory of an MLP's own neurons trains at the common rate, since it was trained before.

    The table beside an MLP was drawn at random, and has a rate of its own.
    """
    converted = conversions("memory of neurons")
    groups = converted.module().GROUPS
    values = [n for n in converted.weights() if "values" in n]
    rates = {n: next(rate for pattern, rate, _ in groups if re.search(pattern, n)) for n in values}
    neurons = {f"model.memory_values_1.{part}": 1.0 for part in ("gate", "up", "down")}
    assert rates == {"model.memory_values_0.weight": 10.0, **neurons}
    axolotl = yaml.safe_load(converted.script.with_name("axolotl.yaml").read_text())
    assert axolotl["lr_groups"][0]["modules"] == ["memory_values_0."]


def test_the_command_writes_them_again(conversions: Convert, tmp_path: Path, call: Call) -> None:
    """`finetune-script` restores an edited script, and --dry-run leaves it alone."""
    folder = conversions("mixtral").folder
    before = files_of(folder)
    assert {n.removeprefix("finetune/") for n in before if n.startswith("finetune/")} == FILES
    script = folder / "finetune" / "finetune.py"
    script.write_text("edited")
    shown = call("finetune-script", folder, "--dry-run", "--json")
    assert script.read_text() == "edited"
    assert shown.json[str(script)] == len(before["finetune/finetune.py"])
    assert call("finetune-script", folder, "--quiet").code == 0 and files_of(folder) == before
    failed = call("finetune-script", tmp_path)
    assert failed.code == 1 and "no surgery.json" in failed.err


def test_a_recipe_gives_the_script_options(tmp_path: Path, call: Call) -> None:
    """A recipe's options are in the script, before those of the command line.

    They survive `finetune-script`, and the recipe of the output has them too.
    """
    options = "{max_steps: 7, l1: 0.5, run_name: 'a \"b\"'}"
    text = "source: demo\noperations: [{operation: relufy, repair: none}]\n"
    (tmp_path / "my.yaml").write_text(f"{text}finetune: {options}\n")
    out = tmp_path / "out"
    assert call("run", tmp_path / "my.yaml", "--out", out, "--no-verify", "--quiet").code == 0
    script = (out / "finetune/finetune.py").read_text()
    given = re.search(r"^GIVEN = (\[.*\])$", script, re.MULTILINE)
    assert given and eval(given[1]) == ["--max_steps=7", "--l1=0.5", '--run_name=a "b"']
    assert "[*GIVEN, *(sys.argv[1:] if arguments is None else arguments)]" in script
    assert yaml.safe_load((out / "recipe.yaml").read_text())["finetune"]["l1"] == 0.5
    before = files_of(out)
    assert call("finetune-script", out, "--quiet").code == 0 and files_of(out) == before
    assert call("run", out / "recipe.yaml", "--out", out, "--no-verify", "--quiet").code == 0
    change = ("run", tmp_path / "my.yaml", "--set")
    failed = call(*change, "finetune.l1=1", "--out", out, "--no-verify")
    assert failed.code == 1 and "other options" in failed.err and files_of(out) == before
    failed = call(*change, "finetune.l1=[1]", "--out", tmp_path / "no")
    assert failed.code == 1 and "l1 is [1]" in failed.err


def test_a_model_of_an_unknown_family_has_a_plain_script() -> None:
    """A copy of a model of an unknown family gets a script without stages."""
    record = {"recipe": [], "exact": True, "source": {"location": "OWNER/NAME", "revision": None}}
    text = finetune.files(record, {"model_type": "unheard_of"})["finetune/finetune.py"].decode()
    assert "STAGES" not in text and "class Trainer" not in text and "SFTTrainer(" in text


def test_no_file_names_a_folder_of_this_disk(conversions: Convert) -> None:
    """The output may be published, and still finds a source beside it if both are moved."""
    converted = conversions("relufy")
    for file in converted.script.parent.iterdir():
        assert str(converted.source.parent) not in file.read_text(encoding="utf-8"), file.name
    assert f'source: str = "../{converted.source.name}"' in converted.script.read_text()


@pytest.mark.parametrize(
    ("source", "output", "named"),
    [
        ("llama", "llama-relu", "../llama"),
        ("models/llama", "outputs/llama-relu", "../../models/llama"),
        ("far/away/llama", "out/puts/llama-relu", "../llama"),
    ],
)
def test_a_source_on_this_disk_is_named_from_the_output(
    source: str, output: str, named: str, tmp_path: Path
) -> None:
    """By a relative path if it is near, and otherwise without the folders that it is in."""
    for folder in (source, output):
        (tmp_path / folder).mkdir(parents=True)
    location = {"location": str(tmp_path / source), "revision": None}
    record = {"recipe": [{"operation": "relufy", "repair": "none"}], "source": location}
    assert finetune.needs(record, {"model_type": "llama"}, tmp_path / output).source == named


def test_a_source_that_is_gone_keeps_its_name_alone() -> None:
    """As when the output is on another machine than the one that made it."""
    record = {"recipe": [], "source": {"location": "/home/someone/llama", "revision": None}}
    assert finetune.needs(record, {"model_type": "llama"}).source == "../llama"


def test_without_its_requirements_the_script_says_how_to_install_them(
    conversions: Convert, tmp_path: Path
) -> None:
    """One line, and not the traceback of an import that failed."""
    (tmp_path / "trl.py").write_text("raise ModuleNotFoundError(\"No module named 'trl'\")\n")
    script = conversions("copy").script
    done = subprocess.run(
        [sys.executable, script.name, "--smoke"],
        cwd=script.parent,
        env=environment() | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: No module named 'trl'; to install it: pip install -r requirements.txt"
    ]
