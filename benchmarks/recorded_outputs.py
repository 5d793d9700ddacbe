"""Record what each operation writes, as sha256 by file, or compare with a record.

A reshaping of the code keeps the bytes.

    python benchmarks/recorded_outputs.py --write before.json
    python benchmarks/recorded_outputs.py --compare before.json

Every operation runs on the embedded model or on a tiny OPT, on one thread and few tokens. Weights,
index, config and tokenizer count; custom code, card, record and scripts do not. Fitted values are
the same bytes only on one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import surgery

DEMO = str(Path(surgery.__file__).parent / "demo" / "model")
FEW = {"tokens": 1024, "sequence_length": 128, "dtype": "fp32", "device": "cpu"}
COUNTED = (
    "*.safetensors",
    "*.index.json",
    "config.json",
    "generation_config.json",
    "token*",
    "*.txt",
    "*.model",
)
Model = Any


def outputs() -> dict[str, tuple[str, Callable[[Model], Model]]]:
    """Name -> the model it starts from, and the operation."""
    s = surgery

    def relufied(**options: object) -> tuple[str, Callable[[Model], Model]]:
        return "demo", lambda c: s.relufy(c, calibration=FEW, **options)

    def carved(**options: object) -> tuple[str, Callable[[Model], Model]]:
        return "demo", lambda c: s.carve(c, calibration=FEW, **options)

    def remembered(**options: object) -> tuple[str, Callable[[Model], Model]]:
        return "demo", lambda c: s.memory(c, calibration=FEW, **options)

    def upcycled(**options: object) -> tuple[str, Callable[[Model], Model]]:
        return "demo", lambda c: s.upcycle(c, **options)

    replaced = {"place": "replace", "layers": [2], "slots": 1024}
    return {
        "cast": ("demo", lambda c: s.cast(c, "fp16")),
        "upcycle": upcycled(experts=4),
        "upcycle-fine": upcycled(granularity=4, shared=1, dense_first=1),
        "upcycle-code": upcycled(experts=4, target="surgery", noise=0.01),
        "upcycle-drop": upcycled(experts=4, drop=0.5, router="centroids", calibration=FEW),
        "relufy-none": relufied(repair="none"),
        "relufy": relufied(),
        "relufy-shifted": relufied(activation="shifted"),
        "relufy-bypass": relufied(activation="fatrelu", bypass=16, per_neuron=True),
        "relufy-stage2": relufied(activation="cats", bypass="full", stage=2),
        "relufy-greedy": relufied(activation="teal", allocation="greedy"),
        "relufy-layers": relufied(layers=[1, 3]),
        "relufy-reconstruct": relufied(activation="drelu", sparsity=0.8, repair="reconstruct"),
        "carve": carved(active=12),
        "carve-exact": carved(active=16, method="kmeans", router="centroids"),
        "carve-each": carved(active=[12, 10, 8], layers=[0, 1, 3]),
        "carve-cmoe": carved(active=8, shared=2, method="cmoe", router="analytic", bypass="full"),
        "carve-relufied": (
            "demo",
            lambda c: s.carve(relufied(bypass=8)[1](c), active=10, calibration=FEW),
        ),
        "carve-opt": ("opt", lambda c: s.carve(c, experts=4, active=3, calibration=FEW)),
        "memory": remembered(layers=[1, 2], slots=256, knn=4, key_dim=32),
        "memory-slots": remembered(**replaced, distill=3),
        "memory-fit": remembered(**replaced, init="fit"),
        "memory-auto": remembered(**(replaced | {"layers": "auto"})),
        "memory-found": remembered(place="replace", layers=[2], find="product-keys"),
        "splinify": ("demo", lambda c: s.splinify(c)),
        "splinify-linear": ("demo", lambda c: s.splinify(c, kind="linear")),
        "composed": ("demo", lambda c: s.upcycle(s.relufy(c, calibration=FEW), experts=2)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--only", help="names that begin so")
    given = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(given.compare.read_text()) if given.compare else {}
    found: dict[str, dict[str, str]] = {}
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        models = {"demo": DEMO, "opt": str(tiny_opt(Path(folder) / "opt"))}
        for name, (model, operate) in outputs().items():
            if given.only and not name.startswith(given.only):
                continue
            out = surgery.write(operate(surgery.open(models[model])), Path(folder) / name)
            found[name] = digests(out)
            same = not known or known.get(name) == found[name]
            differing += not same
            print(f"{name:20} {'' if not known else 'same' if same else 'DIFFERS'}", flush=True)
            for file in () if same else sorted({*found[name], *known.get(name, {})}):
                if known.get(name, {}).get(file) != found[name].get(file):
                    print(f"    {file}")
    if given.write:
        given.write.write_text(json.dumps(found, indent=1))
    return int(differing > 0)


def digests(folder: Path) -> dict[str, str]:
    files = {path for pattern in COUNTED for path in folder.glob(pattern)}
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}


def tiny_opt(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=512,
        hidden_size=64,
        ffn_dim=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=64,
    )
    transformers.OPTForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
