"""Captures the CUDA graphs of decode steps at start, and replays them.

Each batch size has a graph for the forward pass and one for sampling with Variant.PLAIN. They are
separate, so that other work can run between logits and tokens. Small batch sizes have a second
forward graph for long contexts. This module also chooses the batch sizes, and allocates the memory
that the graphs read and write.
"""

import logging
import time

import torch

from penstock.executor.torch.cuda.device_queue import DeviceQueue, Replayable
from penstock.executor.torch.cuda.device_sampler import DeviceSampler, DeviceSamples, Variant
from penstock.executor.torch.cuda.fused_forward import CudaFusedForward, empty_row_tokens
from penstock.executor.torch.cuda.row_staging import RowStaging
from penstock.executor.torch.cuda.tiles import LONG_CONTEXT, MAX_LONG_ROWS, buckets_up_to
from penstock.scheduler.batch import Batch

_LOG_INTERVAL_S = 1.0
logger = logging.getLogger(__name__)


class DecodeGraphs:
    """Captures decode steps of up to `max_rows` rows at construction, and replays them.

    `last_tokens`: see `DeviceSampler.sample`. `staging`: used only for the capture.
    """

    def __init__(
        self,
        queue: DeviceQueue,
        model: CudaFusedForward,
        sampler: DeviceSampler,
        last_tokens: torch.Tensor,
        staging: RowStaging,
        *,
        max_rows: int,
        max_seq_len: int,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._last_tokens = last_tokens
        self._buckets = buckets_up_to(max_rows)
        self._staged = staging.empty_rows()
        self._tokens = empty_row_tokens(max_rows, queue.device)
        self._logits = torch.empty(
            (max_rows, model.vocab_size), dtype=model.outer.head.dtype, device=queue.device
        )
        self._forwards: dict[tuple[int, bool], Replayable] = {}
        self._samplings: dict[int, Replayable] = {}
        self._has_long = max_seq_len > LONG_CONTEXT
        begun_s = self._logged_s = time.monotonic()
        with queue.active():
            staging.stage_scratch(self._staged)
        # Largest first: smaller graphs reuse its memory in the shared pool.
        for bucket in reversed(self._buckets):
            self._capture(queue, bucket)
        with queue.active():
            # This variant is not captured; run it once to compile its kernels before the first
            # request.
            self._sample(max_rows, Variant.FULL)
        queue.synchronize()
        logger.info(
            "captured %d graphs of up to %d rows in %.1f s",
            self.num_graphs,
            max_rows,
            time.monotonic() - begun_s,
        )

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs."""
        return len(self._forwards) + len(self._samplings)

    def run(self, batch: Batch, staging: RowStaging, variant: Variant) -> DeviceSamples:
        """Queue a step of decodes; return its results. They are on the device and valid until the
        next step.
        """
        num_rows = batch.num_rows
        bucket = next(size for size in self._buckets if size >= num_rows)
        longest = int(batch.starts.max()) + 1
        is_long = self._has_long and bucket <= MAX_LONG_ROWS and longest > LONG_CONTEXT
        staging.stage_decodes(batch, self._staged, bucket)
        self._forwards[bucket, is_long].replay()
        if variant is Variant.PLAIN:
            self._samplings[bucket].replay()
            return self._sampler.outcome(num_rows)
        return self._sample(num_rows, variant)

    def _capture(self, queue: DeviceQueue, bucket: int) -> None:
        tokens, logits = self._tokens.first(bucket), self._logits[:bucket]
        for is_long in (False, True) if self._has_long and bucket <= MAX_LONG_ROWS else (False,):

            def forward(is_long: bool = is_long) -> None:
                self._model.decode(self._staged, tokens, logits, rows=bucket, is_long=is_long)

            self._forwards[bucket, is_long] = queue.capture(forward)

        def sampling() -> None:
            self._sample(bucket, Variant.PLAIN)

        self._samplings[bucket] = queue.capture(sampling)
        if (now_s := time.monotonic()) >= self._logged_s + _LOG_INTERVAL_S:
            self._logged_s = now_s
            num_done, num_all = len(self._samplings), len(self._buckets)
            logger.info("capturing graphs: %d of %d step sizes", num_done, num_all)

    def _sample(self, num_rows: int, variant: Variant) -> DeviceSamples:
        tokens, logits = self._tokens.first(num_rows), self._logits[:num_rows]
        return self._sampler.sample(
            logits, tokens.slots, tokens.next_positions, self._last_tokens, variant=variant
        )
