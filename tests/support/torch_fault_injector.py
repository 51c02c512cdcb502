"""Makes steps of the torch executor raise in the middle of the model, for selected requests."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from torch import Tensor

from penstock.executor.torch.cpu.fused_forward import CpuFusedForward
from penstock.executor.torch.executor import TorchExecutor
from penstock.executor.torch.slot_rules import SlotRules
from penstock.scheduler.batch import Batch, StepResult
from penstock.scheduler.executor import Executor


class TorchFaultInjector:
    """Makes steps of `executor` raise before the last layer, when the earlier layers have written
    their keys and values. `raises`: returns the exception for a batch, or None.

    The executor's health probe succeeds unless `is_lost`. `parts`: (request keys, number of tokens)
    of every step, in order, without the probes.
    """

    def __init__(self, executor: Executor, raises: Callable[[Batch], Exception | None]) -> None:
        assert isinstance(executor, TorchExecutor)
        self.is_lost = False
        self.num_probes = 0
        self.parts: list[tuple[tuple[int, ...], int]] = []
        self._raises = raises
        self._batch: Batch | None = None
        inner = executor._run

        def run(batch: Batch, rules: SlotRules) -> StepResult:
            self._batch = batch
            if batch is executor._probe.batch:
                self.num_probes += 1
            else:
                keys = tuple(batch.arrays.key[batch.slots].tolist())
                self.parts.append((keys, int(batch.num_tokens.sum())))
            return inner(batch, rules)

        def before_last_layer(*_: object) -> None:
            assert self._batch is not None
            if self._batch is executor._probe.batch:
                if self.is_lost:
                    raise RuntimeError("device lost")
                return
            error = self._raises(self._batch)
            if error is not None:
                raise error

        executor._run = run  # type: ignore[method-assign] # to see what runs
        forward: Any = executor._forward
        if isinstance(forward, CpuFusedForward):
            _hook_last_layer(forward, before_last_layer)
            return
        module: Any = executor._model.module
        module.model.layers[-1].register_forward_pre_hook(before_last_layer)


def _hook_last_layer(forward: CpuFusedForward, hook: Callable[[], None]) -> None:
    """Make the fused step of `forward` call `hook` before its last layer."""
    last = forward._layers[-1]
    project = last.weights.qkv

    def hooked(x: Tensor) -> Tensor:
        hook()
        return project(x)

    forward._layers[-1] = replace(last, weights=replace(last.weights, qkv=hooked))


def inject_fault(executor: Executor, raises: Callable[[Batch], Exception | None]) -> None:
    """Make a step raise the exception that `raises` returns for its batch, if any. A step of a
    TorchExecutor raises before the last layer; a step of the fused CUDA executor raises after the
    whole step is queued on the device.
    """
    if isinstance(executor, TorchExecutor):
        TorchFaultInjector(executor, raises)
        return
    fused: Any = executor
    inner = fused._enqueue

    def enqueue(batch: Batch, rules: SlotRules, memory: object) -> object:
        flight = inner(batch, rules, memory)
        error = None if batch is fused._probe.batch else raises(batch)
        if error is not None:
            raise error
        return flight

    fused._enqueue = enqueue


def for_keys(bad: Collection[int]) -> Callable[[Batch], Exception | None]:
    """Return a function for `inject_fault` that returns an IndexError for batches with one of these
    keys.
    """

    def raises(batch: Batch) -> Exception | None:
        is_hit = not set(bad).isdisjoint(batch.arrays.key[batch.slots].tolist())
        return IndexError("index 7 is out of bounds") if is_hit else None

    return raises


def for_prompt_token(token: int) -> Callable[[Batch], Exception | None]:
    """Return a function for `inject_fault` that returns a RuntimeError for batches in which a
    request's computed part of the prompt contains `token`."""

    def raises(batch: Batch) -> Exception | None:
        arrays = batch.arrays
        ends = batch.starts + batch.num_tokens
        for slot, end in zip(batch.slots.tolist(), ends.tolist(), strict=True):
            if (arrays.token_ids[slot, : min(end, arrays.num_prompt[slot])] == token).any():
                return RuntimeError("scripted")
        return None

    return raises
