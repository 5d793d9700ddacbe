"""The proof of a conversion: names and shapes, parity of logits with a control, perplexity of both
models.

Names and shapes alone prove little: a wrong norm or rope loads without a complaint. So an exact
conversion is held to

    max |source logits - output logits|  <=  1e-5 · max(1, std of the source logits)

on sequences longer than any sliding window in force, and a control shows that the comparison can
fail: with the MLP of the last converted layer set to zero in the output it must exceed the limit.
Both models are computed in fp32. A deep one can round by more than the limit on its own (attention
computed another way moves the logits of a 30-layer model by 1e-5 of their std), so where fp32
exceeds it, fp32 decides nothing: both are walked again in true fp64, norms, softmax, router and
rope included, on the sequence where they differed most, and held to the same limit, control and
all. There two models of the same function differ by about 1e-13 of the std, and by 1e-7 where
weights were folded and kept in fp32. Any other conversion is shown by what it costs
(analysis/quality.py): perplexity, agreement with the source and exact zeros, on text of two
domains; where it was repaired, of the swap without the repair as well. Routers that a conversion
made are measured (analysis/routing.py), the gradient that they get above all. Both models are
walked layer by layer: neither need fit in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from surgery.analysis.sparsity import REMAINING
from surgery.analysis.weigh import weigh
from surgery.blocks import block_config
from surgery.calibration.data import Sample, sample_ids
from surgery.calibration.stock import NameReport, check_names, parse_config, unknown_fields
from surgery.checkpoint import Checkpoint
from surgery.families import find, locate
from surgery.proof import quality, routing
from surgery.proof.copies import torn_copies
from surgery.proof.parity import Pair, Progress

LENGTH, WINDOW_MARGIN = 512, 64
ROUTED_TOKENS = 1024  # that routers are measured on
SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One check: `value` stands in `relation` to `limit`. A row without a limit only informs."""

    check: str
    value: float | int | str
    relation: str = ""  # "<=", ">"
    limit: float | int | None = None
    passed: bool = True
    detail: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN: a number that is not finite is given as text."""
        value = (
            self.value
            if isinstance(self.value, str) or math.isfinite(self.value)
            else str(self.value)
        )
        limit = {} if self.limit is None else {"relation": self.relation, "limit": self.limit}
        return {
            "check": self.check,
            "value": value,
            **limit,
            "passed": self.passed,
            "detail": list(self.detail),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """All rows, and what they were measured on (None where names or shapes stopped it before a
    forward pass).
    """

    rows: tuple[Row, ...]
    exact: bool
    dtype: str
    sample: Sample | None = None

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "exact": self.exact,
            "dtype": self.dtype,
            "sample": self.sample and self.sample.as_dict(),
            "rows": [row.as_dict() for row in self.rows],
        }


def verify(
    source: Checkpoint,
    output: Checkpoint,
    *,
    exact: bool,
    layers: Sequence[int] | None = None,
    repaired: bool = False,
    torn: int = 1,
    tokens: int = 2048,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    first: Iterable[Row] = (),
    progress: Progress = lambda n: None,
) -> Verification:
    """Compare `output` with the `source` it was made from.

    `layers` are those whose MLP was converted (default: all); `repaired`: the weights were fitted
    after a swap of the activation, which is then shown on its own; `torn`: experts that make up a
    copy, which must be chosen together in the output's own dtype; `tokens` are of each text;
    `first` are rows of other checks, to stand first. Names and shapes that do not fit the output's
    class end it: the class could not run.
    """
    names = [*name_rows(check_names(source), check_names(output)), *unknown_rows(output)]
    result = Verification(
        rows=(*first, *names), exact=exact, dtype=str(dtype).removeprefix("torch.")
    )
    if not all(row.passed for row in names):
        return result
    routes = _routes(output) and not _routes(source)
    if not exact:
        texts = quality.texts(source, tokens, sequence_length(source, output, exact))
        rows = (
            *result.rows,
            *_quality_rows(source, output, texts, repaired, dtype, device, progress),
        )
        if routes and all(row.passed for row in rows):
            rows += _routing_rows(
                output, texts.samples["evaluation"], torn, dtype, device, progress
            )
        return Verification(
            rows=rows, exact=exact, dtype=result.dtype, sample=texts.samples["evaluation"]
        )
    sample = sample_ids(
        source, tokens=tokens, sequence_length=sequence_length(source, output, exact)
    )
    last = max(range(locate(output).count) if layers is None else layers)
    pair = Pair(
        source, output, sample.input_ids, dtype=dtype, device=device, last=last, progress=progress
    )
    rows = (*result.rows, *_rows(pair, sample))
    if torn > 1:
        stored = getattr(
            torch, str(output.config.get("dtype") or output.config.get("torch_dtype") or "float32")
        )
        found = torn_copies(output, sample.input_ids, shards=torn, dtype=stored, device=device)
        rows += (
            Row(
                check=f"tokens with parts of copies in {SHORT[stored]}, of {found.total}",
                value=found.torn,
                relation="<=",
                limit=0,
                passed=not found.torn,
            ),
        )
    if routes and all(row.passed for row in rows):
        rows += _routing_rows(output, sample, torn, dtype, device, progress)
    return Verification(rows=rows, exact=exact, dtype=result.dtype, sample=sample)


def _routes(checkpoint: Checkpoint) -> bool:
    return find(checkpoint.config).is_moe or "experts" in block_config.kinds(checkpoint.config)


def _routing_rows(
    output: Checkpoint,
    sample: Sample,
    shards: int,
    dtype: torch.dtype,
    device: str,
    progress: Progress,
) -> tuple[Row, ...]:
    """What the routers do, the gradient that they get, and what is wrong with them."""
    ids = sample.input_ids[: max(1, ROUTED_TOKENS // sample.input_ids.shape[1])]
    found = routing.measure(
        output,
        ids,
        shards=shards,
        dtype=dtype,
        device=device,
        progress=progress,
    )
    return tuple(
        Row(check=check, value=value, detail=tuple(f"layer {i}: {v}" for i, v in each))
        for check, value, each in routing.summary(found)
    )


def _quality_rows(
    source: Checkpoint,
    output: Checkpoint,
    texts: quality.Texts,
    repaired: bool,
    dtype: torch.dtype,
    device: str,
    progress: Progress,
) -> Iterator[Row]:
    """Perplexity, agreement and zeros of source, swap without repair and output."""
    models = {"source": source} | (
        {"swap without repair": quality.plain_swap(source, output)} if repaired else {}
    )
    found = quality.measure(
        {**models, "output": output}, texts, dtype=dtype, device=device, progress=progress
    )
    if found["source"].not_finite:
        check = "warning: the source's logits are NaN or Inf, so nothing more can be compared"
        yield Row(check=check, value=found["source"].not_finite)
        return
    bad = found["output"].not_finite
    yield Row(check="output logits not finite", value=bad, relation="<=", limit=0, passed=not bad)
    for text, sample in texts.samples.items():
        detail = (f"{sample.input_ids.numel() - len(sample.input_ids)} tokens", sample.source)
        for name, q in found.items():
            yield Row(
                check=f"perplexity of the {name}, {quality.TEXTS[text]}",
                value=q.perplexity[text],
                detail=detail,
            )
    for text in texts.samples:
        check = f"next tokens that agree with the source's, {quality.TEXTS[text]}"
        yield Row(check=check, value=found["output"].agreement[text])
    for name in ("source", "output"):
        layers = tuple(f"layer {i}: {z:.4f}" for i, z in enumerate(found[name].zeros))
        if layers and not math.isnan(found[name].sparsity):
            yield Row(
                check=f"exact zeros among the products of the {name}",
                value=found[name].sparsity,
                detail=layers,
            )
    yield from savings_rows(output, found["output"].zeros)


def savings_rows(output: Checkpoint, zeros: Sequence[float]) -> Iterator[Row]:
    """What a kernel that skips the measured zeros leaves of a token's bytes and FLOPs in the MLPs;
    none without zeros.

    The gate is computed for every neuron, up and down where it is open; where only the product
    decides (TEAL), down alone is saved. A bypass is read in full, and comes on top. A layer without
    an MLP of its own (a mixture) is not counted.
    """
    if not any(z > 0 for z in zeros):
        return
    weights, blocks = weigh(output, output.config), output.config.get("surgery_blocks") or ()
    kernel = (
        "down only" if any(b.get("rule") in ("teal", "drelu") for b in blocks) else "gate first"
    )
    start = locate(output).layer
    added = {
        i: [t for n, t in output.tensors.items() if n.startswith(start(i)) and ".bypass_" in n]
        for i in range(len(zeros))
    }
    for what, of, each in (
        ("bytes", lambda t: t.nbytes, lambda t: t.nbytes),
        ("FLOPs", lambda t: 2 * t.matrices, lambda t: 2 * t.numel),
    ):
        before = after = 0.0
        for part in weights.layers:
            if (
                "mlp" in part.tallies
                and part.index is not None
                and not math.isnan(z := zeros[part.index])
            ):
                bypass = sum(map(each, added[part.index]))
                own = of(part.tallies["mlp"]) - bypass
                before, after = (
                    before + own,
                    after + own * REMAINING[kernel](z, weights.gated) + bypass,
                )
        detail = (
            f"{after / 1e6:.4g} of {before / 1e6:.4g} M{'B' if what == 'bytes' else 'FLOP'} per token",
        )
        yield Row(
            check=f"MLP {what} left where zeros are skipped, {kernel}",
            value=after / before,
            detail=detail,
        )


def name_rows(source: NameReport, output: NameReport) -> list[Row]:
    """Names and shapes of the output against its class. What was unexpected in the source already
    is no failure.
    """
    carried = set(output.unexpected) & set(source.unexpected)
    kinds = {
        "names missing": output.missing,
        "names unexpected": tuple(n for n in output.unexpected if n not in carried),
        "shapes mismatched": output.mismatched,
    }
    rows = [
        Row(check=k, value=len(n), relation="<=", limit=0, passed=not n, detail=n)
        for k, n in kinds.items()
    ]
    if carried:
        rows.append(
            Row(check="names carried over", value=len(carried), detail=tuple(sorted(carried)))
        )
    return rows


def unknown_rows(output: Checkpoint) -> list[Row]:
    """Config fields that the output's class ignores: carried over from the source, and nothing that
    it reads.
    """
    unknown = unknown_fields(output)
    return (
        [Row(check="config fields the class ignores", value=len(unknown), detail=unknown)]
        if unknown
        else []
    )


def sequence_length(source: Checkpoint, output: Checkpoint, exact: bool) -> int:
    """Tokens of a sequence, less its BOS: within the positions of both models, and beyond their
    windows where exact.
    """
    configs = [parse_config(c).get_text_config() for c in (source, output)]
    positions = min(getattr(c, "max_position_embeddings", None) or 2**31 for c in configs)
    windows = [w for w in map(_window, configs) if w < positions]
    length = max([LENGTH, *(w + WINDOW_MARGIN for w in windows)]) if exact else LENGTH
    return min(length, positions - 1)


def _window(config: Any) -> int:
    """The attention window of a parsed config, 0 where none is in force: a qwen2 may state one and
    not use it.
    """
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    sliding = (getattr(config, "sliding_window", None) or 0) if "sliding_attention" in kinds else 0
    chunked = (
        (getattr(config, "attention_chunk_size", None) or 0) if "chunked_attention" in kinds else 0
    )
    return max(sliding, chunked)


def _rows(pair: Pair, sample: Sample) -> Iterator[Row]:
    """Finite logits, parity and its control, perplexity of both where the ids are text."""
    compared = pair.compared
    source, output = compared.not_finite
    if source:
        yield Row(
            check="warning: the source's logits are NaN or Inf, so nothing more can be compared",
            value=source,
        )
        return
    yield Row(
        check="output logits not finite", value=output, relation="<=", limit=0, passed=not output
    )
    yield from _parity(pair)
    if sample.text:
        detail = (
            f"{compared.scored} tokens in windows of {sample.input_ids.shape[1]}",
            sample.source,
        )
        for i, name in enumerate(("source", "output")):
            yield Row(
                check=f"perplexity of the {name}", value=compared.perplexity(i), detail=detail
            )


def _parity(pair: Pair) -> Iterator[Row]:
    """The largest difference against its limit, in fp64 where fp32 cannot tell, and the control."""
    value, limit = pair.compared.delta, pair.compared.limit
    kind = SHORT[pair.dtype]
    if value > limit and kind != "fp64":
        yield Row(
            check=f"logits max|Δ| in {kind}, more than {limit:.3g}: fp64 decides", value=value
        )
        wider = pair.in_fp64()
        yield Row(
            check=f"rounding of the source alone, {kind} from fp64", value=wider.rounding(pair)
        )
        yield from _parity(wider)
        return
    check = f"logits max|Δ| in {kind}" + (", worst sequence" if kind == "fp64" else "")
    sequences, length = pair.input_ids.shape
    yield Row(
        check=check,
        value=value,
        relation="<=",
        limit=limit,
        passed=value <= limit,
        detail=(f"{sequences} × {length} tokens",),
    )
    control, check = (
        pair.control(),
        f"control: max|Δ| in {kind} with the MLP of layer {pair.last} zeroed",
    )
    yield Row(check=check, value=control, relation=">", limit=limit, passed=not control <= limit)
