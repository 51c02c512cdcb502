"""The simulated executor: tokens are hashes, step times come from the cost model.

Keeps the queue of launched steps and injects scripted faults. `launch` computes a step's effects,
in launch order; `collect` waits until the step's time has passed and returns the result.
"""

import json
import os
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from penstock.executor.config import ExecutorConfig
from penstock.executor.fault import COUNT_FAULTS, Fault, FaultKind
from penstock.executor.isolation import run_isolated
from penstock.executor.simulated.clock import RealTimeClock, WaitableClock
from penstock.executor.simulated.script import FaultScript
from penstock.executor.simulated.shadow import ShadowMemory
from penstock.executor.simulated.tokens import (
    NEVER,
    request_origin,
    simulated_logprobs,
    stop_position,
    tokens_at,
)
from penstock.executor.simulated.vocabulary import generated_ids
from penstock.scheduler.batch import Batch, SlotFailure, StepResult, TokenLogprobs
from penstock.scheduler.executor import ExecutorDied, ExecutorInfo, Feature
from penstock.scheduler.request import RequestSpec

DEFAULT_VOCAB_SIZE = 32_000
_DEFAULT_MAX_SEQ_LEN = 4096
DEFAULT_PIPELINE_DEPTH = 1
_NOT_FINITE = "logits are not finite"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _UncollectedStep:
    """A step whose result is computed but not collected yet."""

    result: StepResult
    finish_s: float
    faults: list[Fault]


class SimulatedExecutor:
    """An `Executor` without a model. `clock`, such as a VirtualClock, overrides
    `config.simulated.is_real_time`.

    The constructor raises ValueError for a cache smaller than one block, or for NO_TOKENS or
    EXTRA_TOKENS faults with pipeline depth 2; OSError if `model_path` is given and its config.json
    cannot be read. `launch` and `collect` raise ExecutorDied once the executor is closed or dead,
    and RuntimeError if called in the wrong order. In strict mode, `launch` raises DeviceCheckError
    for a batch that a real device would compute wrongly. `close` may be called from another thread;
    it ends a waiting `collect`.
    """

    def __init__(self, config: ExecutorConfig, *, clock: WaitableClock | None = None) -> None:
        self._config = config.simulated
        self._info = _build_info(config)
        counted = COUNT_FAULTS & {fault.kind for fault in self._config.faults}
        if counted and self._info.pipeline_depth > 1:
            raise ValueError(f"pipeline_depth must be 1 for faults of kind {sorted(counted)}")
        folder = config.tokenizer_path or config.model_path
        self._ids = generated_ids(
            folder if self._config.is_readable else None, self._info.vocab_size
        )
        self._is_immediate = clock is None and not self._config.is_real_time
        self._clock: WaitableClock = clock or RealTimeClock()
        self._script = FaultScript(self._config.faults)
        self._shadow = ShadowMemory(self._info) if self._config.is_strict else None
        self._launched: deque[_UncollectedStep] = deque()
        self._num_launched = 0
        self._device_free_s = 0.0
        self._closed = threading.Event()
        self._fatal_error = ""
        num_slots = self._info.max_num_seqs
        self._origins = np.zeros(num_slots, dtype=np.uint64)
        self._stop_positions = np.full(num_slots, NEVER, dtype=np.int64)
        self._failures: dict[int, str] = {}
        self._raising: set[int] = set()
        # Slots that need more than a hashed token: stop ids, logprobs.
        self._special_slots: set[int] = set()

    @property
    def info(self) -> ExecutorInfo:
        """Limits and features, fixed after construction."""
        return self._info

    @property
    def ready_fd(self) -> int | None:
        """None: `collect` blocks until the step is done."""
        return None

    def launch(self, batch: Batch) -> None:
        """Compute one step and queue its result."""
        self._require_alive()
        if len(self._launched) >= self._info.pipeline_depth:
            raise RuntimeError(f"{len(self._launched)} steps are launched already: call collect")
        self._num_launched += 1
        self._apply_changes(batch)
        if self._shadow is not None:
            self._shadow.check(batch)
            self._shadow.write(batch.arrays, batch.slots, batch.starts, batch.num_tokens)
        faults, result = self._compute(batch)
        self._launched.append(
            _UncollectedStep(
                result=result, finish_s=self._schedule_step(batch, faults), faults=faults
            )
        )

    def collect(self) -> StepResult:
        """Wait until the oldest launched step is done, in simulated time, and return its result."""
        self._require_alive()
        if not self._launched:
            raise RuntimeError("no step is launched: nothing to collect")
        step = self._launched.popleft()
        for fault in step.faults:
            self._inject(fault)
        self._clock.wait_until(step.finish_s, self._closed)
        if self._closed.is_set():
            self._raise_died("closed while a step ran")
        return step.result

    def close(self) -> None:
        """End a waiting `collect`; launched steps can no longer be collected. Idempotent."""
        self._closed.set()

    def _require_alive(self) -> None:
        if self._closed.is_set():
            raise ExecutorDied("the executor is closed")
        if self._fatal_error:
            raise ExecutorDied(self._fatal_error)

    def _raise_died(self, cause: str) -> NoReturn:
        self._fatal_error = cause
        raise ExecutorDied(cause)

    def _inject(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.EXECUTOR_DIES:
                self._raise_died(fault.detail)
            case FaultKind.PROCESS_EXITS:
                # No cleanup and no exception, as after a driver fault or when the kernel's
                # out-of-memory killer kills the process.
                os._exit(fault.exit_code)
            case FaultKind.HANG:
                self._closed.wait()
                self._raise_died("closed while a step hung")
            case _:
                pass  # A slow step changes the finish time, and request faults change the result.

    def _apply_changes(self, batch: Batch) -> None:
        for slot in batch.released:
            self._failures.pop(slot, None)
            self._raising.discard(slot)
            self._special_slots.discard(slot)
            if self._shadow is not None:
                self._shadow.release(slot)
        for request in batch.admitted:
            slot = request.slot
            if self._shadow is not None:
                self._shadow.admit(request, batch.arrays)
            self._script.admit(request)
            self._origins[slot] = request_origin(request.spec)
            self._stop_positions[slot] = stop_position(request.spec, self._config)
            if self._is_special(request.spec):
                self._special_slots.add(slot)

    def _schedule_step(self, batch: Batch, faults: list[Fault]) -> float:
        """Add the step to the device's timeline; return the time, in seconds, at which the step is
        done.
        """
        slow_s = sum(fault.seconds for fault in faults if fault.kind is FaultKind.SLOW_STEP)
        # A step without rows only releases slots.
        is_free = self._is_immediate or not batch.num_rows
        cost_s = 0.0 if is_free else self._cost_s(batch)
        self._device_free_s = max(self._device_free_s, self._clock()) + cost_s + slow_s
        return self._device_free_s

    def _cost_s(self, batch: Batch) -> float:
        return self._config.cost.step_time_s(
            num_prefill_tokens=int(batch.num_tokens[batch.num_decodes :].sum()),
            num_decodes=batch.num_decodes,
            num_context_tokens=int((batch.starts + batch.num_tokens).sum()),
        )

    def _compute(self, batch: Batch) -> tuple[list[Fault], StepResult]:
        slots = batch.sampled_slots
        is_usual = not (
            self._special_slots or self._failures or self._raising or self._shadow is not None
        )
        if is_usual and self._script.is_exhausted:
            return [], self._plain_result(batch)
        faults: list[Fault] = []
        counts = np.ones(self._info.max_num_seqs, dtype=np.int32)
        if not self._script.is_exhausted:
            indices = _ends(batch, slots) - batch.arrays.num_prompt[slots]
            faults, of_rows = self._script.fire(self._num_launched, slots, indices)
            for row, row_faults in of_rows.items():
                for fault in row_faults:
                    self._fail_slot(fault, int(slots[row]), counts)
        return faults, run_isolated(
            batch, lambda part: self._run_part(part, counts), _reraise_unscripted
        )

    def _run_part(self, batch: Batch, counts: NDArray[np.int32]) -> StepResult:
        """Compute the rows of `batch`. Raises _ScriptedError if one of them must raise. `counts`
        int32 [max_num_seqs]: how many tokens each slot gets.
        """
        if self._raising and not self._raising.isdisjoint(batch.slots.tolist()):
            raise _ScriptedError("a scripted fault")
        failures = tuple(
            SlotFailure(slot=slot, detail=self._failures[slot])
            for slot in batch.slots.tolist()
            if slot in self._failures
        )
        slots = batch.sampled_slots
        if failures:
            slots = slots[~np.isin(slots, [failure.slot for failure in failures])]
        positions = _ends(batch, slots).astype(np.int64)
        return self._result(batch, slots, positions, counts[slots], failures)

    def _is_special(self, spec: RequestSpec) -> bool:
        sampling = spec.sampling
        return bool(spec.stop_ids) or max(sampling.num_logprobs, sampling.num_prompt_logprobs) >= 0

    def _plain_result(self, batch: Batch) -> StepResult:
        """Return the same result as `_result`, faster, for a batch whose sampled slots all get one
        hashed token.
        """
        slots = batch.sampled_slots
        ends = _ends(batch, slots)
        tokens = tokens_at(self._origins[slots], ends, self._ids)
        return StepResult(slots=slots, tokens=tokens)

    def _fail_slot(self, fault: Fault, slot: int, counts: NDArray[np.int32]) -> None:
        match fault.kind:
            case FaultKind.REQUEST_FAILS:
                self._failures[slot] = fault.detail
            case FaultKind.NOT_FINITE:
                self._failures[slot] = _NOT_FINITE
            case FaultKind.STEP_RAISES:
                self._raising.add(slot)
            case FaultKind.NO_TOKENS:
                counts[slot] = 0
            case FaultKind.EXTRA_TOKENS:
                counts[slot] += fault.num_extra
            case _:
                pass  # A fault of the whole executor: `_inject` handles it.

    def _result(
        self,
        batch: Batch,
        slots: NDArray[np.int32],
        positions: NDArray[np.int64],
        counts: NDArray[np.int32],
        failures: tuple[SlotFailure, ...],
    ) -> StepResult:
        is_plain = bool((counts == 1).all())
        # With more than one token, the keys and values of all but the last are written too.
        capacity = batch.arrays.num_blocks[slots] * self._info.block_size
        most = np.minimum(capacity + 1, self._info.max_seq_len)
        counts = np.minimum(counts, most - positions).astype(np.int32)
        rows = np.repeat(np.arange(len(slots)), counts)
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        token_positions = positions[rows] + np.arange(len(rows)) - firsts
        token_slots = slots[rows]
        tokens = tokens_at(
            self._origins[token_slots],
            token_positions,
            self._ids,
            batch.arrays.stop_ids[:, token_slots],
        )
        is_stop = token_positions >= self._stop_positions[token_slots]
        tokens[is_stop] = batch.arrays.stop_ids[0, token_slots[is_stop]]
        if self._shadow is not None:
            for row, slot in enumerate(slots.tolist()):
                self._shadow.append(slot, tokens[rows == row])
            if not is_plain:
                self._shadow.write(batch.arrays, slots, positions, counts - 1)
        return StepResult(
            slots=slots,
            tokens=tokens,
            counts=None if is_plain else counts,
            logprobs=self._logprobs(batch, slots, tokens),
            prompt_logprobs=self._prompt_logprobs(batch),
            failures=failures,
        )

    def _logprobs(
        self, batch: Batch, slots: NDArray[np.int32], tokens: NDArray[np.int32]
    ) -> TokenLogprobs | None:
        num_top = int(batch.arrays.num_logprobs[slots].max(initial=-1))
        if num_top < 0:
            return None
        return simulated_logprobs(tokens, num_top, self._info.vocab_size)

    def _prompt_logprobs(self, batch: Batch) -> tuple[tuple[int, int, TokenLogprobs], ...]:
        arrays = batch.arrays
        is_requested = arrays.num_prompt_logprobs[batch.slots] >= 0
        found: list[tuple[int, int, TokenLogprobs]] = []
        for row in np.flatnonzero(
            is_requested & (batch.starts + 1 < arrays.num_prompt[batch.slots])
        ):
            slot, first = int(batch.slots[row]), int(batch.starts[row]) + 1
            end = min(first + int(batch.num_tokens[row]), int(arrays.num_prompt[slot]))
            tokens = arrays.token_ids[slot, first:end].copy()
            num_top = int(arrays.num_prompt_logprobs[slot])
            found.append((slot, first, simulated_logprobs(tokens, num_top, self._info.vocab_size)))
        return tuple(found)


class _ScriptedError(Exception):
    """The error that a step raises because of a STEP_RAISES fault."""


def _reraise_unscripted(error: Exception) -> None:
    """Raise `error` again unless it is scripted; a scripted error needs no cleanup."""
    if not isinstance(error, _ScriptedError):
        raise error


def _ends(batch: Batch, slots: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the position after the last token of each of `slots` in this step, int32 [m] in row
    order.
    """
    ends: NDArray[np.int32] = batch.starts + batch.num_tokens
    return ends if len(slots) == len(ends) else ends[np.isin(batch.slots, slots)]


def _build_info(config: ExecutorConfig) -> ExecutorInfo:
    simulated = config.simulated
    model = _model_limits(config.model_path)
    model_max_seq_len = model.get("max_position_embeddings", _DEFAULT_MAX_SEQ_LEN)
    max_seq_len = config.max_seq_len or model_max_seq_len
    bytes_per_block = simulated.kv_bytes_per_token * config.block_size
    num_blocks = config.num_blocks or config.host_cache_bytes // bytes_per_block
    if num_blocks < 1:
        raise ValueError(f"kv_cache_mib must be at least one block of {bytes_per_block} bytes")
    return ExecutorInfo(
        name="simulated",
        vocab_size=simulated.vocab_size or model.get("vocab_size", DEFAULT_VOCAB_SIZE),
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_seq_len=max_seq_len,
        max_num_seqs=config.max_num_seqs,
        pipeline_depth=config.pipeline_depth or DEFAULT_PIPELINE_DEPTH,
        features=frozenset(
            {
                Feature.SEED,
                Feature.MIN_P,
                Feature.MIN_TOKENS,
                Feature.LOGPROBS,
                Feature.PROMPT_LOGPROBS,
            }
        ),
    )


def _model_limits(model_path: Path | None) -> dict[str, int]:
    """Return the `vocab_size` and `max_position_embeddings` that config.json in `model_path`
    contains.

    Empty if `model_path` is None.
    """
    if model_path is None:
        return {}
    values: Any = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    names = ("vocab_size", "max_position_embeddings")
    return {name: int(values[name]) for name in names if name in values}
