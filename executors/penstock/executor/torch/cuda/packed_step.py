"""Runs a step with a chunk: all tokens of the step, including decodes, in one packed forward pass.

In addition to the forward pass, it updates the device's block table entries of blocks before a
chunk, selects the rows whose logits are needed, computes log probabilities of prompts, and flags
tokens with non-finite values. All work is queued without waiting.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.executor.torch.cuda.device_queue import DeviceQueue
from penstock.executor.torch.cuda.device_sampler import DeviceSampler
from penstock.executor.torch.cuda.device_step import DeviceStep, LaunchedPrompt
from penstock.executor.torch.cuda.fused_forward import (
    CudaFusedForward,
    PackedHidden,
    empty_row_tokens,
)
from penstock.executor.torch.cuda.row_staging import PackedRows, RowStaging
from penstock.executor.torch.prompt_logprobs import PromptRows, prompt_rows
from penstock.executor.torch.token_logprobs import ROWS_AT_ONCE, logprobs_of
from penstock.scheduler.batch import Batch


class PackedStep:
    """Runs packed steps of one model."""

    def __init__(
        self,
        queue: DeviceQueue,
        model: CudaFusedForward,
        sampler: DeviceSampler,
        last_tokens: Tensor,
        table: Tensor,
    ) -> None:
        self._queue = queue
        self._model = model
        self._sampler = sampler
        self._last_tokens = last_tokens
        self._cells = table.view(-1)
        self._table_width = table.shape[1]

    def run(
        self, batch: Batch, staging: RowStaging, launched: DeviceStep, *, is_probe: bool
    ) -> None:
        """Queue the step; store its plan, token flags and prompt log probabilities in `launched`. A
        health probe (`is_probe`) uses the scratch slot and has no prompt log probabilities.
        """
        rows = staging.stage_packed(
            batch,
            tokens_per_tile=self._model.tokens_per_tile,
            table_width=self._table_width,
            is_probe=is_probe,
        )
        if len(rows.table_places):
            self._cells.index_copy_(0, rows.table_places, rows.table_blocks)
        tokens = empty_row_tokens(rows.num_tokens, self._queue.device)
        hidden = self._model.packed(rows.staged, tokens, rows.chunks, num_decodes=rows.num_decodes)
        if len(rows.wanted):
            launched.plan = self._sampler.plan(*rows.sampled)
            logits = self._model.head(hidden, rows.wanted)
            samples = self._sampler.sample(
                logits,
                rows.slots,
                rows.positions,
                self._last_tokens,
                variant=launched.plan.variant,
            )
            has_tops = bool(launched.plan.wants_logprobs.any())
            launched.memory.fetch(samples, has_tops=has_tops)
        if rows.num_tokens > len(rows.wanted):
            self._flag_tokens(hidden, rows, launched)
        if not is_probe:
            launched.prompts = self._score_prompts(batch, hidden, rows)

    def _flag_tokens(self, hidden: PackedHidden, rows: PackedRows, launched: DeviceStep) -> None:
        """Queue the computation of a flag per token (whether its keys and values are finite), and
        the copy of the flags to the host.
        """
        launched.token_flags = launched.memory.fetch_flags(self._model.finite(hidden))
        launched.token_ends = rows.last_of_row + 1

    def _score_prompts(
        self, batch: Batch, hidden: PackedHidden, rows: PackedRows
    ) -> tuple[LaunchedPrompt, ...]:
        return tuple(
            LaunchedPrompt(rows=prompt, parts=self._score(prompt, hidden))
            for prompt in prompt_rows(batch, rows.last_of_row)
        )

    def _score(
        self, prompt: PromptRows, hidden: PackedHidden
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        packed = self._to_device(prompt.packed.astype(np.int32))
        # An invalid token id fails the request, not the step.
        known = prompt.tokens.astype(np.int64).clip(0, self._model.vocab_size - 1)
        tokens = self._to_device(known)
        parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for first in range(0, len(packed), ROWS_AT_ONCE):
            some = slice(first, first + ROWS_AT_ONCE)
            logits = self._model.head(hidden, packed[some])
            parts.append(logprobs_of(logits, tokens[some], prompt.num_top))
        chosen, ranks, top_ids, top_logprobs = (
            torch.cat(column) for column in zip(*parts, strict=True)
        )
        return (
            self._to_host(chosen),
            self._to_host(ranks.int()),
            self._to_host(top_ids.int()),
            self._to_host(top_logprobs),
        )

    def _to_device(self, values: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        """Return a copy of `values` on the device, queued without waiting for earlier work."""
        on_host = torch.from_numpy(values)
        pinned = self._queue.pinned(values.shape, on_host.dtype)
        pinned.copy_(on_host)
        return pinned.to(self._queue.device, non_blocking=True)

    def _to_host(self, values: Tensor) -> Tensor:
        """Return host memory to which `values` are copied; the copy is complete when the work
        queued so far is done.
        """
        fetched = self._queue.pinned(tuple(values.shape), values.dtype)
        fetched.copy_(values, non_blocking=True)
        return fetched
