"""The Python scenario about many requests on one Multiplex stream.

Texts and errors are tested through the client. Keys and credit, which the client does not expose,
are tested with the generated stub.
"""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

import penstock.v1 as pb
from conformance.python_scenario import (
    CALL_S,
    LONG_TOKENS,
    PROMPT,
    CheckedStream,
    ExpectationFailed,
    ScenarioInput,
    greedy,
    require,
)
from penstock.client import Client, InvalidArgument
from penstock.v1 import state_pb2

NUM_TEXTS = 6
_NUM_AT_ONCE = 3
_MAX_RESPONSES = 4000
_CANCELLED, _CREDITED, _CLOCK = 8, 9, 10
"""Keys of requests; the end of the last one shows that the one without credit could have run."""


async def multiplex(scenario: ScenarioInput) -> None:
    await _texts_and_an_error(scenario)
    async with grpc.aio.insecure_channel(scenario.address) as channel:
        await _Keys(channel).run()


async def _texts_and_an_error(scenario: ScenarioInput) -> None:
    prompts = [f"{PROMPT}, number {number}" for number in range(NUM_TEXTS)]
    async with Client(scenario.address, multiplex=True) as client, scenario.client() as plain:
        streams = [
            CheckedStream(client.generate(prompt, deadline_s=CALL_S, **greedy(40)))
            for prompt in prompts
        ]
        for checked in streams:
            await checked.until_accepted()
        try:
            await client.generate_once(PROMPT, deadline_s=CALL_S, temperature=-1.0)
        except InvalidArgument:
            pass
        else:
            raise ExpectationFailed("temperature -1 was answered")
        for checked in streams:
            await checked.until_end()
        # The queue has four places, and is emptied at most once per step.
        for first in range(0, NUM_TEXTS, _NUM_AT_ONCE):
            some = slice(first, first + _NUM_AT_ONCE)
            all_once = await asyncio.gather(
                *(
                    plain.generate_once(prompt, deadline_s=CALL_S, **greedy(40))
                    for prompt in prompts[some]
                )
            )
            for checked, once in zip(streams[some], all_once, strict=True):
                require(checked.text == once.text, f"{checked.text!r} is not {once.text!r}")


class _Keys:
    """One Multiplex call, and its requests by key."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = pb.GenerationServiceStub(channel).Multiplex(timeout=CALL_S)
        self._num_tokens = dict.fromkeys((_CANCELLED, _CREDITED, _CLOCK), 0)
        self._reasons: dict[int, state_pb2.FinishReason.ValueType] = {}

    async def run(self) -> None:
        """Cancel one request by its key, and check that another waits for credit."""
        await self._submit(_CANCELLED, LONG_TOKENS)
        await self._submit(_CREDITED, 20, num_credit_tokens=5)
        await self._until_tokens(_CANCELLED)
        await self._call.write(pb.MultiplexRequest(cancel=pb.MultiplexCancel(key=_CANCELLED)))
        await self._until_end(_CANCELLED)
        reason = self._reasons[_CANCELLED]
        require(reason == state_pb2.FINISH_REASON_CANCELLED, f"the cancelled one ended by {reason}")
        await self._submit(_CLOCK, 60)
        await self._until_end(_CLOCK)
        num_before = self._num_tokens[_CREDITED]
        require(num_before == 5, f"{num_before} tokens came for a credit of 5")
        await self._call.write(
            pb.MultiplexRequest(credit=pb.MultiplexCredit(key=_CREDITED, num_credit_tokens=100))
        )
        await self._until_end(_CREDITED)
        num_after = self._num_tokens[_CREDITED]
        require(num_after == 20, f"{num_after} tokens with credit, not 20")
        await self._call.done_writing()
        require(await self._call.read() is grpc.aio.EOF, "a message after the last end")

    async def _submit(
        self, key: int, num_tokens: int, num_credit_tokens: int | None = None
    ) -> None:
        generation = pb.GenerateRequest(
            text_prompt=pb.TextPrompt(text=PROMPT),
            sampling=pb.SamplingOptions(temperature=0.0),
            stopping=pb.StoppingOptions(max_tokens=num_tokens, ignore_eos=True),
        )
        submit = pb.MultiplexSubmit(
            key=key, generation=generation, num_credit_tokens=num_credit_tokens
        )
        await self._call.write(pb.MultiplexRequest(submit=submit))

    async def _until_tokens(self, key: int) -> None:
        for _ in range(_MAX_RESPONSES):
            if self._num_tokens[key]:
                return
            await self._read()
        raise ExpectationFailed(f"no token for key {key}")

    async def _until_end(self, key: int) -> None:
        for _ in range(_MAX_RESPONSES):
            if key in self._reasons:
                return
            await self._read()
        raise ExpectationFailed(f"no end of key {key}")

    async def _read(self) -> None:
        response = await self._call.read()
        require(isinstance(response, pb.MultiplexResponse), "the stream ended")
        assert isinstance(response, pb.MultiplexResponse)
        for event in response.events:
            require(not event.HasField("error"), f"key {event.key}: {event.error.message}")
            self._num_tokens[event.key] += event.response.tokens.num_tokens
            if event.response.HasField("finished"):
                ends = event.response.finished.outputs
                self._reasons[event.key] = ends[0].finish_reason
