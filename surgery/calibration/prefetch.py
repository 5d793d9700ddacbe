"""The weights of the next layer on their way to the GPU while this one computes.

A thread reads them from the disk into pinned memory and copies them to the device on a stream of
its own: neither the disk nor the bus is waited for, unless they take longer than the layer. It
costs the device a second layer's weights.
Tensors that are computed are left to the walk: what they wait for may change until their turn
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
    """`start` the tensors of the next layer, later `take` them. One thread: a disk is read in
    order.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self.coming: dict[str, tuple[LazyTensor, Future[Tensor]]] = {}

    def start(self, tensors: Mapping[str, LazyTensor]) -> None:
        """Begin to read these; what was begun before and not taken is forgotten."""
        for _, future in self.coming.values():
            future.cancel()
        self.coming = {
            n: (t, self.thread.submit(self._fetch, t)) for n, t in tensors.items() if t.copied
        }

    def take(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """These tensors, with their value at hand where it was begun. An error of reading is raised
        here.
        """
        return {name: self._taken(name, t) for name, t in tensors.items()}

    def _taken(self, name: str, tensor: LazyTensor) -> LazyTensor:
        begun, future = self.coming.pop(name, (None, None))
        if (
            begun is not tensor or future is None
        ):  # other weights under the same name: the walk's caller may load any
            return tensor
        value = future.result()
        if (
            self.stream is not None
        ):  # else that stream would reuse the memory while this one still computes with it
            value.record_stream(torch.cuda.current_stream(self.device))
        return replace(tensor, extents=(), compute=lambda: value, recipe="prefetched")

    def _fetch(self, tensor: LazyTensor) -> Tensor:
        value = tensor.read()
        if self.stream is None:
            return value
        pinned = value.pin_memory()
        with torch.cuda.stream(self.stream):
            there = pinned.to(self.device, non_blocking=True)
        self.stream.synchronize()  # of this thread: the copy is whole for every other stream
        return there
