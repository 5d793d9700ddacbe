"""What is written beside the weights, and whose code is taken for ours."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from models import MODELS, save_tokenizer

from surgery.blocks import block_config, custom_code
from surgery.blocks.block_config import Sparse
from surgery.checkpoint.config import BLOCKS
from surgery.errors import SurgeryError
from surgery.families import known

FOLDER = Path(custom_code.__file__).parent


def test_only_the_lines_of_the_source_change() -> None:
    ours = custom_code.files("gpt_neox", ["sparse"])
    assert set(ours) == {"modeling_surgery.py", "sparse_kernel.py", "sparse_mlp.py"}
    assert ours["sparse_mlp.py"] == (FOLDER / "sparse_mlp.py").read_bytes()
    before, after = (
        (FOLDER / "modeling_surgery.py").read_text().splitlines(),
        ours["modeling_surgery.py"].decode().splitlines(),
    )
    assert [(a, b) for a, b in zip(before, after, strict=True) if a != b] == [
        ('BASE = "llama"', 'BASE = "gpt_neox"')
    ]


def test_only_the_kinds_in_use_come_along(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, name in (("a", "AMLP"), ("b", "BMLP")):
        monkeypatch.setitem(BLOCKS, kind, (f"{kind}_mlp", name))
    read = custom_code._read
    monkeypatch.setattr(
        custom_code, "_read", lambda name: b"" if name[:2] in ("a_", "b_") else read(name)
    )
    ours = custom_code.files("llama", {"b", "a"})
    assert set(ours) == {"modeling_surgery.py", "a_mlp.py", "b_mlp.py"}
    lines = ours["modeling_surgery.py"].decode().splitlines()
    assert [line for line in lines if line.startswith(("from .", "BLOCKS"))] == [
        "from .a_mlp import AMLP",
        "from .b_mlp import BMLP",
        'BLOCKS: dict[str, Any] = {"a": AMLP, "b": BMLP}',
    ]
    assert custom_code.is_ours("modeling_surgery.py", ours["modeling_surgery.py"])


@pytest.mark.parametrize(
    "name", ["modeling_surgery.py", "sparse_kernel.py", *(p.name for p in FOLDER.glob("*_mlp.py"))]
)
def test_custom_code_needs_torch_and_transformers_alone(name: str) -> None:
    tree = ast.parse((FOLDER / name).read_text())
    absolute = {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level
    }
    absolute |= {
        a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names
    }
    found = {str(module).split(".")[0] for module in absolute}
    assert found - {"torch", "transformers"} <= set(sys.stdlib_module_names)


def test_our_code_is_ours_and_any_other_is_not() -> None:
    ours = custom_code.files("qwen2", ["sparse"])
    shell = ours["modeling_surgery.py"]
    assert all(custom_code.is_ours(name, data) for name, data in ours.items())
    assert not custom_code.is_ours("modeling_surgery.py", shell + b"\n")
    assert not custom_code.is_ours(
        "modeling_surgery.py", shell.replace(b'BASE = "qwen2"', b'BASE = "qwen2" + evil()')
    )
    assert not custom_code.is_ours(
        "modeling_surgery.py", shell.replace(b"from .sparse_mlp", b"from .other_mlp")
    )
    assert not custom_code.is_ours("modeling_surgery.py", ours["sparse_mlp.py"])
    assert not custom_code.is_ours("sparse_mlp.py", ours["sparse_mlp.py"].replace(b"4 *", b"5 *"))
    assert not custom_code.is_ours("other.py", ours["sparse_mlp.py"])
    assert not custom_code.is_ours("__init__.py", (FOLDER / "__init__.py").read_bytes())


def test_code_of_another_repository_is_not_ours() -> None:
    """auto_map may name it, in config.json or beside the tokenizer, without a file of code here."""
    ours, config = custom_code.files("llama", ["sparse"]), {"auto_map": dict(block_config.AUTO_MAP)}
    assert custom_code.runs_only_ours([config, {}], ours)
    assert not custom_code.runs_only_ours([config, {}], {**ours, "tokenization_own.py": b""})
    elsewhere = {"auto_map": {"AutoTokenizer": ["some/where--tokenization.Own", None]}}
    assert not custom_code.runs_only_ours([config, elsewhere], ours)
    config["auto_map"]["AutoConfig"] = "some/where--modeling_surgery.SurgeryConfig"
    assert not custom_code.runs_only_ours([config], ours)


def test_a_second_operation_adds_to_the_first() -> None:
    family = known()["llama"]
    first, second = (
        block_config.sparse_entry(family, layers, Sparse(rule="cats", activation="silu"))
        for layers in ([0, 1], [2])
    )
    config = {"model_type": "llama", "hidden_size": 8}
    once = config | block_config.config_changes(config, [first])
    twice = once | block_config.config_changes(once, [second])
    assert twice["model_type"] == "surgery_llama" and block_config.base_type(twice) == "llama"
    assert twice["surgery_blocks"] == [first, second] and block_config.kinds(twice) == ["sparse"]
    assert once["surgery_blocks"] == [first] and json.loads(json.dumps(twice)) == twice
    with pytest.raises(SurgeryError, match="layer 1 has a sparse block already"):
        block_config.config_changes(twice, [first | {"layers": [1, 3]}])


def test_there_is_code_for_each_kind_that_a_config_may_name() -> None:
    for module, name in BLOCKS.values():
        assert f" {name}(" in (FOLDER / f"{module}.py").read_text()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "llama", "auto_map": {"AutoConfig": "configuration_own.Own"}},
            "brings code of its own",
        ),
    ],
)
def test_configs_that_our_code_has_no_place_for(config: dict[str, object], message: str) -> None:
    with pytest.raises(SurgeryError, match=message):
        block_config.config_changes(config, [])


@pytest.mark.parametrize(
    ("name", "rule", "message"),
    [
        ("opt", "cats", "opt keeps its MLP's matrices in the layer itself"),
        ("mixtral", "cats", "mixtral has experts"),
        ("gpt2", "drelu", "gpt2 has no gate"),
        ("llama", "relu3", "no rule 'relu3' is known"),
    ],
)
def test_families_that_a_sparse_block_does_not_fit(name: str, rule: str, message: str) -> None:
    with pytest.raises(SurgeryError, match=message):
        block_config.sparse_entry(known()[name], [0], Sparse(rule=rule, activation="relu"))


def test_a_tokenizer_that_says_no_class_loads(tmp_path: Path) -> None:
    """transformers finds its class by the model_type of the config, which is ours now."""
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(
        json.dumps(
            {k: v for k, v in json.loads(path.read_text()).items() if k != "tokenizer_class"}
        )
    )
    config = {"model_type": "gpt2", **MODELS["gpt2"]}
    changes = block_config.config_changes(config, [])
    assert changes["tokenizer_class"] == "GPT2Tokenizer"
    assert "tokenizer_class" not in block_config.config_changes(
        config | {"tokenizer_class": "OwnTokenizer"}, []
    )
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    for name, data in custom_code.files("gpt2", ["sparse"]).items():
        (tmp_path / name).write_bytes(data)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(tokenizer).__name__.startswith("GPT2Tokenizer")


def test_it_imports_no_torch() -> None:
    code = (
        "import sys, surgery.blocks.custom_code as m; m.files('llama', ['sparse']); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
