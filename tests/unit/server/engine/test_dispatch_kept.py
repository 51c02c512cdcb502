"""Requests of a front that disconnects or reconnects. None runs twice, and requests that no client
reads stay within limits.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.scheduler.request import RequestSpec
from penstock.server.engine.dispatch import Dispatcher
from penstock.server.engine.kept_streams import KeptLimits
from penstock.server.ipc.frames import Detach, KeptRequest, ResumeSpec, Submit, decode
from penstock.server.ipc.wire import FrameBuffer
from support.link import KEPT_LIMITS, hello, spec
from support.self_paced import make_self_paced


def kept_of(spec: RequestSpec, *, is_read: bool = True) -> KeptRequest:
    resume_spec = ResumeSpec(
        request_id="r", seed=1, arrival_s=0, deadline_s=9, resume_timeout_s=9, message=b"m"
    )
    return KeptRequest(
        name=spec.request_id, resume_spec=resume_spec, keys=(spec.key,), is_read=is_read
    )


def again(before: RequestSpec, counter: int) -> RequestSpec:
    key = spec(1, counter).key
    return replace(before, key=key, leader_key=0, num_replays=1)


def test_a_stream_that_returns_to_its_engine_replaces_what_was_kept() -> None:
    engine, executor = make_self_paced(max_num_seqs=1)
    dispatcher = Dispatcher(engine, hello(), kept_limits=KEPT_LIMITS)
    dispatcher.front_connected(1)
    first = spec(1, 1)
    dispatcher.handle_frame(1, Submit(specs=(first,), kept=kept_of(first)))
    dispatcher.step()
    dispatcher.front_disconnected(1)
    dispatcher.front_connected(1)
    second = again(first, 2)
    dispatcher.handle_frame(1, Submit(specs=(second,)))
    dispatcher.step()
    assert [view.key for view in engine.output_views()] == [second.key]
    assert len(dispatcher.kept) == 0
    executor.close()


def test_a_request_whose_stream_another_front_reads_is_not_submitted_again() -> None:
    engine, executor = make_self_paced(max_num_seqs=1)
    dispatcher = Dispatcher(engine, hello(), kept_limits=KEPT_LIMITS)
    dispatcher.front_connected(1)
    first = spec(1, 1)
    dispatcher.handle_frame(1, Submit(specs=(first,), kept=kept_of(first)))
    dispatcher.front_disconnected(1)
    dispatcher.front_connected(1)
    dispatcher.front_connected(2)
    stream = dispatcher.kept.find(first.request_id)
    assert stream is not None
    dispatcher.kept.move(stream, 2)
    second = again(first, 2)
    dispatcher.handle_frame(1, Submit(specs=(second,)))
    assert detached(dispatcher, 1) == [(second.key,)]
    assert [view.key for view in engine.output_views()] == [first.key]
    executor.close()


def test_an_unread_request_beyond_the_limit_does_not_run() -> None:
    engine, executor = make_self_paced(max_num_seqs=1)
    dispatcher = Dispatcher(engine, hello(), kept_limits=KeptLimits(max_bytes=100, max_unread=8))
    dispatcher.front_connected(1)
    parked = again(spec(1, 1), 1)
    dispatcher.handle_frame(1, Submit(specs=(parked,), kept=kept_of(parked, is_read=False)))
    assert detached(dispatcher, 1) == [(parked.key,)]
    assert engine.output_views() == ()
    assert dispatcher.num_live == 0
    executor.close()


def test_a_lost_front_leaves_only_the_streams_within_the_limit() -> None:
    engine, executor = make_self_paced(max_num_seqs=4)
    dispatcher = Dispatcher(
        engine, hello(), kept_limits=KeptLimits(max_bytes=1 << 20, max_unread=1)
    )
    dispatcher.front_connected(1)
    specs = [spec(1, counter) for counter in (1, 2, 3)]
    for one in specs:
        dispatcher.handle_frame(1, Submit(specs=(one,), kept=kept_of(one)))
    dispatcher.step()
    dispatcher.front_disconnected(1)
    dispatcher.step()
    assert [view.key for view in engine.output_views()] == [specs[2].key]
    assert (len(dispatcher.kept), dispatcher.num_live) == (1, 1)
    executor.close()


def detached(dispatcher: Dispatcher, front_id: int) -> list[tuple[int, ...]]:
    """Run a step; return the request keys of each Detach frame that is sent to the front."""
    words = [
        decode(body)
        for to, frame in dispatcher.step()
        if to == front_id
        for body in FrameBuffer().feed(frame)
    ]
    return [word.keys for word in words if isinstance(word, Detach)]
