"""Each turn of a conversation with a real service reuses the cached prefix of the turn before."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest

from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from penstock.v1.prompt_pb2 import ContentPart
from support.fronts import rich_error
from support.service import simulated, started
from support.timeout import TEST_TIMEOUT_S

BLOCK = 16
Message = tuple[str, str]
SYSTEM: Message = ("system", "You are a narrator who knows the plays of the bard by heart.")
KEY = "x-tenant"


@dataclass
class Turn:
    """The result of a turn of a conversation. `num_cached`: number of cached prompt tokens;
    `num_dropped`: number of messages dropped from the prompt so that it fits into `window_tokens`.
    """

    text: str
    prompt_ids: list[int]
    output_ids: list[int]
    num_cached: int
    num_dropped: int


async def take_turn(
    channel: grpc.aio.Channel,
    messages: Sequence[Message],
    *,
    session_id: str | None = None,
    window_tokens: int | None = None,
    max_tokens: int = 40,
    tenant: str = "",
) -> Turn:
    request = pb.GenerateRequest()
    for role, content in messages:
        request.chat_prompt.messages.add(role=role, parts=[ContentPart(text=content)])
    if window_tokens is not None:
        request.chat_prompt.window_tokens = window_tokens
    if session_id is not None:
        request.cache.session_id = session_id
    request.sampling.temperature = 0.0
    request.stopping.max_tokens = max_tokens
    request.stopping.ignore_eos = True
    request.output.echo = True
    request.output.return_token_ids = True
    turn = Turn("", [], [], 0, 0)
    metadata = ((KEY, tenant),) if tenant else ()
    stub = pb_grpc.GenerationServiceStub(channel)
    async for response in stub.Generate(request, timeout=TEST_TIMEOUT_S, metadata=metadata):
        turn.prompt_ids += [record.id for record in response.prompt.records]
        turn.output_ids += [record.id for record in response.tokens.records]
        turn.text += response.tokens.text
        turn.num_dropped += response.accepted.num_dropped_messages
        turn.num_cached += response.finished.usage.num_cached_prompt_tokens
    return turn


def num_reusable(before: Turn, after: Turn) -> int:
    """Return how many prompt tokens of `after` the cache can supply: the tokens of the full blocks
    at its start that `before` computed. At least one token is left to compute.

    The last token of an output is sampled but not computed.
    """
    known = [*before.prompt_ids, *before.output_ids[:-1]]
    num_equal = 0
    for old, new in zip(known, after.prompt_ids[:-1], strict=False):
        if old != new:
            break
        num_equal += 1
    return num_equal // BLOCK * BLOCK


async def test_every_turn_reuses_the_blocks_of_the_previous_turn_and_its_output() -> None:
    async with (
        started("--block-size", str(BLOCK), "--fronts", "1") as served,
        served.channel() as c,
    ):
        conversation = [SYSTEM, ("user", "Who is it that speaks there in the dark of the night?")]
        turns: list[Turn] = []
        for _ in range(3):
            turns.append(await take_turn(c, conversation, session_id="night", max_tokens=64))
            conversation += [("assistant", turns[-1].text), ("user", "And what did they say then?")]
        assert turns[0].num_cached == 0
        for before, after in itertools.pairwise(turns):
            assert after.num_cached == num_reusable(before, after)
        # Blocks of an answer are reused if its text is encoded to the same tokens.
        assert any(
            after.num_cached > len(before.prompt_ids) for before, after in itertools.pairwise(turns)
        )


async def test_a_window_limits_a_conversation_and_keeps_its_prefix_between_truncations() -> None:
    arguments = ("--block-size", str(BLOCK), "--fronts", "1")
    async with started(*simulated(), *arguments) as served, served.channel() as channel:
        conversation = [SYSTEM]
        turns: list[Turn] = []
        for index in range(14):
            conversation.append(
                ("user", f"{index}: tell me more of what you know about it, please.")
            )
            turns.append(
                await take_turn(
                    channel, conversation, session_id="w", window_tokens=400, max_tokens=4
                )
            )
            # The text of a simulated model need not encode to the same tokens.
            conversation.append(
                ("assistant", "The rain it raineth every day, said the fool to all.")
            )
        assert max(len(turn.prompt_ids) for turn in turns) <= 400
        cuts = [turn.num_dropped for turn in turns]
        assert cuts == sorted(cuts)
        assert cuts[0] == 0
        assert len(set(cuts)) < len(cuts) / 2
        assert cuts[-1] > 0
        assert cuts[-1] % 2 == 0
        for before, after in itertools.pairwise(turns):
            assert after.num_cached >= num_reusable(before, after) >= BLOCK
            if before.num_dropped == after.num_dropped:
                assert after.num_cached >= len(before.prompt_ids) - 3 * BLOCK

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await take_turn(channel, conversation, window_tokens=20)
        error = rich_error(caught.value)
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "chat_prompt.window_tokens" in str(error)
