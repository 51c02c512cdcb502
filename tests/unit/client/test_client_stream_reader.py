"""The stream reader checks that events come in the order of the contract, with unbroken sequence
numbers and exactly one end.
"""

from typing import Any

import pytest

import penstock.v1 as pb
from penstock.client import Accepted, Event, Finished, Progress, StreamBroken, Tokens
from penstock.client.stream_reader import StreamReader
from support.scripted_server import finished_message

ACCEPTED: dict[str, Any] = {"accepted": pb.RequestAccepted(request_id="r-1")}
PROGRESS: dict[str, Any] = {
    "progress": pb.RequestProgress(state=pb.RequestState.REQUEST_STATE_PENDING)
}
TOKENS: dict[str, Any] = {"tokens": pb.TokenDelta(text="a", num_tokens=1)}
PROMPT: dict[str, Any] = {"prompt": pb.PromptEcho(text="p")}
FINISHED: dict[str, Any] = {"finished": finished_message(1)}
UNKNOWN: dict[str, Any] = {}


def feed(reader: StreamReader, *events: dict[str, Any]) -> list[Event | None]:
    return [
        reader.receive(pb.GenerateResponse(sequence=number, **event))
        for number, event in enumerate(events)
    ]


def test_events_come_in_order_and_the_end_comes_last() -> None:
    reader = StreamReader()

    events = feed(reader, ACCEPTED, PROGRESS, TOKENS, FINISHED)
    end = reader.end()

    assert [type(event) for event in events] == [Accepted, Progress, Tokens, type(None)]
    assert isinstance(end, Finished)
    assert [event.sequence for event in [*events, end] if event] == [0, 1, 2, 3]


def test_an_event_of_unknown_type_is_skipped_but_counted() -> None:
    reader = StreamReader()

    events = feed(reader, ACCEPTED, UNKNOWN, TOKENS, FINISHED)

    assert events[1] is None
    assert reader.end().sequence == 3


@pytest.mark.parametrize(("event", "counts"), [(TOKENS, True), (PROMPT, True), (PROGRESS, False)])
def test_events_that_count_as_output(event: dict[str, Any], counts: bool) -> None:
    reader = StreamReader()

    feed(reader, ACCEPTED, event)

    assert reader.has_output is counts


@pytest.mark.parametrize("sequence", [0, 2, 7])
def test_a_sequence_number_out_of_turn_breaks_the_stream(sequence: int) -> None:
    reader = StreamReader()
    feed(reader, ACCEPTED)

    with pytest.raises(StreamBroken, match=f"expected message 1, got {sequence}") as caught:
        reader.receive(pb.GenerateResponse(sequence=sequence, **TOKENS))

    assert caught.value.request_id == "r-1"
    assert caught.value.reason == "STREAM_BROKEN"


@pytest.mark.parametrize(
    "events",
    [(TOKENS,), (FINISHED,), (UNKNOWN,), (ACCEPTED, ACCEPTED), (ACCEPTED, FINISHED, TOKENS)],
)
def test_wrong_order_breaks_the_stream(events: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(StreamBroken):
        feed(StreamReader(), *events)


def test_an_end_without_finished_breaks_the_stream() -> None:
    reader = StreamReader()
    feed(reader, ACCEPTED, TOKENS)

    with pytest.raises(StreamBroken, match="without `finished`"):
        reader.end()
