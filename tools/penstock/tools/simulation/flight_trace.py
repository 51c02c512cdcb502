"""Converts a flight recording to a trace to replay, and to steps for fitting the cost model.

Owns the conversion. A recording has no common prefixes: every replayed prompt is unique.
"""

from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.request import FailureReason, FinishReason
from penstock.server.observe.flight.layout import MAGIC, EventKind, FlightError
from penstock.server.observe.flight.lives import Asked, Life, lives_of
from penstock.server.observe.flight.reader import FlightReader, Recording
from penstock.server.observe.recording.request_log import OF_LOAD
from penstock.server.observe.recording.trace import TraceRequest

_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightTrace:
    """The requests in order of arrival, the first at 0 s. `num_left_out`: omitted requests."""

    requests: tuple[TraceRequest, ...]
    num_left_out: int


def is_flight_file(path: Path) -> bool:
    """Return whether a file has the header of a flight recording. Raises OSError.

    False for a pipe, which cannot be read twice.
    """
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def flight_trace(path: Path) -> FlightTrace:
    """Return the requests of a recording. Raises FlightError, also when there are none, and
    OSError.

    A request that has not ended has the output generated so far. A request that was rejected or
    dropped for lack of capacity counts as load too, with the mean output of completed requests, or
    its `max_tokens` if that is less or none completed. Other requests without output are omitted,
    and so are requests of which the recording holds too little: its ring buffers overwrite the
    oldest rows.
    """
    recording = FlightReader(path).recording()
    lives = lives_of(recording)
    mean = _mean_output(lives)
    collected_s: NDArray[np.float64] = recording.steps["collected_s"]
    is_self_paced = recording.facts.is_self_paced
    counted: list[tuple[float, Asked, int]] = []
    for life in lives:
        if life.asked is None:
            continue
        num_output = life.num_output_tokens
        if life.end is None:
            num_output = 0 if is_self_paced else _output_so_far(life, collected_s)
        elif not num_output and life.end is EventKind.FAILED and _is_of_load(life):
            num_output = min(life.asked.max_tokens, mean or life.asked.max_tokens)
        if num_output:
            counted.append((life.asked.arrival_s, life.asked, num_output))
    if not counted:
        raise FlightError("contains no requests")
    counted.sort(key=lambda each: each[0])
    start_s = counted[0][0]
    return FlightTrace(
        requests=tuple(
            _request(asked, arrival_s - start_s, num) for arrival_s, asked, num in counted
        ),
        num_left_out=_num_of(recording) - len(counted),
    )


def flight_steps(path: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return counts float64 [n, 3] (prefill tokens, decode rows, context tokens), seconds float64
    [n].

    If the engine had work since the previous step, a step lasts from the end of that step to its
    own end, which includes the work of the service between them; otherwise from its own beginning.
    Raises FlightError and OSError.
    """
    recording = FlightReader(path).recording()
    if recording.facts.is_self_paced:
        raise FlightError("its engine paced itself: its steps have no price")
    steps = recording.steps
    seconds = steps["updated_s"] - steps["begun_s"]
    had_work = (steps["num_running"][:-1] > 0) | (steps["num_waiting"][:-1] > 0)
    # Consecutive step numbers: nothing was launched between them.
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


def _mean_output(lives: list[Life]) -> int:
    """Return the mean output length of completed requests, at least 1; 0 if there are none."""
    lengths = [
        life.num_output_tokens
        for life in lives
        if life.end is EventKind.FINISHED and life.reason in _WHOLE
    ]
    return max(1, round(sum(lengths) / len(lengths))) if lengths else 0


def _is_of_load(life: Life) -> bool:
    known = {int(reason) for reason in FailureReason}
    return life.reason in known and FailureReason(life.reason) in OF_LOAD


def _output_so_far(life: Life, collected_s: NDArray[np.float64]) -> int:
    """Count one token for each step since the first token; 0 if the first token is not recorded."""
    num_output = life.num_output_tokens
    first_s = life.stays[-1].first_token_s if life.stays else np.nan
    if isnan(first_s):
        return num_output
    return num_output + int(np.count_nonzero(collected_s >= first_s))


def _request(asked: Asked, arrival_s: float, num_output_tokens: int) -> TraceRequest:
    return TraceRequest(
        arrival_s=round(arrival_s, 6),
        num_prompt_tokens=max(1, asked.num_prompt_tokens),
        num_output_tokens=num_output_tokens,
        tenant=asked.tenant,
        priority=asked.priority,
        ttft_deadline_s=max(asked.ttft_deadline_s - asked.arrival_s, 1e-6),
        deadline_s=max(asked.deadline_s - asked.arrival_s, 1e-6),
    )
