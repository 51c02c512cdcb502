"""Builders of what fronts and engines report (heartbeats, records, steps, views), with default
values for the fields that a test does not set.
"""

import inspect
import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.events import Residency, Wait
from penstock.scheduler.output_view import OutputView
from penstock.scheduler.state import RequestState
from penstock.server.ipc.frames import EngineHello
from penstock.server.observe.flight.layout import STEP, EventKind, FlightFacts
from penstock.server.observe.flight.memory import (
    EVENT_RING,
    REQUEST_RING,
    STEP_RING,
    RingMemory,
    create_memory,
)
from penstock.server.observe.flight.reader import FlightReader
from penstock.server.observe.frames import FrontRequestView, Heartbeat, OutcomeCount
from penstock.server.observe.request_record import (
    RequestOptions,
    RequestRecord,
    Segment,
    SegmentKind,
    TraceParent,
)
from support.link import INFO, hello
from support.snapshots import NOW_UNIX_S

T = TypeVar("T")

GENERATE = "penstock.v1.GenerationService/Generate"
WAIT = Wait(blocks_s=0.3, slots_s=0.05, token_budget_s=0.1, other_s=0.05, num_passed_by=2)
RESIDENCY = Residency(num_chunks=3, num_steps=20, min_batch_size=4, max_batch_size=9)
_ZEROS: dict[Any, Any] = {int: 0, float: 0.0, str: "", bool: False}


def blank(kind: type[T], /, **given: Any) -> T:
    """Return a value of class `kind` with the given fields; its other required fields are zero or
    empty.
    """
    hints = get_type_hints(kind)
    parameters = inspect.signature(kind).parameters.values()
    needed = (one.name for one in parameters if one.default is one.empty)
    return kind(**{name: _ZEROS.get(hints[name], ()) for name in needed} | given)


def engine_hello(num_blocks: int = 40) -> EngineHello:
    return hello(1, replace(INFO, block_size=16, num_blocks=num_blocks, max_num_seqs=8))


def outcome(num: int = 1, **settings: Any) -> OutcomeCount:
    given = {"method": GENERATE, "finish_reason": "STOP", "num": num}
    return blank(OutcomeCount, **given | settings)


def heartbeat(front_id: int = 1, *outcomes: OutcomeCount, **settings: Any) -> Heartbeat:
    """Return the heartbeat of an idle front."""
    given = {"front_id": front_id, "pid": 100 + front_id, "epoch": 1, "is_engine_up": True}
    return blank(Heartbeat, outcomes=outcomes, **given | settings)


def record(*segments: Segment, **settings: Any) -> RequestRecord:
    """Return the record of a successful request that took 1 s; all token counts are 0."""
    given: dict[str, Any] = {
        "front_id": 1,
        "method": GENERATE,
        "trace": TraceParent(b"t" * 16, b"s" * 8),
        "arrival_s": 100.0,
        "end_s": 101.0,
        "finish_reasons": ("STOP",),
        "options": RequestOptions(),
        "ttft_s": math.nan,
        "num_ahead": -1,
        "estimated_queue_s": math.nan,
    }
    return blank(RequestRecord, **{"segments": segments, **given, **settings})


def trace_parent(number: int = 1, **changes: Any) -> TraceParent:
    parent = TraceParent(
        trace_id=(0xA11CE << 64 | number).to_bytes(16, "big"),
        span_id=(0xB0B << 32 | number).to_bytes(8, "big"),
    )
    return msgspec.structs.replace(parent, **changes)


def request_record(number: int = 1, **changes: Any) -> RequestRecord:
    """Return the record of a successful request that was queued for half a second and took two
    seconds, with one prefill and one decode. `changes`: fields that differ.
    """
    arrival_s: float = changes.get("arrival_s", 100.0)
    given: dict[str, Any] = {
        "sequence": number,
        "front_id": 3,
        "request_id": f"request-{number}",
        "model": "tiny",
        "tenant": "acme",
        "peer": "ipv4:127.0.0.1:50123",
        "trace": trace_parent(number),
        "arrival_s": arrival_s,
        "end_s": arrival_s + 2.0,
        "options": RequestOptions(max_tokens=64, temperature=0.7, top_p=0.9, top_k=40, seed=7),
        "num_prompt_tokens": 96,
        "num_cached_tokens": 32,
        "num_completion_tokens": 17,
        "ttft_s": 0.7,
        "num_ahead": 5,
        "estimated_queue_s": 0.4,
        "num_messages": 18,
    }
    return record(
        Segment(SegmentKind.PREPARE, arrival_s, arrival_s + 0.01),
        Segment(SegmentKind.QUEUE, arrival_s + 0.01, arrival_s + 0.51, wait=WAIT),
        Segment(SegmentKind.PREFILL, arrival_s + 0.51, arrival_s + 0.7, num_cached_tokens=32),
        Segment(
            SegmentKind.DECODE,
            arrival_s + 0.7,
            arrival_s + 1.95,
            residency=RESIDENCY,
            num_tokens=17,
        ),
        Segment(SegmentKind.DELIVER, arrival_s + 1.95, arrival_s + 2.0),
        **given | changes,
    )


def rejected_record(code: int, reason: str, **changes: Any) -> RequestRecord:
    """Return the record of a request that was rejected during its preparation."""
    reported: dict[str, Any] = {
        "code": code,
        "reason": reason,
        "finish_reasons": (),
        "end_s": 100.002,
        "segments": (Segment(SegmentKind.PREPARE, 100.0, 100.002),),
        "num_cached_tokens": 0,
        "num_completion_tokens": 0,
        "ttft_s": math.nan,
        "num_ahead": -1,
        "estimated_queue_s": math.nan,
        "num_messages": 0,
    }
    return request_record(**(reported | changes))


def preempted_record(**changes: Any) -> RequestRecord:
    """Return the record of a request that was preempted once, while it decoded."""
    kinds = SegmentKind
    segments = (
        Segment(kinds.PREPARE, 100.0, 100.1),
        Segment(kinds.QUEUE, 100.1, 100.2, wait=Wait(slots_s=0.1)),
        Segment(kinds.PREFILL, 100.2, 100.3),
        Segment(kinds.DECODE, 100.3, 100.8, residency=RESIDENCY, num_tokens=9),
        Segment(kinds.QUEUE, 100.8, 101.2, wait=Wait(blocks_s=0.4)),
        Segment(kinds.PREFILL, 101.2, 101.3, num_cached_tokens=64),
        Segment(
            kinds.DECODE, 101.3, 101.9, residency=Residency(num_chunks=1, num_steps=9), num_tokens=8
        ),
        Segment(kinds.DELIVER, 101.9, 102.0),
    )
    reported: dict[str, Any] = {"segments": segments, "num_preemptions": 1}
    return request_record(**(reported | changes))


def steps(*rows: dict[str, Any]) -> NDArray[Any]:
    """Return rows of STEP, an array [n]. By default the steps begin one second apart, and each
    takes 7.8 ms on the device after 0.5 ms of planning and before 0.5 ms of updating.
    """
    array = np.zeros(len(rows), dtype=STEP)
    for index, row in enumerate(rows):
        begun_s = 10.0 + index
        defaults = {
            "step": index,
            "begun_s": begun_s,
            "launched_s": begun_s + 2**-11,
            "collected_s": begun_s + 2**-11 + 2**-7,
            "updated_s": begun_s + 2**-10 + 2**-7,
            "itl_s": math.nan,
            "predicted_s": math.nan,
        }
        for name, value in {**defaults, **row}.items():
            array[name][index] = value
    return array


def steps_at(num_steps: int, at_s: Callable[[int], float], **values: Any) -> NDArray[Any]:
    """Return steps of 10 ms, an array [num_steps]; step i ends (`updated_s`) at `at_s(i)`."""
    before_s = {"begun_s": 0.01, "launched_s": 0.008, "collected_s": 0.002, "updated_s": 0.0}
    return steps(
        *(
            {name: at_s(index) - early_s for name, early_s in before_s.items()} | values
            for index in range(num_steps)
        )
    )


def output_view(key: int, request_id: str = "mine", **changes: Any) -> OutputView:
    """Return the engine's view of a running output."""
    given: dict[str, Any] = {
        "state": RequestState.PROCESSING,
        "arrival_s": 50.0,
        "deadline_s": math.inf,
        "num_prompt_tokens": 10,
        "num_output_tokens": 3,
        "num_computed_tokens": 12,
        "num_blocks": 2,
        "slot": 0,
    }
    return blank(OutputView, key=key, request_id=request_id, **given | changes)


def front_request_view(
    keys: list[int], request_id: str = "mine", **changes: Any
) -> FrontRequestView:
    """Return the front's view of a request whose outputs have these keys."""
    given: dict[str, Any] = {
        "front_id": 1,
        "trace_id": "ab" * 16,
        "arrival_s": 50.0,
        "phase": "decode",
        "history": (("prepare", 50.0), ("queue", 50.1), ("prefill", 50.2), ("decode", 50.3)),
        "num_prompt_tokens": 10,
        "num_cached_tokens": 4,
        "num_output_tokens": 2,
        "num_backlog_tokens": 1,
    }
    return blank(FrontRequestView, keys=tuple(keys), request_id=request_id, **given | changes)


def make_facts(**changed: Any) -> FlightFacts:
    values: dict[str, Any] = {
        "model": "demo",
        "executor": "simulated",
        "epoch": 3,
        "max_num_seqs": 8,
        "num_blocks": 60,
        "block_size": 16,
        "max_num_batched_tokens": 2048,
        "pipeline_depth": 1,
        "is_self_paced": False,
        "clock_s": 1000.0,
        "unix_s": 1.8e9,
        "version": "0.1.0",
    }
    return FlightFacts(**{**values, **changed})


def small_recording(num_steps: int = 6) -> bytes:
    """Return a flight record: in each step a request of tenant acme arrives; from the second
    step on, the request of the previous step ends.
    """
    fd = create_memory(64, "test")
    memory = RingMemory(fd, make_facts(num_blocks=100, unix_s=NOW_UNIX_S))
    rows = steps_at(
        num_steps,
        lambda index: 1000.0 + index,
        predicted_s=0.5,
        num_prefill_tokens=20,
        num_prefill_rows=1,
        num_decodes=2,
        num_running=3,
        num_waiting=1,
        waits_for=2,
        num_used_blocks=40,
        num_cached_blocks=10,
        num_free_blocks=50,
        num_admitted=1,
        num_finished=1,
    )
    # A request's key, which its id contains, is the number of the step in which it arrives.
    for key, row in enumerate(rows):
        at_s = float(row["updated_s"])
        names = (f"r{key}".encode(), b"acme")
        numbers = (math.inf, math.inf, 20, 64, 0, 0)
        memory.append(REQUEST_RING, key, at_s, *numbers, bytes(16), *names)
        memory.append(STEP_RING, *row.item())
        for kind, of_key in ((EventKind.CHUNK, key), (EventKind.ADMITTED, key)):
            memory.append(EVENT_RING, at_s, key, of_key, 0, 20, kind, 0)
        if key:
            memory.append(EVENT_RING, at_s, key, key - 1, 0, 5, EventKind.FINISHED, 1)
    reader = FlightReader(fd)
    try:
        return reader.copy(1000.0 + num_steps)
    finally:
        reader.close()
        memory.close()
        os.close(fd)
