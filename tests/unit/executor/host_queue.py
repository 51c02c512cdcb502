"""A `DeviceQueue` on the host. It runs launches synchronously and can replay captured work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor


class _CompletedMark:
    def wait(self) -> None:
        return


class _RepeatedRun:
    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def replay(self) -> None:
        self._run()


class HostQueue:
    """A `DeviceQueue` for kernels that run in Triton's interpreter."""

    device = torch.device("cpu")

    def active(self) -> nullcontext[None]:
        return nullcontext()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def mark(self) -> _CompletedMark:
        return _CompletedMark()

    def capture(self, run: Callable[[], None]) -> _RepeatedRun:
        run()
        return _RepeatedRun(run)

    def free_bytes(self) -> int:
        return 1 << 40

    def peak_bytes(self, run: Callable[[], None]) -> int:
        run()
        return 0

    def synchronize(self) -> None:
        return

    def release_memory(self) -> None:
        return
