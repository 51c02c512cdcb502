"""The live requests of the engine and of the fronts are merged into one list."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.scheduler.events import WaitReason
from penstock.scheduler.output_view import OutputView
from penstock.scheduler.state import RequestState
from penstock.server.observe.frames import FrontRequestView
from penstock.server.observe.operations.snapshot import PhaseChange, RequestView, merge
from penstock.server.tenants import engine_request_id
from support.reports import front_request_view, output_view

PENDING = RequestState.PENDING


def merged(
    engine: Iterable[OutputView] = (), fronts: Iterable[FrontRequestView] = ()
) -> tuple[RequestView, ...]:
    return merge(engine, fronts, model="tiny", now_s=60.0, to_unix_s=lambda at_s: at_s + 1e9)


def test_views_of_engine_and_front_are_merged() -> None:
    (view,) = merged([output_view(1, deadline_s=65.0)], [front_request_view([1])])

    assert (view.request_id, view.model, view.state, view.phase) == (
        "mine",
        "tiny",
        "PROCESSING",
        "decode",
    )
    assert (view.arrival_s, view.age_s, view.time_to_deadline_s) == (1e9 + 50, 10.0, 5.0)
    assert (view.num_prompt_tokens, view.num_cached_tokens) == (10, 4)
    assert (view.num_output_tokens, view.num_backlog_tokens) == (3, 1)
    assert (view.num_blocks, view.num_computed_tokens) == (2, 12)
    assert view.trace_id == "ab" * 16
    assert view.history[0] == PhaseChange(phase="prepare", since_s=1e9 + 50.0)
    assert (view.waits_for, view.queue_position) == ("", None)


def test_outputs_of_one_request_are_one_request() -> None:
    outputs = [
        output_view(1, num_output_tokens=5, num_preemptions=1),
        output_view(2, state=PENDING, slot=-1, num_blocks=0, waits_for=WaitReason.SLOTS),
    ]
    (view,) = merged(outputs, [front_request_view([1, 2])])

    assert view.state == "PROCESSING"
    assert (view.num_output_tokens, view.num_blocks, view.num_preemptions) == (8, 2, 1)
    assert view.waits_for == ""


def test_a_waiting_request_reports_its_reason_and_its_process() -> None:
    outputs = [
        output_view(1, state=PENDING, waits_for=WaitReason.BLOCKS, queue_position=7),
        output_view(2, state=PENDING, waits_for=WaitReason.SLOTS, queue_position=3),
        output_view(3, state=PENDING, waits_for=None, queue_position=None),
    ]
    (view,) = merged(outputs, [front_request_view([1, 2, 3], phase="queue")])

    assert (view.state, view.waits_for, view.queue_position) == ("PENDING", "SLOTS", 3)
    assert view.time_to_deadline_s is None


def test_a_request_that_only_its_front_knows() -> None:
    fronts = [
        front_request_view([], "a", phase="prepare", history=(("prepare", 50.0),)),
        front_request_view([4], "b", phase="deliver"),
    ]
    prepared, delivered = merged([], fronts)

    assert (prepared.state, prepared.phase) == ("PENDING", "prepare")
    assert (delivered.state, delivered.phase, delivered.num_blocks) == ("PROCESSING", "deliver", 0)
    assert delivered.num_output_tokens == 2


def test_a_request_that_only_the_engine_knows() -> None:
    engine_id = engine_request_id("acme", "lost")
    outputs = [
        output_view(1, engine_id, tenant="acme", trace_id=bytes(range(16))),
        output_view(2, engine_id, tenant="acme", output_index=1),
        output_view(3, "new", state=PENDING, num_output_tokens=0),
        output_view(4, "prompt", num_output_tokens=0),
    ]
    by_id = {view.request_id: view for view in merged(outputs)}

    assert set(by_id) == {"lost", "new", "prompt"}
    lost = by_id["lost"]
    assert (lost.tenant, lost.num_output_tokens, lost.phase) == ("acme", 6, "decode")
    assert lost.trace_id == bytes(range(16)).hex()
    assert lost.history == ()
    assert (by_id["new"].phase, by_id["new"].state) == ("queue", "PENDING")
    assert by_id["prompt"].phase == "prefill"


def test_the_list_is_by_arrival() -> None:
    fronts = [front_request_view([], f"r{at}", arrival_s=at) for at in (55.0, 51.0, 53.0)]

    assert [view.request_id for view in merged([], fronts)] == ["r51.0", "r53.0", "r55.0"]


def test_tenants_with_one_id_are_two_requests() -> None:
    outputs = [
        output_view(1, engine_request_id("a", "same"), tenant="a"),
        output_view(2, engine_request_id("b", "same"), tenant="b"),
    ]
    views = merged(outputs)

    assert [(view.tenant, view.request_id) for view in views] == [("a", "same"), ("b", "same")]
