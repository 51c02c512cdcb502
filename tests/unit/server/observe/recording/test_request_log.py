"""The request log records the lengths, times and order of requests, but no ids, names or hashes."""

import math
from typing import Any

import numpy as np
import pytest

from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.events import Completed, Failed
from penstock.scheduler.request import FailureReason, FinishReason, RequestSpec
from penstock.server.observe.recording.request_log import RequestLog

BLOCK = 4


def log(**settings: int) -> RequestLog:
    return RequestLog(block_size=BLOCK, secret=b"secret", **settings)


def spec(key: int, prompt: list[int] | None = None, **fields: Any) -> RequestSpec:
    ids = np.array([1, 2, 3] if prompt is None else prompt, dtype=np.int32)
    return RequestSpec(key=key, request_id=str(key), prompt_ids=ids, max_tokens=9, **fields)


def shared(key: int, prompt: list[int], salt: bytes = b"s") -> RequestSpec:
    hashes = hash_blocks(np.array(prompt, dtype=np.int32), BLOCK, chain_root(salt))
    return spec(key, prompt, block_hashes=hashes, hash_salt=salt)


def ran(requests: RequestLog, key: int, num_tokens: int) -> None:
    requests.add_tokens(np.full(num_tokens, key, dtype=np.int64))
    requests.end(Completed(key=key, at_s=0.0, reason=FinishReason.LENGTH))


def test_times_count_from_the_first_arrival_and_deadlines_from_their_own() -> None:
    requests = log()
    requests.add(
        (
            spec(1, arrival_s=100.0),
            spec(2, arrival_s=102.5, ttft_deadline_s=103.0, deadline_s=112.5, priority=3),
        )
    )
    ran(requests, 1, 2)
    ran(requests, 2, 5)

    first, second = requests.take()

    assert (first.arrival_s, first.num_prompt_tokens, first.num_output_tokens) == (0.0, 3, 2)
    assert (first.ttft_deadline_s, first.deadline_s) == (math.inf, math.inf)
    assert (second.arrival_s, second.num_output_tokens, second.priority) == (2.5, 5, 3)
    assert (second.ttft_deadline_s, second.deadline_s) == (0.5, 10.0)
    assert requests.take() == []


def test_requests_come_in_the_order_they_were_queued_in_whichever_ends_first() -> None:
    requests = log()
    # The second was stamped before the first, by another front, and queued after it.
    requests.add((spec(1, arrival_s=5.0),))
    requests.add((spec(2, arrival_s=4.9),))
    ran(requests, 2, 7)
    assert requests.take() == []

    ran(requests, 1, 3)

    assert [(one.arrival_s, one.num_output_tokens) for one in requests.take()] == [(0, 3), (0, 7)]


def test_a_request_that_holds_back_too_many_others_is_left_out() -> None:
    requests = log(max_num_held=2)
    requests.add(tuple(spec(key) for key in (1, 2, 3)))
    for key in (2, 3):
        ran(requests, key, key)

    assert [one.num_output_tokens for one in requests.take()] == [2, 3]
    assert (requests.num_left_out, requests.num_live) == (1, 0)
    ran(requests, 1, 4)
    assert requests.take() == []


@pytest.mark.parametrize(
    "reason",
    [
        FailureReason.QUEUE_FULL,
        FailureReason.TENANT_OVER_QUOTA,
        FailureReason.TTFT_DEADLINE_UNREACHABLE,
        FailureReason.DEADLINE_EXCEEDED,
    ],
)
def test_a_request_rejected_for_load_is_recorded_with_the_mean_length(
    reason: FailureReason,
) -> None:
    requests = log()
    requests.add(tuple(spec(key) for key in (1, 2, 3, 4)))
    requests.end(Failed(key=1, at_s=0.0, reason=reason))
    ran(requests, 2, 2)
    ran(requests, 3, 4)
    requests.end(Failed(key=4, at_s=0.0, reason=reason))

    # Nothing was known when the first was rejected: its max_tokens.
    assert [one.num_output_tokens for one in requests.take()] == [9, 2, 4, 3]


def test_a_request_without_output_for_another_reason_is_left_out() -> None:
    requests = log()
    requests.add(tuple(spec(key) for key in (1, 2, 3, 4)))
    requests.end(Failed(key=1, at_s=0.0, reason=FailureReason.PROMPT_TOO_LONG))
    requests.end(Completed(key=2, at_s=0.0, reason=FinishReason.CANCELLED))
    requests.add_tokens(np.array([3, 3, 4], dtype=np.int64))
    requests.end(Completed(key=3, at_s=0.0, reason=FinishReason.CANCELLED))
    requests.end(Failed(key=4, at_s=0.0, reason=FailureReason.DEADLINE_EXCEEDED))

    assert [one.num_output_tokens for one in requests.take()] == [2, 1]
    assert requests.num_left_out == 2


def test_equal_prefixes_have_equal_ids_and_all_else_differs() -> None:
    requests = log()
    requests.add(
        (
            shared(1, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
            shared(2, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
            shared(3, [1, 2, 3, 4, 0, 6, 7, 8]),
            shared(4, [1, 2, 3, 4, 5, 6, 7, 8], salt=b"other"),
            spec(5, [1, 2, 3, 4]),
        )
    )
    for key in range(1, 6):
        ran(requests, key, 1)

    a, b, c, d, e = (one.prefix_ids for one in requests.take())

    assert a[:2] == b[:2]
    assert c[0] == a[0]
    assert [len(ids) for ids in (a, b, c, d, e)] == [3, 3, 2, 2, 0]
    # Begun blocks, blocks after a difference, other salts.
    assert len({a[2], b[2], a[1], c[1], a[0], d[0], d[1]}) == 7


def test_nothing_of_the_prompt_or_its_owner_is_reported() -> None:
    prompt = [11_111, 12_222, 13_333, 14_444, 15_555]
    one = shared(7, prompt)
    requests = [
        RequestLog(block_size=BLOCK, secret=secret) for secret in (b"one recording", b"another")
    ]
    reported = []
    for each in requests:
        each.add((spec(6, prompt, tenant="acme"), one, spec(8, prompt, tenant="zeta")))
        for key in (6, 7, 8):
            ran(each, key, 1)
        reported.append(each.take())

    text = repr(reported)

    assert all(str(token) not in text for token in prompt)
    assert "acme" not in text
    assert [request.tenant for request in reported[0]] == ["tenant-1", "", "tenant-2"]
    # Not from the hash alone: which guesses the prompt cannot find it in the file.
    digest = one.block_hashes[0]
    assert str(int.from_bytes(digest[:6], "little")) not in text
    assert reported[0][1].prefix_ids[0] != reported[1][1].prefix_ids[0]
