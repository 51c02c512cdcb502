"""The eager path: the modules of transformers, with paged attention and, on a CPU, with packed
linear layers.

Packs the inputs, runs attention and clears pages. The same code runs on a CPU and on a CUDA device.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.executor.torch.attention_interface import attach_runner
from penstock.executor.torch.kv_pages import KVPages, block_bytes
from penstock.executor.torch.loading import LoadedModel
from penstock.executor.torch.paged_attention import PagedAttention, Scoring
from penstock.executor.torch.prepacked_linear import prepack_linears
from penstock.executor.torch.resources import weight_bytes
from penstock.executor.torch.step_forward import ForwardPath, ForwardResult
from penstock.executor.torch.step_inputs import Ints, StepInputs
from penstock.scheduler.batch import Batch

_GROUP_OVERHEAD_BYTES = {"cpu": 2 << 20, "cuda": 128 << 20}
"""Cost of one more group of rows (`split_by_length`), expressed as the bytes of keys and values
that could be read in the same time (measured: the time of a few launches times the memory
bandwidth).
"""


def eager_path(model: LoadedModel) -> ForwardPath:
    """Return the eager path; it supports every loaded model. On a CPU, pack the model's bfloat16
    linear layers in place.
    """
    num_weight_bytes = weight_bytes(model)
    if model.device.type == "cpu":
        prepack_linears(model.module)
    return ForwardPath(
        name="eager",
        num_weight_bytes=num_weight_bytes,
        kv_dtype=model.dtype,
        make=lambda pages: ModuleForward(model, pages),
    )


class ModuleForward:
    """A `StepForward` that runs the modules of transformers; keys and values are in `pages`.

    Attaches itself to the modules as their `AttentionRunner`.
    """

    def __init__(self, model: LoadedModel, pages: KVPages) -> None:
        self._model = model
        self._pages = pages
        self._attention = PagedAttention(pages)
        layer_bytes = block_bytes(model.shapes, pages.block_size, model.dtype) // len(model.shapes)
        self._overhead_blocks = _GROUP_OVERHEAD_BYTES[model.device.type] / layer_bytes
        self._step: StepInputs | None = None
        self._is_token_good: Tensor | None = None
        self._has_unsampled = False
        attach_runner(model.module, self)

    def run(self, batch: Batch, choose: Callable[[Ints], Ints]) -> ForwardResult:
        """Write the keys and values of a batch's tokens; return logits.

        `choose` gets `ForwardResult.last_of_row` and returns the indices of the packed tokens whose
        logits are returned.
        """
        step = StepInputs(
            batch,
            self._pages,
            num_embeddings=self._model.num_embeddings,
            overhead_blocks=self._overhead_blocks,
        )
        if self._attention.needs_clean_blocks and len(step.unwritten_blocks):
            # Otherwise masked reads would include values written by an earlier request.
            self._pages.zero_tokens(
                step.to_device(step.unwritten_blocks), step.to_device(step.unwritten_offsets)
            )
        self._step, self._is_token_good = step, None
        self._has_unsampled = step.num_tokens > len(batch.sampled_slots)
        try:
            logits = self._model.logits(
                step.input_ids, step.position_ids, step.to_device(choose(step.last_of_row))
            )
        finally:
            self._step = None
        return ForwardResult(
            logits=logits, last_of_row=step.last_of_row, is_token_good=self._is_token_good
        )

    def run_layer(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Compute one layer's attention of the current step (see `AttentionRunner`). Raises
        RuntimeError if no step is running.
        """
        if self._step is None:
            raise RuntimeError("attention outside a step")
        if self._has_unsampled and layer == len(self._pages.shapes) - 1:
            # Invalid values of earlier layers propagate to the last layer's keys and values, also
            # for tokens without sampled logits.
            is_finite = torch.isfinite(key) & torch.isfinite(value)
            self._is_token_good = is_finite.flatten(1).all(1)
        return self._attention.attend(layer, self._step, query, key, value, scoring)
