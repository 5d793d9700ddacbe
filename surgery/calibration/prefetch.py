"""Bring the weights of the next layer to the GPU while the current one computes.

A thread reads them from the disk into pinned memory and copies them to the device on a stream of
its own. The walk then waits for neither the disk nor the bus, unless they take longer than the
layer. The price is a second layer's weights in device memory.

Tensors that are computed are left to the walk: what they depend on may change until their turn
comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from surgery.checkpoint import LazyTensor


class Prefetch:
    """Reads tensors ahead: `start` the next layer's, later `take` them. A single thread reads."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self.coming: dict[str, tuple[LazyTensor, Future[Tensor]]] = {}

    def start(self, tensors: Mapping[str, LazyTensor]) -> None:
        """Begin to read these; forget those begun before and not taken."""
        for _, future in self.coming.values():
            future.cancel()
        self.coming = {
            n: (t, self.thread.submit(self._fetch, t)) for n, t in tensors.items() if t.copied
        }

    def take(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """Return these tensors, with the values of those that were begun.

        Raises here what went wrong when reading them.
        """
        return {name: self._taken(name, t) for name, t in tensors.items()}

    def _taken(self, name: str, tensor: LazyTensor) -> LazyTensor:
        begun, future = self.coming.pop(name, (None, None))
        # The caller of the walk may load other weights under the same name.
        if begun is not tensor or future is None:
            return tensor
        value = future.result()
        # Otherwise that stream would reuse the memory while this one still computes with it.
        if self.stream is not None:
            value.record_stream(torch.cuda.current_stream(self.device))
        return replace(tensor, extents=(), compute=lambda: value, recipe="prefetched")

    def _fetch(self, tensor: LazyTensor) -> Tensor:
        value = tensor.read()
        if self.stream is None:
            return value
        pinned = value.pin_memory()
        with torch.cuda.stream(self.stream):
            there = pinned.to(self.device, non_blocking=True)
        self.stream.synchronize()  # blocks this thread: the copy is then whole for every stream
        return there
