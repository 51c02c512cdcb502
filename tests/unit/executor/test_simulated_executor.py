"""The simulated executor driven without an engine: results of steps, rejected batches, and requests
that fail.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.fault import Fault, FaultKind
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.executor.simulated.shadow import DeviceCheckError
from penstock.scheduler.batch import StepResult
from penstock.scheduler.request import Request, RequestSpec, SamplingParams
from penstock.scheduler.slot_arrays import SlotArrays
from support.batches import batch_of, fill_slot
from support.simulated_output import simulated_output

VOCAB = 500
BLOCK = 4


def build(*faults: Fault, depth: int = 1, **simulated: Any) -> SimulatedExecutor:
    config = ExecutorConfig(
        kind=ExecutorKind.SIMULATED,
        block_size=BLOCK,
        num_blocks=16,
        max_num_seqs=4,
        max_seq_len=32,
        pipeline_depth=depth,
        simulated=SimulatedConfig(
            vocab_size=VOCAB, **{"is_strict": True, "faults": faults, **simulated}
        ),
    )
    return SimulatedExecutor(config)


def spec_of(key: int, *prompt: int, **fields: Any) -> RequestSpec:
    return RequestSpec(
        key=key,
        request_id=str(key),
        prompt_ids=np.array(prompt, dtype=np.int32),
        max_tokens=12,
        **{"sampling": SamplingParams(temperature=0.0), **fields},
    )


class StepLauncher:
    """Launches steps in place of the scheduler. Slot s has the blocks 4s to 4s + 3."""

    def __init__(self, executor: SimulatedExecutor) -> None:
        info = executor.info
        self.executor = executor
        self.arrays = SlotArrays(
            num_slots=info.max_num_seqs, max_seq_len=info.max_seq_len, block_size=info.block_size
        )
        self._step = 0
        self._admitted: list[Request] = []
        self._released: list[int] = []

    def admit(self, spec: RequestSpec, slot: int) -> None:
        self._admitted.append(fill_slot(self.arrays, spec, slot))
        self.arrays.num_blocks[slot] = 4
        self.arrays.block_table[slot, :4] = np.arange(4 * slot, 4 * slot + 4)

    def release(self, slot: int) -> None:
        self.arrays.clear(slot)
        self._released.append(slot)

    def launch(self, *rows: tuple[int, int, int], sampled: tuple[int, ...] | None = None) -> None:
        """Launch a step of `rows`, decodes first. Each row is (slot, position of its first token,
        number of tokens). All rows are sampled unless `sampled` lists the slots to sample.
        """
        self._step += 1
        changes = {} if sampled is None else {"sampled_slots": np.array(sampled, dtype=np.int32)}
        batch = batch_of(
            self.arrays,
            rows,
            step=self._step,
            admitted=tuple(self._admitted),
            released=tuple(self._released),
            **changes,
        )
        self._admitted, self._released = [], []
        self.executor.launch(batch)

    def collect(self) -> StepResult:
        result = self.executor.collect()
        counts = np.ones(len(result.slots), np.int32) if result.counts is None else result.counts
        slots = np.repeat(result.slots, counts)
        for slot, token in zip(slots.tolist(), result.tokens.tolist(), strict=True):
            self.arrays.token_ids[slot, self.arrays.num_tokens[slot]] = token
            self.arrays.num_tokens[slot] += 1
        return result

    def step(self, *rows: tuple[int, int, int]) -> StepResult:
        self.launch(*rows)
        return self.collect()

    def output(self, slot: int) -> list[int]:
        first, end = int(self.arrays.num_prompt[slot]), int(self.arrays.num_tokens[slot])
        tokens: list[int] = self.arrays.token_ids[slot, first:end].tolist()
        return tokens


def test_a_request_gets_its_reference_generation() -> None:
    hand = StepLauncher(build())
    spec = spec_of(1, 5, 6, 7)
    hand.admit(spec, 2)

    hand.step((2, 0, 3))
    for start in range(3, 14):
        hand.step((2, start, 1))

    assert hand.output(2) == simulated_output(spec, VOCAB).tolist()


def test_at_depth_two_sampled_tokens_are_inputs_of_the_next_step() -> None:
    hand = StepLauncher(build(depth=2))
    spec = spec_of(1, 5, 6, 7)
    hand.admit(spec, 0)

    hand.launch((0, 0, 3))
    for start in range(3, 8):
        hand.launch((0, start, 1))
        hand.collect()

    assert hand.output(0) == simulated_output(spec, VOCAB)[:5].tolist()


def test_a_scripted_stop_id_comes_after_min_tokens() -> None:
    config = SimulatedConfig(min_output_tokens=2, max_output_tokens=2)
    hand = StepLauncher(build(min_output_tokens=2, max_output_tokens=2))
    spec = spec_of(1, 5, 6, 7, min_tokens=4, stop_ids=(9, 10))
    hand.admit(spec, 0)

    hand.step((0, 0, 3))
    for start in range(3, 7):
        hand.step((0, start, 1))

    assert hand.output(0)[-1] == 9
    assert hand.output(0) == simulated_output(spec, VOCAB, config).tolist()


def test_logprobs_are_returned_if_requested() -> None:
    hand = StepLauncher(build())
    asks = SamplingParams(temperature=0.0, num_logprobs=2, num_prompt_logprobs=1)
    hand.admit(spec_of(1, 5, 6, 7), 0)
    hand.admit(spec_of(2, 5, 6, 8, sampling=asks), 1)

    result = hand.step((0, 0, 3), (1, 0, 3))
    silent = hand.step((0, 3, 1))

    assert result.logprobs is not None
    assert result.logprobs.top_ids.shape == (2, 2)
    ((slot, first, prompt),) = result.prompt_logprobs
    assert (slot, first, prompt.top_ids[:, 0].tolist()) == (1, 1, [6, 8])
    assert silent.logprobs is None
    assert silent.prompt_logprobs == ()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda hand: hand.launch((0, 4, 1)), "with 4 known tokens|reads|sampled"),
        (lambda hand: hand.launch((1, 0, 1)), "1 has no slot"),
        (lambda hand: hand.launch((0, 3, 1), (0, 3, 1)), "two rows"),
        (lambda hand: hand.launch((0, 3, 1), sampled=()), "sampled_slots"),
        (lambda hand: hand.release(3) or hand.launch(), "not assigned"),
        (lambda hand: hand.admit(spec_of(2, 1), 0) or hand.launch(), "assigned twice"),
    ],
)
def test_strict_device_rejects_a_wrong_batch(spoil: Any, message: str) -> None:
    hand = StepLauncher(build())
    hand.admit(spec_of(1, 5, 6, 7), 0)
    hand.step((0, 0, 3))

    with pytest.raises(DeviceCheckError, match=message):
        spoil(hand)


def test_strict_device_sees_a_block_that_was_never_written() -> None:
    hand = StepLauncher(build())
    hand.admit(spec_of(1, 5, 6, 7, 8, 9), 0)

    with pytest.raises(DeviceCheckError, match="position 0 in block 0: nothing was written"):
        hand.launch((0, 4, 1))


def test_strict_device_sees_a_block_taken_from_a_live_request() -> None:
    hand = StepLauncher(build())
    hand.admit(spec_of(1, 5, 6, 7), 0)
    hand.admit(spec_of(2, 5, 6, 8), 1)
    hand.step((0, 0, 3))
    hand.arrays.block_table[1, 0] = 0

    hand.step((1, 0, 3))

    with pytest.raises(DeviceCheckError, match="position 2 in block 0: another prefix"):
        hand.launch((0, 3, 1))


def test_strict_device_sees_a_prefix_shared_across_salts() -> None:
    hand = StepLauncher(build())
    hand.admit(spec_of(1, 5, 6, 7, 8, hash_salt=b"a"), 0)
    hand.step((0, 0, 4))
    hand.admit(spec_of(2, 5, 6, 7, 8, 9, hash_salt=b"b"), 1)
    hand.arrays.block_table[1, 0] = 0

    with pytest.raises(DeviceCheckError, match="another prefix"):
        hand.launch((1, 4, 1))


def test_strict_device_lets_a_right_prefix_be_shared() -> None:
    hand = StepLauncher(build())
    hand.admit(spec_of(1, 5, 6, 7, 8, hash_salt=b"a"), 0)
    hand.step((0, 0, 4))
    hand.admit(spec_of(2, 5, 6, 7, 8, 9, hash_salt=b"a"), 1)
    hand.arrays.block_table[1, 0] = 0

    assert len(hand.step((1, 4, 1)).tokens) == 1


def test_strict_device_sees_a_prefix_shared_within_its_own_step() -> None:
    hand = StepLauncher(build())
    hand.admit(spec_of(1, 5, 6, 7, 8), 0)
    hand.admit(spec_of(2, 5, 6, 7, 8, 9), 1)
    hand.arrays.block_table[1, 0] = 0

    with pytest.raises(DeviceCheckError, match="nothing was written"):
        hand.launch((1, 4, 1), (0, 0, 4))


def test_strict_device_sees_tokens_changed_behind_its_back() -> None:
    hand = StepLauncher(build())
    hand.admit(spec_of(1, 5, 6, 7), 0)
    hand.step((0, 0, 3))
    hand.arrays.token_ids[0, 3] += 1

    with pytest.raises(DeviceCheckError, match="tokens differ"):
        hand.launch((0, 3, 1))


@pytest.mark.parametrize(
    ("kind", "detail"),
    [(FaultKind.REQUEST_FAILS, "scripted fault"), (FaultKind.NOT_FINITE, "logits are not finite")],
)
def test_a_request_fails_alone(kind: FaultKind, detail: str) -> None:
    hand = StepLauncher(build(Fault(kind=kind, at_request=2, at_output=1)))
    hand.admit(spec_of(1, 5, 6, 7), 0)
    hand.admit(spec_of(2, 5, 6, 8), 1)
    hand.step((0, 0, 3), (1, 0, 3))

    result = hand.step((0, 3, 1), (1, 3, 1))

    assert [(failure.slot, failure.detail) for failure in result.failures] == [(1, detail)]
    assert result.slots.tolist() == [0]
    assert len(result.tokens) == 1


def test_a_failed_slot_serves_its_next_request() -> None:
    hand = StepLauncher(build(Fault(kind=FaultKind.REQUEST_FAILS, at_step=1)))
    hand.admit(spec_of(1, 5, 6, 7), 0)
    assert len(hand.step((0, 0, 3)).failures) == 1
    hand.release(0)
    hand.admit(spec_of(2, 5, 6, 7), 0)

    result = hand.step((0, 0, 3))

    assert result.failures == ()
    assert len(result.tokens) == 1


def test_a_poisoned_prompt_fails_by_its_token() -> None:
    hand = StepLauncher(build(Fault(kind=FaultKind.REQUEST_FAILS, at_prompt_token=13, max_times=9)))
    hand.admit(spec_of(1, 5, 13), 0)
    hand.admit(spec_of(2, 5, 14), 1)

    result = hand.step((0, 0, 2), (1, 0, 2))

    assert [failure.slot for failure in result.failures] == [0]


def test_a_replayed_output_poisons_no_prompt() -> None:
    hand = StepLauncher(build(Fault(kind=FaultKind.REQUEST_FAILS, at_prompt_token=13, max_times=9)))
    hand.admit(replace(spec_of(1, 5, 13), num_replayed=1), 0)
    hand.admit(replace(spec_of(2, 13, 5), num_replayed=1), 1)

    result = hand.step((0, 0, 2), (1, 0, 2))

    assert [failure.slot for failure in result.failures] == [1]


def test_a_step_without_tokens_can_be_run_again() -> None:
    spec = spec_of(1, 5, 6, 7)
    hand = StepLauncher(build(Fault(kind=FaultKind.NO_TOKENS, at_step=1)))
    hand.admit(spec, 0)

    empty = hand.step((0, 0, 3))
    hand.step((0, 2, 1))

    assert empty.counts is not None
    assert empty.counts.tolist() == [0]
    assert hand.output(0) == simulated_output(spec, VOCAB)[:1].tolist()


def test_extra_tokens_are_returned_in_order() -> None:
    spec = spec_of(1, 5, 6, 7)
    hand = StepLauncher(build(Fault(kind=FaultKind.EXTRA_TOKENS, at_output=0, num_extra=2)))
    hand.admit(spec, 0)

    result = hand.step((0, 0, 3))
    hand.step((0, 5, 1))

    assert result.counts is not None
    assert result.counts.tolist() == [3]
    assert hand.output(0) == simulated_output(spec, VOCAB)[:4].tolist()


def test_extra_tokens_stay_within_the_blocks() -> None:
    hand = StepLauncher(build(Fault(kind=FaultKind.EXTRA_TOKENS, at_output=0, num_extra=9)))
    hand.admit(spec_of(1, 5, 6, 7), 0)
    hand.arrays.num_blocks[0] = 1

    assert len(hand.step((0, 0, 3)).tokens) == 2


def test_extra_tokens_stay_within_the_maximum_length() -> None:
    hand = StepLauncher(build(Fault(kind=FaultKind.EXTRA_TOKENS, at_output=0, num_extra=9)))
    hand.admit(spec_of(1, *range(31)), 0)
    hand.arrays.num_blocks[0] = 8
    hand.arrays.block_table[0] = np.arange(8)

    assert len(hand.step((0, 0, 31)).tokens) == 1


def test_the_step_already_launched_reports_the_failure_again() -> None:
    hand = StepLauncher(build(Fault(kind=FaultKind.REQUEST_FAILS, at_step=1), depth=2))
    hand.admit(spec_of(1, 5, 6, 7), 0)

    hand.launch((0, 0, 3))
    hand.launch((0, 3, 1))

    assert [[f.slot for f in hand.collect().failures] for _ in range(2)] == [[0], [0]]


def test_calls_in_the_wrong_order_are_rejected() -> None:
    hand = StepLauncher(build())
    hand.admit(spec_of(1, 5, 6, 7), 0)
    with pytest.raises(RuntimeError, match="no step is launched"):
        hand.collect()
    hand.launch((0, 0, 3))
    with pytest.raises(RuntimeError, match="call collect"):
        hand.launch((0, 3, 1))
