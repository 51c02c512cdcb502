"""The executor that runs the fused step: `launch` queues a step, `collect` waits for it and reads
its results.

Two steps may be in flight. A step of decodes replays captured graphs; any other step uses one
packed forward pass. Only the results are copied to the host, and only `collect` waits for the
device.

Failures are per request: the results of a step have flags for non-finite values. The keys and
values of a failed request need not be cleared: they are never read, since all loads of the kernels
are masked. If a step raises while it is queued, it is repeated in parts
(`penstock.executor.isolation`). This is safe, because a repeated step writes the same values to the
same locations.
"""

import traceback
from collections import deque
from dataclasses import dataclass, replace

import torch

from penstock.executor.isolation import run_isolated
from penstock.executor.torch.cuda.decode_graphs import DecodeGraphs
from penstock.executor.torch.cuda.device_queue import DeviceQueue
from penstock.executor.torch.cuda.device_sampler import DeviceSampler
from penstock.executor.torch.cuda.device_step import DeviceStep, OutcomeMemory, launched_step_of
from penstock.executor.torch.cuda.fused_forward import CudaFusedForward
from penstock.executor.torch.cuda.packed_step import PackedStep
from penstock.executor.torch.cuda.row_staging import RowStaging, packed_size
from penstock.executor.torch.health_probe import HealthProbe
from penstock.executor.torch.kv_pages import block_bytes
from penstock.executor.torch.loading import LoadedModel
from penstock.executor.torch.resources import describe_resources
from penstock.executor.torch.slot_rules import SlotRules
from penstock.scheduler.batch import Batch, StepResult
from penstock.scheduler.executor import ExecutorDied, ExecutorInfo

_NUM_SETS = 3
"""Sets of pinned memory: for two steps in flight and one that is being packed. Synchronous steps
have a separate set, because the sets of steps in flight are still in use.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusedParts:
    """A fused model over its pages, and the tensors that it shares with its executor.

    `table` and `last_tokens` have one scratch slot after the slots of requests; the pages have the
    health probe's blocks after the blocks of requests. `max_step_tokens`: the maximum number of
    tokens of a packed step.
    """

    model: CudaFusedForward
    table: torch.Tensor
    last_tokens: torch.Tensor
    num_weight_bytes: int
    page_dtype: torch.dtype
    max_step_tokens: int


class FusedExecutor:
    """An `Executor` on a CUDA device; built by `fused_loading`."""

    def __init__(
        self,
        info: ExecutorInfo,
        queue: DeviceQueue,
        loaded: LoadedModel,
        parts: FusedParts,
        sampler: DeviceSampler,
    ) -> None:
        self._queue = queue
        self._sampler = sampler
        self._rules = SlotRules(vocab_size=loaded.vocab_size, num_embeddings=loaded.num_embeddings)
        self._probe = HealthProbe(info)
        max_rows = sampler.padding_slot
        sets = [_StepMemory(queue, info, parts, max_rows) for _ in range(_NUM_SETS + 1)]
        self._synchronous_set, *self._sets = sets
        self._num_steps = 0
        self._packed = PackedStep(queue, parts.model, sampler, parts.last_tokens, parts.table)
        with torch.inference_mode():
            self._graphs = DecodeGraphs(
                queue,
                parts.model,
                sampler,
                parts.last_tokens,
                self._synchronous_set.staging,
                max_rows=info.max_num_seqs,
                max_seq_len=info.max_seq_len,
            )
            # Compile the kernels of a packed step before the first request.
            self._enqueue(self._probe.batch, self._probe.rules, self._synchronous_set).wait()
        page_bytes = info.num_blocks * block_bytes(loaded.shapes, info.block_size, parts.page_dtype)
        self._info = replace(
            info,
            resources=describe_resources(
                loaded,
                page_bytes=page_bytes,
                path="fused",
                num_graphs=self._graphs.num_graphs,
                num_weight_bytes=parts.num_weight_bytes,
                quantization=info.quantization,
                page_dtype=parts.page_dtype,
            ),
        )
        self._launched: deque[DeviceStep | StepResult] = deque()
        self._is_closed = False

    @property
    def info(self) -> ExecutorInfo:
        """Limits and features, fixed after construction."""
        return self._info

    @property
    def ready_fd(self) -> int | None:
        """None: `collect` blocks until the step is done."""
        return None

    @torch.inference_mode()
    def launch(self, batch: Batch) -> None:
        """Queue one step; if it raises, run it again synchronously, in parts if necessary. Raises
        ExecutorDied if the executor is closed, or if the step raises and the health probe fails
        too.
        """
        if self._is_closed:
            raise ExecutorDied("the executor is closed")
        try:
            self._update_slots(batch)
        except Exception as error:
            # After an out-of-memory error, release the allocator's cached memory and repeat.
            self._recover(error)
            self._update_slots(batch)
        if batch.num_rows == 0:
            self._launched.append(StepResult(slots=batch.sampled_slots, tokens=batch.sampled_slots))
            return
        try:
            memory = self._sets[self._num_steps % _NUM_SETS]
            self._num_steps += 1
            self._launched.append(self._enqueue(batch, self._rules, memory))
        except ExecutorDied:
            raise
        except Exception as error:
            # Find the row that causes the error: run parts of the step synchronously.
            traceback.clear_frames(error.__traceback__)
            self._recover(error)
            self._launched.append(run_isolated(batch, self._run_part, self._recover))

    @torch.inference_mode()
    def collect(self) -> StepResult:
        """Return the oldest launched step's results. Raises ExecutorDied if the device is lost,
        IndexError if no step is launched.
        """
        launched = self._launched.popleft()
        if isinstance(launched, StepResult):
            return launched
        try:
            return launched.wait()
        except RuntimeError as error:
            raise ExecutorDied(f"the device failed: {error}") from error

    def close(self) -> None:
        """Wait for the device, then release model, pages and graphs. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.synchronize()
            self._launched.clear()
            del self._graphs, self._packed, self._sampler, self._sets, self._synchronous_set

    def _update_slots(self, batch: Batch) -> None:
        self._rules.update(batch)
        for request in batch.admitted:
            rejection = self._sampler.rejection(request)
            if rejection and request.slot >= 0:
                self._rules.rejections.setdefault(request.slot, rejection)
        with self._queue.active():
            self._sampler.update(batch, self._rules)

    def _enqueue(self, batch: Batch, rules: SlotRules, own: "_StepMemory") -> DeviceStep:
        staging, memory = own.staging, own.outcome
        launched = launched_step_of(batch, memory, rules.rejections)
        with self._queue.active():
            if batch.num_rows == batch.num_decodes:
                slots = batch.slots.astype("int64")
                launched.plan = self._sampler.plan(slots, batch.starts.astype("int64") + 1)
                samples = self._graphs.run(batch, staging, launched.plan.variant)
                memory.fetch(samples, has_tops=bool(launched.plan.wants_logprobs.any()))
            else:
                self._packed.run(batch, staging, launched, is_probe=batch is self._probe.batch)
            launched.mark = self._queue.mark()
        return launched

    def _run_part(self, batch: Batch) -> StepResult:
        return self._enqueue(batch, self._rules, self._synchronous_set).wait()

    def _recover(self, error: Exception) -> None:
        """Wait for the device, release cached memory and run the health probe. Raises ExecutorDied
        if any of these fails, because every later operation would fail.
        """
        try:
            self._queue.synchronize()
            self._queue.release_memory()
            self._enqueue(self._probe.batch, self._probe.rules, self._synchronous_set).wait()
        except Exception as broken:
            raise ExecutorDied(
                f"{type(error).__name__}: {error}; then, of the health probe, "
                f"{type(broken).__name__}: {broken}"
            ) from error


class _StepMemory:
    """Pinned memory of one step, for its copies to and from the device.

    It is allocated for the largest step, because a later allocation may wait for queued work.
    """

    def __init__(
        self, queue: DeviceQueue, info: ExecutorInfo, parts: FusedParts, max_rows: int
    ) -> None:
        num_tokens = parts.max_step_tokens
        num_packed = packed_size(
            num_tokens=num_tokens,
            num_rows=max_rows,
            tokens_per_tile=parts.model.tokens_per_tile,
            table_width=parts.table.shape[1],
        )
        self.staging = RowStaging(
            queue,
            max_rows=max_rows,
            scratch=(max_rows, info.num_blocks),
            num_packed=num_packed,
        )
        self.outcome = OutcomeMemory(queue, max_rows=max_rows, max_tokens=num_tokens)
