"""Converts a flight record (the steps and requests that a service's engine recorded) to a trace
to replay, and to steps for fitting the cost model.

A recording does not contain the common prefixes of prompts, so replayed prompts share none.
"""

from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.request import FailureReason, FinishReason
from penstock.server.observe.flight.histories import RequestDetails, RequestHistory, histories_of
from penstock.server.observe.flight.layout import MAGIC, EventKind, FlightError
from penstock.server.observe.flight.reader import FlightReader, Recording
from penstock.server.observe.recording.request_log import CAPACITY_FAILURES
from penstock.server.observe.recording.trace import TraceRequest

_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightTrace:
    """The requests of a recording in order of arrival, the first at 0 s. `num_left_out`: number of
    requests in the recording that are omitted.
    """

    requests: tuple[TraceRequest, ...]
    num_left_out: int


def is_flight_file(path: Path) -> bool:
    """Return whether a file has the header of a flight record. Raises OSError.

    Returns False for anything but a regular file, without opening it: a pipe, for example, cannot
    be read twice.
    """
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def flight_trace(path: Path) -> FlightTrace:
    """Return the requests of a recording. Raises FlightError if it is invalid or has no usable
    requests, OSError if it cannot be read.

    An unfinished request has the output generated so far; if the executor does its own batching
    (self-paced), that output is not known and the request is omitted. A request that was rejected
    or dropped for lack of capacity is included, with the mean output length of completed requests
    or its `max_tokens`, whichever is less. Other requests without output are omitted, and so are
    requests whose rows were partly overwritten in the recording's ring buffers.
    """
    recording = FlightReader(path).recording()
    histories = histories_of(recording)
    mean = _mean_output(histories)
    collected_s: NDArray[np.float64] = recording.steps["collected_s"]
    is_self_paced = recording.facts.is_self_paced
    counted: list[tuple[float, RequestDetails, int]] = []
    for history in histories:
        if history.details is None:
            continue
        num_output = history.num_output_tokens
        if history.end is None:
            num_output = 0 if is_self_paced else _output_so_far(history, collected_s)
        elif not num_output and history.end is EventKind.FAILED and _failed_for_capacity(history):
            num_output = min(history.details.max_tokens, mean or history.details.max_tokens)
        if num_output:
            counted.append((history.details.arrival_s, history.details, num_output))
    if not counted:
        raise FlightError("contains no requests")
    counted.sort(key=lambda each: each[0])
    start_s = counted[0][0]
    return FlightTrace(
        requests=tuple(
            _request(details, arrival_s - start_s, num) for arrival_s, details, num in counted
        ),
        num_left_out=_num_of(recording) - len(counted),
    )


def flight_steps(path: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the steps of a recording: counts float64 [n, 3] (prefill tokens, decode rows, context
    tokens) and durations in seconds, float64 [n].

    If the engine still had work after the previous step, a step is measured from the end of that
    step, so it includes the overhead between the two; otherwise it is measured from its own start.
    Raises OSError; FlightError for an invalid recording or a self-paced executor (one that does its
    own batching).
    """
    recording = FlightReader(path).recording()
    if recording.facts.is_self_paced:
        raise FlightError("its engine was self-paced, so its steps do not determine a cost model")
    steps = recording.steps
    seconds = steps["updated_s"] - steps["begun_s"]
    had_work = (steps["num_running"][:-1] > 0) | (steps["num_waiting"][:-1] > 0)
    # Consecutive step numbers: no other step was launched in between.
    had_work &= np.diff(steps["step"].astype(np.int64)) == 1
    whole = np.diff(steps["updated_s"])
    seconds[1:] = np.where(had_work, whole, seconds[1:])
    names = ("num_prefill_tokens", "num_decodes", "num_context_tokens")
    counts = np.column_stack([steps[name].astype(np.float64) for name in names])
    is_timed = seconds > 0.0
    return counts[is_timed], seconds[is_timed]


def _num_of(recording: Recording) -> int:
    keys: NDArray[Any] = np.concatenate((recording.requests["key"], recording.events["key"]))
    return len(np.unique(keys))


def _mean_output(histories: list[RequestHistory]) -> int:
    """Return the mean output length of completed requests, at least 1; 0 if there are none."""
    lengths = [
        history.num_output_tokens
        for history in histories
        if history.end is EventKind.FINISHED and history.reason in _WHOLE
    ]
    return max(1, round(sum(lengths) / len(lengths))) if lengths else 0


def _failed_for_capacity(history: RequestHistory) -> bool:
    known = {int(reason) for reason in FailureReason}
    return history.reason in known and FailureReason(history.reason) in CAPACITY_FAILURES


def _output_so_far(history: RequestHistory, collected_s: NDArray[np.float64]) -> int:
    """Return the output tokens so far of an unfinished request.

    This is the number in the request's last event with a count, plus one token for each step since
    the first token after its last admission.
    """
    num_output = history.num_output_tokens
    first_s = history.slot_intervals[-1].first_token_s if history.slot_intervals else np.nan
    if isnan(first_s):
        return num_output
    return num_output + int(np.count_nonzero(collected_s >= first_s))


def _request(details: RequestDetails, arrival_s: float, num_output_tokens: int) -> TraceRequest:
    return TraceRequest(
        arrival_s=round(arrival_s, 6),
        num_prompt_tokens=max(1, details.num_prompt_tokens),
        num_output_tokens=num_output_tokens,
        tenant=details.tenant,
        priority=details.priority,
        ttft_deadline_s=max(details.ttft_deadline_s - details.arrival_s, 1e-6),
        deadline_s=max(details.deadline_s - details.arrival_s, 1e-6),
    )
