"""Describes the resources of an executor (device, formats, memory) in one line, for logs."""

import os
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from penstock.executor.torch.load_progress import size
from penstock.executor.torch.loading import LoadedModel
from penstock.executor.torch.thread_environment import describe_threads


def describe_resources(
    model: LoadedModel,
    *,
    page_bytes: int,
    path: str,
    num_graphs: int = 0,
    num_weight_bytes: int | None = None,
    quantization: str = "none",
    page_dtype: torch.dtype | None = None,
) -> str:
    """Return device, threads (of a CPU), number format, path, size of weights and pages, and the
    number of captured graphs unless it is 0, as one line.

    `path`: the name of the path that serves the model, eager or fused. `num_weight_bytes`: the
    bytes of the weights; None: the bytes of the model's own tensors. A path that has released these
    must give the number. The number formats of weights (`quantization`) and pages (`page_dtype`;
    None: the model's) are included if they differ from the model's number format.
    """
    if num_weight_bytes is None:
        num_weight_bytes = weight_bytes(model)
    device = model.device
    name = f"{torch.cuda.get_device_name(device)} ({device})" if device.type == "cuda" else "CPU"
    threads = describe_threads(torch.get_num_threads(), os.environ)
    parts = [
        name,
        *([threads] if device.type == "cpu" else []),
        str(model.dtype).removeprefix("torch."),
        f"{path} path",
        f"weights {size(num_weight_bytes)}{_type_note(quantization, 'none')}",
        f"KV cache {size(page_bytes)}{_type_note(page_dtype or model.dtype, model.dtype)}",
    ]
    if num_graphs:
        parts.append(f"{num_graphs} graphs")
    return ", ".join(parts)


def _type_note(kind: object, usual: object) -> str:
    return "" if kind == usual else f" in {str(kind).removeprefix('torch.')}"


def weight_bytes(model: LoadedModel, others: Iterable[Tensor] = ()) -> int:
    """Return the total size of parameters, buffers and `others`, in bytes; shared memory counts
    once.
    """
    tensors = chain(model.module.parameters(), model.module.buffers(), others)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
