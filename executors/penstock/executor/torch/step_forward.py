"""The interface of the eager and the fused path: they compute the logits of a step.

A `ForwardPath` is created once per model; its `StepForward` once per executor, with the executor's
pages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.executor.torch.kv_pages import KVPages
from penstock.executor.torch.step_inputs import Ints
from penstock.scheduler.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardResult:
    """The result of a step's forward pass.

    `logits` [chosen tokens, vocabulary]. `last_of_row` int64 [rows of the batch]: packed index of
    each row's last token. `is_token_good` bool [tokens]: False where a token's keys or values are
    not finite; None when every token's logits are checked.
    """

    logits: Tensor
    last_of_row: Ints
    is_token_good: Tensor | None


class StepForward(Protocol):
    """Computes steps of one model with one set of pages."""

    def run(self, batch: Batch, choose: Callable[[Ints], Ints]) -> ForwardResult:
        """Write the keys and values of a batch's tokens; return logits.

        `choose` gets `ForwardResult.last_of_row` and returns the indices of the packed tokens whose
        logits are returned.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardPath:
    """A way to compute a model's steps.

    `num_weight_bytes`: bytes of the weights that it reads. `quantization`: the quantisation of the
    weights, "none" if they are not quantised. `kv_dtype`: the number format of the pages. `make`:
    returns the `StepForward` for an executor's pages.
    """

    name: str
    num_weight_bytes: int
    kv_dtype: torch.dtype
    quantization: str = "none"
    make: Callable[[KVPages], StepForward]
