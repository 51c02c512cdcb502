"""Builders of resumable requests, and readers of their streams while a stepped engine runs."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.server.rpc.mapping_out import duration_of
from penstock.v1 import generation_service_pb2 as pb
from support.fronts import text_of
from support.stepped_service import SteppedService, ids_of, request
from support.timeout import TEST_TIMEOUT_S


def resumable(
    num_tokens: int = 8,
    *,
    request_id: str = "r",
    resume_timeout_s: float = 60.0,
    prompt: Iterable[int] = (5, 6, 7, 8),
) -> pb.GenerateRequest:
    """Return a greedy request that can be resumed for `resume_timeout_s` seconds.

    Its output has exactly `num_tokens` tokens, and its stream contains their ids.
    """
    timeout = duration_of(resume_timeout_s)
    return request(num_tokens, prompt, request_id=request_id, resume_timeout=timeout)


def resumed(
    request_id: str, *, next_sequence: int = 0, num_received: Sequence[int] = ()
) -> pb.ResumeRequest:
    """Return a request to resume from the message `next_sequence`. `num_received`: number of tokens
    received of each output.
    """
    return pb.ResumeRequest(
        request_id=request_id, next_sequence=next_sequence, received_token_counts=num_received
    )


def resume_after(
    responses: Iterable[pb.GenerateResponse], num_outputs: int = 1, *, request_id: str = "r"
) -> pb.ResumeRequest:
    responses = list(responses)
    return resumed(
        request_id,
        next_sequence=len(responses),
        num_received=num_tokens_of(responses, num_outputs),
    )


async def read_some(service: SteppedService, call: Any, num_messages: int) -> list[Any]:
    """Read `num_messages` messages of a call. The engine is stepped only while a read waits;
    otherwise several tokens would share a message.
    """
    messages = aiter(call)
    read: list[Any] = []
    async with asyncio.timeout(TEST_TIMEOUT_S):
        while len(read) < num_messages:
            reading = asyncio.ensure_future(anext(messages))
            while not reading.done():
                service.step()
                # Not every step sends a message.
                await asyncio.wait({reading}, timeout=0.05)
            read.append(await reading)
    return read


async def read_and_cancel(service: SteppedService, call: Any, num_messages: int) -> list[Any]:
    """Read `num_messages` messages of a call and cancel it; return them once the front has detected
    the cancel.
    """
    messages = await read_some(service, call, num_messages)
    call.cancel()
    await service.until(lambda: not service.server.num_active_calls)
    return messages


def num_tokens_of(responses: Iterable[pb.GenerateResponse], num_outputs: int = 1) -> list[int]:
    """Return the number of tokens of each output, as a client counts them."""
    counts = [0] * num_outputs
    for response in responses:
        counts[response.tokens.output_index] += response.tokens.num_tokens
    return counts


def outputs_of(responses: Sequence[pb.GenerateResponse]) -> list[tuple[str, list[int], bytes]]:
    """Return the text, the token ids and the encoded OutputEnd of every output of a complete
    stream.
    """
    outputs: list[tuple[str, list[int], bytes]] = []
    for end in responses[-1].finished.outputs:
        own = [one for one in responses if one.tokens.output_index == end.output_index]
        outputs.append((text_of(own, end.output_index), ids_of(own), end.SerializeToString()))
    return outputs


def unbroken(responses: Sequence[pb.GenerateResponse]) -> bool:
    """Return whether the sequence numbers have no gap, and the events begin with the only accepted
    one and end with the finished one.
    """
    numbers = [response.sequence for response in responses]
    events = [response.WhichOneof("event") for response in responses]
    return (
        numbers == list(range(len(numbers)))
        and events[0] == "accepted"
        and events.count("accepted") == 1
        and events[-1] == "finished"
    )
