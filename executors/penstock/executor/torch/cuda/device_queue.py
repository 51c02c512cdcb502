"""A queue of device work: one stream, its events and captured graphs, and pinned host memory.

Work launched inside `active` is stream-ordered.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from penstock.executor.torch.device_memory import free_bytes, peak_bytes


class Mark(Protocol):
    """A point in the queue that the host can wait for."""

    def wait(self) -> None:
        """Wait until all work queued before this mark is done. Raises RuntimeError if the device
        failed.
        """
        ...


class Replayable(Protocol):
    """Captured work that can be queued any number of times."""

    def replay(self) -> None:
        """Queue the captured work again, on the same memory."""
        ...


class DeviceQueue(Protocol):
    """The queue of work for one device."""

    @property
    def device(self) -> torch.device:
        """The device of the queue."""
        ...

    def active(self) -> AbstractContextManager[object]:
        """Return a context in which work is launched to this queue."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate host memory that the device can access directly; its content is undefined."""
        ...

    def mark(self) -> Mark:
        """Return a mark at the current end of the queue."""
        ...

    def capture(self, run: Callable[[], None]) -> Replayable:
        """Call `run` twice: to warm up, then to capture its work; return the captured work."""
        ...

    def free_bytes(self) -> int:
        """Return the device memory that can be allocated, in bytes."""
        ...

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Call `run` once; return its peak additional memory, in bytes."""
        ...

    def synchronize(self) -> None:
        """Wait until all work on the device is done."""
        ...

    def release_memory(self) -> None:
        """Return unused memory to the device."""
        ...


class CudaMark:
    """A `Mark` that is an event of a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        """Wait until the event has completed."""
        self._event.synchronize()


class CudaQueue:
    """A `DeviceQueue` on a stream of one CUDA device; captured graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def device(self) -> torch.device:
        """The device of the queue."""
        return self._device

    def active(self) -> AbstractContextManager[object]:
        """Return a context in which the queue's stream is the current one."""
        return torch.cuda.stream(self._stream)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate page-locked host memory; its content is undefined."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def mark(self) -> CudaMark:
        """Record an event at the end of the stream, and return it."""
        return CudaMark(self._stream)

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Call `run` once to compile kernels and initialise libraries; return a captured graph of a
        second call, replayed once, because the first replay uploads it.
        """
        with self.active():
            run()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with self.active():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
            graph.replay()
        return graph

    def free_bytes(self) -> int:
        """Return the device's free memory plus the allocator's unused memory."""
        return free_bytes(self._device)

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Call `run` once; return its peak additional memory, in bytes, as measured by the
        allocator.
        """
        with self.active():
            return peak_bytes(self._device, run)

    def synchronize(self) -> None:
        """Wait until all work on the device is done."""
        torch.cuda.synchronize(self._device)

    def release_memory(self) -> None:
        """Empty the allocator's cache."""
        torch.cuda.empty_cache()
