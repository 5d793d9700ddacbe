"""Which of the model types of transformers surgery can operate on: a tiny model of each of them,
and every operation on it.

    python benchmarks/coverage.py --write surgery/families/measured.json      # all: ten minutes
    python benchmarks/coverage.py --kind causal llama olmo3 lfm2          # some

A cell is "ok", or the reason. `ok` means more than that nothing was raised:

    inspect    every tensor has a role, and the MLPs weigh something
    analyze    the walk's logits are those of the model, and so are its counts of open neurons
    relufy     the output loads, generates, has zeros where it should, saves and loads again
    upcycle, carve, memory, splinify     the output loads, and its logits are the source's
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

import surgery
from surgery.errors import SurgeryError
from surgery.families import locate
from surgery.families.coverage import OPERATIONS, works
from surgery.families.discovery import stacks_of
from surgery.families.probe import randomise
from surgery.families.shrink import VOCAB, shrink

KINDS = {
    "causal": (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForCausalLM),
    "image": (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        transformers.AutoModelForImageTextToText,
    ),
}
# What the default config of a class lacks, and every checkpoint of it has.
LACKING: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
    "dots1": {"n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dory": {
        "num_hidden_layers": 6,
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
    },
    "gemma4_assistant": {},
    "dots3_note_text": {"swa_head_dim": 12},
}
DECODERS = (
    "bert",
    "roberta",
    "electra",
    "ernie",
    "camembert",
    "data2vec-text",
    "big_bird",
    "megatron-bert",
    "rembert",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "roberta-prelayernorm",
    "bert-generation",
    "xmod",
)
TOLERANCE = 2e-4


def tiny(kind: str, model_type: str, seed: int = 0) -> Any:
    """Return a tiny random model of a type, in fp32."""
    cls = transformers.CONFIG_MAPPING[model_type]
    whole = cls(**({"is_decoder": True} if model_type in DECODERS else {})).to_dict()
    config = cls.from_dict(shrink(whole) | LACKING.get(model_type, {}))
    torch.manual_seed(seed)
    model = KINDS[kind][1].from_config(config, dtype=torch.float32).eval()
    randomise(model)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(0.5)
    return model


class Subject:
    """A tiny model, saved in a folder, and what it computes."""

    def __init__(self, kind: str, model_type: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.model = tiny(kind, model_type)
        self.model.save_pretrained(folder / "source")
        self.ids = torch.randint(3, VOCAB - 8, (2, 24), generator=torch.Generator().manual_seed(1))
        self.model = self.load(folder / "source")
        self.logits = self.run(self.model)
        self.source = surgery.open(folder / "source")

    def load(self, folder: Path) -> Any:
        auto = KINDS[self.kind][1]
        model, info = auto.from_pretrained(
            folder, trust_remote_code=True, dtype=torch.float32, output_loading_info=True
        )
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[what] and folder.name != "source":
                raise AssertionError(f"{what}: {sorted(info[what])[0]}")
        return model.eval()

    @torch.no_grad()
    def run(self, model: Any) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=self.ids, use_cache=False).logits
        return found

    def written(self, output: Any, name: str) -> Any:
        """Write an output and load it."""
        surgery.write(output, self.folder / name, trust_remote_code=True)
        return self.load(self.folder / name)

    def parity(self, output: Any, name: str) -> str:
        return self.same(self.run(self.written(output, name)))

    def same(self, logits: torch.Tensor) -> str:
        error = float((logits - self.logits).norm() / self.logits.norm())
        if not error < TOLERANCE:
            raise AssertionError(f"logits differ by {error:.1e}")
        return "ok"


# --- operations -----------------------------------------------------------------------------------


def inspect(s: Subject) -> str:
    weights = surgery.inspect(s.source)
    return "ok" if weights.mlp_share > 0 else "no MLP"


def analyze(s: Subject) -> str:
    from surgery.analysis.analyze import analyze as measure
    from surgery.calibration.data import Sample
    from surgery.calibration.walk import Walk

    walk = Walk(s.source, s.ids)
    for _ in walk:
        pass
    logits = torch.zeros_like(s.logits)
    for (rows, columns), found in walk.logits():
        logits[rows, columns] = found
    s.same(logits)
    found = measure(s.source, Sample(input_ids=s.ids, source="random", text=False))
    looked_into = [layer for layer in found.layers if layer.mlp or layer.router]
    if not looked_into:
        raise AssertionError("no layer was looked into")
    return _counts(s, found)


def _counts(s: Subject, found: Any) -> str:
    """Compare the counts of open neurons with hooks on the whole model."""
    blocks, caught = locate(s.source), dict[str, torch.Tensor]()
    path = blocks.family.gate or blocks.family.up
    layers = next(m for n, m in stacks_of(s.model) if f".{n}".endswith(f".{blocks.family.layers}"))
    hooks = [
        m.register_forward_hook(lambda m, i, o, n=n: caught.__setitem__(n, o))
        for n, m in layers.named_modules()
        if n.partition(".")[2] == path
    ]
    s.run(s.model)
    for hook in hooks:
        hook.remove()
    for layer in found.layers:
        out = caught.get(f"{layer.index}.{path}")
        if layer.mlp is None or layer.mlp.part != "mlp":
            continue
        if out is None:
            raise AssertionError(f"no hook saw the gate of layer {layer.index}")
        gate = out.view(*s.ids.shape, -1)[:, 1:, : layer.mlp.width]
        if (gate > 0).flatten(0, 1).sum(0).tolist() != layer.mlp.active.tolist():
            raise AssertionError(f"the open neurons of layer {layer.index} are others")
    return "ok"


def relufy(s: Subject) -> str:
    output = surgery.relufy(s.source, repair="none")
    model = s.written(output, "relufy")
    if torch.equal(s.run(model), s.logits):
        raise AssertionError("nothing changed")
    _require_zeros(s, model, output)
    new = model.generate(s.ids[:1, :8], max_new_tokens=3, do_sample=False, pad_token_id=0)
    if new.shape[1] < 9:
        raise AssertionError("generated nothing")
    again = s.folder / "again"
    model.save_pretrained(again)
    for code in (s.folder / "relufy").glob("*.py"):
        (again / code.name).write_bytes(code.read_bytes())
    if not torch.equal(s.run(s.load(again)), s.run(model)):
        raise AssertionError("saved and loaded again it is another")
    return "stock" if output.config["model_type"] == s.source.config["model_type"] else "code"


def _require_zeros(s: Subject, model: Any, output: Any) -> None:
    family, shares = locate(s.source).family, list[float]()
    paths = {family.down, family.gathered.down if family.loose else family.down}
    layers = next(m for n, m in stacks_of(model) if f".{n}".endswith(f".{family.layers}"))
    hooks = [
        m.register_forward_hook(lambda m, i, o: shares.append(float((i[0] == 0).float().mean())))
        for n, m in layers.named_modules()
        if n.partition(".")[2] in paths and not isinstance(m, torch.nn.Identity)
    ]
    s.run(model)
    for hook in hooks:
        hook.remove()
    if not family.is_moe and not (shares and min(shares) > 0.1):
        raise AssertionError(f"the products are no zeros: {shares[:3]}")


def upcycle(s: Subject) -> str:
    output = surgery.upcycle(s.source, experts=4, top_k=2)
    s.parity(output, "upcycle")
    kind = output.config["model_type"]
    return "code" if kind.startswith("surgery_") else kind


def carve(s: Subject) -> str:
    output = surgery.carve(
        s.source,
        experts=4,
        active=4,
        method="random",
        router="centroids",
        repair="none",
        calibration=_CALIBRATION,
    )
    return s.parity(output, "carve")


_CALIBRATION = {"tokens": 64, "sequence_length": 16, "dtype": "fp32", "device": "cpu"}


def memory(s: Subject) -> str:
    layer = locate(s.source).dense[0]
    output = surgery.memory(
        s.source, layers=[layer], place="beside", slots=16, key_dim=8, knn=2, heads=1
    )
    return s.parity(output, "memory")


def splinify(s: Subject) -> str:
    return s.parity(surgery.splinify(s.source, groups="layer"), "splinify")


# --- the matrix -----------------------------------------------------------------------------------


def cells(kind: str, model_type: str, operations: tuple[str, ...] = OPERATIONS) -> dict[str, str]:
    """Return what came of each operation on a tiny model of a type."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            subject = Subject(kind, model_type, Path(folder))
        except Exception as e:
            return {"model": _reason(e)}
        return {name: _cell(globals()[name], subject) for name in operations}


def _cell(operation: Callable[[Subject], str], subject: Subject) -> str:
    try:
        return operation(subject)
    except Exception as e:
        return _reason(e)


def _reason(e: Exception) -> str:
    line = (str(e).strip().splitlines() or [""])[0][:200]
    return line if isinstance(e, SurgeryError) else f"{type(e).__name__}: {line}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--operation", choices=OPERATIONS, action="append")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found: dict[str, dict[str, Mapping[str, str]]] = {}
    for kind in options.kind or KINDS:
        found[kind] = {}
        for model_type in options.types or sorted(KINDS[kind][0]):
            if model_type not in KINDS[kind][0]:
                continue
            start = time.time()
            row = cells(kind, model_type, tuple(options.operation or OPERATIONS))
            found[kind][model_type] = row
            print(
                f"{kind} {model_type} ({time.time() - start:.1f} s)",
                *(f"    {n}: {c}" for n, c in row.items()),
                sep="\n",
                flush=True,
            )
            if options.write:
                whole = {"transformers": transformers.__version__, **found}
                options.write.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")
    for kind, rows in found.items():
        for name in options.operation or OPERATIONS:
            good = sum(works(row.get(name, "not built")) for row in rows.values())
            print(f"{kind}: {name} {good} of {len(rows)}")


if __name__ == "__main__":
    sys.exit(main())
