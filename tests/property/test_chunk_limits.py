"""Any split of a stream into messages has the same content, and messages reach the minimum size
unless the maximum delay has passed.
"""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.request import FinishReason
from penstock.server.front import events
from penstock.server.front.config import FrontConfig
from penstock.server.front.events import StreamEvent, TokenRecord, TokensPiece, TopToken
from penstock.server.front.generation import ChunkLimits
from penstock.server.front.stream import TokenStream
from penstock.server.rpc.mapping_out import encoder_for
from penstock.v1.generation_service_pb2 import GenerateResponse
from support.timers import FakeTimers

MIN_TOKENS = 4
MAX_DELAY_S = 1.0
FINISHED = events.Finished(
    outputs=(events.OutputEnd(output_index=0, reason=FinishReason.STOP, num_completion_tokens=1),),
    usage=events.Usage(num_prompt_tokens=1, num_completion_tokens=1, num_cached_prompt_tokens=0),
    timings=events.Timings(queue_s=0.0, prefill_s=0.0, decode_s=0.0, total_s=0.0, ttft_s=None),
    num_preemptions=0,
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
records = st.builds(
    TokenRecord,
    st.integers(0, 10**6),
    st.floats(-50, 0, width=32),
    st.integers(1, 100),
    st.lists(st.builds(TopToken, st.integers(0, 99), st.floats(-9, 0, width=32)), max_size=3),
)
pieces = st.builds(
    lambda index, text, record: TokensPiece(index, text, 1, (record,)),
    st.integers(0, 1),
    texts,
    records,
)
WRITE = "write"
steps = st.lists(
    st.one_of(pieces, pieces, st.just(WRITE), st.floats(0.01, 2.0)), min_size=1, max_size=60
)


def run(
    script: Iterable[object], limits: ChunkLimits, timers: FakeTimers
) -> list[GenerateResponse]:
    """Return the messages of a stream. `script`: pieces to send, times to wait in seconds, and any
    other value to write the messages that are due.
    """
    stream = TokenStream(limits, timers)
    encoder = encoder_for(limits, FrontConfig())
    messages: list[GenerateResponse] = []

    def write(batch: list[StreamEvent]) -> None:
        messages.extend(map(GenerateResponse.FromString, encoder.encode(batch)))

    for step in script:
        if isinstance(step, TokensPiece):
            stream.push(step)
            stream.wake()
        elif isinstance(step, float):
            timers.advance(step)
        else:
            write(stream.take_due())
    stream.push(FINISHED)
    stream.close()
    stream.wake()
    write(stream.take_due())
    assert stream.is_drained
    assert timers.pending == []
    return messages


@given(steps)
def test_any_split_gives_the_same(script: list[object]) -> None:
    limits = ChunkLimits(min_tokens=MIN_TOKENS, max_delay_s=MAX_DELAY_S)
    messages = run(script, limits, FakeTimers())
    assert [message.sequence for message in messages] == list(range(len(messages)))
    assert messages[-1].WhichOneof("event") == "finished"
    for index in (0, 1):
        sent = [s for s in script if isinstance(s, TokensPiece) and s.output_index == index]
        reported = [m.tokens for m in messages[:-1] if m.tokens.output_index == index]
        assert "".join(tokens.text for tokens in reported) == "".join(s.text for s in sent)
        assert sum(tokens.num_tokens for tokens in reported) == len(sent)
        assert [
            (r.id, r.logprob, r.rank, [(top.id, top.logprob) for top in r.top_logprobs])
            for tokens in reported
            for r in tokens.records
        ] == [
            (r.token_id, r.logprob, r.rank, [(top.token_id, top.logprob) for top in r.top])
            for s in sent
            for r in s.records
        ]


@given(steps)
def test_no_message_is_smaller_than_asked_while_there_is_time(script: list[object]) -> None:
    in_time = [step for step in script if not isinstance(step, float)]
    limits = ChunkLimits(min_tokens=MIN_TOKENS, max_delay_s=MAX_DELAY_S)
    messages = run(in_time, limits, FakeTimers())
    for index in (0, 1):
        sizes = [m.tokens.num_tokens for m in messages[:-1] if m.tokens.output_index == index]
        # Three messages may be smaller: the first one, which is not delayed; one that is sent
        # with another output's first; and the last one, which has the rest.
        assert sum(size < MIN_TOKENS for size in sizes) <= 3
        assert all(size >= MIN_TOKENS for size in sizes[2:-1])


@given(steps)
def test_no_token_waits_longer_than_allowed(script: list[object]) -> None:
    timers = FakeTimers()
    stream = TokenStream(ChunkLimits(min_tokens=MIN_TOKENS, max_delay_s=MAX_DELAY_S), timers)
    born_s: list[float] = []

    def write() -> None:
        for event in stream.take_due():
            assert isinstance(event, TokensPiece)
            assert timers.now_s - born_s[int(event.text)] <= MAX_DELAY_S + 1e-9
        # A timer is set for the tokens that are left.
        assert not stream.num_backlog_tokens or timers.pending

    stream.attach(write)
    for step in script:
        if isinstance(step, TokensPiece):
            stream.push(step._replace(text=str(len(born_s))))
            born_s.append(timers.now_s)
            stream.wake()
        elif isinstance(step, float):
            timers.advance(step)
