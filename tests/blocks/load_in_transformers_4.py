"""Load checkpoints with our code by another version of transformers. Reads JSON, names to
{"folder", "expected"}; prints what was found:

    PYTHONPATH=<folder with transformers 4.57> python load_in_transformers_4.py < job.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers


def compare(folder: str, expected: str) -> dict[str, Any]:
    """Distances from the expected logits and tokens: as loaded, with skipping on, saved and loaded
    again, in bf16.
    """
    want = torch.load(expected)
    model, info = load(folder, torch.float32)
    again = f"{folder}-again-by-{transformers.__version__}"
    model.save_pretrained(again)
    half, _ = load(folder, torch.bfloat16)
    fresh = transformers.AutoModelForCausalLM.from_config(model.config, trust_remote_code=True)
    found = {
        "keys": {k: sorted(map(str, v)) for k, v in info.items() if v},
        "class": type(model).__name__,
        "delta": distance(model, want),
        "std": want["logits"].std().item(),
        "same_tokens": generate(model, want) == want["tokens"],
        "again": distance(load(again, torch.float32)[0], want),
        "files": sorted(p.name for p in Path(again).glob("*.py")),
        "dtypes": {str(t.dtype) for n, t in half.state_dict().items() if "threshold" not in n},
        "threshold_dtypes": {
            str(t.dtype) for n, t in half.state_dict().items() if "threshold" in n
        },
        "not_finite": [n for n, t in fresh.state_dict().items() if not t.isfinite().all()],
    }
    model.set_sparse_decode()
    return {k: sorted(v) if isinstance(v, set) else v for k, v in found.items()} | {
        "same_tokens_skipping": generate(model, want) == want["tokens"]
    }


def load(folder: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    capped = getattr(config, "attn_logit_softcapping", None)  # sdpa leaves the cap out
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        trust_remote_code=True,
        output_loading_info=True,
        attn_implementation="eager" if capped else None,
    )
    return model.eval(), info


@torch.no_grad()
def distance(model: Any, want: dict[str, Any]) -> float:
    return (model(want["ids"]).logits - want["logits"]).abs().max().item()


def generate(model: Any, want: dict[str, Any]) -> list[int]:
    prompt, new = 12, len(want["tokens"])
    ids = want["ids"][:1, :prompt]
    options = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
    tokens: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[
        0, prompt:
    ].tolist()
    return tokens


def attempt(arguments: dict[str, str]) -> dict[str, Any]:
    try:
        return compare(**arguments)
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    job = json.load(sys.stdin)
    json.dump(
        {"version": transformers.__version__, **{name: attempt(a) for name, a in job.items()}},
        sys.stdout,
    )
