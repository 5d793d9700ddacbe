"""Load checkpoints and configs with another version of transformers, for tests to compare. Reads
and prints JSON:

    PYTHONPATH=<folder with transformers 4.57> python tests/transformers_4.py < job.json

A job has "models", names to {"folder", "expected": a file that torch saved with ids, logits and
tokens}; and "configs", names to the arguments of `fields_of`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import transformers


def compare(folder: str, expected: str) -> dict[str, Any]:
    """What stock loading finds, how far the logits are from those expected, whether greedy tokens
    are the same.
    """
    import torch

    torch.set_num_threads(1)
    config, want = transformers.AutoConfig.from_pretrained(folder), torch.load(expected)
    options = (
        {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    )
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype=torch.float32, output_loading_info=True, **options
    )
    ids = want["ids"].to(torch.long)
    with torch.no_grad():
        logits = model.eval()(ids).logits
        prompt, new = 12, len(want["tokens"])
        tokens = model.generate(
            ids[:1, :prompt],
            attention_mask=torch.ones(1, prompt, dtype=torch.long),
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=0,
        )[0, prompt:].tolist()
    return {
        "delta": (logits - want["logits"]).abs().max().item(),
        "std": want["logits"].std().item(),
        "same_tokens": tokens == want["tokens"],
        "keys": {k: sorted(map(str, v)) for k, v in info.items() if v},
        "class": type(model).__name__,
        "dtype": str(config.torch_dtype),
        "tokenizer": tokenize(folder),
    }


def tokenize(folder: str) -> list[int] | None:
    if not Path(folder, "tokenizer_config.json").exists():
        return None
    ids: list[int] = transformers.AutoTokenizer.from_pretrained(folder)("a b")["input_ids"]
    return ids


def attempt(folder: str, expected: str) -> dict[str, Any]:
    try:
        return compare(folder, expected)
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"}


def fields_of(config: dict[str, Any], fields: list[str] | None = None) -> dict[str, Any] | None:
    """The fields (default: all) of a parsed config.json, the language model's; None for an unknown
    model_type.
    """
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        return None
    parsed = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config).get_text_config()
    rope = getattr(parsed, "rope_parameters", None) or {}
    if "rope_theta" in rope:
        parsed.rope_theta = rope["rope_theta"]
    return {
        f: getattr(parsed, f)
        for f in fields or (*parsed.to_dict(), "rope_theta")
        if hasattr(parsed, f)
    }


def main() -> None:
    job = json.load(sys.stdin)
    transformers.utils.logging.set_verbosity_error()
    result = {
        "version": transformers.__version__,
        "models": {name: attempt(**model) for name, model in job.get("models", {}).items()},
        "configs": {
            name: fields_of(**arguments) for name, arguments in job.get("configs", {}).items()
        },
    }
    json.dump(result, sys.stdout, default=str)


if __name__ == "__main__":
    main()
