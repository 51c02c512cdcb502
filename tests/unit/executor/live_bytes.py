"""Measures the host memory of tensors, excluding memory that is mapped from files."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """A context manager. `peak` is the largest total size, in bytes, of live host tensors that
    operations of this thread allocated within the context.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = set(_storages((args, kwargs)))
        self._live = {ref: size for ref, size in self._live.items() if not ref.expired()}
        self._live |= {ref: size for ref, size in _storages(out).items() if ref not in given}
        self.peak = max(self.peak, sum(self._live.values()))
        return out


def _storages(values: Any) -> dict[StorageWeakRef, int]:
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu")
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}
