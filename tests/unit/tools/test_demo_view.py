"""Which sequences of request states the demo accepts as complete, how it reports failures, and that
it prints a state after the text before it, with what its time means.
"""

import io

import grpc
import pytest

from penstock.client import (
    Accepted,
    Event,
    Finished,
    FinishReason,
    OutputEnd,
    PenstockError,
    Progress,
    RequestState,
    Timings,
    Tokens,
    Usage,
    WaitReason,
)
from penstock.client.errors import Failure, error_of
from penstock.tools.demo.run import DemoRequest, DemoRun
from penstock.tools.demo.view import LineView, pane_lines


def make_run(name: str = "romeo") -> DemoRun:
    return DemoRun(DemoRequest(name=name, prompt="p", options={}))


def accepted() -> Event:
    return Accepted(
        sequence=0,
        request_id="r",
        model="demo",
        num_prompt_tokens=1,
        seed=1,
        estimated_queue_s=None,
    )


def progress(state: RequestState) -> Event:
    return Progress(
        sequence=1,
        state=state,
        queue_position=None,
        wait_reason=WaitReason.UNSPECIFIED,
        num_cached_prompt_tokens=0,
        num_preemptions=0,
        queue_s=0.0,
        estimated_queue_s=None,
    )


def tokens(text: str) -> Event:
    return Tokens(sequence=2, output_index=0, text=text, records=(), num_tokens=1)


def finished() -> Event:
    end = OutputEnd(
        output_index=0,
        finish_reason=FinishReason.LENGTH,
        stop_string=None,
        stop_token_id=None,
        num_completion_tokens=5,
    )
    return Finished(
        sequence=3,
        outputs=(end,),
        usage=Usage(num_prompt_tokens=1, num_completion_tokens=5, num_cached_prompt_tokens=0),
        timings=Timings(queue_s=0.0004, prefill_s=0.01, ttft_s=0.0213, decode_s=0.1, total_s=0.2),
        num_preemptions=0,
    )


def whole_life() -> list[Event]:
    return [
        accepted(),
        progress(RequestState.PENDING),
        progress(RequestState.PROCESSING),
        tokens("What "),
        tokens("light"),
        finished(),
    ]


def play(run: DemoRun, events: list[Event]) -> DemoRun:
    for number, event in enumerate(events):
        run.on_event(event, number / 100)
    return run


def error() -> PenstockError:
    return error_of(Failure(code=grpc.StatusCode.INTERNAL, message="oh", reason="INTERNAL"))


def test_a_complete_sequence_of_states_is_sound() -> None:
    run = play(make_run(), whole_life())

    assert run.states == [("PENDING", 0.0), ("PROCESSING", 0.02), ("COMPLETED", 0.05)]
    assert run.text == "What light"
    assert run.is_sound
    assert run.problem == ""


def test_preemption_is_part_of_the_history() -> None:
    states = (RequestState.PROCESSING, RequestState.PENDING, RequestState.PROCESSING)

    run = play(make_run(), [accepted(), *map(progress, states), finished()])

    names = [name for name, _ in run.states]
    assert names == ["PENDING", "PROCESSING", "PENDING", "PROCESSING", "COMPLETED"]
    assert run.is_sound


@pytest.mark.parametrize("left_out", [0, 2, 5])
def test_an_incomplete_sequence_of_states_is_not_sound(left_out: int) -> None:
    events = whole_life()
    if left_out == 0:
        del events[:2]
    else:
        del events[left_out]

    run = play(make_run(), events)

    assert not run.is_sound
    assert run.problem.startswith("states seen: ")


def test_a_failure_is_reported() -> None:
    run = play(make_run(), whole_life()[:4])

    run.on_error(error(), 0.5)

    assert run.state == "ERROR"
    assert run.problem == "INTERNAL: oh"


def test_a_state_comes_after_the_text_before_it() -> None:
    out = io.StringIO()
    view = LineView(out)
    run = make_run()

    view.on_text(run, "unfinished")
    run.on_event(accepted(), 0.0)
    view.on_state(run)

    assert out.getvalue() == "romeo    | unfinished\nromeo    | * PENDING since 0 ms\n"


def test_a_pane_gives_the_time_since_which_a_request_runs_and_after_which_it_ended() -> None:
    def heading(run: DemoRun) -> str:
        lines = pane_lines([run], columns=80, rows=10)
        return lines[0].removeprefix("\x1b[1m").removesuffix("\x1b[0m")

    assert heading(make_run()) == "romeo: SUBMITTED, 0 tokens"
    assert heading(play(make_run(), whole_life()[:4])) == "romeo: PROCESSING since 20 ms, 1 token"
    assert heading(play(make_run(), whole_life())) == "romeo: COMPLETED after 50 ms, 2 tokens"
