"""The proof of a conversion: names and shapes, then parity of logits or quality.

Names and shapes alone prove little: a wrong norm or rope loads without a complaint. So an exact
conversion is held to

    max |source logits - output logits|  <=  1e-5 · max(1, std of the source logits)

on sequences longer than any sliding window in force. A control shows that the comparison can fail:
with the MLP of the last converted layer set to zero in the output, it must exceed the limit.

Both models are computed in fp32. A deep model can round by more than the limit on its own:
attention computed another way moves the logits of a 30-layer model by 1e-5 of their std. Where fp32
exceeds the limit it therefore decides nothing. Both models are walked again in true fp64 (norms,
softmax, router and rope included) on the sequence where they differed most, and held to the same
limit and control. In fp64 two models of the same function differ by about 1e-13 of the std, and by
1e-7 where weights were folded and kept in fp32.

Any other conversion is measured by what it costs (proof/quality.py): perplexity, agreement with the
source and exact zeros, on held-out text of every domain. What counts is the ratio of perplexities,
its geometric mean over the domains and the worst. Where the conversion was repaired, the change
without the repair is measured too. Routers that a conversion made are measured by proof/routing.py. All models are
walked layer by layer, so that none need fit in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from surgery.analysis.sparsity import REMAINING
from surgery.analysis.weigh import Tally, weigh
from surgery.blocks.rules import RULES
from surgery.calibration.data import Sample, sample_ids
from surgery.calibration.stock import NameReport, check_names, parse_config, unknown_fields
from surgery.calibration.texts import Text
from surgery.checkpoint import Checkpoint, LazyTensor, Progress
from surgery.checkpoint.row import Row
from surgery.families import find, locate
from surgery.proof import quality
from surgery.proof.comparison import SHORT, Check, Comparison
from surgery.proof.parity import Pair
from surgery.proof.require import Require
from surgery.proof.verdict import NOT_COMPARABLE

LENGTH, WINDOW_MARGIN = 512, 64
TOKENS = 2048  # for logits to be compared on
# Tokens that quality is measured on: of each domain, of all where they are few, and of a window.
EACH, ALL, WINDOW = 512, 4096, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """All rows, and the text that they were measured on.

    `sample` is None where names or shapes ended the verification before a forward pass.
    """

    rows: tuple[Row, ...]
    exact: bool
    dtype: str
    sample: Sample | None = None

    @property
    def passed(self) -> bool:
        """Whether every row passed."""
        return all(row.passed for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, for surgery.json."""
        return {
            "passed": self.passed,
            "exact": self.exact,
            "dtype": self.dtype,
            "sample": self.sample and self.sample.as_dict(),
            "rows": [row.as_dict() for row in self.rows],
        }


def require_text(source: Checkpoint, output: Checkpoint, texts: Sequence[Text] = ()) -> None:
    """Raise SurgeryError where the text that a verification runs cannot be had, or not embedded."""
    length = sequence_length(source, output, exact=output.exact)
    if output.exact:
        sample_ids(source, tokens=TOKENS, sequence_length=length)
    else:
        quality.texts(source, tokens_each(texts), length, texts)


def tokens_each(texts: Sequence[Text]) -> int:
    """Return how many tokens of each text quality is measured on, by default the built-in ones."""
    return max(EACH, ALL // len(texts)) if texts else EACH


def verify(
    source: Checkpoint,
    output: Checkpoint,
    *,
    exact: bool,
    layers: Sequence[int] | None = None,
    beside: Mapping[str, Checkpoint] | None = None,
    checks: Iterable[Check] = (),
    texts: Sequence[Text] = (),
    require: Require | None = None,
    tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    first: Iterable[Row] = (),
    allow_nonfinite: bool = False,
    progress: Progress = lambda n: None,
) -> Verification:
    """Compare `output` with the `source` it was made from.

    1. Names and shapes are checked against the model class. What does not fit it could not run, so
       that ends the verification.
    2. An exact conversion is held to parity of logits, with a control; any other is shown by what
       it costs in quality.
    3. The checks that the operations bring follow, where nothing has failed so far.

    Args:
        exact: whether the conversion claims to keep the function.
        layers: those whose MLP was converted; by default all.
        beside: further models by name, whose quality is shown beside that of the two, like the
            change of an activation without its repair. Ignored where `exact`.
        checks: what the operations of the conversion check themselves.
        texts: those that quality is measured on; by default the built-in ones of all domains.
        require: limits of the quality, beyond which the verification fails.
        tokens: how many tokens are run; of each text, where quality is measured.
        first: rows of checks that were made before; they come first.
        allow_nonfinite: whether a source whose logits are NaN or Inf, with which nothing can be
            compared, passes all the same.
        progress: is told of each layer that was run.
    """
    pair = Comparison(
        source=source,
        output=output,
        exact=exact,
        dtype=dtype,
        device=device,
        tokens=tokens or (TOKENS if exact else tokens_each(texts)),
        allow_nonfinite=allow_nonfinite,
        progress=progress,
    )
    names = [*name_rows(check_names(source), check_names(output)), *unknown_rows(output)]
    rows, sample = [*first, *names], None
    if all(row.passed for row in names):
        if exact:
            measured = _exactness(pair, layers)
        else:
            measured = _quality(pair, beside or {}, texts, require or Require())
        sample = measured.sample
        rows += measured.rows
        if all(row.passed for row in measured.rows) and not _uncomparable(measured.rows):
            some = sample.input_ids if exact else sample.rows(slice(len(sample.domains))).input_ids
            rows += [row for check in checks for row in check(pair, some)]
    name = str(dtype).removeprefix("torch.")
    return Verification(rows=tuple(rows), exact=exact, dtype=name, sample=sample)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """Rows and the text that they were measured on."""

    rows: list[Row]
    sample: Sample


def _exactness(pair: Comparison, layers: Sequence[int] | None) -> _Measured:
    """Compare the logits, on text longer than any sliding window in force."""
    length = sequence_length(pair.source, pair.output, exact=True)
    sample = sample_ids(pair.source, tokens=pair.tokens, sequence_length=length)
    last = max(range(locate(pair.output).count) if layers is None else layers)
    logits = Pair(
        pair.source,
        pair.output,
        sample.input_ids,
        dtype=pair.dtype,
        device=pair.device,
        last=last,
        progress=pair.progress,
    )
    rows = list(_rows(logits, sample, pair.allow_nonfinite))
    return _Measured(rows=rows, sample=sample)


def _quality(
    pair: Comparison,
    beside: Mapping[str, Checkpoint],
    texts: Sequence[Text],
    require: Require,
) -> _Measured:
    """Measure the quality of the source, of the models beside it and of the output."""
    length = sequence_length(pair.source, pair.output, exact=False)
    sample = quality.texts(pair.source, pair.tokens, length, texts)
    models = {"source": pair.source, **beside, "output": pair.output}
    found = quality.measure(
        models, sample, dtype=pair.dtype, device=pair.device, progress=pair.progress
    )
    rows = list(_quality_rows(found, sample, require, pair.allow_nonfinite))
    if found["source"].not_finite == 0:
        rows += savings_rows(pair.output, found["output"].zeros)
    return _Measured(rows=rows, sample=sample)


def _quality_rows(
    found: Mapping[str, quality.Quality], sample: Sample, require: Require, allow_nonfinite: bool
) -> Iterator[Row]:
    """Say what was measured of the models in `found`, of which "source" and "output" are two."""
    if found["source"].not_finite:
        yield _not_comparable(found["source"].not_finite, allow_nonfinite)
        return
    yield _finite_output(found["output"].not_finite)
    yield from domain_rows(found, sample, require)
    for name in ("source", "output"):
        if not math.isnan(found[name].sparsity):
            of_all = found[name].sparsity_of_all
            open_too = of_all != found[name].sparsity
            yield Row(
                key=f"zeros.{name}",
                check=f"exact zeros among the products of the {name}",
                value=found[name].sparsity,
                detail=(f"{of_all:.1%} with the always-open neurons",) if open_too else (),
                layers=tuple((i, round(z, 4)) for i, z in enumerate(found[name].zeros)),
            )


def domain_rows(
    found: Mapping[str, quality.Quality], sample: Sample, require: Require
) -> Iterator[Row]:
    """Yield the ratio of perplexities on each domain, then the worst, then the geometric mean.

    The mean is held to what is required of it.
    """
    ratios = found["output"].over(found["source"])
    length = sample.input_ids.shape[1] - 1
    for domain, ratio in ratios.items():
        yield Row(
            key=f"domain.{domain}",
            check=f"perplexity over the source's, {domain}",
            value=ratio,
            detail=(f"{sample.row_domains.count(domain) * length} tokens",),
            models={n: _measured_of(q, domain) for n, q in found.items()},
        )
    worst = max(ratios, key=lambda domain: ratios[domain])
    yield Row(
        key="domains.worst",
        check="perplexity over the source's, worst domain",
        value=ratios[worst],
        detail=(worst,),
        models={n: _measured_of(q, worst) for n, q in found.items()},
    )
    mean, limit = quality.geometric_mean(ratios.values()), require.max_perplexity
    yield Row(
        key="domains.mean",
        check="perplexity over the source's, geometric mean over domains",
        value=mean,
        relation="" if limit is None else "<=",
        limit=limit,
        passed=limit is None or mean <= limit,
        models={
            n: {"perplexity": q.mean, "agreement": sum(q.agreement.values()) / len(ratios)}
            for n, q in found.items()
        },
    )


def _measured_of(found: quality.Quality, domain: str) -> dict[str, float]:
    return {"perplexity": found.perplexity[domain], "agreement": found.agreement[domain]}


def _finite_output(count: int) -> Row:
    return Row(
        key="nonfinite_logits.output",
        check="output logits not finite",
        value=count,
        relation="<=",
        limit=0,
        passed=not count,
    )


def _not_comparable(count: int, allowed: bool) -> Row:
    """Return the row of a source with which nothing can be compared: that is not a pass."""
    return Row(
        key=NOT_COMPARABLE,
        check="source logits not finite, so that nothing can be compared",
        value=count,
        relation="" if allowed else "<=",
        limit=None if allowed else 0,
        passed=allowed,
        warns=True,
    )


def _uncomparable(rows: Iterable[Row]) -> bool:
    return any(row.key == NOT_COMPARABLE for row in rows)


def savings_rows(output: Checkpoint, zeros: Sequence[float]) -> Iterator[Row]:
    """Yield what skipping the measured zeros leaves of a token's bytes and FLOPs in the MLPs.

    There are no rows without zeros. The gate is computed for every neuron, up and down only where
    it is open; where the product decides (TEAL), only down is saved. A bypass is read in full and
    comes on top, and so do always-open neurons. A layer without an MLP of its own (a mixture) is not counted.
    """
    if not any(z > 0 for z in zeros):
        return
    weights, blocks = weigh(output, output.config), output.config.get("surgery_blocks") or ()
    foreseen = all(RULES[b["rule"]].foreseen for b in blocks if "rule" in b)
    kernel = "gate first" if foreseen else "down only"
    sizes: dict[str, tuple[Callable[[Tally], float], Callable[[LazyTensor], float]]] = {
        "bytes": (lambda t: t.nbytes, lambda t: t.nbytes),
        "FLOPs": (lambda t: 2 * t.matrices, lambda t: 2 * t.numel),
    }
    for what, (of_mlp, of_tensor) in sizes.items():
        before = after = 0.0
        for part in weights.layers:
            if "mlp" not in part.tallies or part.index is None or math.isnan(zeros[part.index]):
                continue
            whole = of_mlp(part.tallies["mlp"])
            bypass = sum(map(of_tensor, _bypass(output, part.index))) + whole * _open_part(output)
            own = whole - bypass
            before += own
            after += own * REMAINING[kernel](zeros[part.index], weights.gated) + bypass
        if not before:  # experts alone, shared ones among them
            continue
        unit = "MB" if what == "bytes" else "MFLOP"
        yield Row(
            key=f"left.{what.lower()}",
            check=f"MLP {what} left where zeros are skipped, {kernel}",
            value=after / before,
            detail=(f"{after / 1e6:.4g} of {before / 1e6:.4g} {unit} per token",),
        )


def _open_part(output: Checkpoint) -> float:
    """Return the part of an MLP's neurons that are always open."""
    family = find(output.config)
    return locate(output).always_open / max(1, int(output.text_config.get(family.width_key) or 1))


def _bypass(output: Checkpoint, index: int) -> list[LazyTensor]:
    """Return the tensors of the bypass of decoder layer `index`."""
    start = locate(output).layer(index)
    return [t for n, t in output.tensors.items() if n.startswith(start) and ".bypass_" in n]


def name_rows(source: NameReport, output: NameReport) -> list[Row]:
    """Compare names and shapes of the output with its class.

    Names that the source's class did not expect either were carried over, which is no failure.
    """
    carried = set(output.unexpected) & set(source.unexpected)
    kinds = {
        "names missing": output.missing,
        "names unexpected": tuple(n for n in output.unexpected if n not in carried),
        "shapes mismatched": output.mismatched,
    }
    rows = [none_of(kind.replace(" ", "_"), kind, names) for kind, names in kinds.items()]
    if carried:
        detail = tuple(sorted(carried))
        check = "names carried over"
        rows.append(Row(key="names_carried_over", check=check, value=len(carried), detail=detail))
    return rows


def none_of(key: str, check: str, found: Sequence[str]) -> Row:
    """Return the row of a check that fails where anything was `found`."""
    return Row(
        key=key,
        check=check,
        value=len(found),
        relation="<=",
        limit=0,
        passed=not found,
        detail=tuple(found),
    )


def unknown_rows(output: Checkpoint) -> list[Row]:
    """Return a row that names the config fields which the output's class ignores, if any."""
    unknown = unknown_fields(output)
    row = Row(
        key="config_fields_ignored",
        check="config fields the class ignores",
        value=len(unknown),
        detail=unknown,
    )
    return [row] if unknown else []


def sequence_length(source: Checkpoint, output: Checkpoint, exact: bool) -> int:
    """Return the length of a sequence in tokens, without its BOS.

    It is within the positions of both models, and beyond their sliding windows where `exact`.
    """
    configs = [parse_config(c).get_text_config() for c in (source, output)]
    positions = min(getattr(c, "max_position_embeddings", None) or 2**31 for c in configs)
    windows = [w for w in map(_window, configs) if w < positions]
    length = max([LENGTH, *(w + WINDOW_MARGIN for w in windows)]) if exact else WINDOW
    return min(length, positions - 1)


def _window(config: Any) -> int:
    """Return the attention window of a parsed config, 0 where none is in force.

    A qwen2 may state a window and not use it.
    """
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    sliding = (getattr(config, "sliding_window", None) or 0) if "sliding_attention" in kinds else 0
    chunked = (
        (getattr(config, "attention_chunk_size", None) or 0) if "chunked_attention" in kinds else 0
    )
    return max(sliding, chunked)


def _rows(pair: Pair, sample: Sample, allow_nonfinite: bool) -> Iterator[Row]:
    """Yield finite logits, parity and its control, and perplexity where the ids are text."""
    compared = pair.compared
    source, output = compared.not_finite
    if source:
        yield _not_comparable(source, allow_nonfinite)
        return
    yield _finite_output(output)
    yield from _parity(pair)
    if sample.text:
        windows = f"{compared.scored} tokens in windows of {sample.input_ids.shape[1]}"
        both = [compared.perplexity(i) for i in (0, 1)]
        yield Row(
            key="perplexity",
            check="perplexity of the output",
            value=both[1],
            detail=(windows, sample.source),
            models={"source": {"perplexity": both[0]}, "output": {"perplexity": both[1]}},
        )


def _parity(pair: Pair) -> Iterator[Row]:
    """Hold the largest difference and the control to the limit, in fp64 where fp32 cannot tell."""
    value, limit = pair.compared.delta, pair.compared.limit
    kind = SHORT[pair.dtype]
    if value > limit and kind != "fp64":
        check = f"logits max|Δ| in {kind}, more than {limit:.3g}: fp64 decides"
        yield Row(key="logits.undecided", check=check, value=value)
        wider = pair.in_fp64()
        check = f"rounding of the source alone, {kind} from fp64"
        yield Row(key="logits.rounding", check=check, value=wider.rounding(pair))
        yield from _parity(wider)
        return
    sequences, length = pair.input_ids.shape
    yield Row(
        key="logits.difference",
        check=f"logits max|Δ| in {kind}" + (", worst sequence" if kind == "fp64" else ""),
        value=value,
        relation="<=",
        limit=limit,
        passed=value <= limit,
        detail=(f"{sequences} × {length} tokens",),
    )
    control = pair.control()
    yield Row(
        key="logits.control",
        check=f"control: max|Δ| in {kind} with the MLP of layer {pair.last} zeroed",
        value=control,
        relation=">",
        limit=limit,
        passed=not control <= limit,
    )
