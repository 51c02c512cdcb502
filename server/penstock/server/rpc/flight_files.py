"""Converts the rows of the flight recorder (the latest steps of the engine) to StepRecord messages
or a trace file, for operators.

Joins steps with their requests, if the recorder still has them. This is slow for many steps, so it
must not run on the event loop.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.server.observe.flight.layout import EventKind
from penstock.server.observe.flight.reader import FlightReader, Recording
from penstock.server.observe.flight.timeline import timeline_json
from penstock.server.observe.operations.engine_steps import wait_reason_name
from penstock.server.observe.operations.snapshot import CacheSnapshot
from penstock.server.rpc.mapping_operations import cache_of, duration_if_known, timestamp_of
from penstock.server.rpc.mapping_out import duration_of, wait_reason_of
from penstock.v1 import stats_pb2 as pb
from penstock.v1.state_pb2 import WaitReason


def steps_of_recording(data: bytes, max_steps: int | None) -> list[pb.StepRecord]:
    """Return the latest `max_steps` steps (None: all) of the encoded recording `data`, the oldest
    first. Raises FlightError if `data` is not a valid recording."""
    return list(step_records(FlightReader(data).recording(), max_steps))


def perfetto_file(data: bytes, max_steps: int | None) -> bytes:
    """Return the latest `max_steps` steps (None: all) of the encoded recording `data` as a Chrome
    trace in JSON. Raises FlightError if `data` is not a valid recording."""
    return b"".join(timeline_json(FlightReader(data).recording(), num_steps=max_steps))


@dataclass(slots=True)
class _StepDetails:
    """The events of one step: the number of tokens computed for each output (`shares`), and the ids
    of the requests that were admitted, preempted or ended."""

    shares: list[pb.StepShare] = field(default_factory=list[pb.StepShare])
    admitted: list[str] = field(default_factory=list[str])
    preempted: list[str] = field(default_factory=list[str])
    ended: list[str] = field(default_factory=list[str])


def step_records(rows: Recording, max_steps: int | None) -> Iterator[pb.StepRecord]:
    """Yield the latest `max_steps` steps (None: all) of a recording as messages, the oldest
    first."""
    steps = rows.steps if max_steps is None else rows.steps[-max_steps:]
    if not len(steps):
        return
    events = _events_by_step(rows, int(steps[0]["step"]))
    for step in steps:
        yield _record_of(step, events.get(int(step["step"]), _StepDetails()), rows)


def _record_of(step: Any, events: _StepDetails, rows: Recording) -> pb.StepRecord:
    begun_s, launched_s = float(step["begun_s"]), float(step["launched_s"])
    collected_s, updated_s = float(step["collected_s"]), float(step["updated_s"])
    return pb.StepRecord(
        step=int(step["step"]),
        launch_time=timestamp_of(rows.facts.unix_time_s(launched_s)),
        scheduler_duration=duration_of(launched_s - begun_s + updated_s - collected_s),
        executor_duration=duration_of(collected_s - launched_s),
        num_prefill_tokens=int(step["num_prefill_tokens"]),
        num_decode_outputs=int(step["num_decodes"]),
        shares=events.shares,
        admitted_request_ids=events.admitted,
        preempted_request_ids=events.preempted,
        ended_request_ids=events.ended,
        cache=_cache_after(step, rows.facts.block_size),
        predicted_duration=duration_if_known(float(step["predicted_s"])),
        inter_token_duration=duration_if_known(float(step["itl_s"])),
        num_inter_token_outputs=int(step["num_itl"]),
        num_prefill_outputs=int(step["num_prefill_rows"]),
        num_context_tokens=int(step["num_context_tokens"]),
        num_tokens=int(step["num_tokens"]),
        num_running=int(step["num_running"]),
        num_waiting=int(step["num_waiting"]),
        num_waiting_tokens=int(step["num_waiting_tokens"]),
        num_admitted=int(step["num_admitted"]),
        num_preempted=int(step["num_preempted"]),
        num_finished=int(step["num_finished"]),
        num_failed=int(step["num_failed"]),
        wait_reason=_wait_reason(step),
    )


def _wait_reason(step: Any) -> WaitReason.ValueType:
    return wait_reason_of(wait_reason_name(int(step["waits_for"])) if step["num_waiting"] else "")


def _cache_after(step: Any, block_size_tokens: int) -> pb.CacheStats:
    num_used, num_cached = int(step["num_used_blocks"]), int(step["num_cached_blocks"])
    num_free = int(step["num_free_blocks"])
    return cache_of(
        CacheSnapshot(
            block_size_tokens=block_size_tokens,
            num_total_blocks=num_used + num_cached + num_free,
            num_used_blocks=num_used,
            num_cached_blocks=num_cached,
            num_free_blocks=num_free,
        )
    )


def _events_by_step(rows: Recording, first_step: int) -> dict[int, _StepDetails]:
    names = _names_by_key(rows.requests)
    by_step: defaultdict[int, _StepDetails] = defaultdict(_StepDetails)
    events = rows.events[rows.events["step"] >= np.uint64(first_step)]
    for event in events:
        name = names.get(int(event["key"]))
        if name is None:
            continue
        request_id, output_index = name
        of_step = by_step[int(event["step"])]
        match int(event["kind"]):
            case EventKind.ADMITTED:
                of_step.admitted.append(request_id)
            case EventKind.PREEMPTED:
                of_step.preempted.append(request_id)
            case EventKind.FINISHED | EventKind.FAILED:
                of_step.ended.append(request_id)
            case EventKind.CHUNK:
                of_step.shares.append(
                    pb.StepShare(
                        request_id=request_id,
                        output_index=output_index,
                        num_tokens=int(event["count"]),
                    )
                )
            case _:
                pass
    return by_step


def _names_by_key(requests: NDArray[Any]) -> dict[int, tuple[str, int]]:
    """Return the request id and the output index of each output, by its key in the recording."""
    return {
        int(row["key"]): (
            _text(row["request_id"]),
            int(row["output_index"]),
        )
        for row in requests
    }


def _text(value: bytes) -> str:
    """Decode a name. It may be truncated within a UTF-8 character."""
    return value.decode("utf-8", "ignore")
