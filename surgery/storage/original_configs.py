"""config.json made from the params.json of Meta and of Mistral."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surgery.checkpoint.schema import Schema, violations
from surgery.errors import SurgeryError
from surgery.storage.original_tokenizers import Tokenizer

Params = Mapping[str, Any]
_MOST, _LAYERS = 2**31, 10_000
_REPAIR = "download params.json again, or repair it"
HF = "give the Hugging Face version of the model"


def _nullable(kind: str) -> Schema:
    return {"type": [kind, "null"]}


# Both makers write these.
PARAMS: dict[str, Schema] = {
    "dim": {"type": "integer"},
    "n_layers": {"type": "integer"},
    "n_heads": {"type": "integer"},
    "n_kv_heads": _nullable("integer"),
    "head_dim": _nullable("integer"),
    "norm_eps": {"type": "number"},
    "vocab_size": {"type": "integer"},
    "rope_theta": _nullable("number"),
    "max_seq_len": _nullable("integer"),
    "max_batch_size": _nullable("integer"),
    "model_parallel_size": _nullable("integer"),
}
_META: dict[str, Schema] = {
    "multiple_of": {"type": "integer"},
    "ffn_dim_multiplier": _nullable("number"),
    "use_scaled_rope": _nullable("boolean"),
    "rope_scaling_factor": _nullable("number"),
}
_MISTRAL: dict[str, Schema] = {
    "hidden_dim": {"type": "integer"},
    "sliding_window": _nullable("integer"),
    "tied_embeddings": _nullable("boolean"),
    "max_position_embeddings": _nullable("integer"),
    "model_type": _nullable("string"),
}
_REQUIRED = ["dim", "n_layers", "n_heads", "norm_eps", "vocab_size"]


def _schema(own: dict[str, Schema], sign: str) -> Schema:
    return {
        "type": "object",
        "properties": PARAMS | own,
        "required": [*_REQUIRED, sign],
        "additionalProperties": False,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimensions:
    """The sizes of a model.

    Args:
        layers: how many there are.
        head_dim: the rows of a head.
        heads: heads of queries ("q") and of keys ("k").
        sizes: by letter: V tokens (0 where the tensors say), D hidden, F in the MLP, Q rows of the
            queries, K of the keys.
    """

    layers: int
    head_dim: int
    heads: Mapping[str, int]
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, params: Params, location: str) -> Dimensions:
        """Return the dimensions that params.json gives, which fits a schema.

        Raises SurgeryError for what no model can have.
        """
        dim, heads = params["dim"], params["n_heads"]
        keys = heads if params.get("n_kv_heads") is None else params["n_kv_heads"]
        limits = {"dim": (dim, _MOST), "n_heads": (heads, _MOST), "n_kv_heads": (keys, _MOST)}
        limits["n_layers"] = (params["n_layers"], _LAYERS)
        given = params.get("head_dim")
        if given is not None:
            limits["head_dim"] = (given, _MOST)
        for name, (value, most) in limits.items():
            if not 0 < value < most:
                raise _odd(f"{name} is {value}", location)
        head_dim = given or dim // heads
        width = _width(params)
        if heads % keys or (given is None and dim % heads) or head_dim % 2:
            raise _odd(f"dim {dim} with {heads} heads and {keys} key-value heads", location)
        if not 0 < width < _MOST:
            raise _odd(f"the MLP would have {width} neurons", location)
        sizes = {"D": dim, "F": width, "Q": heads * head_dim, "K": keys * head_dim}
        sizes["V"] = max(params["vocab_size"], 0)
        return cls(
            layers=params["n_layers"],
            head_dim=head_dim,
            heads={"q": heads, "k": keys},
            sizes=sizes,
        )


def _odd(what: str, location: str) -> SurgeryError:
    return SurgeryError(f"params.json of {location}: {what}", _REPAIR)


def _width(params: Params) -> int:
    """Return the neurons of an MLP: as given, or as Meta's code computes them."""
    if "hidden_dim" in params:
        return int(params["hidden_dim"])
    width, multiple = int(2 * (4 * params["dim"]) / 3), params["multiple_of"]
    if params.get("ffn_dim_multiplier") is not None:
        width = int(params["ffn_dim_multiplier"] * width)
    return int(multiple * ((width + multiple - 1) // multiple)) if multiple > 0 else 0


def _common(
    model_type: str, architecture: str, params: Params, sizes: Dimensions, tokenizer: Tokenizer
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": sizes.sizes["D"],
        "intermediate_size": sizes.sizes["F"],
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads["q"],
        "num_key_value_heads": sizes.heads["k"],
        "head_dim": sizes.head_dim,
        "rms_norm_eps": params["norm_eps"],
        "rope_theta": params.get("rope_theta") or 10000.0,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.eos,
    }


def _llama(
    params: Params, sizes: Dimensions, tokenizer: Tokenizer, tied: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the config of a Llama. Neither the context nor the factor of its scaling is known."""
    config = _common("llama", "LlamaForCausalLM", params, sizes, tokenizer)
    context, why = _context(params, tokenizer)
    notes = [f"max_position_embeddings {context} is assumed: {why}"]
    config |= {"attention_bias": False, "mlp_bias": False, "max_position_embeddings": context}
    config |= {"tie_word_embeddings": tied, "rope_scaling": None}
    if params.get("use_scaled_rope"):
        given = params.get("rope_scaling_factor")
        factor = given or (32.0 if tied else 8.0)
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": float(factor),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        release = "3.2, whose embeddings are tied" if tied else "3.1 and 3.3"
        if not given:
            notes.append(f"the factor {factor:g} of rope_scaling is assumed, as in Llama {release}")
    return config, notes


def _context(params: Params, tokenizer: Tokenizer) -> tuple[int, str]:
    """Return the context of a Llama, and by what it is told."""
    if params.get("max_seq_len"):
        return params["max_seq_len"], "max_seq_len of params.json"
    if params.get("use_scaled_rope"):
        return 131072, "as in Llama 3.1"
    if tokenizer.of_ranks:
        return 8192, "as in Llama 3"
    if (params.get("rope_theta") or 0) > 10000:
        return 16384, "as in Code Llama"
    return 4096, "as in Llama 2"


def _mistral(
    params: Params, sizes: Dimensions, tokenizer: Tokenizer, tied: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the config of a dense Mistral."""
    config = _common("mistral", "MistralForCausalLM", params, sizes, tokenizer)
    given = params.get("max_position_embeddings") or params.get("max_seq_len")
    config |= {"sliding_window": params.get("sliding_window"), "tie_word_embeddings": tied}
    config |= {"max_position_embeddings": given or 32768}
    return config, [] if given else ["max_position_embeddings 32768 is assumed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Original:
    """What one maker does otherwise than transformers.

    Args:
        maker: who.
        sign: the key of params.json that only this maker writes.
        schema: what params.json may hold: a key that is not in it may change what is computed.
        config: the config.json of a model: of params.json, its dimensions and its tokenizer, and
            whether the head is the embedding. It comes with notes on what is assumed in it.
        twice: whether a head that is the embedding is written all the same, without a word.
    """

    maker: str
    sign: str
    schema: Schema
    config: Callable[[Params, Dimensions, Tokenizer, bool], tuple[dict[str, Any], list[str]]]
    twice: bool = False


ORIGINALS = (
    Original(
        maker="Meta",
        sign="multiple_of",
        schema=_schema(_META, "multiple_of"),
        config=_llama,
        twice=True,
    ),
    Original(
        maker="Mistral",
        sign="hidden_dim",
        schema=_schema(_MISTRAL, "hidden_dim"),
        config=_mistral,
    ),
)


def original_of(params: Params, location: str) -> Original:
    """Return the row of ORIGINALS that a params.json belongs to, which fits its schema.

    Raises SurgeryError where it is of no maker, or has values or keys that are not known.
    """
    kind = next((o for o in ORIGINALS if o.sign in params), None)
    if kind is None:
        signs = " nor ".join(f"{o.sign} ({o.maker})" for o in ORIGINALS)
        raise SurgeryError(f"params.json of {location} has neither {signs}", HF)
    for found in violations(params, kind.schema, ("params.json",)):
        raise SurgeryError(f"params.json of {location}: {found.message[:200]}", HF)
    return kind
