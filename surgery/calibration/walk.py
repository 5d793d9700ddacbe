"""A forward pass that holds one decoder layer at a time, so that a model need not fit in memory.

1. The real body runs once with every decoder layer replaced by a stub that keeps its arguments.
   This records the embeddings, masks and positions.
2. Each layer is loaded, run on all batches, and dropped.
3. The stock class runs once more, with stubs that return the walk's hidden states. Final norm,
   head, soft-capping and scaling therefore need no code here.

Shapes: b sequences of a batch, T positions, H hidden_size, V vocab_size.
"""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn

from surgery.blocks import block_config
from surgery.calibration import stock
from surgery.calibration.fp64 import arithmetic
from surgery.calibration.prefetch import Prefetch
from surgery.checkpoint import Checkpoint
from surgery.errors import SurgeryError, UsageError, first_line
from surgery.families import Family, locate
from surgery.families.classes import without_head

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Positions = tuple[slice, slice]  # rows and positions of input_ids
BATCH_TOKENS = 2048  # tokens of a batch, by default
_WITHOUT_TEXT = (
    "use what needs no text: `surgery inspect`, `surgery relufy --repair none`, `upcycle`"
)
CHUNK_LOGITS = 2**24  # logits held at once: 64 MiB in fp32


@dataclass(kw_only=True, slots=True)
class Layer:
    """One decoder layer with its weights loaded.

    `hidden` holds [b, T, H] for each batch: the inputs of the layer, and after `run` its outputs.
    """

    index: int
    module: nn.Module
    hidden: list[Tensor]
    arguments: list[Arguments]
    device: str = "cpu"
    loaded: list[nn.Module] = field(default_factory=list)  # the layer itself, and its tables
    done: bool = False

    @torch.no_grad()
    def outputs(self, hidden: Sequence[Tensor] | None = None) -> Iterator[Tensor]:
        """Yield the output [b, T, H] for each batch, or for each of `hidden`.

        The module computes as it is, and the walk does not move.
        """
        states = self.hidden if hidden is None else hidden
        for x, (args, kwargs) in zip(states, self.arguments, strict=False):
            with arithmetic(x.dtype), _refusing(self.module, f"layer {self.index}"):
                out = self.module(x.to(self.device), *args, **kwargs)
            yield out[0] if isinstance(out, tuple | list) else out

    def run(self, each: Callable[[int, Tensor], None] = lambda b, output: None) -> None:
        """Replace the hidden states by the layer's outputs, batch by batch.

        `each` is called with the number of the batch and its output as they come.
        """
        for b, out in enumerate(self.outputs()):
            each(b, out)
            self.hidden[b] = out
        self.done = True


class Walk:
    """A walk through the decoder layers: `for layer in walk: ...` visits each one, loaded.

    The body of the loop may hook `layer.module`, look at `layer.outputs()`, load other weights into
    it, and `run()` it. A layer that it did not run is run when the loop goes on. After the last
    layer, `logits()` gives the logits. `hidden` are the hidden states where the walk is, changed in
    place. Hidden states beyond `memory_budget` bytes are kept in a temporary file. With `dtype`
    fp64 everything is computed in fp64 (see `calibration/fp64.py`).

    Example:
        walk = Walk(open_checkpoint("Qwen/Qwen3-0.6B"), input_ids)
        for layer in walk:
            layer.run()
            print(layer.index, walk.hidden[0].norm())
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        input_ids: Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        batch_size: int = 0,
        memory_budget: int | None = None,
    ) -> None:
        self.checkpoint, self.device, self.dtype = checkpoint, device, dtype
        self.blocks = locate(checkpoint)
        _require_chained(self.blocks.family)
        self.ahead = Prefetch(device) if device.startswith("cuda") else None
        self.model = stock.meta_model(checkpoint, dtype, device)
        self.layers_name, self.layers = stock.decoder_layers(self.model, self.blocks)
        self.memory_budget = memory_budget
        self.hidden: list[Tensor] = _Hidden(memory_budget)
        self.arguments: list[list[Arguments]] = [[] for _ in self.layers]  # by layer, by batch
        self._other: Walk | None = None  # a walk of the model whose layers `install` takes
        self._record(input_ids.split(batch_size or max(1, BATCH_TOKENS // input_ids.shape[1])))

    def __len__(self) -> int:
        """Return the number of decoder layers."""
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        """Visit all layers."""
        return self.steps()

    def steps(self, start: int = 0) -> Iterator[Layer]:
        """Visit the layers from `start` on; `hidden` must hold the inputs of the first.

        Raises SurgeryError if the checkpoint lacks a tensor of a layer.
        """
        for index in range(start, len(self.layers)):
            loaded = self._load_layer(index)
            self._read_ahead(self.blocks.names(index + 1))
            layer = Layer(
                index=index,
                loaded=loaded,
                module=self.layers[index],
                hidden=self.hidden,
                arguments=self.arguments[index],
                device=self.device,
            )
            try:
                yield layer
                if not layer.done:
                    layer.run()
            finally:
                for module in layer.loaded:
                    stock.unload(module)

    def install(self, layer: Layer, output: Checkpoint) -> None:
        """Replace the layer by that of `output`, as it will be on disk, and drop its own weights.

        `output` has the layers of this walk's checkpoint, in the same places. Layers other than
        this one need not be known yet.
        """
        if self._other is None or self._other.checkpoint is not output:
            self._other = self._like(output)
        for module in layer.loaded:
            stock.unload(module)
        layer.module = self._other.layers[layer.index]
        layer.loaded = self._other._load_layer(layer.index)

    def _like(self, output: Checkpoint) -> Walk:
        """Return a walk of another checkpoint, which has no text to run."""
        other = copy.copy(self)
        other.checkpoint, other.blocks, other.ahead = output, locate(output), None
        other.model = stock.meta_model(output, self.dtype, self.device)
        other.layers_name, other.layers = stock.decoder_layers(other.model, other.blocks)
        return other

    def _load_layer(self, index: int) -> list[nn.Module]:
        """Load a decoder layer and the tables that it reads, and return their modules."""
        module, tables = self.layers[index], self._tables(index)
        self.load([*self.blocks.names(index), *(n for names, _ in tables for n in names)])
        modules = [module, *(m for _, m in tables)]
        missing = [n for m in modules for n, p in m.named_parameters() if p.is_meta]
        self._require(missing, f"layer {index}: ")
        return modules

    def _tables(self, index: int | None = None) -> list[tuple[list[str], nn.Module]]:
        """Return the modules of the body that custom-code blocks of a layer (or of any layer) read.

        Each comes with the names of its tensors on disk.
        """
        found, place = [], self.layers_name.rpartition(".")[0]
        for name in block_config.shared_modules(self.checkpoint.config, index):
            leaf = name.rpartition(".")[2]
            stored = [n for n in self.checkpoint.tensors if f".{leaf}." in f".{n}"]
            found.append((stored, self.model.get_submodule(f"{place}.{leaf}".removeprefix("."))))
        return found

    def load(self, names: Sequence[str]) -> None:
        """Load these tensors of the checkpoint into the model."""
        tensors = {n: self.checkpoint.tensors[n] for n in names}
        stock.load(self.model, self.ahead.take(tensors) if self.ahead else tensors, self.device)

    def _read_ahead(self, names: Sequence[str]) -> None:
        """Start reading these tensors, or tell the kernel to, while something else is computed."""
        if self.ahead:
            self.ahead.start({n: self.checkpoint.tensors[n] for n in names})
            return
        if not hasattr(os, "posix_fadvise"):  # macOS has none
            return
        for extent in (e for n in names for e in self.checkpoint.tensors[n].sources()):
            with extent.file.path().open("rb") as f:
                os.posix_fadvise(f.fileno(), extent.offset, extent.length, os.POSIX_FADV_WILLNEED)

    def twin(self) -> list[Tensor]:
        """Return a copy of the hidden states, to be moved through the layers with other weights.

        It has the same memory budget.
        """
        copy = _Hidden(self.memory_budget)
        for hidden in self.hidden:
            copy.append(hidden)
        return copy

    def fork(self, checkpoint: Checkpoint, hidden: Sequence[Tensor]) -> Walk:
        """Return a walk that goes on from `hidden` with the weights of another checkpoint.

        `hidden` are those of the first batches, and `checkpoint` must have the same config. The two
        walks share the model: use one at a time.
        """
        other = copy.copy(self)
        other.ahead = None if self.ahead is None else Prefetch(self.device)
        other.checkpoint, other.blocks, other.hidden = checkpoint, locate(checkpoint), list(hidden)
        return other

    @torch.no_grad()
    def logits(self) -> Iterator[tuple[Positions, Tensor]]:
        """Yield logits [b, n, V] of n positions of a batch, and their place in `input_ids`.

        Call it after the last layer. At most `CHUNK_LOGITS` logits (but at least one position of a
        batch) are held at a time.
        """
        self._load_outer(without=self.model.get_input_embeddings())
        vocab_size = self.model.config.get_text_config().vocab_size
        try:
            row = 0
            for hidden in self.hidden:
                rows = slice(row, row + len(hidden))
                n = max(1, CHUNK_LOGITS // (len(hidden) * vocab_size))
                for start in range(0, hidden.shape[1], n):
                    chunk = hidden[:, start : start + n].to(self.device)
                    yield (rows, slice(start, start + chunk.shape[1])), self._head(chunk)
                row = rows.stop
        finally:
            stock.unload(self.model)

    def loss_gradient(self, input_ids: Tensor) -> list[Tensor]:
        """Return the gradient of the language-model loss in the hidden states.

        It is [b, T, H] for each batch. Call it after the last layer. The loss is the mean over all
        targets of `input_ids` [B, T].
        """
        self._load_outer(without=self.model.get_input_embeddings())
        targets, found, row = input_ids[:, 1:].to(self.device), list[Tensor](), 0
        try:
            for hidden in self.hidden:
                own = targets[row : row + len(hidden)]
                found.append(self._loss_gradient(hidden, own, targets.numel()))
                row += len(hidden)
        finally:
            stock.unload(self.model)
        return found

    def _loss_gradient(self, hidden: Tensor, targets: Tensor, count: int) -> Tensor:
        """Return the gradient for one batch [b, T, H].

        `targets` [b, T - 1] are those of the batch, `count` is the number of targets in all
        batches.
        """
        found = torch.zeros_like(hidden, device=self.device)
        vocab_size = self.model.config.get_text_config().vocab_size
        n = max(1, CHUNK_LOGITS // (len(hidden) * vocab_size))
        for start in range(0, targets.shape[1], n):
            where = slice(start, min(start + n, targets.shape[1]))
            chunk = hidden[:, where].to(self.device).requires_grad_()
            logits, wanted = self._head(chunk).flatten(0, 1), targets[:, where].flatten()
            loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
            (found[:, where],) = torch.autograd.grad(loss / count, chunk)
        return found

    def _head(self, hidden: Tensor) -> Tensor:
        """Apply final norm and head to hidden states [b, n, H] of the end of the last layer."""
        embeddings = self.model.get_input_embeddings()
        rows = hidden.shape[:2]
        nothing = torch.zeros(*rows, embeddings.embedding_dim, dtype=self.dtype, device=self.device)
        stub = lambda hidden_states, *args, **kwargs: hidden.as_subclass(_Whole)  # noqa: E731
        # Some classes look up more than the embeddings by token, so that tokens must be given.
        ids = torch.zeros(rows, dtype=torch.long, device=self.device)
        embeddings.forward = lambda *args, **kwargs: nothing
        try:
            with arithmetic(self.dtype), self._stubs(stub):
                return self.model(input_ids=ids, use_cache=False).logits
        finally:
            del embeddings.forward

    @torch.no_grad()
    def _record(self, batches: Sequence[Tensor]) -> None:
        """Run the body with stubs, to record the first layer's inputs and all other arguments."""
        self._load_outer(without=self.model.get_output_embeddings())
        pool: list[Tensor] = []
        for ids in batches:
            calls: list[tuple[int, Tensor, Arguments]] = []

            def stub(
                hidden_states: Tensor,
                *args: Any,
                _calls: list[Any] = calls,
                _layer: int,
                **kwargs: Any,
            ) -> Tensor:
                _calls.append((_layer, hidden_states, (args, kwargs)))
                return hidden_states.as_subclass(_Whole)

            body = self.model.base_model
            with arithmetic(self.dtype), self._stubs(stub), _refusing(body, "the body"):
                body(input_ids=ids.to(self.device), use_cache=False)
            self.hidden.append(calls[0][1])
            for index, _, (args, kwargs) in calls:  # text does not pass through every layer of all
                shared = {k: _share(v, pool) for k, v in kwargs.items()}
                self.arguments[index].append((_share(args, pool), shared))
        stock.unload(self.model)

    @contextmanager
    def _stubs(self, forward: Callable[..., Tensor]) -> Iterator[None]:
        """Replace the forward of every decoder layer while the context lasts.

        `forward` is told the layer's index as `_layer`.
        """
        for index, layer in enumerate(self.layers):
            layer.forward = functools.partial(forward, _layer=index)
        try:
            with stock.on_device(self.device):
                yield
        finally:
            for layer in self.layers:
                del layer.forward

    def _load_outer(self, without: nn.Module) -> None:
        """Load the weights outside the layers, without those of the embeddings or of the head.

        If the checkpoint stores only one of the two, it serves both and is loaded.
        """
        names, left_out = stock.outer_names(self.blocks), set[str]()
        ends = [self.model.get_input_embeddings(), self.model.get_output_embeddings()]
        on_disk = [self._on_disk(module, names) for module in ends]
        if all(on_disk):
            left_out = set(on_disk[ends.index(without)])
        tables = self._tables()
        skipped = [self.layers, *([without] if left_out else []), *(m for _, m in tables)]
        left_out.update(n for names, _ in tables for n in names)
        self.load([n for n in names if n not in left_out])
        self._require(stock.without_weights(self.model, skipped))

    def _on_disk(self, module: nn.Module, names: Sequence[str]) -> list[str]:
        """Return which of these names on disk are the module's matrix; a bias is never tied."""
        leaf = stock.module_name(self.model, module).split(".")[-1]
        return [n for n in names if n.split(".")[-2:] == [leaf, "weight"]]

    def _require(self, missing: Sequence[str], where: str = "") -> None:
        """Raise SurgeryError if parameters are missing."""
        if missing:
            raise without_head(self.checkpoint, missing) or SurgeryError(
                f"{where}the checkpoint has no tensor for {missing[0]} ({len(missing)} such)",
                "check that the checkpoint is complete and that config.json is its own",
            )


def choose_device(name: str | None = None) -> str:
    """Return the device of that name; by default the fastest that is available.

    Raises UsageError if it is not available.
    """
    mps = torch.backends.mps.is_available()
    there = {"cuda": torch.cuda.is_available(), "mps": mps, "cpu": True}
    name = name or next(n for n, available in there.items() if available)
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    if not there.get(name.split(":")[0]):
        found = ", ".join(n for n, available in there.items() if available)
        raise UsageError(f"no device {name!r} here", f"choose one of these: {found}")
    return name


def processes() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    together = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if together else (0, 1)


def choose_dtype(name: str | None, device: str) -> torch.dtype:
    """Return the dtype of the name bf16, fp16 or fp32.

    The default is bf16 on a GPU and on a CPU that multiplies it in hardware, and fp32 otherwise.
    """
    if name is None:
        # Older versions of torch lack these functions: `bool` then answers False.
        asked = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
        multiplies = any(getattr(torch.cpu, support, bool)() for support in asked)
        name = "bf16" if device != "cpu" or multiplies else "fp32"
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


@contextmanager
def _refusing(module: nn.Module, place: str) -> Iterator[None]:
    """Turn what a class of transformers raises, where it is run in parts, into a SurgeryError."""
    try:
        yield
    except (AttributeError, LookupError, NotImplementedError, TypeError, ValueError) as e:
        raise SurgeryError(
            f"{type(module).__name__} cannot be run layer by layer: {place} ended with "
            f"{first_line(e)}",
            _WITHOUT_TEXT,
        ) from e


def _require_chained(family: Family) -> None:
    """Raise SurgeryError for a family whose layers cannot be run one after the other."""
    if family.unchained:
        raise SurgeryError(
            f"a {family.model_type} cannot be walked layer by layer: {family.unchained}",
            _WITHOUT_TEXT,
        )


class _Hidden(list[Tensor]):
    """The hidden states of each batch.

    Those that do not fit into `budget` bytes are mapped from a file and replaced inside it.
    """

    def __init__(self, budget: int | None) -> None:
        super().__init__()
        self.left = budget
        self.mapped: set[int] = set()

    def append(self, hidden: Tensor) -> None:
        if self.left is not None:
            self.left -= hidden.nbytes
            if self.left < 0:
                self.mapped.add(len(self))
                hidden = _mapped(hidden)
        super().append(hidden)

    def __setitem__(self, b: Any, hidden: Any) -> None:
        if b in self.mapped:
            self[b].copy_(hidden)
        else:
            super().__setitem__(b, hidden)


def _mapped(value: Tensor) -> Tensor:
    """Return a copy in a temporary file, which goes away with the tensor.

    The file is in the folder named by TMPDIR.
    """
    with tempfile.NamedTemporaryFile(prefix="surgery-") as file:
        file.truncate(value.nbytes)
        size, dtype = value.numel(), value.dtype
        copy = torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(value.shape)
    return copy.copy_(value)


class _Whole(Tensor):
    """The output of a stub, which is its own first element.

    Some bodies take a layer's output whole, others take `[0]` of a tuple, or unpack a pair.
    """

    # Every operation on it returns a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __iter__(self) -> Iterator[Any]:
        """Unpack as the pair of a layer's output and of what it tells beside it."""
        return iter((self.as_subclass(Tensor), None))

    def __getitem__(self, index: Any) -> Tensor:
        whole = self.as_subclass(Tensor)
        return whole if isinstance(index, int) and index == 0 else whole[index]


def _share(value: Any, pool: list[Tensor]) -> Any:
    """Return `value` with its tensors replaced by equal ones of `pool`.

    Batches of the same shape then share a single mask.
    """
    if isinstance(value, tuple):
        return tuple(_share(v, pool) for v in value)
    if not isinstance(value, Tensor):
        return value
    for known in pool:
        if known.shape == value.shape and known.dtype == value.dtype and torch.equal(known, value):
            return known
    pool.append(value)
    return value
