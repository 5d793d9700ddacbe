"""Tiny random models of every dense family, saved by transformers, and conversions of them.

Norms and biases are random too, because their initial values of 1 and 0 would hide a tensor that
was not loaded. Sequences are longer than the sliding windows and than the original context of
longrope, so that an error in either shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from surgery.checkpoint import Checkpoint, Source, constant, make_plan
from surgery.families import known
from surgery.operations.relufy import relufy
from surgery.operations.upcycle import upcycle
from surgery.storage import open_checkpoint, write

torch.set_num_threads(1)  # More threads do not help with matrices of 32 rows.
transformers.utils.logging.disable_progress_bar()

LAYERS, LENGTH, WINDOW, VOCAB = 3, 40, 8, 61
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
GEMMA = {
    "head_dim": 8,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
FEWER = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 20000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}

# By name, which begins with the model_type: the fields of the config that differ from COMMON.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama with llama3 rope": {"rope_parameters": LLAMA3},
    "llama with head_dim": {"head_dim": 16},
    "llama with attention biases": {"attention_bias": True},
    "llama with as many key-value heads": {"num_key_value_heads": 4},
    "mistral": {"sliding_window": WINDOW},
    "mistral without window": {
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "mistral with yarn": {"sliding_window": None, "rope_parameters": YARN},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3 with windows": {
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen2 with windows": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "gemma": {"head_dim": 8, "initializer_range": 0.1},
    "gemma2": {**GEMMA, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 0.5},
    "gemma3_text": {
        **GEMMA,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e4},
        },
    },
    "phi3": {},
    "phi3 with window": {"sliding_window": WINDOW},
    "phi3 with longrope": {"rope_parameters": LONG, "original_max_position_embeddings": 16},
    "phi3 with partial rotary": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
    },
    "olmo2": {},
    "smollm3": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 3e5},
        "no_rope_layers": [1, 0, 1],
    },
    "ernie4_5": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "gpt2": FEWER,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "init_std": 0.2},
    "gpt_neox": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.5}
    },
    "falcon": {
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "bias": True,
        "ffn_hidden_size": 48,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3e4},
    },
    "nemotron": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 3e4,
            "partial_rotary_factor": 0.25,
        }
    },
}


def config_of(name: str, **changes: Any) -> Any:
    """Return the stock config of a model of MODELS."""
    model_type = name.split()[0]
    return transformers.AutoConfig.for_model(model_type, **{**COMMON, **MODELS[name], **changes})


def save_model(
    name: str, folder: Path, *, dtype: torch.dtype = torch.float32, **changes: Any
) -> None:
    """Save a random model of MODELS with the installed transformers."""
    save_config(config_of(name, **changes), folder, dtype)


def save_config(config: Any, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Save a random model of a config."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        if p.ndim == 1:
            torch.nn.init.normal_(p, p.mean().item(), 0.1)
    model.to(dtype).save_pretrained(folder)


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of two words, with the ids 3 and 4."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 3, "b": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    fast.save_pretrained(folder)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    """Load a model the stock way; return it and the missing, unexpected and mismatched tensors."""
    config = transformers.AutoConfig.from_pretrained(folder)
    capped = getattr(config, "attn_logit_softcapping", None)
    # sdpa leaves the cap on attention logits out.
    options = {"attn_implementation": "eager"} if capped else {}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True, **options
    )
    return model.eval(), info


def sample_ids() -> torch.Tensor:
    """Return token ids, [2, LENGTH]."""
    return torch.randint(3, VOCAB - 3, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    """Return the logits of the sample ids, [2, LENGTH, V]."""
    return model(sample_ids()).logits


def greedy(model: Any, prompt: int = 12, new: int = 5) -> list[int]:
    """Return the `new` most likely tokens after the first `prompt` tokens of the first sample."""
    options = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
    return model.generate(sample_ids()[:1, :prompt], **options)[0, prompt:].tolist()


def fake(
    model_type: str, *, layers: int = LAYERS, hidden: int = 8, width: int = 12, **config: Any
) -> Checkpoint:
    """Return a checkpoint of zeros, for what is decided before any weight is read.

    It has the MLPs of a family and an embedding. Its config has the sizes and `config` alone.
    """
    f = known()[model_type]
    tensors = {"model.embed_tokens.weight": constant(0.0, (VOCAB, hidden), "F32")}
    for i in range(layers):
        for path in {f.gate, f.up, f.down} - {None}:
            rows = 2 * width if f.fused_gate_up and path == f.up else width
            shape = (hidden, width) if path == f.down else (rows, hidden)
            stored = shape[::-1] if f.transposed else shape
            tensors[f"model.{f.layers}.{i}.{path}.weight"] = constant(0.0, stored, "F32")
    sizes = {
        f.hidden_key: hidden,
        f.width_key: width,
        f.layers_key: layers,
        "num_attention_heads": 2,
        "vocab_size": VOCAB,
    }
    return Checkpoint(
        config={"model_type": model_type, **sizes, **config},
        tensors=tensors,
        source=Source(location="fake"),
    )


# --- conversions ----------------------------------------------------------------------------------


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))


def read_config(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return value


def as_written_by_4(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config as transformers 4 writes it."""
    out, rope = dict(config), dict(config["rope_parameters"])
    del out["rope_parameters"]
    out["torch_dtype"] = out.pop("dtype")
    out["rope_theta"], kind = rope.pop("rope_theta"), rope.pop("rope_type")
    if kind == "default":
        scaling = None
    elif kind == "longrope":
        outside = ("original_max_position_embeddings", "partial_rotary_factor")
        scaling = {"type": kind} | {k: v for k, v in rope.items() if k not in outside}
    else:
        scaling = {"rope_type": kind} | rope
    return out | {"rope_scaling": scaling}


def silent(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config as an old one is: sizes, and nothing that is the class's default."""
    unsaid = (
        "rope_parameters",
        "num_key_value_heads",
        "rms_norm_eps",
        "tie_word_embeddings",
        "head_dim",
        "dtype",
    )
    return {k: v for k, v in config.items() if k not in unsaid}


def silent_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config without rotary embeddings, so that the class's defaults hold."""
    return {k: v for k, v in config.items() if k != "rope_parameters"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One conversion.

    Args:
        model: the name of the source in MODELS.
        target: the model_type that must come out.
        options: the options of the operation.
        edit: changes the source's config.json first.
        activation: the activation of `relufy`; "" means `upcycle`.
        dtype: the dtype of the source.
        tokenizer: whether the source has a tokenizer.
    """

    model: str
    target: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    edit: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    activation: str = ""
    dtype: torch.dtype = torch.float32
    tokenizer: bool = False


UPCYCLED: dict[str, Case] = {
    "llama": Case(model="llama", target="mixtral"),
    "llama in bf16": Case(model="llama", target="mixtral", dtype=torch.bfloat16, tokenizer=True),
    "llama tied, k=1": Case(model="llama tied", target="mixtral", options={"top_k": 1}),
    "llama with llama3 rope": Case(model="llama with llama3 rope", target="mixtral"),
    "llama with head_dim, k=E": Case(
        model="llama with head_dim", target="mixtral", options={"top_k": 4}
    ),
    "llama with attention biases": Case(model="llama with attention biases", target="granitemoe"),
    "llama into granitemoe": Case(
        model="llama with llama3 rope", target="granitemoe", options={"target": "granitemoe"}
    ),
    "llama, config of 4": Case(
        model="llama with llama3 rope", target="mixtral", edit=as_written_by_4
    ),
    "llama, silent config": Case(
        model="llama with as many key-value heads", target="mixtral", edit=silent
    ),
    "llama with biases, head_dim null": Case(
        model="llama with attention biases",
        target="granitemoe",
        edit=lambda c: c | {"head_dim": None},
    ),
    "mistral": Case(model="mistral", target="mixtral"),
    "mistral, config of 4": Case(model="mistral", target="mixtral", edit=as_written_by_4),
    "mistral without window": Case(model="mistral without window", target="mixtral"),
    "mistral with yarn": Case(model="mistral with yarn", target="mixtral"),
    "mistral with yarn, config of 4": Case(
        model="mistral with yarn",
        target="mixtral",
        edit=lambda c: as_written_by_4(c) | {"head_dim": None},
    ),
    "qwen2, k=1": Case(model="qwen2", target="qwen2_moe", options={"top_k": 1}),
    "qwen2": Case(model="qwen2", target="qwen2_moe"),
    "qwen2, one layer": Case(model="qwen2", target="qwen2_moe", options={"layers": [1]}),
    "qwen2, config of 4": Case(
        model="qwen2",
        target="qwen2_moe",
        edit=lambda c: as_written_by_4(c) | {"sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": Case(model="qwen3", target="qwen3_moe"),
    "qwen3, two layers": Case(model="qwen3", target="qwen3_moe", options={"layers": [0, 2]}),
    "phi3": Case(model="phi3", target="mixtral"),
    "phi3 with window, k=E": Case(model="phi3 with window", target="mixtral", options={"top_k": 4}),
    "phi3 with longrope": Case(model="phi3 with longrope", target="mixtral"),
    "phi3 with longrope, config of 4": Case(
        model="phi3 with longrope", target="mixtral", edit=as_written_by_4
    ),
    "granite": Case(model="granite", target="granitemoe"),
    "olmo2": Case(model="olmo2", target="flex_olmo"),
    "gemma": Case(model="gemma", target="mixtral"),
    "gemma, first config": Case(
        model="gemma", target="mixtral", edit=lambda c: as_written_by_4(c) | {"hidden_act": "gelu"}
    ),
    "llama into glm4_moe": Case(
        model="llama with llama3 rope", target="glm4_moe", options={"target": "glm4_moe"}
    ),
    "mistral into glm4_moe": Case(
        model="mistral without window", target="glm4_moe", options={"target": "glm4_moe"}
    ),
    "qwen2 into glm4_moe": Case(model="qwen2", target="glm4_moe", options={"target": "glm4_moe"}),
    "qwen3 into glm4_moe": Case(
        model="qwen3", target="glm4_moe", options={"target": "glm4_moe"}, edit=silent_rope
    ),
    "gemma into glm4_moe": Case(model="gemma", target="glm4_moe", options={"target": "glm4_moe"}),
    "qwen3 into dots1": Case(model="qwen3", target="dots1", options={"target": "dots1"}),
    "qwen3 with windows": Case(model="qwen3 with windows", target="dots1"),
    "qwen3 with windows, config of 4": Case(
        model="qwen3 with windows",
        target="dots1",
        edit=lambda c: {k: v for k, v in as_written_by_4(c).items() if k != "layer_types"},
    ),
    "phi3 with partial rotary": Case(model="phi3 with partial rotary", target="glm4_moe"),
    "phi3 with longrope into glm4_moe": Case(
        model="phi3 with longrope", target="glm4_moe", options={"target": "glm4_moe"}
    ),
    "granite into granitemoeshared": Case(
        model="granite", target="granitemoeshared", options={"target": "granitemoeshared"}
    ),
    "smollm3": Case(model="smollm3", target="llama4_text"),
    "smollm3, one layer": Case(model="smollm3", target="llama4_text", options={"layers": [1]}),
    "ernie4_5": Case(model="ernie4_5", target="ernie4_5_moe"),
    "ernie4_5, shared, inner layer": Case(
        model="ernie4_5", target="ernie4_5_moe", options={"shared": 1, "layers": [1]}
    ),
    "hunyuan_v1_dense": Case(model="hunyuan_v1_dense", target="hunyuan_v1_moe"),
    "hunyuan_v1_dense, nothing shared": Case(
        model="hunyuan_v1_dense", target="hunyuan_v1_moe", options={"shared": 0}
    ),
}

# Experts that are parts of a copy. G: granularity; E: experts; K: active; S: shared.
FINE: dict[str, Case] = {
    "qwen3, G=2": Case(
        model="qwen3", target="glm4_moe", options={"granularity": 2, "experts": 8, "top_k": 4}
    ),
    "qwen3 in bf16, G=2": Case(
        model="qwen3",
        target="glm4_moe",
        options={"granularity": 2, "experts": 16, "top_k": 4},
        dtype=torch.bfloat16,
    ),
    "qwen3 with windows, G=3": Case(
        model="qwen3 with windows",
        target="dots1",
        options={"granularity": 3, "experts": 12, "top_k": 6},
    ),
    "qwen3, G=6, S=1, dense first": Case(
        model="qwen3",
        target="glm4_moe",
        options={"granularity": 6, "shared": 1, "experts": 20, "top_k": 10, "dense_first": 1},
    ),
    "qwen3 into dots1, G=6, S=2": Case(
        model="qwen3",
        target="dots1",
        options={"target": "dots1", "granularity": 6, "shared": 2, "experts": 16, "top_k": 4},
    ),
    "qwen2 in bf16, G=2": Case(
        model="qwen2",
        target="glm4_moe",
        options={"granularity": 2, "experts": 16, "top_k": 4},
        dtype=torch.bfloat16,
    ),
    "qwen2, G=3, S=2": Case(
        model="qwen2", target="qwen2_moe", options={"granularity": 3, "shared": 2}
    ),
    "qwen2, G=2, K=E": Case(
        model="qwen2", target="qwen2_moe", options={"granularity": 2, "shared": 0, "top_k": 4}
    ),
    "llama, G=6": Case(
        model="llama", target="glm4_moe", options={"granularity": 6, "experts": 24, "top_k": 12}
    ),
    "llama, G=2, S=1": Case(
        model="llama tied", target="glm4_moe", options={"granularity": 2, "shared": 1}
    ),
    "llama, G=2, zero router": Case(
        model="llama",
        target="glm4_moe",
        options={"granularity": 2, "experts": 8, "top_k": 4, "router": "zero"},
    ),
    "llama, G=3, K=E": Case(
        model="llama", target="mixtral", options={"granularity": 3, "experts": 6, "top_k": 6}
    ),
    "llama into mixtral, G=3": Case(
        model="llama",
        target="mixtral",
        options={"target": "mixtral", "granularity": 3, "experts": 12, "top_k": 6},
    ),
    "mistral, G=2": Case(
        model="mistral", target="mixtral", options={"granularity": 2, "experts": 8, "top_k": 4}
    ),
    "phi3 with partial rotary, G=3": Case(
        model="phi3 with partial rotary",
        target="glm4_moe",
        options={"granularity": 3, "experts": 12, "top_k": 6},
    ),
    "gemma, G=2": Case(
        model="gemma", target="glm4_moe", options={"granularity": 2, "experts": 8, "top_k": 4}
    ),
    "granite, G=4, S=3": Case(
        model="granite", target="granitemoeshared", options={"granularity": 4, "shared": 3}
    ),
    "granite, G=3": Case(
        model="granite", target="granitemoe", options={"granularity": 3, "experts": 12, "top_k": 6}
    ),
    "olmo2, G=2": Case(
        model="olmo2", target="flex_olmo", options={"granularity": 2, "experts": 8, "top_k": 4}
    ),
    "ernie4_5, G=3, S=1": Case(
        model="ernie4_5",
        target="ernie4_5_moe",
        options={"granularity": 3, "shared": 1, "experts": 8, "top_k": 4},
    ),
    "hunyuan_v1_dense, G=2": Case(
        model="hunyuan_v1_dense",
        target="hunyuan_v1_moe",
        options={"granularity": 2, "experts": 8, "top_k": 4},
    ),
}
UPCYCLED |= FINE

# These need transformers 5, in which alone the config decides the activation of GPT-OSS.
ONLY_5: dict[str, Case] = {
    f"{name} into gpt_oss{', G=2' if granularity > 1 else ''}": Case(
        model=name,
        target="gpt_oss",
        options={
            "target": "gpt_oss",
            "granularity": granularity,
            "experts": 4 * granularity,
            "top_k": 2 * granularity,
        },
    )
    for name, granularity in (
        ("llama with llama3 rope", 1),
        ("llama with attention biases", 2),
        ("mistral", 1),
        ("qwen2", 1),
        ("qwen2 with windows", 1),
    )
}

RELUFIED: dict[str, Case] = {
    "llama in bf16, relu": Case(
        model="llama with llama3 rope", activation="relu", dtype=torch.bfloat16, tokenizer=True
    ),
} | {
    f"{name}, {activation}": Case(model=name, activation=activation)
    for name in (
        "llama",
        "llama with llama3 rope",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "phi3",
        "phi3 with longrope",
        "phi3 with partial rotary",
        "granite",
        "olmo2",
        "smollm3",
        "gpt2",
        "opt",
        "gpt_neox",
        "falcon",
        "nemotron",
        "ernie4_5",
        "hunyuan_v1_dense",
    )
    for activation in {"opt": ("relu2",), "llama": ("relu", "relu2")}.get(name, ("relu",))
}


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A conversion on the disk.

    `logits` and `tokens` are those of the source, or those of the output where it is not exact.
    """

    case: Case
    source: Path
    output: Path
    checkpoint: Checkpoint
    logits: torch.Tensor
    tokens: list[int]


class Workshop:
    """A place that makes each conversion once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.convert = cache(self._convert)

    def _convert(self, name: str) -> Conversion:
        case = (UPCYCLED | RELUFIED | ONLY_5)[name]
        folder = self.folder / str(len(list(self.folder.iterdir())))
        source, output = folder / "source", folder / "output"
        save_model(case.model, source, dtype=case.dtype)
        if case.tokenizer:
            save_tokenizer(source)
        if case.edit:
            edit_config(source, case.edit)
        checkpoint = open_checkpoint(source)
        if case.activation:
            result = relufy(checkpoint, activation=case.activation, repair="none")
        else:
            options = {"experts": 4, "top_k": 2, "router_std": 0.3, **case.options}
            result = upcycle(checkpoint, **options)
        write(make_plan(result), output, source=checkpoint)
        reference, _ = load(output if case.activation else source)
        logits, tokens = logits_of(reference), greedy(reference)
        expected = {"ids": sample_ids(), "logits": logits, "tokens": tokens}
        torch.save(expected, folder / "expected.pt")
        return Conversion(
            case=case, source=source, output=output, checkpoint=result, logits=logits, tokens=tokens
        )

    def expected(self, name: str) -> Path:
        """Return the file with the ids, and the logits and tokens that they must give."""
        return self.convert(name).source.parent / "expected.pt"
