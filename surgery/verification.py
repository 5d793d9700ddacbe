"""The proof of a conversion: names and shapes, parity of logits with a control, perplexity of both models.

Names and shapes alone prove little: a wrong norm or rope loads without a complaint. So an exact conversion is held to

    max |source logits - output logits|  <=  1e-5 · max(1, std of the source logits)        in fp32

on sequences longer than any sliding window in force, and a control shows that the comparison can fail: with the MLP of
the last converted layer set to zero in the output it must exceed the limit. A deep real model can round by more than
that on its own (attention computed another way moves the logits of a 30-layer model by 1e-5 of their std), so where
the limit is exceeded the rounding of the source is measured: its logits with each MLP output y computed as
0.4·y + 0.6·y, the same numbers rounded as routing weights round them. The limit is then four times that, and the row
says so. Any other conversion is shown by the perplexity of both,

    exp( - mean log p(token t+1 | tokens 1..t) )        natural logarithm, over windows of 512 tokens

where the beginning-of-sequence token is never predicted. Both models are walked layer by layer: neither need fit in
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.data import Sample, sample_ids
from surgery.calibration.stock import NameReport, check_names, parse_config, unknown_fields
from surgery.calibration.walk import Walk
from surgery.checkpoint import Checkpoint, constant
from surgery.families import locate

PARITY = 1e-5  # of max(1, std of the source logits)
ROUNDING = 4  # times the measured rounding of the source, where that is the larger limit
LENGTH, WINDOW_MARGIN = 512, 64
Progress = Callable[[str, int, int], None]  # what is done, how many layers of how many


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
        value = self.value if isinstance(self.value, str) or math.isfinite(self.value) else str(self.value)
        limit = {} if self.limit is None else {"relation": self.relation, "limit": self.limit}
        return {"check": self.check, "value": value, **limit, "passed": self.passed, "detail": list(self.detail)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """All rows, and what they were measured on (None where names or shapes stopped it before a forward pass)."""

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


def verify(source: Checkpoint, output: Checkpoint, *, exact: bool, layers: Sequence[int] | None = None,
           tokens: int = 2048, dtype: torch.dtype = torch.float32, device: str = "cpu",
           first: Iterable[Row] = (), progress: Progress = lambda what, done, total: None) -> Verification:  # fmt: skip
    """Compare `output` with the `source` it was made from.

    `layers` are those whose MLP was converted (default: all); `first` are rows of other checks, to stand first. Names
    and shapes that do not fit the output's class end it: the class could not run.
    """
    names = [*name_rows(check_names(source), check_names(output)), *unknown_rows(output)]
    result = Verification(rows=(*first, *names), exact=exact, dtype=str(dtype).removeprefix("torch."))
    if not all(row.passed for row in names):
        return result
    sample = sample_ids(source, tokens=tokens, sequence_length=sequence_length(source, output, exact))
    walks = [Walk(c, sample.input_ids, dtype=dtype, device=device) for c in (source, output)]
    pair = _Pair(walks[0], walks[1], sample, progress, last=max(range(len(walks[1])) if layers is None else layers))
    return Verification(rows=(*result.rows, *pair.rows(exact)), exact=exact, dtype=result.dtype, sample=sample)


def name_rows(source: NameReport, output: NameReport) -> list[Row]:
    """Names and shapes of the output against its class. What was unexpected in the source already is no failure."""
    carried = set(output.unexpected) & set(source.unexpected)
    kinds = {
        "names missing": output.missing,
        "names unexpected": tuple(n for n in output.unexpected if n not in carried),
        "shapes mismatched": output.mismatched,
    }
    rows = [Row(check=k, value=len(n), relation="<=", limit=0, passed=not n, detail=n) for k, n in kinds.items()]
    if carried:
        rows.append(Row(check="names carried over", value=len(carried), detail=tuple(sorted(carried))))
    return rows


def unknown_rows(output: Checkpoint) -> list[Row]:
    """Config fields that the output's class ignores: carried over from the source, and nothing that it reads."""
    unknown = unknown_fields(output)
    return [Row(check="config fields the class ignores", value=len(unknown), detail=unknown)] if unknown else []


def sequence_length(source: Checkpoint, output: Checkpoint, exact: bool) -> int:
    """Tokens of a sequence, less its BOS: within the positions of both models, and beyond their windows where exact."""
    configs = [parse_config(c).get_text_config() for c in (source, output)]
    positions = min(getattr(c, "max_position_embeddings", None) or 2**31 for c in configs)
    windows = [w for w in map(_window, configs) if w < positions]
    length = max([LENGTH, *(w + WINDOW_MARGIN for w in windows)]) if exact else LENGTH
    return min(length, positions - 1)


def _window(config: Any) -> int:
    """The attention window of a parsed config, 0 where none is in force: a qwen2 may state one and not use it."""
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    sliding = (getattr(config, "sliding_window", None) or 0) if "sliding_attention" in kinds else 0
    chunked = (getattr(config, "attention_chunk_size", None) or 0) if "chunked_attention" in kinds else 0
    return max(sliding, chunked)


# --- forward passes ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Comparison:
    """Sums over the logits of both models: everything that the rows are made of."""

    delta: Tensor = field(default_factory=lambda: torch.zeros(()))  # a tensor, as Python's max would lose a NaN
    total: float = 0.0  # of the source's logits
    squares: float = 0.0
    count: int = 0
    not_finite: list[int] = field(default_factory=lambda: [0, 0])
    nll: list[float] = field(default_factory=lambda: [0.0, 0.0])
    scored: int = 0

    def add(self, logits: tuple[Tensor, Tensor], targets: Tensor) -> None:
        """Logits of source and output [b, n, V]; the tokens that follow [b, n], one fewer at the end of a sequence."""
        a, b = logits
        self.delta = torch.maximum(self.delta, (a - b).abs().max().cpu())
        self.total += a.sum(dtype=torch.float64).item()
        self.squares += a.double().square().sum().item()
        self.count += a.numel()
        self.scored += targets.numel()
        for i, x in enumerate(logits):
            self.not_finite[i] += int((~x.isfinite()).sum())
            flat = x[:, : targets.shape[1]].flatten(0, 1)
            self.nll[i] += torch.nn.functional.cross_entropy(flat, targets.flatten(), reduction="sum").item()

    @property
    def limit(self) -> float:
        mean = self.total / self.count
        return PARITY * max(1.0, math.sqrt(max(0.0, self.squares / self.count - mean * mean)))

    def perplexity(self, i: int) -> float:
        return math.exp(min(self.nll[i] / self.scored, 700.0))  # a double ends soon after


class _Pair:
    """Source and output at the end of their walks, over the same ids; `last` is the last converted layer."""

    def __init__(self, source: Walk, output: Walk, sample: Sample, progress: Progress, last: int) -> None:
        self.source, self.output, self.sample, self.progress, self.last = source, output, sample, progress, last
        self.before_last: list[Tensor] = []  # the first batch, as it enters that layer of the output
        self.limit = math.nan
        for name, walk in (("source", source), ("output", output)):
            for layer in walk:
                if walk is output and layer.index == last:
                    self.before_last = layer.hidden[:1]
                layer.run()
                progress(f"{name} layers", layer.index + 1, len(walk))

    def rows(self, exact: bool) -> Iterator[Row]:
        """Finite logits, parity and its control where `exact`, perplexity of both where the ids are text."""
        compared = self._compare(self.source, self.output)
        self.limit = compared.limit
        source, output = compared.not_finite
        if source:
            yield Row(
                check="warning: the source's logits are NaN or Inf, so nothing more can be compared", value=source
            )
            return
        yield Row(check="output logits not finite", value=output, relation="<=", limit=0, passed=not output)
        if exact:
            yield from self._parity(compared.delta.item())
            yield self.control()
        if self.sample.text or not exact:
            detail = (f"{compared.scored} tokens in windows of {self.sample.input_ids.shape[1]}", self.sample.source)
            for i, name in enumerate(("source", "output")):
                yield Row(check=f"perplexity of the {name}", value=compared.perplexity(i), detail=detail)

    def _parity(self, value: float) -> Iterator[Row]:
        check = "logits max|Δ|"
        if value > self.limit and (rounding := self.rounding()) * ROUNDING > self.limit:
            yield Row(check="rounding of the source's own logits in fp32", value=rounding)
            self.limit, check = ROUNDING * rounding, f"{check}, against {ROUNDING} × that rounding"
        yield Row(check=check, value=value, relation="<=", limit=self.limit, passed=value <= self.limit)

    def rounding(self) -> float:
        """max|Δ| of the source's logits against its own with each MLP output y computed as 0.4·y + 0.6·y."""
        walk = Walk(self.source.checkpoint, self.sample.input_ids, dtype=self.source.dtype, device=self.source.device)
        for layer in walk:
            down = layer.module.get_submodule(walk.blocks.family.down)
            hook = down.register_forward_hook(lambda module, inputs, y: 0.4 * y + 0.6 * y)
            layer.run()
            hook.remove()
            self.progress("rounding layers", layer.index + 1, len(walk))
        return self._compare(self.source, walk).delta.item()

    def control(self) -> Row:
        """Parity again on the first batch, with the output's MLP of the last converted layer zeroed: it must be caught."""
        zeroed = self.output.fork(without_mlp(self.output.checkpoint, self.last), self.before_last)
        for layer in zeroed.steps(start=self.last):
            layer.run()
            self.progress("control layers", layer.index + 1 - self.last, len(zeroed) - self.last)
        compared = self._compare(self.source.fork(self.source.checkpoint, self.source.hidden[:1]), zeroed)
        value, check = compared.delta.item(), f"control: max|Δ| with the MLP of layer {self.last} zeroed"
        return Row(check=check, value=value, relation=">", limit=self.limit, passed=not value <= self.limit)

    def _compare(self, source: Walk, output: Walk) -> _Comparison:
        compared = _Comparison()
        for ((rows, positions), a), (_, b) in zip(source.logits(), output.logits(), strict=True):
            following = slice(positions.start + 1, positions.stop + 1)
            compared.add((a.float(), b.float()), self.sample.input_ids[rows, following].to(a.device))
        return compared


def without_mlp(checkpoint: Checkpoint, index: int) -> Checkpoint:
    """The checkpoint with every tensor of the MLP of layer `index` zero."""
    names, tensors = locate(checkpoint).mlp_names(index), dict(checkpoint.tensors)
    return checkpoint.replace(tensors=tensors | {n: constant(0.0, tensors[n].shape, tensors[n].dtype) for n in names})
