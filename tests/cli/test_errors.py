"""What goes wrong is two lines on stderr, `error:` and `hint:`, and an exit code: 1 failed, 2 wrong
usage.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import STAGE, Call, assert_two_lines, files_of, llama_tensors, write_llama


def edit_config(**fields: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return edit


def edit_tensors(**tensors: torch.Tensor) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        save_file(
            {**load_file(folder / "model.safetensors"), **tensors}, folder / "model.safetensors"
        )

    return edit


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def gguf(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-q8_0.gguf")


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def without_an_up_projection(folder: Path) -> None:
    tensors = llama_tensors(layers=3)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


FAILURES = {
    "no weights": (no_weights, ("no weights in", "model.safetensors")),
    "GGUF": (gguf, ("GGUF is an inference format",)),
    "truncated": (truncated, ("model.safetensors", "download it again")),
    "unsupported": (edit_config(model_type="mamba9"), ("mamba9", "surgery families")),
    "no model_type": (edit_config(model_type=None), ("model_type",)),
    "quantised": (
        edit_config(quantization_config={"quant_method": "gptq", "bits": 4}),
        ("'gptq'", "bf16 or fp16"),
    ),
    "fp8": (
        edit_tensors(
            **{"model.layers.0.mlp.up_proj.weight": torch.zeros(64, 32).to(torch.float8_e4m3fn)}
        ),
        ("F8_E4M3",),
    ),
    "its own code": (
        edit_config(auto_map={"AutoModelForCausalLM": "modeling_x.X"}),
        ("auto_map", "--trust-remote-code"),
    ),
    "a weight is missing": (without_an_up_projection, ("layer 1",)),
    "experts already": (edit_config(model_type="mixtral"), ("mixtral",)),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_model_that_cannot_be_converted(
    kind: str, call: Call, model: Path, tmp_path: Path
) -> None:
    """Known before the first byte: nothing is written."""
    change, words = FAILURES[kind]
    change(model)
    before = files_of(tmp_path)
    assert_two_lines(call("upcycle", model), *words)
    assert_two_lines(call("upcycle", model, "--dry-run"), *words)
    assert_two_lines(call("upcycle", model, "--json"), *words)
    assert files_of(tmp_path) == before


USAGE = {
    ("--experts", "0"): ("0 experts", "at least 1"),
    ("--experts", "2", "--top-k", "4"): ("top-k 4 of 2 experts",),
    ("--top-k", "0"): ("top-k 0",),
    ("--router-std", "-1"): ("-1.0",),
    ("--layers", "3"): ("layers [3] of a model with 3", "0 to 2"),
    ("--layers", "2-1"): ("'2-1'", "0-7,12,20-23"),
    ("--layers", "all"): ("'all'", "0-7,12,20-23"),
    ("--layers", ""): ("''", "0-7,12,20-23"),
    ("--target", "gpt5"): ("'gpt5'", "mixtral"),
    ("--max-shard-size", "5 gigabytes"): ("'5 gigabytes'", "5GB"),
    ("--dtype", "int8"): ("'int8'", "bf16"),
    ("--experts", "many"): ("--experts", "'many'", "surgery upcycle --help"),
    ("--expert", "4"): ("--expert", "surgery upcycle --help"),
    ("one", "more"): ("surgery upcycle --help",),
}


@pytest.mark.parametrize("options", USAGE, ids=" ".join)
def test_options_that_cannot_be_meant(
    options: tuple[str, ...], call: Call, model: Path, tmp_path: Path
) -> None:
    before = files_of(tmp_path)
    assert_two_lines(call("upcycle", model, *options), *USAGE[options], code=2)
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("upcicle",), 2, ("upcicle",)),
        (("completion",), 2, ("bash, zsh, fish", "surgery completion --help")),
        (("completion", "powershell"), 2, ("powershell",)),
        (("verify", "a"), 2, ("OUTPUT",)),
        (("relufy", "--activation", "tanh"), 2, ("'tanh'",)),
        (("inspect", "./absent"), 1, ("./absent",)),
        (("relufy", "/absent/model"), 1, ("no file or folder /absent/model",)),
    ],
)
def test_other_commands(
    arguments: tuple[str, ...], code: int, words: tuple[str, ...], call: Call
) -> None:
    assert_two_lines(call(*arguments), *words, code=code)


def test_layers_that_must_stay_together(call: Call, model: Path) -> None:
    """Mixtral has experts in every layer: a part of them is no wrong number but a thing it cannot
    do.
    """
    assert_two_lines(
        call("upcycle", model, "--target", "mixtral", "--layers", "0-1"),
        "mixtral has experts in every layer",
        "--layers",
    )


def test_the_output_below_a_file(call: Call, model: Path) -> None:
    """An error of the system, with its path."""
    out = model / "config.json" / "out"
    ran = call("relufy", "--repair", "none", model, "--no-verify", "--out", out)
    assert_two_lines(ran, str(model))


def test_debugging_shows_the_traceback(
    call: Call, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_weights(model)
    monkeypatch.setenv("SURGERY_DEBUG", "1")
    ran = call("upcycle", model)
    assert (
        ran.code == 1
        and "Traceback" in ran.err
        and ran.err.splitlines()[-2].startswith("error: no weights")
    )


def test_a_bug_is_two_lines_too(call: Call, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an exception that nobody foresaw the first line is shown, not pages."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("first\nsecond")

    monkeypatch.setattr("surgery.workflow.convert.convert", broken)
    assert_two_lines(
        call("relufy", "--repair", "none", model),
        "unexpected ZeroDivisionError: first",
        "this is a bug",
        "SURGERY_DEBUG=1",
    )


# --- verify ---------------------------------------------------------------------------------------


def test_a_damaged_output_fails_its_verification(call: Call, model: Path, tmp_path: Path) -> None:
    """One bit in a shard: exit 1, the row names the shard, and the record says so too."""
    out = tmp_path / "out"
    assert call("upcycle", model, "--out", out, "--experts", "2").code == 0
    data = bytearray((out / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (out / "model.safetensors").write_bytes(data)
    ran = call("verify", model, out)
    assert ran.code == 1
    assert "model.safetensors has sha256" in ran.out and "FAILED" in ran.out
    said = [line for line in ran.err.splitlines() if not STAGE.fullmatch(line)]
    assert [line[:6] for line in said] == ["error:", "hint: "]
    assert json.loads((out / "surgery.json").read_text())["verification"]["passed"] is False
    # The bars of reading back are for terminals.
    assert call("verify", model, out, "--quiet").out == ""


def test_what_cannot_be_verified(call: Call, model: Path, tmp_path: Path) -> None:
    assert_two_lines(call("verify", model, model), "no surgery.json")
    assert_two_lines(call("verify", model, tmp_path / "absent"), "no surgery.json")
    (model / "surgery.json").write_text("{")
    assert_two_lines(call("verify", model, model), "not valid JSON")


def poisoned(folder: Path, name: str) -> Path:
    """Write a Llama of three layers whose tensor `name` is all NaN."""
    shape = llama_tensors()["model.norm.weight"].shape
    nan = {name: torch.full(shape, float("nan"), dtype=torch.bfloat16)}
    return write_llama(folder, layers=3, tensors={**llama_tensors(layers=3), **nan})


def test_nan_that_nothing_reads_is_a_warning_that_names_it(call: Call, tmp_path: Path) -> None:
    """The logits are compared: the conversion is proved, and the user should know of the NaN."""
    spare = "model.layers.3.mtp.weight"
    model = poisoned(tmp_path / "model", spare)
    ran = call("upcycle", model, "--experts", "2", "--json")
    assert ran.code == 0, ran.err
    rows = {row["key"]: row for row in ran.json["verification"]["rows"]}
    warning = rows["nonfinite_values.source"]
    assert warning["value"] == 1 and warning["detail"] == [spare] and warning["passed"]
    assert ran.json["verification"]["passed"] is True and rows["logits.difference"]["passed"]
    shown = call("verify", model, f"{model}-mixtral-2x-top2")
    assert shown.code == 0 and "NaN" in shown.out and spare in shown.out


@pytest.mark.parametrize("command", [("upcycle", "--experts", "2"), ("relufy", "--repair", "none")])
def test_what_cannot_be_compared_has_not_passed(
    command: tuple[str, ...], call: Call, tmp_path: Path
) -> None:
    """NaN in a weight that every token meets: nothing is proved, unless that is allowed."""
    model, out = poisoned(tmp_path / "model", "model.norm.weight"), tmp_path / "out"
    ran = call(*command, model, "--out", out)
    assert ran.code == 1 and "does not pass" in ran.err
    assert "Not compared: the source's logits are NaN or Inf" in ran.out
    card = (out / "README.md").read_text()
    assert "that was not checked" in card and "FAILED" in card
    assert call("push", out, "me/it", "--dry-run").code == 1
    assert call("verify", model, out).code == 1

    allowed = call("verify", model, out, "--allow-nonfinite")
    assert allowed.code == 0 and "Not compared" in allowed.out
    card = (out / "README.md").read_text()
    assert "that was not checked" in card and "Nothing was compared" in card
    assert "It computes what its source does" not in card


def test_a_layer_that_writes_nan_is_not_fitted(call: Call, tmp_path: Path) -> None:
    bad = "model.layers.1.post_attention_layernorm.weight"
    ran = call(
        "relufy", poisoned(tmp_path / "model", bad), "--tokens", "600", "--out", tmp_path / "o"
    )
    assert_two_lines(ran, "decoder layer 1 of the source writes NaN or Inf")
    assert bad in ran.err
