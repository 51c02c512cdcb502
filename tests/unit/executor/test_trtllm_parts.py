"""Parts of the TensorRT-LLM executor without an engine: the accounting of slots and pages, the
queue of responses, and how results and errors are read.
"""

from __future__ import annotations

import asyncio
import logging
import select
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.executor.trtllm.block_account import BlockAccount
from penstock.executor.trtllm.error_texts import is_fatal, is_invalid_request
from penstock.executor.trtllm.page_audit import PageAudit
from penstock.executor.trtllm.response_queue import Response, ResponseQueue
from penstock.executor.trtllm.results import result_of
from penstock.executor.trtllm.submitted_request import SubmittedRequest
from penstock.scheduler.executor import ExecutorDied
from penstock.scheduler.request import FinishReason, SamplingParams
from penstock.server.front.events import LogprobRows, TopToken
from support.core import make_spec


def request_of(
    key: int = 1, *, slot: int = 0, num_blocks: int = 2, num_logprobs: int = -1
) -> SubmittedRequest:
    spec = make_spec(key, 4, sampling=SamplingParams(num_logprobs=num_logprobs))
    return SubmittedRequest(
        spec=spec, tokens=spec.prompt_ids, slot=slot, num_blocks=num_blocks, num_cached=0
    )


# BlockAccount


def test_requests_enter_the_engine_in_the_order_of_admission() -> None:
    account = BlockAccount(max_num_seqs=4, num_blocks=8)
    submitted = [request_of(key) for key in (1, 2, 3)]
    for each in submitted:
        account.admit(each)

    assert list(account.next_submissions()) == submitted
    assert account.num_in_engine == 3


def test_a_released_request_occupies_its_slot_until_the_engine_ends_it() -> None:
    account = BlockAccount(max_num_seqs=1, num_blocks=8)
    old, new = request_of(1), request_of(2)
    account.admit(old)
    list(account.next_submissions())

    assert account.release(old)
    account.admit(new)
    assert list(account.next_submissions()) == []
    assert (account.num_in_engine, account.num_waiting) == (1, 1)
    account.on_end(old)

    assert list(account.next_submissions()) == [new]


def test_a_released_request_occupies_its_pages_until_the_engine_ends_it() -> None:
    account = BlockAccount(max_num_seqs=4, num_blocks=5)
    old, other, big, small = (
        request_of(1, num_blocks=2),
        request_of(2),
        request_of(3, num_blocks=3),
        request_of(4),
    )
    for each in (old, other):
        account.admit(each)
    list(account.next_submissions())
    account.release(old)

    account.admit(big)
    account.admit(small)
    # The small one would fit, and must not overtake.
    assert list(account.next_submissions()) == []
    account.on_end(old)

    assert list(account.next_submissions()) == [big, small]


def test_releasing_a_request_that_never_entered_the_engine_needs_no_abort() -> None:
    account = BlockAccount(max_num_seqs=1, num_blocks=8)
    leaving, waiting = request_of(1), request_of(2)
    account.admit(leaving)
    list(account.next_submissions())
    account.release(leaving)
    account.admit(waiting)

    assert not account.release(waiting)
    account.on_end(leaving)

    assert list(account.next_submissions()) == []
    assert account.num_in_engine == 0


def test_releasing_after_the_end_in_the_engine_needs_no_abort() -> None:
    account = BlockAccount(max_num_seqs=1, num_blocks=8)
    done = request_of(1)
    account.admit(done)
    list(account.next_submissions())
    account.on_end(done)

    assert not account.release(done)
    assert account.num_aborted_blocks == 0


# Audit


def test_an_engine_that_holds_what_the_mirror_holds_does_not_drift() -> None:
    audit = PageAudit()
    audit.record_expected(5, 1.0)

    assert audit.check(5) == 0
    assert (audit.num_checks, audit.num_drifts) == (1, 0)


@pytest.mark.parametrize(("held", "drift"), [(0, 0), (3, 0), (9, 0), (12, 0), (13, 1), (20, 8)])
def test_the_engines_page_count_may_be_as_old_as_the_window(held: int, drift: int) -> None:
    audit = PageAudit()
    for at_s, num_blocks in ((0.0, 3), (1.0, 10), (2.0, 6)):
        audit.record_expected(num_blocks, at_s, slack_blocks=2)

    assert audit.check(held) == drift


def test_page_counts_before_the_window_do_not_explain_a_drift() -> None:
    audit = PageAudit()
    audit.record_expected(50, 0.0)
    audit.record_expected(10, 1.0)
    audit.record_expected(11, 10.0)
    audit.record_expected(12, 11.0)

    assert audit.check(50) == 38
    assert audit.check(4) == -6
    assert (audit.num_checks, audit.num_drifts) == (2, 2)
    assert audit.worst_drift == 38


def test_the_page_count_at_the_start_of_the_window_counts() -> None:
    audit = PageAudit()
    audit.record_expected(7, 0.0)
    audit.record_expected(9, 100.0)

    # From 98 to 100 seconds it held 7.
    assert audit.check(7) == 0


# Responses


@pytest.fixture
def responses() -> Iterator[ResponseQueue]:
    made = ResponseQueue()
    yield made
    made.close()


def is_readable(responses: ResponseQueue) -> bool:
    return bool(select.select([responses.ready_fd], [], [], 0)[0])


async def test_one_wake_up_delivers_all_results_of_a_turn(responses: ResponseQueue) -> None:
    loop = asyncio.get_running_loop()
    first, second = Response(request_of(1)), Response(request_of(2))
    responses.put(first, loop)
    responses.put(second, loop)
    assert not is_readable(responses)
    await asyncio.sleep(0)

    assert is_readable(responses)
    assert responses.take() == [first, second]
    assert not is_readable(responses)
    assert responses.take() == []


async def test_the_death_of_the_engine_is_reported_at_once_and_permanently(
    responses: ResponseQueue,
) -> None:
    responses.fail(RuntimeError("first"))
    responses.fail(RuntimeError("second"))

    assert is_readable(responses)
    for _ in range(2):
        with pytest.raises(ExecutorDied, match="first"):
            responses.take()


async def test_a_closed_response_queue_accepts_and_returns_nothing() -> None:
    responses = ResponseQueue()
    responses.close()
    responses.close()

    responses.fail(RuntimeError("too late"))
    with pytest.raises(ExecutorDied, match="closed"):
        responses.take()


# Results


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


def test_several_arrivals_of_a_request_make_one_row() -> None:
    one, two = request_of(1, slot=3), request_of(2, slot=1)

    result = result_of(
        [Response(one, [5, 6], num_cached=4), Response(two, [7]), Response(one, [8])]
    )

    assert result.slots.tolist() == [3, 1]
    assert result.counts is not None
    assert result.counts.tolist() == [3, 1]
    assert result.tokens.tolist() == [5, 6, 8, 7]
    assert result.num_cached == ((3, 4),)
    assert result.logprobs is None


def test_results_for_a_released_slot_are_dropped() -> None:
    gone = request_of(1, slot=-1)

    result = result_of([Response(gone, [5], is_last=True, finish_reason="stop")])

    assert (len(result.slots), result.ends, result.failures) == (0, (), ())


@pytest.mark.parametrize(
    ("reason", "expected"), [("stop", FinishReason.STOP), ("length", FinishReason.LENGTH)]
)
def test_ends_are_reported(reason: str, expected: FinishReason) -> None:
    (end,) = result_of(
        [Response(request_of(slot=2), is_last=True, finish_reason=reason, stop_id=9)]
    ).ends

    assert (end.slot, end.reason, end.stop_id) == (2, expected, 9)


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "not_finished", ""])
def test_an_unrequested_end_is_a_failure(reason: str) -> None:
    result = result_of([Response(request_of(slot=2), [4], is_last=True, finish_reason=reason)])

    assert len(result.slots) == 0
    (failure,) = result.failures
    assert failure.slot == 2
    assert not failure.is_rejected
    assert reason in failure.detail


def test_a_failure_drops_the_tokens_of_its_step_and_keeps_its_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = request_of(slot=2)
    caplog.set_level(logging.INFO)

    result = result_of(
        [
            Response(failing, [4]),
            Response(failing, is_last=True, failure="x" * 9000, is_rejected=True),
        ]
    )

    assert len(result.slots) == 0
    (failure,) = result.failures
    assert failure.is_rejected
    assert failure.detail == "the engine rejected it"
    # They may quote the prompt.
    assert "xxx" not in caplog.text


def test_logprobs_are_next_to_the_tokens_of_requests_that_asked() -> None:
    silent = Response(request_of(1, slot=0), [5])
    asking = Response(
        request_of(2, slot=1, num_logprobs=2),
        [6, 7],
        logprobs=[
            {6: Logprob(-0.5, 1), 9: Logprob(-1.0, 2), 8: Logprob(-2.0, 3)},
            {7: Logprob(-0.15), 9: Logprob(-0.1), 8: Logprob(-0.2)},
        ],
    )

    logprobs = result_of([silent, asking]).logprobs

    assert logprobs is not None
    assert logprobs.chosen.tolist() == pytest.approx([0.0, -0.5, -0.15])
    assert logprobs.ranks.tolist() == [0, 1, 2]
    assert logprobs.top_ids.tolist() == [[-1, -1], [6, 9], [9, 7]]
    assert logprobs.top_logprobs[1:].tolist() == [
        pytest.approx([-0.5, -1.0]),
        pytest.approx([-0.1, -0.15]),
    ]


def test_alternatives_that_the_engine_omitted_are_not_invented() -> None:
    asking = Response(
        request_of(slot=1, num_logprobs=3),
        [6],
        logprobs=[{6: Logprob(-0.5, 1), 9: Logprob(-1.0, 2)}],
    )

    logprobs = result_of([asking]).logprobs

    assert logprobs is not None
    assert logprobs.top_ids.tolist() == [[6, 9, -1]]
    assert LogprobRows(logprobs).record(0, 6, 3).top == (TopToken(6, -0.5), TopToken(9, -1.0))


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        [],
        [{1: Logprob(-1.0)}],
        [{5: Logprob(-1.0, 0)}],
        [{5: Logprob(-9.0), 1: Logprob(-1.0)}],
    ],
    ids=["none", "too few", "without the chosen", "a number", "chosen for no rank"],
)
def test_missing_logprobs_fail_the_request_that_asked(logprobs: Any) -> None:
    result = result_of([Response(request_of(num_logprobs=0), [5], logprobs=logprobs)])

    assert "log probabilit" in result.failures[0].detail


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Token ID out of range", True),
        ("The prompt length (900) should not be larger than max_seq_len (512)", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("", False),
        ("`default_max_tokens` (-3) must be greater than 0, `max_seq_len` 512", True),
        ("Assertion failed: prompt length (9) exceeds max_seq_len (8)", True),
        ("Failed to compile the JSON schema", True),
        (
            'Guided decoding error: [09:11:02] /project/cpp/x.cc:902: Unsupported type "strnig"',
            True,
        ),
        ('Guided decoding error: Unsupported type "internal forward kernel CUDA"', False),
        ("Guided decoding error: [TensorRT-LLM][ERROR] CUDA runtime error in cudaMemcpy", False),
        ("Guided decoding error: CUDA error: device-side assert triggered", False),
        ("Guided decoding error: CUDA out of memory", False),
        ("mpi: failed to compile the grammar", False),
    ],
)
def test_the_engines_messages_show_the_cause(message: str, expected: bool) -> None:
    assert is_invalid_request(message) is expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA error: device-side assert triggered", True),
        ("cudaErrorIllegalAddress: an illegal memory access was encountered", True),
        ("unspecified launch failure", True),
        ("Guided decoding error: CUDA error: device-side assert triggered", True),
        ("CUDA out of memory. Tried to allocate 2 GiB", False),
        ("forward failed", False),
    ],
)
def test_errors_that_destroy_the_cuda_context_are_recognised(message: str, expected: bool) -> None:
    assert is_fatal(message) is expected


def test_quoted_text_of_the_request_is_not_the_engines() -> None:
    constraint_text = '{"type": "internal forward kernel CUDA device-side assert"}'
    text = f"Guided decoding error: Unsupported type {constraint_text}"

    assert is_invalid_request(text, constraint_text)
    assert not is_fatal(text, constraint_text)
    assert is_fatal(f"{text}: an illegal memory access was encountered", constraint_text)
    assert not is_invalid_request(f"{text}: an illegal memory access, cublasSgemm", constraint_text)
