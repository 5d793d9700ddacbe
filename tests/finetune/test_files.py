"""What stands in finetune/ beside a conversion, before any of it runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from scripts import OPERATIONS, Converted
from support import files_of, surgery

from surgery import finetune

Convert = Callable[[str], Converted]
FILES = {"finetune.py", "fsdp2.yaml", "zero3.yaml", "axolotl.yaml", "requirements.txt", "smoke.txt"}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_script_is_short_enough_to_read(name: str, conversions: Convert) -> None:
    """And nothing is left of the template: no tag, no import that is not used, no run of blank
    lines.
    """
    text = conversions(name).script.read_text()
    lines = text.splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 120
    assert not re.search(r"{{|{%|\n\n\n\n|\n\n\n    ", text)
    for imported in re.findall(r"^(?:from \S+ )?import (.+)$", text, re.MULTILINE):
        for word in imported.split(", "):
            assert len(re.findall(rf"\b{word}\b", text)) > 1, word


def test_its_table_has_what_the_operation_needs(conversions: Convert) -> None:
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
    folder = conversions("relufy").script.parent
    fsdp, zero = (
        load_config_from_file(str(folder / name)) for name in ("fsdp2.yaml", "zero3.yaml")
    )
    assert (
        fsdp.num_processes == zero.num_processes == 8
        and fsdp.mixed_precision == zero.mixed_precision == "bf16"
    )
    assert fsdp.fsdp_config["fsdp_version"] == 2 and zero.deepspeed_config["zero_stage"] == 3


def test_axolotls_config(conversions: Convert) -> None:
    """It can give the values of a memory their own rate, and train coefficients alone."""
    memory, splines = (
        yaml.safe_load(conversions(n).script.with_name("axolotl.yaml").read_text())
        for n in ("memory", "splines")
    )
    assert (
        memory["lr_groups"][0]["modules"] == ["memory_values"]
        and memory["lr_groups"][0]["lr"] == 10 * memory["learning_rate"]
    )
    assert (
        splines["unfrozen_parameters"] == [r"\.coefficients$"]
        and memory["trust_remote_code"]
        and splines["trust_remote_code"]
    )


def test_neurons_in_a_memory_have_no_rate_of_their_own(conversions: Convert) -> None:
    """They were trained already; the table beside an MLP was not."""
    converted = conversions("memory of neurons")
    groups = converted.module().GROUPS
    rates = {
        n: next(rate for pattern, rate, _ in groups if re.search(pattern, n))
        for n in converted.weights()
        if "values" in n
    }
    assert rates == {"model.memory_values_0.weight": 10.0} | {
        f"model.memory_values_1.{part}": 1.0 for part in ("gate", "up", "down")
    }
    axolotl = yaml.safe_load(converted.script.with_name("axolotl.yaml").read_text())
    assert axolotl["lr_groups"][0]["modules"] == ["memory_values_0."]


def test_the_command_writes_them_again(conversions: Convert, tmp_path: Path) -> None:
    folder = conversions("mixtral").folder
    before = files_of(folder)
    assert {n.removeprefix("finetune/") for n in before if n.startswith("finetune/")} == FILES
    script = folder / "finetune" / "finetune.py"
    script.write_text("edited")
    shown = surgery("finetune-script", folder, "--dry-run", "--json")
    assert script.read_text() == "edited" and shown.json[str(script)] == len(
        before["finetune/finetune.py"]
    )
    assert surgery("finetune-script", folder, "--quiet").code == 0 and files_of(folder) == before
    failed = surgery("finetune-script", tmp_path)
    assert failed.code == 1 and "no surgery.json" in failed.err


def test_a_recipe_gives_the_script_options(tmp_path: Path) -> None:
    """They survive `finetune-script`, stand in the output's recipe, and a command's own come after
    them.
    """
    text = "source: demo\noperations: [{operation: relufy, repair: none}]\nfinetune: {max_steps: 7, l1: 0.5, run_name: 'a \"b\"'}\n"
    (tmp_path / "my.yaml").write_text(text)
    out = tmp_path / "out"
    assert surgery("run", tmp_path / "my.yaml", "--out", out, "--no-verify", "--quiet").code == 0
    script = (out / "finetune/finetune.py").read_text()
    given = re.search(r"^GIVEN = (\[.*\])  #", script, re.MULTILINE)
    assert given and eval(given[1]) == ["--max_steps=7", "--l1=0.5", '--run_name=a "b"']
    assert (
        script.count("\n") <= 150
        and "[*GIVEN, *(sys.argv[1:] if arguments is None else arguments)]" in script
    )
    assert yaml.safe_load((out / "recipe.yaml").read_text())["finetune"]["l1"] == 0.5
    before = files_of(out)
    assert surgery("finetune-script", out, "--quiet").code == 0 and files_of(out) == before
    assert surgery("run", out / "recipe.yaml", "--out", out, "--no-verify", "--quiet").code == 0
    failed = surgery(
        "run", tmp_path / "my.yaml", "--set", "finetune.l1=1", "--out", out, "--no-verify"
    )
    assert failed.code == 1 and "other options" in failed.err and files_of(out) == before
    failed = surgery(
        "run", tmp_path / "my.yaml", "--set", "finetune.l1=[1]", "--out", tmp_path / "no"
    )
    assert failed.code == 1 and "l1 is [1]" in failed.err


def test_a_model_of_an_unknown_family_has_a_plain_script() -> None:
    record = {"recipe": [], "exact": True, "source": {"location": "OWNER/NAME", "revision": None}}
    text = finetune.files(record, {"model_type": "unheard_of"})["finetune/finetune.py"].decode()
    assert "STAGES" not in text and "class Trainer" not in text and "SFTTrainer(" in text
