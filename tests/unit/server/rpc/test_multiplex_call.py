"""One Multiplex call to a front whose engine and transport the test controls."""

from __future__ import annotations

import time

import pytest
from grpc import StatusCode

from penstock.scheduler.request import FailureReason, FinishReason
from penstock.server.front.config import FrontConfig
from penstock.server.rpc.large_messages import LARGE_BYTES, LargeMessageQueue
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import state_pb2
from support.fronts import admitted, finished, rich_status
from support.multiplex import cancel, credit, kind, multiplex_call, submit


async def test_a_step_is_one_message_for_all(text: ModelText) -> None:
    async with multiplex_call(text) as call:
        call.wire.send(*(submit(key) for key in range(5)))
        keys = [await call.port.next_key() for _ in range(5)]
        call.port.emit(changes=[admitted(key) for key in keys])
        await call.settle()
        for letter in "abc":
            num_before = len(call.wire.messages)
            call.port.emit(tokens=[(key, call.token(letter)) for key in keys])
            await call.settle()
            (message,) = call.wire.messages[num_before:]
            assert [event.key for event in message.events] == [0, 1, 2, 3, 4]
        call.port.emit(ends=[finished(key) for key in keys])
        call.wire.half_close()
        await call.task
        for key in range(5):
            assert call.wire.text(key) == "abc"
            reported = [event.response.sequence for event in call.wire.events(key)]
            assert reported == list(range(len(reported)))
            assert call.wire.kinds(key) == ["accepted", "progress", *["tokens"] * 3, "finished"]
        assert len(call.front.table) == 0
        assert call.port.cancelled == []


async def test_a_blocked_write_makes_the_next_message_larger(text: ModelText) -> None:
    async with multiplex_call(text) as call:
        call.wire.send(submit(1), submit(2))
        keys = [await call.port.next_key() for _ in range(2)]
        call.port.emit(changes=[admitted(key) for key in keys])
        await call.settle()
        call.wire.is_open.clear()
        for letter in "abcd":
            call.port.emit(tokens=[(key, call.token(letter)) for key in keys])
            await call.settle()
        num_before = len(call.wire.messages)
        call.wire.is_open.set()
        await call.settle()
        first, second = call.wire.messages[num_before:]
        assert [event.response.tokens.text for event in first.events] == ["a", "a"]
        assert [event.response.tokens.text for event in second.events] == ["bcd", "bcd"]
        assert [event.response.tokens.num_tokens for event in second.events] == [3, 3]


async def test_a_large_command_waits_for_its_turn_and_a_small_one_does_not(
    text: ModelText,
) -> None:
    now_s = iter((0.0, 3600.0))
    large_messages = LargeMessageQueue(lambda: next(now_s))
    # Its handling takes an hour, so the next message may be read in an hour.
    await large_messages.acquire("another")
    async with multiplex_call(text, large_messages=large_messages) as call:
        call.wire.send(submit(1))
        await call.port.next_key()
        call.wire.send(submit(2, text="a" * LARGE_BYTES))
        await call.settle()
        assert not call.wire.events(2), "nor is it rejected as too long yet"


async def test_messages_are_split_at_the_hint(text: ModelText) -> None:
    async with multiplex_call(text, FrontConfig(max_shared_message_bytes_hint=100)) as call:
        call.wire.send(*(submit(key) for key in range(20)))
        keys = [await call.port.next_key() for _ in range(20)]
        call.port.emit(changes=[admitted(key) for key in keys])
        await call.settle()
        num_before = len(call.wire.messages)
        call.port.emit(tokens=[(key, call.token("a")) for key in keys])
        await call.settle()
        messages = call.wire.messages[num_before:]
        assert 1 < len(messages) < 20
        assert all(message.ByteSize() <= 100 for message in messages)
        assert [e.key for message in messages for e in message.events] == list(range(20))


async def test_credit_is_what_may_be_sent(text: ModelText) -> None:
    async with multiplex_call(text) as call:
        call.wire.send(submit(1, credit=0), submit(2, credit=2))
        one, two = await call.port.next_key(), await call.port.next_key()
        call.port.emit(changes=[admitted(one), admitted(two)])
        for letter in "abc":
            call.port.emit(tokens=[(one, call.token(letter)), (two, call.token(letter))])
            await call.settle()
        assert call.wire.kinds(1) == ["accepted", "progress"], "what is no token needs none"
        assert call.wire.text(2) == "ab"
        call.wire.send(credit(1, 1))
        await call.settle()
        assert call.wire.text(1) == "a"
        call.port.emit(ends=[finished(one), finished(two)])
        call.wire.send(credit(1, 1), credit(7, 1))
        await call.settle()
        assert call.wire.text(1) == "ab"
        assert call.wire.kinds(1)[-1] == "tokens", "the end stays behind what it ends"
        call.wire.send(credit(1, 9), credit(2, 2**32 - 1))
        await call.settle()
        for key in (1, 2):
            assert call.wire.text(key) == "abc"
            assert call.wire.kinds(key)[-1] == "finished"
        assert len(call.front.table) == 0


async def test_credit_where_none_is_needed_changes_nothing(text: ModelText) -> None:
    async with multiplex_call(text) as call:
        call.wire.send(submit(1), credit(1, 1))
        key = await call.port.next_key()
        for letter in "abc":
            call.port.emit(tokens=[(key, call.token(letter))])
            await call.settle()
        assert call.wire.text(1) == "abc"


async def test_without_credit_for_too_long_one_is_cut_and_the_others_continue(
    text: ModelText,
) -> None:
    async with multiplex_call(text, FrontConfig(max_backlog_tokens=4)) as call:
        call.wire.send(submit(1, credit=0), submit(2))
        one, two = await call.port.next_key(), await call.port.next_key()
        for _ in range(5):
            call.port.emit(tokens=[(one, call.token("a")), (two, call.token("a"))])
            await call.settle()
        (event,) = [event for event in call.wire.events(1) if event.HasField("error")]
        error = rich_status(event.error)
        assert (error.code, error.info.reason, error.retry_s) == (
            StatusCode.RESOURCE_EXHAUSTED,
            "READER_STALLED",
            None,
        )
        assert set(call.port.cancelled) == {((one,), FinishReason.CANCELLED)}
        assert call.front.counters.num_disconnected_readers == 1
        call.port.finish(two)
        await call.settle()
        assert call.wire.text(2) == "aaaaa"
        assert call.wire.kinds(2)[-1] == "finished"
        assert not call.task.done()


async def test_a_rejected_request_does_not_affect_the_others(text: ModelText) -> None:
    async with multiplex_call(text, FrontConfig(max_live_requests=1)) as call:
        call.wire.send(
            submit(1),
            submit(2, edit=lambda m: setattr(m, "request_id", "second")),
            submit(3, edit=lambda m: m.ClearField("text_prompt")),
        )
        key = await call.port.next_key()
        await call.settle()
        (full,) = call.wire.events(2)
        error = rich_status(full.error)
        assert (error.code, error.info.reason, error.request_id) == (
            StatusCode.RESOURCE_EXHAUSTED,
            "QUEUE_FULL",
            "second",
        )
        assert error.retry_s == pytest.approx(1.125), "drawn out, as for a call"
        (invalid,) = call.wire.events(3)
        assert rich_status(invalid.error).info.reason == "INVALID_ARGUMENT"
        assert rich_status(invalid.error).request_id, "one that the server gave it"
        call.port.finish(key)
        await call.settle()
        assert call.wire.kinds(1)[-1] == "finished"
        call.wire.send(submit(2))
        await call.port.next_key()


async def test_an_unread_request_is_ended_when_the_front_is_full(
    text: ModelText,
) -> None:
    now_s = time.monotonic()
    config = FrontConfig(max_live_requests=2)
    async with multiplex_call(text, config, clock=lambda: now_s) as call:
        call.wire.send(submit(1, credit=1), submit(2))
        one, _ = await call.port.next_key(), await call.port.next_key()
        call.port.emit(changes=[admitted(one)])
        call.port.emit(tokens=[(one, call.token("a"))] * 3)
        call.port.finish(one)
        await call.settle()
        assert call.wire.kinds(1)[-1] != "finished"
        now_s += 60.0
        call.wire.send(submit(3))
        await call.port.next_key()
        await call.settle()
        last = rich_status(call.wire.events(1)[-1].error)
        assert (last.code, last.info.reason) == (StatusCode.RESOURCE_EXHAUSTED, "READER_STALLED")
        assert call.wire.kinds(2) == ["accepted"] or not call.wire.kinds(2)
        call.wire.send(submit(1), submit(4))
        await call.settle()
        error = rich_status(call.wire.events(4)[-1].error)
        assert (error.code, error.info.reason) == (
            StatusCode.RESOURCE_EXHAUSTED,
            "QUEUE_FULL",
        ), "running ones are left alone"


async def test_the_engines_rejection_is_the_requests(text: ModelText) -> None:
    async with multiplex_call(text) as call:
        call.wire.send(submit(1), submit(2))
        one, _ = await call.port.next_key(), await call.port.next_key()
        call.port.fail(one, FailureReason.QUEUE_FULL, retry_after_s=3.0)
        await call.settle()
        (event,) = call.wire.events(1)
        error = rich_status(event.error)
        assert error.info.reason == "QUEUE_FULL"
        assert error.retry_s == pytest.approx(3.375)
        assert error.request_id
        assert not call.wire.events(2), "nor is it rejected as too long yet"


async def test_cancel_ends_well_and_unknown_keys_are_ignored(text: ModelText) -> None:
    async with multiplex_call(text) as call:
        call.wire.send(submit(1), cancel(2), credit(3, 1))
        key = await call.port.next_key()
        call.wire.send(cancel(1))
        await call.settle()
        assert call.port.cancelled == [((key,), FinishReason.CANCELLED)]
        call.port.finish(key, FinishReason.CANCELLED)
        await call.settle()
        end = call.wire.events(1)[-1].response.finished.outputs[0]
        assert end.finish_reason == state_pb2.FINISH_REASON_CANCELLED
        call.wire.send(cancel(1))
        await call.settle()
        assert not call.task.done()


async def test_cancel_sent_together_with_the_submit(text: ModelText) -> None:
    async with multiplex_call(text) as call:
        call.wire.send(submit(1, edit=lambda m: setattr(m.sampling, "num_outputs", 2)), cancel(1))
        await call.settle()
        await call.settle()
        # Whether the engine was reported yet depends on the tokenizer's thread.
        for keys, _ in call.port.cancelled:
            call.port.emit(ends=[finished(key, FinishReason.CANCELLED) for key in keys])
        await call.settle()
        assert call.wire.kinds(1) == ["accepted", "finished"]
        ends = call.wire.events(1)[-1].response.finished.outputs
        assert [end.finish_reason for end in ends] == [state_pb2.FINISH_REASON_CANCELLED] * 2
        assert len(call.front.table) == 0


async def test_a_key_is_free_again_after_its_end(text: ModelText) -> None:
    async with multiplex_call(text) as call:
        for _ in range(3):
            call.wire.send(submit(2**64 - 1))
            call.port.finish(await call.port.next_key())
            await call.settle()
        assert call.wire.kinds(2**64 - 1) == ["accepted", "finished"] * 3


async def test_an_output_that_ends_is_not_held_for_the_others(text: ModelText) -> None:
    async with multiplex_call(text) as call:

        def two_large(message: pb.GenerateRequest) -> None:
            message.sampling.num_outputs = 2
            message.output.min_chunk_tokens = 9
            message.output.max_chunk_delay.FromSeconds(10)

        call.wire.send(submit(1, edit=two_large))
        first, second = (spec.key for spec in await call.port.next_submission())
        call.port.emit(changes=[admitted(first), admitted(second)])
        for letter in "abc":
            call.port.emit(tokens=[(first, call.token(letter))])
            await call.settle()
        assert call.wire.text(1) == "a"
        call.port.finish(first)
        await call.settle()
        assert call.wire.text(1) == "abc"
        assert "finished" not in call.wire.kinds(1)


async def test_chunk_limits_apply_to_multiplex_calls(text: ModelText) -> None:
    async with multiplex_call(text) as call:

        def large(message: pb.GenerateRequest) -> None:
            message.output.min_chunk_tokens = 3
            message.output.max_chunk_delay.FromSeconds(10)

        call.wire.send(submit(1, edit=large), submit(2))
        one, two = await call.port.next_key(), await call.port.next_key()
        for letter in "abcdef":
            call.port.emit(tokens=[(one, call.token(letter)), (two, call.token(letter))])
            await call.settle()
        reported = [e.response.tokens.text for e in call.wire.events(1) if kind(e) == "tokens"]
        assert reported == ["a", "bcd"]
        call.port.finish(one)
        await call.settle()
        assert call.wire.text(1) == call.wire.text(2) == "abcdef"
