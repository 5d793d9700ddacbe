"""A forward pass that holds one decoder layer at a time, so that a model need not fit in memory.

Embeddings and masks are recorded once by running the real body with every decoder layer replaced by
a stub that keeps its arguments; then each layer is loaded, run on all batches and dropped. At the
end the stock class runs once more, its stubs returning the walk's hidden states: final norm, head,
soft-capping and scaling need no code here.

Shapes: b sequences of a batch, T positions, H hidden_size, V vocab_size.
"""

from __future__ import annotations

import copy
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
from surgery.errors import SurgeryError, UsageError
from surgery.families import locate

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Positions = tuple[slice, slice]  # rows and positions of input_ids
BATCH_TOKENS = 2048
CHUNK_LOGITS = 2**24  # logits held at once: 64 MiB in fp32


@dataclass(kw_only=True, slots=True)
class Layer:
    """One decoder layer with its weights. `hidden` [b, T, H] for each batch: its inputs, and after
    `run` its outputs.
    """

    index: int
    module: nn.Module
    hidden: list[Tensor]
    arguments: list[Arguments]
    device: str = "cpu"
    loaded: list[nn.Module] = field(
        default_factory=list
    )  # the modules with weights: itself, tables
    done: bool = False

    @torch.no_grad()
    def outputs(self, hidden: Sequence[Tensor] | None = None) -> Iterator[Tensor]:
        """The output [b, T, H] of each batch, or of these `hidden`, with the module as it stands;
        the walk does not move.
        """
        states = self.hidden if hidden is None else hidden
        for x, (args, kwargs) in zip(states, self.arguments, strict=False):
            with arithmetic(x.dtype):
                out = self.module(x.to(self.device), *args, **kwargs)
            yield out[0] if isinstance(out, tuple) else out

    def run(self, each: Callable[[int, Tensor], None] = lambda b, output: None) -> None:
        """Replace the hidden states by the layer's outputs, batch by batch; `each` sees them as
        they come.
        """
        for b, out in enumerate(self.outputs()):
            each(b, out)
            self.hidden[b] = out
        self.done = True


class Walk:
    """`for layer in walk: ...` visits each decoder layer, loaded; then `logits()`.

    The body of the loop may hook `layer.module`, look at `layer.outputs()`, load other weights into
    it, and `run()` it; a layer that it did not run is run when the loop goes on. `hidden` is where
    the walk stands, and is changed in place. Hidden states beyond `memory_budget` bytes lie in a
    temporary file. With `dtype` fp64 everything is computed in fp64 (see `double`).
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
        self.ahead = Prefetch(device) if device.startswith("cuda") else None
        self.model = stock.meta_model(checkpoint, dtype, device)
        self.layers_name, self.layers = stock.decoder_layers(self.model, self.blocks)
        self.memory_budget = memory_budget
        self.hidden: list[Tensor] = _Hidden(memory_budget)
        self.arguments: list[list[Arguments]] = [[] for _ in self.layers]  # by layer, by batch
        self._other: Walk | None = None  # the model whose layers are installed
        self._record(input_ids.split(batch_size or max(1, BATCH_TOKENS // input_ids.shape[1])))

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return self.steps()

    def steps(self, start: int = 0) -> Iterator[Layer]:
        """The layers from `start` on; `hidden` is the input of the first."""
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
        """Put the layer of `output` in the place of this one, as it will be on the disk.

        `output` has the layers of this walk's checkpoint, in their places; its other ones need not
        be known yet. The layer's own weights are dropped.
        """
        if self._other is None or self._other.checkpoint is not output:
            self._other = self._like(output)
        for module in layer.loaded:
            stock.unload(module)
        layer.module = self._other.layers[layer.index]
        layer.loaded = self._other._load_layer(layer.index)

    def _like(self, output: Checkpoint) -> Walk:
        """Return a walk without text of another checkpoint."""
        other = copy.copy(self)
        other.checkpoint, other.blocks, other.ahead = output, locate(output), None
        other.model = stock.meta_model(output, self.dtype, self.device)
        other.layers_name, other.layers = stock.decoder_layers(other.model, other.blocks)
        return other

    def _load_layer(self, index: int) -> list[nn.Module]:
        """Load a decoder layer and the tables that it reads; return their modules."""
        module, tables = self.layers[index], self._tables(index)
        self.load([*self.blocks.names(index), *(n for names, _ in tables for n in names)])
        modules = [module, *(m for _, m in tables)]
        read = [n for m in modules for n, p in m.named_parameters() if p.is_meta]
        self._require(read, f"layer {index}: ")
        return modules

    def _tables(self, index: int | None = None) -> list[tuple[list[str], nn.Module]]:
        """What blocks of a layer (or of any) read and the body owns: names on disk, and the
        module.
        """
        return [
            (
                [n for n in self.checkpoint.tensors if f".{name}." in f".{n}"],
                self.model.base_model.get_submodule(name),
            )
            for name in block_config.shared_modules(self.checkpoint.config, index)
        ]

    def load(self, names: Sequence[str]) -> None:
        """Load these tensors of the checkpoint into the model."""
        tensors = {n: self.checkpoint.tensors[n] for n in names}
        stock.load(self.model, self.ahead.take(tensors) if self.ahead else tensors, self.device)

    def _read_ahead(self, names: Sequence[str]) -> None:
        """Read these tensors, or ask the kernel to read their bytes, while something else is
        computed.
        """
        if self.ahead:
            self.ahead.start({n: self.checkpoint.tensors[n] for n in names})
            return
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        for extent in (e for n in names for e in self.checkpoint.tensors[n].sources()):
            with extent.file.path().open("rb") as f:
                os.posix_fadvise(f.fileno(), extent.offset, extent.length, os.POSIX_FADV_WILLNEED)

    def twin(self) -> list[Tensor]:
        """The hidden states once more, to be moved through the layers by other weights; spilled
        alike.
        """
        copy = _Hidden(self.memory_budget)
        for hidden in self.hidden:
            copy.append(hidden)
        return copy

    def fork(self, checkpoint: Checkpoint, hidden: Sequence[Tensor]) -> Walk:
        """A walk that goes on from `hidden` (the first batches) with the weights of `checkpoint`,
        of the same config.

        It shares the model: use one of the two at a time.
        """
        other = copy.copy(self)
        other.ahead = None if self.ahead is None else Prefetch(self.device)
        other.checkpoint, other.blocks, other.hidden = checkpoint, locate(checkpoint), list(hidden)
        return other

    @torch.no_grad()
    def logits(self) -> Iterator[tuple[Positions, Tensor]]:
        """After the last layer: logits [b, n, V] of n positions of a batch, and where in
        `input_ids` they stand.

        Never more than `CHUNK_LOGITS` of them (or one position of a batch) at a time.
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
        """After the last layer: d(mean language-model loss of input_ids [B, T]) / d(hidden states)
        [b, T, H] of each batch.
        """
        self._load_outer(without=self.model.get_input_embeddings())
        targets, found, row = input_ids[:, 1:].to(self.device), list[Tensor](), 0
        try:
            for hidden in self.hidden:
                found.append(
                    self._loss_gradient(hidden, targets[row : row + len(hidden)], targets.numel())
                )
                row += len(hidden)
        finally:
            stock.unload(self.model)
        return found

    def _loss_gradient(self, hidden: Tensor, targets: Tensor, count: int) -> Tensor:
        """Of a batch; `count`: the targets of all."""
        found = torch.zeros_like(hidden, device=self.device)
        n = max(1, CHUNK_LOGITS // (len(hidden) * self.model.config.get_text_config().vocab_size))
        for start in range(0, targets.shape[1], n):
            chunk = (
                hidden[:, start : min(start + n, targets.shape[1])].to(self.device).requires_grad_()
            )
            logits = self._head(chunk)
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets[:, start : start + n].flatten(), reduction="sum"
            )
            (found[:, start : start + chunk.shape[1]],) = torch.autograd.grad(loss / count, chunk)
        return found

    def _head(self, hidden: Tensor) -> Tensor:
        """Final norm and head of hidden states [b, n, H] that stand at the end of the last
        layer.
        """
        width = self.model.get_input_embeddings().embedding_dim
        nothing = torch.zeros(*hidden.shape[:2], width, dtype=self.dtype, device=self.device)
        with (
            arithmetic(self.dtype),
            self._stubs(lambda hidden_states, *args, **kwargs: hidden.as_subclass(_Whole)),
        ):
            return self.model(inputs_embeds=nothing, use_cache=False).logits

    @torch.no_grad()
    def _record(self, batches: Sequence[Tensor]) -> None:
        """Run the body with stubs, for the inputs of the first layer and the other arguments of
        each.
        """
        self._load_outer(without=self.model.get_output_embeddings())
        pool: list[Tensor] = []
        for ids in batches:
            calls: list[tuple[Tensor, Arguments]] = []

            def stub(
                hidden_states: Tensor, *args: Any, _calls: list[Any] = calls, **kwargs: Any
            ) -> Tensor:
                _calls.append((hidden_states, (args, kwargs)))
                return hidden_states.as_subclass(_Whole)

            with arithmetic(self.dtype), self._stubs(stub):
                self.model.base_model(input_ids=ids.to(self.device), use_cache=False)
            self.hidden.append(calls[0][0])
            for arguments, (_, (args, kwargs)) in zip(self.arguments, calls, strict=True):
                arguments.append(
                    (_share(args, pool), {k: _share(v, pool) for k, v in kwargs.items()})
                )
        stock.unload(self.model)

    @contextmanager
    def _stubs(self, forward: Callable[..., Tensor]) -> Iterator[None]:
        for layer in self.layers:
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward

    def _load_outer(self, without: nn.Module) -> None:
        """Load what stands outside the layers, less the embeddings or the head where the checkpoint
        has both.
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
        leaf = stock.module_name(self.model, module).split(".")[-1]
        return [n for n in names if n.split(".")[-2:-1] == [leaf]]

    def _require(self, missing: Sequence[str], where: str = "") -> None:
        if missing:
            raise SurgeryError(
                f"{where}the checkpoint has no tensor for {missing[0]} ({len(missing)} such)",
                "the checkpoint is incomplete, or its config.json is another model's",
            )


def choose_device(name: str | None = None) -> str:
    """The device of that name, by default the fastest that is there. Raises UsageError where it is
    not.
    """
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    name = name or next(n for n, found in there.items() if found)
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    if not there.get(name.split(":")[0]):
        raise UsageError(
            f"no device {name!r} here",
            f"there is: {', '.join(n for n, found in there.items() if found)}",
        )
    return name


def join_processes() -> None:
    """Find the other processes that `torchrun` or `accelerate launch` started with this one, if
    any.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not distributed.is_initialized():
        distributed.init_process_group("gloo")  # statistics are merged on the CPU


def processes() -> tuple[int, int]:
    """The number of this process, and how many there are."""
    together = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if together else (0, 1)


def choose_dtype(name: str | None, device: str) -> torch.dtype:
    """bf16, fp16 or fp32; by default bf16 on a GPU and on a processor that multiplies it, else
    fp32.
    """
    if name is None:
        multiplies = (
            "_is_amx_tile_supported",
            "_is_avx512_bf16_supported",
        )  # absent from older versions
        name = (
            "bf16"
            if device != "cpu" or any(getattr(torch.cpu, m, bool)() for m in multiplies)
            else "fp32"
        )
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


class _Hidden(list[Tensor]):
    """Hidden states of each batch. Those that do not fit in `budget` bytes are mapped from a file,
    and replaced in it.
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
    """A copy in a file of the folder that TMPDIR names, which goes when the tensor does."""
    with tempfile.NamedTemporaryFile(prefix="surgery-") as file:
        file.truncate(value.nbytes)
        copy = torch.from_file(file.name, shared=True, size=value.numel(), dtype=value.dtype).view(
            value.shape
        )
    return copy.copy_(value)


class _Whole(Tensor):
    """A stub's output that is its own first element: some bodies take a layer's output whole, some
    take `[0]` of a tuple.
    """

    __torch_function__ = (
        torch._C._disabled_torch_function_impl
    )  # every operation on it returns a plain tensor

    def __getitem__(self, index: Any) -> Tensor:
        whole = self.as_subclass(Tensor)
        return whole if isinstance(index, int) and index == 0 else whole[index]


def _share(value: Any, pool: list[Tensor]) -> Any:
    """`value` with its tensors replaced by equal ones of `pool`: batches of one shape have one
    mask.
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
