"""Tiny models with a block put in, made once, and loaded by both versions of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from models import greedy, load, logits_of, sample_ids, save_model
from support import found_by_transformers_4

import surgery
from surgery.checkpoint import Checkpoint, make_plan
from surgery.storage import open_checkpoint, write

# Every operation, as one applies it to a small Llama.
EVERY_OPERATION: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "upcycle": lambda c: surgery.upcycle(c, experts=2),
    "relufy": lambda c: surgery.relufy(c, repair="none"),
    "carve": lambda c: surgery.carve(c),
    "memory": lambda c: surgery.memory(c),
    "splinify": lambda c: surgery.splinify(c),
    "cast": lambda c: surgery.cast(c, "fp32"),
    "prune": lambda c: surgery.prune(c, keep=0.5, multiple_of=8),
    "fold": lambda c: surgery.fold(
        surgery.relufy(c, activation="shifted", threshold=0.1, form="code")
    ),
}


class Shop:
    """`case(name)`: the source's folder, the output's, and what was written; `<output>.pt` has what
    the output must give.
    """

    def __init__(
        self,
        folder: Path,
        cases: Mapping[str, tuple[str, dict[str, Any]]],
        operation: Callable[..., Checkpoint],
    ) -> None:
        self.folder, self.cases, self.operation = folder, cases, operation
        self.case = cache(self._case)

    def _case(self, name: str) -> tuple[Path, Path, Checkpoint]:
        model, options = self.cases[name]
        folder = self.folder / f"case{list(self.cases).index(name)}"
        source, output = folder / "source", folder / "output"
        save_model(model, source)
        checkpoint = open_checkpoint(source)
        result = self.operation(checkpoint, **options)
        write(make_plan(result), output, source=checkpoint)
        reference, _ = load(source)
        torch.save(
            {"ids": sample_ids(), "logits": logits_of(reference), "tokens": greedy(reference)},
            f"{output}.pt",
        )
        return source, output, result


def loaded(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The output as a user loads it, every key accounted for."""
    capped = "gemma2" in (folder / "config.json").read_text()
    options |= {"attn_implementation": "eager"} if capped else {}  # sdpa leaves the cap out
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, trust_remote_code=True, output_loading_info=True, **options
    )
    assert {k: v for k, v in info.items() if v} == {}
    return model.eval()


def expected(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(f"{output}.pt")
    return found


def found_by_4(shop: Shop, modules: Path) -> dict[str, Any]:
    """What transformers 4.57 finds, every case in one process: its import costs more than all the
    models.
    """
    return found_by_transformers_4({name: shop.case(name)[1] for name in shop.cases}, modules)


def assert_same_by_4(found: dict[str, Any], files: list[str]) -> None:
    assert "error" not in found, found["error"]
    limit = 1e-5 * max(1.0, found["std"])
    assert (
        found["keys"] == {} and found["class"] == "SurgeryForCausalLM" and found["not_finite"] == []
    )
    assert found["delta"] <= limit and found["same_tokens"]
    # gathered_mlp.py is the code of OPT.
    assert found["again"] <= limit and sorted({*found["files"]} - {"gathered_mlp.py"}) == files
    assert found["dtypes"] == ["torch.bfloat16"]
