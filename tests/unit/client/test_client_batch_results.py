"""How a client combines events into whole generations, and how many requests of a batch run at
once.
"""

import grpc
import pytest

from penstock.client import (
    Accepted,
    BatchItem,
    EchoedPrompt,
    Event,
    Finished,
    FinishReason,
    GenerationBuilder,
    OutputEnd,
    PromptEcho,
    StreamBroken,
    Timings,
    Tokens,
    Unavailable,
    Usage,
)
from penstock.client.batch import BatchResults, batch_width
from penstock.client.errors import Failure
from penstock.client.local_errors import client_closed


def accepted(request_id: str = "r") -> Accepted:
    return Accepted(
        sequence=0,
        request_id=request_id,
        model="demo",
        num_prompt_tokens=1,
        seed=1,
        estimated_queue_s=None,
    )


def tokens(text: str, output_index: int = 0) -> Tokens:
    return Tokens(sequence=1, output_index=output_index, text=text, records=(), num_tokens=1)


def finished(num_outputs: int = 1) -> Finished:
    ends = tuple(
        OutputEnd(
            output_index=index,
            finish_reason=FinishReason.STOP,
            stop_string=None,
            stop_token_id=None,
            num_completion_tokens=1,
        )
        for index in range(num_outputs)
    )
    return Finished(
        sequence=2,
        outputs=ends,
        usage=Usage(num_prompt_tokens=1, num_completion_tokens=1, num_cached_prompt_tokens=0),
        timings=Timings(queue_s=0.0, prefill_s=0.0, ttft_s=None, decode_s=0.0, total_s=0.0),
        num_preemptions=0,
    )


def built(*events: Event) -> GenerationBuilder:
    builder = GenerationBuilder()
    for event in events:
        builder.add(event)
    return builder


def test_deltas_are_put_together_by_output() -> None:
    builder = built(accepted(), tokens("a"), tokens("x", 1), tokens("b"), finished(2))

    assert [output.text for output in builder.result().outputs] == ["ab", "x"]
    assert builder.result().prompt is None


def test_an_echo_in_pieces_is_one_prompt() -> None:
    pieces = [PromptEcho(sequence=1, text=text, records=()) for text in ("To ", "be")]

    prompt = built(accepted(), *pieces, finished()).result().prompt

    assert prompt == EchoedPrompt(text="To be", records=())


def test_a_second_accepted_begins_again() -> None:
    builder = built(accepted("first"), tokens("lost"), accepted("second"), tokens("b"), finished())

    assert builder.result().text == "b"
    assert builder.result().accepted.request_id == "second"


@pytest.mark.parametrize("events", [(), (accepted(),), (accepted(), tokens("a"))])
def test_no_result_before_the_end(events: tuple[Event, ...]) -> None:
    with pytest.raises(StreamBroken):
        built(*events).result()


def test_results_are_in_order_whatever_ends_first() -> None:
    reported: list[int] = []
    results = BatchResults(lambda index, event: reported.append(index))
    error = client_closed()

    items: list[BatchItem] = [
        (1, accepted()),
        (0, accepted()),
        (1, tokens("b")),
        (1, finished()),
        (0, error),
    ]
    for item in items:
        results.add(item)

    first, second = results.in_order()
    assert first is error
    assert not isinstance(second, Exception)
    assert second.text == "b"
    assert reported == [1, 0, 1, 1]


@pytest.mark.parametrize(
    ("wanted", "bound", "width"), [(8, None, 8), (8, 3, 3), (2, 3, 2), (1, 1, 1)]
)
def test_the_pool_narrows_a_batch(wanted: int, bound: int | None, width: int) -> None:
    assert batch_width(wanted, bound) == width


def test_a_failure_of_many_names_each_request() -> None:
    error = Unavailable(Failure(code=grpc.StatusCode.UNAVAILABLE, message="gone", reason="X"))

    other = error.of_request("r-1")

    assert type(other) is Unavailable
    assert (other.request_id, other.message, other.reason) == ("r-1", "gone", "X")
    assert error.request_id == ""
