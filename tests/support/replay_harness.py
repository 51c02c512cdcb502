"""A front whose engines the test controls, kills and replaces, on a clock that the test
advances.
"""

import asyncio

import pytest
from msgspec import structs

from penstock.scheduler.request import (
    Constraint,
    ConstraintKind,
    RequestSpec,
)
from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import RequestError
from penstock.server.front.events import (
    StreamEvent,
    TokensPiece,
)
from penstock.server.front.front import Front
from penstock.server.front.generation import (
    GenerationSpec,
    Sampling,
    Stopping,
    TokenInput,
)
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.submission import CallTimes
from penstock.server.text.model_text import ModelText
from support.fronts import ScriptedPort, admitted
from support.timeout import TEST_TIMEOUT_S

PROMPT = tuple(range(60, 60 + 40))
A, B, C, D = 67, 68, 69, 70


def generation(num_outputs: int = 1, **options: object) -> GenerationSpec:
    made = GenerationSpec(
        prompt=TokenInput(ids=PROMPT),
        prompt_path="token_ids",
        request_id="r",
        sampling=Sampling(num_outputs=num_outputs, seed=7),
        stopping=Stopping(max_tokens=20, ignore_eos=True),
    )
    return structs.replace(made, **options)


class ReplayHarness:
    """A front, its successive engines, and a clock that the test advances."""

    def __init__(self, text: ModelText, **settings: object) -> None:
        self.now_s = 1000.0
        self.port = ScriptedPort()
        self.front = Front(
            text,
            FrontConfig(**{"acceptance_delay_s": 60.0, **settings}),  # type: ignore[arg-type]
            port=self.port,
            clock=lambda: self.now_s,
        )
        self.port.listener = self.front
        self.epoch = 0
        self.come_up()

    def come_up(self) -> None:
        self.epoch += 1
        self.port.come_up(self.epoch)

    async def open(self, made: GenerationSpec) -> tuple[LiveRequest, tuple[RequestSpec, ...]]:
        request = await self.front.open(made, CallTimes(arrival_s=self.now_s))
        return request, await self.port.next_submission()

    async def replace_engine(self) -> tuple[RequestSpec, ...]:
        """Report the engine as lost and connect the next one; return the specs that it receives."""
        self.port.go_down()
        self.come_up()
        return await self.port.next_submission()

    def run(self, *keys: int) -> None:
        self.port.emit(changes=[admitted(key) for key in keys])

    def tokens(self, *pairs: tuple[int, int]) -> None:
        self.port.emit(tokens=pairs, at_s=self.now_s)


async def end_of(request: LiveRequest) -> list[StreamEvent]:
    events: list[StreamEvent] = []
    async with asyncio.timeout(TEST_TIMEOUT_S):
        while batch := await request.stream.take():
            events += batch
    return events


async def rejection_of(request: LiveRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await end_of(request)
    return caught.value


def text_in(events: list[StreamEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TokensPiece))


CHOICE = Constraint(kind=ConstraintKind.CHOICE, texts=("ab", "cd"))


async def constrained(site: ReplayHarness) -> tuple[LiveRequest, RequestSpec]:
    """Generate two tokens of a constrained request and replace the engine; return the request and
    the spec that the next engine receives.
    """
    request, [first] = await site.open(generation(constraint=CHOICE))
    site.run(first.key)
    site.tokens((first.key, A))
    site.tokens((first.key, B))
    [again] = await site.replace_engine()
    assert again.prompt_ids.tolist() == list(PROMPT), "from the beginning"
    assert (again.num_replayed, again.num_replays) == (0, 1)
    site.run(again.key)
    return request, again
