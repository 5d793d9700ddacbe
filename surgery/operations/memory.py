"""Memory layers: a product-key memory beside an MLP, exactly, or in its place, fitted on
calibration text.

Published memory layers (Memory Layers at Scale, Berges et al. 2024, arXiv 2412.09764) are trained
from scratch, and in a trained model they would be noise in the place of what it learned. Beside the
MLP a memory adds zero until it is trained. In its place the init is fitted, a layer at a time, on
what the converted layers before it give (memory_fit.py, memory_neurons.py).

Bytes are counted as a token reads them: query, keys and projections whole, the rows of the table
that are looked up, the neurons that were kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from surgery.blocks import block_config
from surgery.blocks.custom_code import with_blocks, with_gathered_mlps
from surgery.blocks.preconditions import chosen_layers, require_whole
from surgery.calibration.settings import Calibration
from surgery.checkpoint import Checkpoint, LazyTensor, Progress, Step, Work
from surgery.errors import SurgeryError, UsageError
from surgery.families import Blocks, Mlp, locate
from surgery.fitting import memory_init as init_of

if TYPE_CHECKING:
    from torch import Tensor

    from surgery.calibration.data import Sample
    from surgery.calibration.walk import Layer, Walk

CHOICE_TOKENS = 8192  # that layers are chosen on
DEFAULTS = {
    "beside": {"slots": 2**20, "heads": 4, "knn": 32, "key_dim": 512},
    "replace": {"slots": 4096, "heads": 1, "knn": 16, "key_dim": 32},
}
DEPTHS = (
    1 / 6,
    1 / 2,
    5 / 6,
)  # where a memory is put by default: layers 4, 12, 20 of 24, as in the paper
PARTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What is to be done, checked."""

    blocks: Blocks
    layers: tuple[int, ...]
    place: str
    init: str
    entries: tuple[Mapping[str, Any], ...]
    seed: int
    distill: int
    calibration: Calibration

    @property
    def fitted(self) -> bool:
        return self.init in ("slots", "fit")

    @property
    def hidden(self) -> int:
        return _hidden(self.blocks)

    def entry(self, index: int) -> Mapping[str, Any]:
        return next(e for e in self.entries if index in e["layers"])

    def table(self, entry: Mapping[str, Any]) -> str:
        """The name of an entry's table on disk."""
        return self.blocks.prefix.removesuffix(f"{self.blocks.family.layers}.") + str(
            entry["shared"]
        )


def memory(
    checkpoint: Checkpoint,
    *,
    layers: Collection[int] | str | None = None,
    place: str = "beside",
    init: str | None = None,
    kind: str = "pkm",
    slots: int | None = None,
    heads: int | None = None,
    knn: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    own_tables: bool = False,
    sparse_gradients: bool = False,
    reads: float = 0.5,
    count: int = 1,
    find: str = "always",
    distill: int = 0,
    seed: int = 0,
    calibration: Calibration | Mapping[str, Any] | None = None,
) -> Checkpoint:
    """The model with a memory in some layers.

    Args:
        layers: by default, three beside; "auto": `count` of them, whose MLPs are cheapest to
            replace.
        place: "beside" the MLP, which stays and to which zero is added; or "replace".
        init: of a memory in the MLP's place: "slots" (the MLP's own neurons that matter most, and a
            memory of what they lack), "fit" (an affine map and a memory), "zero" or "random".
        kind: "pkm" (values) or "peer" (a slot is an MLP of one neuron).
        slots: of the table, a square; by default 1048576 beside, 4096 in place.
        heads: lookups of a token, 4 or 1 by default.
        knn: slots that a head reads, 32 or 16 by default.
        key_dim: dimensions of a head's query, 512 or 32 by default.
        value_dim: of a value, by default the hidden size.
        own_tables: a table for each layer beside an MLP, not one for all; in the MLP's place each
            has its own.
        sparse_gradients: gradients of the table only for the rows that were read, for optimisers
            that take them.
        reads: what a token reads of a fitted memory, as a fraction of the MLP's bytes.
        find: the neurons of "slots": "always" the same, or "product-keys": all are slots, and each
            token reads those that its query finds, as many as `reads` allows unless `knn` is given;
            `slots` beyond them are empty.
        count: layers for "auto".
        distill: steps of Adam on the neurons that "slots" keeps, against what the layer is to
            write.
        seed: of what is drawn.
        calibration: what a memory in the MLP's place is fitted on; see `Calibration`.

    Raises SurgeryError for a mixture of experts, or where a layer was operated on already.
    """
    calibrated, checkpoint = Calibration.of(calibration), with_gathered_mlps(checkpoint)
    blocks = _source(checkpoint)
    init = init or ("slots" if place == "replace" else "random")
    sizes = {"slots": slots, "heads": heads, "knn": knn, "key_dim": key_dim}
    init_of.check(place, init, find, kind, sizes | {"value_dim": value_dim}, reads, distill)
    chosen = _chosen(blocks, layers, place, count, calibrated)
    _require_free(checkpoint, chosen, place)
    _require_value_dim(
        value_dim, _hidden(blocks) if init in ("slots", "fit") or kind == "peer" else None
    )
    if find == "product-keys":
        make = partial(
            _entry_of_neurons, sizes=sizes, sparse_gradients=sparse_gradients, reads=reads
        )
    else:
        make = partial(
            _entry,
            spec=_spec(blocks, place, init, kind, sizes, value_dim, sparse_gradients),
            reads=reads,
        )
    whole = place == "beside" and not own_tables  # one table for all
    entries = tuple(
        make(blocks, group) for group in ([chosen] if whole else [(i,) for i in chosen])
    )
    job = _Job(
        blocks=blocks,
        layers=chosen,
        place=place,
        init=init,
        entries=entries,
        seed=seed,
        distill=distill,
        calibration=calibrated,
    )
    changes = with_blocks(checkpoint, entries)
    work = _work(checkpoint, job) if job.fitted else None
    tensors = _tensors(checkpoint, job, work)
    given = _parameters(
        job,
        {
            "kind": kind,
            **sizes,
            "value_dim": value_dim,
            "own_tables": own_tables or None,
            "find": find if find != "always" else None,
            "sparse_gradients": sparse_gradients or None,
        },
        reads,
    )
    step = Step(
        operation="memory",
        parameters=given,
        exact=place == "beside",
        layers=chosen,
        notes=_notes(job, checkpoint, tensors),
        work=work,
    )
    return checkpoint.replace(step=step, tensors=tensors, **changes)


def _parameters(job: _Job, options: Mapping[str, Any], reads: float) -> dict[str, Any]:
    """What makes the same again: `options` that were given, and what they decided."""
    found = {
        "layers": list(job.layers),
        "place": job.place,
        "init": job.init if job.place == "replace" else None,
        **options,
        "reads": reads if job.fitted and reads != 0.5 else None,
        "seed": job.seed or None,
        "distill": job.distill or None,
        "calibration": job.calibration.as_dict() or None if job.fitted else None,
    }
    return {k: v for k, v in found.items() if v is not None}


# --- what is asked for ----------------------------------------------------------------------------


def _source(checkpoint: Checkpoint) -> Blocks:
    blocks = locate(checkpoint)
    require_whole(blocks)
    block_config.entry(
        blocks.family, "memory", []
    )  # raises where no block can take the MLP's place
    return blocks


def _hidden(blocks: Blocks) -> int:
    return int(blocks.checkpoint.text_config[blocks.family.hidden_key])


def _chosen(
    blocks: Blocks,
    layers: Collection[int] | str | None,
    place: str,
    count: int,
    calibration: Calibration,
) -> tuple[int, ...]:
    if layers == "auto":
        if place == "beside":
            raise UsageError(
                "--layers auto beside the MLP",
                "it chooses what is cheap to replace; name layers, or leave it out",
            )
        return cheapest(blocks, calibration, count)
    if isinstance(layers, str):
        raise UsageError(f"layers {layers!r}", "give numbers, or auto")
    if layers is None and place == "replace":
        raise UsageError(
            "no layers whose MLP is to be replaced", "give --layers 8,16 or --layers auto"
        )
    return chosen_layers(
        blocks, {int(d * blocks.count) for d in DEPTHS} if layers is None else layers
    )


def _require_free(checkpoint: Checkpoint, layers: Collection[int], place: str) -> None:
    """A memory in the MLP's place is made of a plain MLP; beside it, of whatever is there but
    another memory.
    """
    for entry in block_config.changed(checkpoint.config):
        if place == "replace" and (both := sorted(set(entry["layers"]) & set(layers))):
            raise SurgeryError(
                f"layer {both[0]} has a {entry['kind']} block already", "leave that layer out"
            )


def _require_value_dim(value_dim: int | None, hidden: int | None) -> None:
    if hidden is not None and value_dim not in (None, hidden):
        raise UsageError(
            f"a value_dim of {value_dim}", f"here values are added to the stream, and have {hidden}"
        )


def _spec(
    blocks: Blocks,
    place: str,
    init: str,
    kind: str,
    sizes: Mapping[str, int | None],
    value_dim: int | None,
    sparse_gradients: bool,
) -> dict[str, Any]:
    """What is the same in all entries."""
    hidden, fitted = _hidden(blocks), init in ("slots", "fit")
    slots, heads, knn, key_dim = (
        sizes[n] or DEFAULTS[place][n] for n in ("slots", "heads", "knn", "key_dim")
    )
    n = _side(slots, key_dim)
    if knn > n:
        raise UsageError(f"knn {knn} of {n} keys", f"{slots} slots are {n} × {n}: give at most {n}")
    return {
        "place": place,
        "slots": kind,
        "heads": heads,
        "keys": n,
        "knn": knn,
        "key_dim": key_dim + 2 * fitted,
        "value_dim": value_dim or hidden,
        "query_norm": not fitted,
        "gated": kind == "pkm" and not fitted,
        "activation": "gelu",
        "bypass": {"fit": "affine", "slots": "bias"}.get(init, ""),
        "width": 0,
        "keep": init == "slots",
        "sparse_gradients": sparse_gradients,
    }


def _side(slots: int, key_dim: int) -> int:
    """The keys of a half."""
    n = math.isqrt(slots)
    if n * n != slots:
        raise UsageError(f"{slots} slots are no square", f"give {n * n} or {(n + 1) ** 2}")
    if key_dim % 2 or key_dim < 2:
        raise UsageError(f"a key_dim of {key_dim}", "a query is cut in halves: give an even number")
    return n


def _entry_of_neurons(
    blocks: Blocks,
    layers: tuple[int, ...],
    sizes: Mapping[str, int | None],
    sparse_gradients: bool,
    reads: float,
) -> dict[str, Any]:
    """The entry of config.json where product keys find the MLP's neurons; with as many found as a
    token may read.
    """
    mlp, hidden, key_dim = (
        blocks.mlp(layers[0]),
        _hidden(blocks),
        sizes["key_dim"] or DEFAULTS["replace"]["key_dim"],
    )
    least = math.isqrt(mlp.width - 1) + 1
    slots = sizes["slots"] or least**2
    n = _side(slots, key_dim)
    if n < least:
        raise UsageError(
            f"{slots} slots for {mlp.width} neurons",
            f"each is one: give {least**2} or a larger square",
        )
    parts = [p for p in PARTS if p != "down_bias" and getattr(mlp, p)]
    entry = block_config.entry(
        blocks.family,
        "memory",
        layers,
        shared=f"memory_values_{layers[0]}",
        place="replace",
        slots="neurons",
        heads=1,
        keys=n,
        knn=0,
        key_dim=key_dim,
        value_dim=hidden,
        query_norm=False,
        gated=False,
        activation=blocks.activation,
        bypass="bias",
        width=0,
        parts=parts,
        sparse_gradients=sparse_gradients,
    )
    entry["knn"] = sizes["knn"] or init_of.knn_of(reads, mlp, entry, hidden)
    if entry["knn"] > slots:
        raise UsageError(f"knn {entry['knn']} of {slots} slots", f"give at most {slots}")
    return entry


def _entry(
    blocks: Blocks, layers: tuple[int, ...], spec: Mapping[str, Any], reads: float
) -> dict[str, Any]:
    """The entry of config.json; with as many neurons kept as a token may read."""
    spec = dict(spec)
    entry = block_config.entry(
        blocks.family, "memory", layers, shared=f"memory_values_{layers[0]}", **spec
    )
    mlp = blocks.mlp(layers[0])
    if entry.pop("keep"):
        others = init_of.numbers_read(entry, _hidden(blocks))
        entry["width"] = init_of.width_of(reads, mlp, others)
        if entry["width"] < 8:
            raise UsageError(
                f"a token that reads {reads:g} of {init_of.mlp_numbers(mlp):,} numbers: the memory alone is {others:,}",
                "give a larger --reads, or fewer --heads, --knn or --key-dim",
            )
    return entry


def _notes(job: _Job, checkpoint: Checkpoint, tensors: Mapping[str, LazyTensor]) -> tuple[str, ...]:
    """Parameters and bytes added, bytes read per token."""
    parameters = sum(t.numel for t in tensors.values()) - checkpoint.parameters
    size = init_of.nbytes(tensors) - checkpoint.nbytes
    mlp, entry = job.blocks.mlp(job.layers[0]), job.entries[0]
    item = init_of.itemsize(mlp.down.dtype)
    whole = item * init_of.mlp_numbers(mlp)
    read = item * (
        init_of.numbers_read(entry, job.hidden) + init_of.mlp_numbers(mlp, entry["width"])
    )
    notes = [
        f"{parameters:+,} parameters, {size / 1e6:+,.1f} MB; of the memory a token reads {read / 1e6:,.3f} MB in each of "
        f"{len(job.layers)} layers, {read / whole:.3f} of the MLP's {whole / 1e6:,.3f} MB"
    ]
    if job.place == "beside":
        notes.append(
            "nothing is added until it is trained; at first only the output projection has a gradient"
        )
    elif not job.fitted:
        notes.append(
            f"--init {job.init} in the MLP's place leaves the model without that MLP or worse: perplexity is measured, train it before any use"
        )
    else:
        notes.append(
            f"layers {', '.join(map(str, job.layers))} were fitted on calibration text, not on the language-model loss"
        )
    notes.append(
        "loads with trust_remote_code=True: its code goes along; other runtimes (llama.cpp, vLLM) cannot run it"
    )
    return tuple(notes)


# --- what is planned ------------------------------------------------------------------------------


def _tensors(checkpoint: Checkpoint, job: _Job, work: Work | None) -> dict[str, LazyTensor]:
    tensors = dict(checkpoint.tensors)
    for entry in job.entries:
        for index in entry["layers"]:
            mlp = job.blocks.mlp(index)
            if job.place == "replace":
                tensors = {n: t for n, t in tensors.items() if n not in job.blocks.mlp_names(index)}
                if work and entry["width"]:
                    tensors |= job.blocks.restored(
                        index, _promised(work, index, mlp, entry["width"])
                    )
            start = f"{job.blocks.layer(index)}{job.blocks.family.mlp}.memory"
            tensors |= {
                f"{start}.{path}": t
                for path, t in _own(job, work, entry, index, start, mlp.down.dtype)
            }
        name, dtype = job.table(entry), job.blocks.mlp(entry["layers"][0]).down.dtype
        tensors |= {f"{name}.{path}": t for path, t in _table(job, work, entry, name, dtype)}
    return tensors


def _own(
    job: _Job, work: Work | None, entry: Mapping[str, Any], index: int, name: str, dtype: str
) -> Any:
    if work is None:
        return init_of.random_memory(entry, job.hidden, name, dtype, job.seed)
    shapes = init_of.memory_shapes(entry, job.hidden)
    return [(path, work.promise(f"{index}.{path}", dtype, shape)) for path, shape in shapes.items()]


def _table(job: _Job, work: Work | None, entry: Mapping[str, Any], name: str, dtype: str) -> Any:
    if work is None:
        return init_of.random_table(
            entry, job.hidden, name, dtype, job.seed, zero=job.init == "zero"
        )
    shapes, index = init_of.table_shapes(entry, job.hidden), entry["layers"][0]
    return [
        (path, work.promise(f"{index}.table.{path}", dtype, shape))
        for path, shape in shapes.items()
    ]


def _promised(work: Work, index: int, mlp: Mlp, width: int) -> Mlp:
    """The neurons that are kept, in Linear's layout."""
    shapes = {
        "gate": (width, mlp.down.shape[0]),
        "up": (width, mlp.down.shape[0]),
        "down": (mlp.down.shape[0], width),
        "gate_bias": (width,),
        "up_bias": (width,),
        "down_bias": (mlp.down.shape[0],),
    }
    parts: dict[str, Any] = {
        p: work.promise(f"{index}.{p}", t.dtype, shapes[p]) for p in PARTS if (t := getattr(mlp, p))
    }
    return dataclasses.replace(mlp, **parts)


# --- what is computed -----------------------------------------------------------------------------


def _work(checkpoint: Checkpoint, job: _Job) -> Work:
    source = "\n".join(f"{n} {t.identity()}" for n, t in sorted(checkpoint.tensors.items()))
    parts = [
        list(map(dict, job.entries)),
        job.init,
        job.seed,
        job.distill,
        job.calibration.identity,
    ]
    slots, tokens = job.entries[0]["keys"] ** 2, job.calibration.tokens
    layer = 4 * sum(checkpoint.tensors[n].numel for n in job.blocks.names(0))
    peak = 3 * layer + 4 * 4 * tokens * job.hidden + 4 * 3 * slots**2
    if job.entries[0]["slots"] == "neurons":
        peak += 2 * min(init_of.MASSES, tokens * slots) + 4 * 2 * min(
            init_of.PLACED, tokens * slots
        )
    return Work(
        f"memory {parts}\n{source}",
        lambda work, progress: _calibrate(checkpoint, job, work, progress),
        total=max(job.layers) + 1,
        peak_memory=peak,
    )


def _calibrate(checkpoint: Checkpoint, job: _Job, work: Work, progress: Progress) -> None:
    """Walk as far as the last of the layers, converting each on what the converted ones before it
    give.
    """
    from surgery.calibration.install import convert_layers

    convert_layers(
        checkpoint,
        job.calibration,
        job.layers,
        work,
        progress,
        fit=lambda layer, sample, source: _fit(layer, job, sample, source, work),
        install=lambda layer, walk: _install(layer, job, walk, work),
    )


def _fit(layer: Layer, job: _Job, sample: Sample, source: Sequence[Tensor], work: Work) -> None:
    from surgery.calibration.install import observe
    from surgery.fitting import memory_fit, memory_neurons, repair

    rows = observe(layer, job.blocks, sample, source)
    index, entry = layer.index, job.entry(layer.index)
    mlp, act = job.blocks.mlp(index), job.blocks.activation
    if entry["slots"] == "neurons":
        found, figures = memory_neurons.fit(mlp, act, rows, entry, job.seed)
    else:
        found, figures = memory_fit.fit(mlp, act, rows, entry, job.seed, job.distill)
    for path, value in found.items():
        work.put(f"{index}.{path}", value)
    work.note(str(index), repair.figures(**figures))


def _install(layer: Layer, job: _Job, walk: Walk, work: Work) -> None:
    """Put the memory into the layer, as it will be on the disk."""
    from surgery.blocks import memory_mlp

    index, family, entry = layer.index, job.blocks.family, dict(job.entry(layer.index))
    block = memory_mlp.with_memory(layer.module.get_submodule(family.mlp), entry, walk.model.config)
    table: Any = block.memory.make_shared()
    block.memory.read_from(table)
    state = {path: work.get(f"{index}.{path}") for path in init_of.memory_shapes(entry, job.hidden)}
    block.memory.load_state_dict(state)
    table.load_state_dict(
        {
            path: work.get(f"{index}.table.{path}")
            for path in init_of.table_shapes(entry, job.hidden)
        }
    )
    if entry["width"]:
        mlp = job.blocks.mlp(index)
        parts: dict[str, Any] = {p: work.lazy(f"{index}.{p}") for p in PARTS if getattr(mlp, p)}
        mlp = dataclasses.replace(mlp, **parts)
        start = f"{job.blocks.layer(index)}{family.mlp}."
        kept = {n.removeprefix(start): t.read() for n, t in job.blocks.restored(index, mlp).items()}
        block.load_state_dict(kept, strict=False)
    for module in (block, table):
        module.to(layer.device, walk.dtype).requires_grad_(False)
    setattr(layer.module, family.mlp, block)


# --- which layers ---


def cheapest(blocks: Blocks, calibration: Calibration, count: int) -> tuple[int, ...]:
    """The layers whose stream loses least where half of the MLP's neurons are kept and their values
    refitted: the weighted squared error on rows that were not fitted on (repair.py). Raises
    UsageError for more layers than there are."""
    from surgery.calibration.install import observe
    from surgery.fitting import memory_fit, repair
    from surgery.fitting.repair import Neurons

    if count > blocks.count:
        raise UsageError(
            f"{count} layers of a model with {blocks.count}", f"give at most {blocks.count}"
        )
    calibration = dataclasses.replace(calibration, tokens=min(calibration.tokens, CHOICE_TOKENS))
    sample = calibration.sample(blocks.checkpoint)
    walk, costs = calibration.walk(blocks.checkpoint, sample.input_ids), {}
    for layer in walk:
        rows = observe(layer, blocks, sample, list(layer.outputs()), feedback=0.0)
        whole = Neurons.of(
            blocks.mlp(layer.index), rule="plain", act=blocks.activation, device=layer.device
        )
        kept = repair.ridge(
            memory_fit.best(whole, rows, len(whole.up) // 2),
            rows,
            damping=memory_fit.DAMPING,
            bias=True,
        )
        costs[layer.index] = (
            memory_fit.size(rows, rows.fitted)
            * repair.error(kept, rows, rows.fitted)
            / (len(rows.z) - rows.fitted)
        )
        layer.run()
    return tuple(sorted(sorted(costs, key=lambda i: costs[i])[:count]))
