"""Which of the model types of transformers surgery can operate on: a tiny model of each of them,
and every operation on it.

    python benchmarks/coverage.py --write surgery/families/measured.json      # all: ten minutes
    python benchmarks/coverage.py --kind causal llama olmo3 lfm2          # some

A cell is "ok", or the reason. `ok` means more than that nothing was raised:

    inspect    every tensor has a role, and the MLPs weigh something ("none": it has no MLP)
    analyze    the walk's logits are those of the model, and so are its counts of open neurons
    relufy     the output loads, generates, has zeros where it should, saves and loads again
    upcycle, carve, memory, splinify, prune
               the output loads, and its logits are the source's
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
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
_DEEP_TOP_K = {"topk_method": "greedy", "num_experts_per_tok": 2}
_VOCABULARY = {"vocabulary_map": {"<image>": 90, "<|extra_200|>": 91, "IMGIMGAZ": 92}}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_TWO_ROPES = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4}
        for kind in ("sliding_attention", "full_attention")
    },
}
LACKING: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 8},
    "deepseek_v2": _DEEP_TOP_K,
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense"] + ["sparse"] * 31, **_DEEP_TOP_K}
    },
    "diffusion_gemma": {
        "text_config": {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
    },
    "chameleon": _VOCABULARY,
    "emu3": _VOCABULARY,
    "qwen4_exp_text": _INDEXER,
    "qwen4_exp": {"text_config": _INDEXER},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0, "kv_n_heads": 2}},
    "dots1": {"n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": (["mamba"] * 3 + ["attention"]) * 8},
    "lfm2_moe": {"layer_types": (["conv"] * 3 + ["full_attention"]) * 2, "num_hidden_layers": 8},
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1},
    "cohere_compass_text": _TWO_ROPES,
    "cohere_compass": {"text_config": _TWO_ROPES},
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[-2, 1]]},
    "hunyuan_vl": {"text_config": {"head_dim": 8}},
    "step3p7": {"text_config": {"sliding_window": 8}},
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
    given = {"is_decoder": True} if model_type in DECODERS else {}
    whole = cls(**given | LACKING.get(model_type, {})).to_dict()
    config = cls.from_dict(shrink(whole))
    torch.manual_seed(seed)
    with torch.device("meta"):
        count = sum(p.numel() for p in KINDS[kind][1].from_config(config).parameters())
    if count > 300_000_000:
        raise AssertionError(f"a small one has {count:,} parameters")
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
        built = tiny(kind, model_type)
        self.cls = type(built)
        built.save_pretrained(folder / "source")
        self.ids = torch.randint(3, VOCAB - 8, (2, 24), generator=torch.Generator().manual_seed(1))

    @cached_property
    def source(self) -> Any:
        return surgery.open(self.folder / "source")

    @cached_property
    def model(self) -> Any:
        return self.load(self.folder / "source")

    @cached_property
    def logits(self) -> torch.Tensor:
        return self.run(self.model)

    def load(self, folder: Path) -> Any:
        """Load with the Auto class, or as the source's class where that knows no such config."""
        auto = KINDS[self.kind][1]
        known = type(transformers.AutoConfig.from_pretrained(self.folder / "source"))
        model, info = (auto if known in auto._model_mapping else self.cls).from_pretrained(
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

    def generates(self) -> bool:
        """Return whether the class of the source generates at all, in this version."""
        try:
            self.generate(self.model)
        except Exception:
            return False
        return True

    def generate(self, model: Any) -> Any:
        return model.generate(self.ids[:1, :8], max_new_tokens=3, do_sample=False, pad_token_id=0)

    def written(self, output: Any, name: str) -> Any:
        """Write an output and load it."""
        surgery.write(output, self.folder / name, trust_remote_code=True)
        return self.load(self.folder / name)

    def parity(self, output: Any, name: str) -> str:
        return self.same(self.run(self.written(output, name)))

    def same(self, logits: torch.Tensor) -> str:
        return same(logits, self.logits)


def same(logits: torch.Tensor, wanted: torch.Tensor) -> str:
    error = float((logits - wanted).norm() / wanted.norm())
    if not error < TOLERANCE:
        raise AssertionError(f"logits differ by {error:.1e}")
    return "ok"


def _stack_name(model: Any, family: Any) -> str:
    """Return the name of the list of layers that a family is about."""
    return next(n for n, _ in stacks_of(model) if f".{n}".endswith(f".{family.layers}"))


# --- operations -----------------------------------------------------------------------------------


def inspect(s: Subject) -> str:
    weights = surgery.inspect(s.source)
    return "ok" if weights.mlp_share > 0 else "none"


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
    layers = s.model.get_submodule(_stack_name(s.model, blocks.family))
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
    if s.generates() and s.generate(model).shape[1] < 9:
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
    layers = model.get_submodule(_stack_name(model, family))
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


def prune(s: Subject) -> str:
    """Leave out neurons that add nothing: the first 8 of each MLP, whose `down` is zero."""
    blocks = locate(s.source)
    blocks.family.require_dense()
    tensors, model = dict(s.source.tensors), copy.deepcopy(s.model)
    layers = model.get_submodule(_stack_name(model, blocks.family))
    for index in blocks.dense:
        mlp = blocks.mlp(index)
        down = mlp.down.map("the first 8 zero", _without_first)
        tensors |= blocks.restored(index, replace(mlp, down=down))
        weight = layers[index].get_submodule(blocks.family.down).weight.data
        weight[:8] = 0 if blocks.family.transposed else weight[:8]
        weight[:, :8] = weight[:, :8] if blocks.family.transposed else 0
    wanted = s.run(model)
    output = surgery.prune(s.source.replace(tensors=tensors), keep=1.0, multiple_of=8)
    return same(s.run(s.written(output, "prune")), wanted)


def _without_first(down: torch.Tensor) -> torch.Tensor:
    """Return `down` [H, F] without what the first 8 neurons add."""
    out = down.clone()
    out[:, :8] = 0
    return out


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


def _put(path: Path, kind: str, model_type: str, row: Mapping[str, str]) -> None:
    """Put a row into a file of rows."""
    whole = json.loads(path.read_text()) if path.exists() else {k: {} for k in KINDS}
    whole["transformers"] = transformers.__version__
    old = whole[kind].get(model_type, {})
    whole[kind][model_type] = dict(row) if "model" in {**old, **row} else {**old, **row}
    path.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--operation", choices=(*OPERATIONS, "prune"), action="append")
    parser.add_argument("--write", type=Path, help="put the rows into this file, beside others")
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
                _put(options.write, kind, model_type, row)
    for kind, rows in found.items():
        for name in options.operation or OPERATIONS:
            good = sum(works(row.get(name, "not built")) for row in rows.values())
            print(f"{kind}: {name} {good} of {len(rows)}")


if __name__ == "__main__":
    sys.exit(main())
