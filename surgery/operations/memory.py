"""Memory layers: a product-key memory beside an MLP, exactly, or in its place, fitted on text.

Published memory layers (Memory Layers at Scale, Berges et al. 2024, arXiv 2412.09764) are trained
from scratch, and in a trained model they would be noise in the place of what it learned. Beside the
MLP a memory adds zero until it is trained. In its place the init is fitted, a layer at a time, on
what the converted layers before it give (fitting/memory_fit.py, fitting/memory_neurons.py).

Bytes are counted as a token reads them: query, keys and projections whole, the rows of the table
that are looked up, and the neurons that were kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgery.blocks import block_config
from surgery.blocks.custom_code import NEEDS_TRUST, with_blocks, with_gathered_mlps
from surgery.blocks.paper import Paper
from surgery.blocks.preconditions import chosen_layers, require_whole
from surgery.calibration.settings import Calibration
from surgery.checkpoint import Checkpoint, LazyTensor, Pending, Progress, Step, Work
from surgery.checkpoint.work import identity
from surgery.errors import SurgeryError, UsageError
from surgery.families import Blocks, Mlp, locate
from surgery.fitting import memory_init as init_of
from surgery.operations.operation import OWN_TEXT, Operation, Parameters

if TYPE_CHECKING:
    from surgery.calibration.install import Fitting
    from surgery.calibration.walk import Layer
    from surgery.fitting.rows import Rows

PLACES = ("beside", "replace")
INITS = ("slots", "fit", "zero", "random")  # of a memory in the MLP's place
FINDS = ("always", "product-keys")  # the neurons that --init slots keeps
KINDS = ("pkm", "peer")
CHOICE_TOKENS = 8192  # that layers are chosen on
SIZES = ("slots", "heads", "knn", "key_dim")
DEFAULTS = {
    "beside": {"slots": 2**20, "heads": 4, "knn": 32, "key_dim": 512},
    "replace": {"slots": 4096, "heads": 1, "knn": 16, "key_dim": 32},
}
DEPTHS = (1 / 6, 1 / 2, 5 / 6)  # of the default layers: 4, 12 and 20 of 24, as in the paper
PARTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of `memory`; its docstring explains each."""

    layers: Collection[int] | str | None
    place: str
    init: str
    kind: str
    slots: int | None
    heads: int | None
    knn: int | None
    key_dim: int | None
    value_dim: int | None
    own_tables: bool
    sparse_gradients: bool
    reads: float
    count: int
    find: str
    distill: int
    seed: int
    calibration: Calibration

    def __post_init__(self) -> None:
        for what, value, known in (
            ("place", self.place, PLACES),
            ("init", self.init, INITS),
            ("find", self.find, FINDS),
            ("kind", self.kind, KINDS),
        ):
            if value not in known:
                raise UsageError(f"unknown {what} {value!r}", f"one of: {', '.join(known)}")
        for name in (*SIZES, "value_dim"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise UsageError(f"{name} {size}", "give 1 or more")
        if not 0 < self.reads <= 1:
            what = f"a token that reads {self.reads} of the MLP"
            raise UsageError(what, "give a fraction, like 0.5")
        self._check_init()
        self._check_layers()
        if self.find != "always":
            self._check_found()

    def _check_init(self) -> None:
        if self.place == "beside" and self.init != "random":
            raise UsageError(
                f"--init {self.init} beside the MLP",
                "beside it a memory adds zero; --place replace has inits",
            )
        if self.kind == "peer" and self.fitted:
            raise UsageError(
                f"--init {self.init} of peer",
                "it is fitted for pkm; give --init zero or random, or --place beside",
            )
        if self.distill and self.init != "slots":
            raise UsageError(
                f"--distill {self.distill} with --init {self.init}",
                "it optimises the neurons that --init slots keeps",
            )

    def _check_layers(self) -> None:
        if isinstance(self.layers, str) and self.layers != "auto":
            raise UsageError(f"layers {self.layers!r}", "give numbers, or auto")
        if self.auto and self.place == "beside":
            raise UsageError(
                "--layers auto beside the MLP",
                "it chooses what is cheap to replace; name layers, or leave it out",
            )
        if self.layers is None and self.place == "replace":
            raise UsageError(
                "no layers whose MLP is to be replaced", "give --layers 8,16 or --layers auto"
            )

    def _check_found(self) -> None:
        if self.init != "slots":
            raise UsageError(
                f"--find {self.find} with --init {self.init}",
                "it finds neurons: give --place replace --init slots",
            )
        if self.heads not in (None, 1):
            raise UsageError(
                f"{self.heads} heads with --find {self.find}",
                "one lookup finds the neurons: leave --heads out",
            )
        if self.distill:
            raise UsageError(
                f"--distill {self.distill} with --find {self.find}",
                "it optimises neurons that are always read",
            )

    @property
    def auto(self) -> bool:
        """Return whether layers are chosen by what they cost."""
        return self.layers == "auto"

    @property
    def fitted(self) -> bool:
        """Return whether the memory is fitted on text."""
        return self.init in ("slots", "fit")

    def size(self, name: str) -> int:
        """Return slots, heads, knn or key_dim, by default that of the place."""
        return getattr(self, name) or DEFAULTS[self.place][name]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """Memory layers to be made, checked against the checkpoint."""

    blocks: Blocks
    options: Options
    layers: tuple[int, ...]
    entries: tuple[Mapping[str, Any], ...]

    @property
    def hidden(self) -> int:
        return _hidden(self.blocks)

    def entry(self, index: int) -> Mapping[str, Any]:
        """Return the `surgery_blocks` entry that covers layer `index`."""
        return next(e for e in self.entries if index in e["layers"])

    def table(self, entry: Mapping[str, Any]) -> str:
        """Return the name of an entry's table on disk."""
        family = self.blocks.family
        if family.layers_on_disk:  # the loader would not rename what it does not know
            places = (family.body, family.layers.rpartition(".")[0], str(entry["shared"]))
            return ".".join(filter(None, places))
        layers = self.blocks.prefix.removesuffix(".").rpartition(".")[2]
        return self.blocks.prefix.removesuffix(f"{layers}.") + str(entry["shared"])


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
    """Return the model with a memory in some layers.

    Args:
        layers: by default, three beside; "auto": `count` of them, whose MLPs are cheapest to
            replace. They are found on the calibration text before the output is planned.
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

    Example:
        >>> source = surgery.open("meta-llama/Llama-2-7b-hf")
        >>> output = surgery.memory(source, layers=[8, 16], slots=2**20)
    """
    options = Options(
        layers=layers,
        place=place,
        init=init or ("slots" if place == "replace" else "random"),
        kind=kind,
        slots=slots,
        heads=heads,
        knn=knn,
        key_dim=key_dim,
        value_dim=value_dim,
        own_tables=own_tables,
        sparse_gradients=sparse_gradients,
        reads=reads,
        count=count,
        find=find,
        distill=distill,
        seed=seed,
        calibration=Calibration.of(calibration),
    )
    base, checkpoint = checkpoint, with_gathered_mlps(checkpoint)
    job = _check(checkpoint, options)
    work = _work(job) if options.fitted else None
    tensors = _tensors(job, work)
    step = Step(
        operation="memory",
        parameters=_parameters(job),
        exact=place == "beside",
        layers=job.layers,
        notes=_notes(job, tensors),
        work=work,
        pending=_pending(job, base) if options.auto else None,
    )
    return checkpoint.replace(step=step, tensors=tensors, **with_blocks(checkpoint, job.entries))


def _parameters(job: _Job) -> dict[str, Any]:
    """Return the options that make the same again: those given, and what was chosen."""
    o = job.options
    found = {
        "layers": list(job.layers),
        "place": o.place,
        "init": o.init if o.place == "replace" else None,
        "kind": o.kind,
        **{name: getattr(o, name) for name in (*SIZES, "value_dim")},
        "own_tables": o.own_tables or None,
        "find": o.find if o.find != "always" else None,
        "sparse_gradients": o.sparse_gradients or None,
        "reads": o.reads if o.fitted and o.reads != 0.5 else None,
        "seed": o.seed or None,
        "distill": o.distill or None,
        "calibration": (o.fitted and o.calibration.as_dict()) or None,
    }
    return {k: v for k, v in found.items() if v is not None}


def _pending(job: _Job, base: Checkpoint) -> Pending:
    """Return the choice of layers, which a walk of the source makes."""
    return Pending(
        base=base,
        title="choosing layers",
        total=job.blocks.count,
        identity=identity("cheapest layers", job.blocks.checkpoint, job.options),
        choose=lambda progress: {"layers": list(cheapest(job.blocks, job.options, progress))},
        check=lambda: job.options.calibration.require(job.blocks.checkpoint),
        asked={"layers": "auto", "count": job.options.count},
    )


# --- what is asked for ----------------------------------------------------------------------------


def _check(checkpoint: Checkpoint, options: Options) -> _Job:
    blocks = locate(checkpoint)
    require_whole(blocks)
    block_config.entry(blocks.family, "memory", [])  # raises where no block can take its place
    chosen = _chosen(blocks, options)
    if options.place == "replace":
        _require_free(checkpoint, chosen)
    hidden = _hidden(blocks)
    if (options.fitted or options.kind == "peer") and options.value_dim not in (None, hidden):
        raise UsageError(
            f"a value_dim of {options.value_dim}",
            f"here values are added to the stream, and have {hidden}",
        )
    make = _entry_of_neurons if options.find == "product-keys" else _entry
    one_table = options.place == "beside" and not options.own_tables
    groups = [chosen] if one_table else [(index,) for index in chosen]
    entries = tuple(make(blocks, group, options) for group in groups)
    return _Job(blocks=blocks, options=options, layers=chosen, entries=entries)


def _hidden(blocks: Blocks) -> int:
    return int(blocks.checkpoint.text_config[blocks.family.hidden_key])


def _chosen(blocks: Blocks, options: Options) -> tuple[int, ...]:
    """Return the layers; until "auto" has chosen them, the first that it could choose."""
    if options.auto:
        free = _free(blocks)
        if options.count > len(free):
            raise UsageError(
                f"{options.count} layers of a model with {len(free)}", f"give at most {len(free)}"
            )
        return free[: options.count]
    named = options.layers
    if named is None:
        named = {int(depth * blocks.count) for depth in DEPTHS}
    assert not isinstance(named, str)
    return chosen_layers(blocks, named)


def _free(blocks: Blocks) -> tuple[int, ...]:
    """Return the layers whose MLP is as the source had it."""
    changed = block_config.changed(blocks.checkpoint.config)
    taken = {index for entry in changed for index in entry["layers"]}
    return tuple(index for index in blocks.dense if index not in taken)


def _require_free(checkpoint: Checkpoint, layers: Collection[int]) -> None:
    """Raise SurgeryError where a layer has a block: a plain MLP alone can be replaced."""
    for entry in block_config.changed(checkpoint.config):
        if both := sorted(set(entry["layers"]) & set(layers)):
            raise SurgeryError(
                f"layer {both[0]} has a {entry['kind']} block already", "leave that layer out"
            )


def _side(slots: int, key_dim: int) -> int:
    """Return how many keys a half has."""
    n = math.isqrt(slots)
    if n * n != slots:
        raise UsageError(f"{slots} slots are no square", f"give {n * n} or {(n + 1) ** 2}")
    if key_dim % 2 or key_dim < 2:
        raise UsageError(f"a key_dim of {key_dim}", "a query is cut in halves: give an even number")
    return n


def _entry_of_neurons(blocks: Blocks, layers: tuple[int, ...], options: Options) -> dict[str, Any]:
    """Return the entry where product keys find the MLP's neurons, as many as a token may read."""
    mlp, hidden, key_dim = blocks.mlp(layers[0]), _hidden(blocks), options.size("key_dim")
    least = math.isqrt(mlp.width - 1) + 1
    slots = options.slots or least**2
    n = _side(slots, key_dim)
    if n < least:
        raise UsageError(
            f"{slots} slots for {mlp.width} neurons",
            f"each is one: give {least**2} or a larger square",
        )
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
        parts=[p for p in PARTS if p != "down_bias" and getattr(mlp, p)],
        sparse_gradients=options.sparse_gradients,
    )
    entry["knn"] = options.knn or init_of.knn_of(options.reads, mlp, entry, hidden)
    if entry["knn"] > slots:
        raise UsageError(f"knn {entry['knn']} of {slots} slots", f"give at most {slots}")
    return entry


def _entry(blocks: Blocks, layers: tuple[int, ...], options: Options) -> dict[str, Any]:
    """Return the entry of a memory, with as many neurons kept as a token may read."""
    hidden, fitted = _hidden(blocks), options.fitted
    slots, knn, key_dim = (options.size(name) for name in ("slots", "knn", "key_dim"))
    n = _side(slots, key_dim)
    if knn > n:
        raise UsageError(f"knn {knn} of {n} keys", f"{slots} slots are {n} × {n}: give at most {n}")
    entry = block_config.entry(
        blocks.family,
        "memory",
        layers,
        shared=f"memory_values_{layers[0]}",
        place=options.place,
        slots=options.kind,
        heads=options.size("heads"),
        keys=n,
        knn=knn,
        key_dim=key_dim + 2 * fitted,
        value_dim=options.value_dim or hidden,
        query_norm=not fitted,
        gated=options.kind == "pkm" and not fitted,
        activation="gelu",
        bypass={"fit": "affine", "slots": "bias"}.get(options.init, ""),
        width=0,
        sparse_gradients=options.sparse_gradients,
    )
    if options.init == "slots":
        entry["width"] = _width(blocks.mlp(layers[0]), entry, hidden, options.reads)
    return entry


def _width(mlp: Mlp, entry: Mapping[str, Any], hidden: int, reads: float) -> int:
    """Return how many neurons are kept beside the memory."""
    others = init_of.numbers_read(entry, hidden)
    width = init_of.width_of(reads, mlp, others)
    if width < 8:
        numbers = init_of.mlp_numbers(mlp)
        raise UsageError(
            f"a token that reads {reads:g} of {numbers:,} numbers: the memory alone is {others:,}",
            "give a larger --reads, or fewer --heads, --knn or --key-dim",
        )
    return width


def _notes(job: _Job, tensors: Mapping[str, LazyTensor]) -> tuple[str, ...]:
    """Say what was added, what a token reads of it, and what that is worth."""
    checkpoint, entry = job.blocks.checkpoint, job.entries[0]
    parameters = sum(t.numel for t in tensors.values()) - checkpoint.parameters
    size = init_of.nbytes(tensors) - checkpoint.nbytes
    mlp = job.blocks.mlp(job.layers[0])
    item, whole = init_of.itemsize(mlp.down.dtype), init_of.mlp_numbers(mlp)
    read = init_of.numbers_read(entry, job.hidden) + init_of.mlp_numbers(mlp, entry["width"])
    if job.options.place == "beside":
        worth = (
            "nothing is added until it is trained; at first only the output projection has a "
            "gradient"
        )
    elif job.options.fitted:
        layers = ", ".join(map(str, job.layers))
        worth = f"layers {layers} were fitted on calibration text, not on the language-model loss"
    else:
        worth = (
            f"--init {job.options.init} in the MLP's place leaves the model without that MLP or "
            "worse: perplexity is measured, train it before any use"
        )
    return (
        f"{parameters:+,} parameters, {size / 1e6:+,.1f} MB; of the memory a token reads "
        f"{item * read / 1e6:,.2f} MB in each of {len(job.layers)} layers, "
        f"{read / whole:.2f} × what the MLP reads ({item * whole / 1e6:,.2f} MB)",
        worth,
        NEEDS_TRUST,
    )


# --- what is planned ------------------------------------------------------------------------------


def _tensors(job: _Job, work: Work | None) -> dict[str, LazyTensor]:
    tensors = dict(job.blocks.checkpoint.tensors)
    for entry in job.entries:
        for index in entry["layers"]:
            mlp = job.blocks.mlp(index)
            if job.options.place == "replace":
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
        return init_of.random_memory(entry, job.hidden, name, dtype, job.options.seed)
    shapes = init_of.memory_shapes(entry, job.hidden)
    return [(path, work.promise(f"{index}.{path}", dtype, shape)) for path, shape in shapes.items()]


def _table(job: _Job, work: Work | None, entry: Mapping[str, Any], name: str, dtype: str) -> Any:
    if work is None:
        return init_of.random_table(
            entry, job.hidden, name, dtype, job.options.seed, zero=job.options.init == "zero"
        )
    shapes, index = init_of.table_shapes(entry, job.hidden), entry["layers"][0]
    return [
        (path, work.promise(f"{index}.table.{path}", dtype, shape))
        for path, shape in shapes.items()
    ]


def _promised(work: Work, index: int, mlp: Mlp, width: int) -> Mlp:
    """Return the neurons that are kept, in Linear's layout."""
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


def _work(job: _Job) -> Work:
    options, checkpoint = job.options, job.blocks.checkpoint
    slots, tokens = job.entries[0]["keys"] ** 2, options.calibration.tokens
    layer = 4 * sum(checkpoint.tensors[n].numel for n in job.blocks.names(job.layers[0]))
    peak = 3 * layer + 4 * 4 * tokens * job.hidden + 4 * 3 * slots**2
    if job.entries[0]["slots"] == "neurons":
        peak += 2 * min(init_of.MASSES, tokens * slots) + 4 * 2 * min(
            init_of.PLACED, tokens * slots
        )
    entries = list(map(dict, job.entries))
    parts = (entries, options.init, options.seed, options.distill, options.calibration.identity)
    return Work(
        identity("memory", checkpoint, *parts),
        lambda work, progress: _calibrate(job, work, progress),
        total=max(job.layers) + 1,
        peak_memory=peak,
        check=lambda: options.calibration.require(checkpoint),
    )


def _calibrate(job: _Job, work: Work, progress: Progress) -> None:
    """Walk as far as the last of the layers, fitting each on what those before it give."""
    from surgery.calibration.install import fit_layers, read_text

    def fit(fitting: Fitting) -> None:
        _fit(job, fitting, work)

    reading = read_text(job.blocks, job.options.calibration, work)
    fit_layers(reading, job.layers, work, progress, fit)


def _fit(job: _Job, fitting: Fitting, work: Work) -> None:
    from surgery.fitting import measures, memory_fit, memory_neurons

    index, rows, options = fitting.index, fitting.rows, job.options
    entry, mlp, act = job.entry(index), job.blocks.mlp(index), job.blocks.activation
    if entry["slots"] == "neurons":
        found, figures = memory_neurons.fit(mlp, act, rows, entry, options.seed)
    else:
        found, figures = memory_fit.fit(mlp, act, rows, entry, options.seed, options.distill)
    for path, value in found.items():
        work.put(f"{index}.{path}", value)
    work.note(str(index), measures.figures(**figures))


def cheapest(
    blocks: Blocks, options: Options, progress: Progress = lambda n: None
) -> tuple[int, ...]:
    """Return the `count` layers whose stream loses least without half of the MLP's neurons.

    The values of the other half are refitted. What is lost is the weighted squared error on rows
    that were not fitted on (fitting/measures.py).
    """
    from surgery.calibration.install import costs_of_layers
    from surgery.fitting import memory_fit
    from surgery.fitting.measures import error
    from surgery.fitting.neurons import Neurons
    from surgery.fitting.ridge import ridge

    def cost(layer: Layer, rows: Rows) -> float:
        mlp = blocks.mlp(layer.index)
        whole = Neurons.of(mlp, rule="plain", act=blocks.activation, device=layer.device)
        kept = memory_fit.best(whole, rows, len(whole.up) // 2)
        kept = ridge(kept, rows, damping=memory_fit.DAMPING, bias=True)
        progress(1)
        lost = error(kept, rows, rows.fitted) * memory_fit.size(rows, rows.fitted)
        return lost / (len(rows.z) - rows.fitted)

    tokens = min(options.calibration.tokens, CHOICE_TOKENS)
    calibration = dataclasses.replace(options.calibration, tokens=tokens)
    sample = calibration.sample(blocks.checkpoint)
    costs = costs_of_layers(blocks, calibration, sample, _free(blocks), cost)
    return tuple(sorted(sorted(costs, key=lambda i: costs[i])[: options.count]))


# --- the record -----------------------------------------------------------------------------------

PRODUCT_KEYS = Paper(
    "1907.05242", "Lample, Guillaume", "Large Memory Layers with Product Keys", 2019
)
AT_SCALE = Paper("2412.09764", "Berges, Vincent-Pierre", "Memory Layers at Scale", 2024)


def _done(p: Parameters, where: str) -> str:
    replaces = p.get("place") == "replace"
    return f"{where} {'gave its place to a memory' if replaces else 'got a memory beside it'}"


OPERATION = Operation(
    name="memory",
    function=memory,
    summary="Put product-key memory beside MLPs, exactly, or in their place.",
    done=_done,
    why="A memory layer looks few values up in a large table: parameters that cost next to no work "
    "per token.",
    limits="It was not trained after the conversion: new memory holds nothing yet.",
    suffix=lambda p: "memory",
    papers=lambda p: [PRODUCT_KEYS, AT_SCALE],
    tags=("memory-layers",),
    blocks=("memory",),
    remedies=lambda p: ("fewer layers, or cheaper ones: --layers auto", *OWN_TEXT),
)
