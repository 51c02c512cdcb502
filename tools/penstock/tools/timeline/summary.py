"""Summarises a flight record (the steps and requests that an engine recorded).

The summary contains duration, speed, errors of predicted step times, and waits. Does no I/O.
"""

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.server.observe.flight.histories import RequestHistory, end_s, histories_of
from penstock.server.observe.flight.reader import Recording
from penstock.server.observe.flight.timeline import end_of, waits_for

_NUM_WAITERS = 5


def step_seconds(steps: NDArray[Any]) -> NDArray[np.float64]:
    """Return the duration of each step in seconds, float64 [n]: from the start of its planning to
    its result.

    If planning begins before the previous step's result, the step is counted from that result.
    """
    begun_s = steps["begun_s"].astype(np.float64)
    begun_s[1:] = np.maximum(begun_s[1:], steps["collected_s"][:-1])
    return np.maximum(steps["collected_s"] - begun_s, 0.0)


def summary_lines(recording: Recording, *, num_steps: int | None = None) -> list[str]:
    """Return the lines of the summary. `num_steps`: only the last N steps are summarised; None:
    all.
    """
    facts = recording.facts
    steps = recording.steps if num_steps is None else recording.steps[-num_steps:]
    head = f"{facts.model} on {facts.executor}, engine {facts.epoch}, penstock {facts.version}"
    lines = [f"engine       {head}"]
    if not len(steps):
        return [*lines, "steps        none"]
    since_s, until_s = float(steps["begun_s"][0]), float(steps["updated_s"][-1])
    span_s = until_s - since_s
    first, last = int(steps["step"][0]), int(steps["step"][-1])
    lines.append(f"steps        {len(steps):,} ({first} to {last}) in {span_s:.3f} s")
    launch = recording.last_launch
    if launch is not None and launch.step > last:
        lines.append(
            f"in flight    step {launch.step} for {end_s(recording) - launch.at_s:.3f} s:"
            f" {launch.num_decodes} decodes, {launch.num_prefill_tokens} tokens of prefill"
        )
    lines.append(_speed(steps, span_s))
    lines += _step_times(steps, is_self_paced=facts.is_self_paced)
    lines.append(_waited_for(steps))
    lines += _requests(histories_of(recording), since_s, end_s(recording))
    return lines


def _speed(steps: NDArray[Any], span_s: float) -> str:
    num_out, num_prefill = (
        int(steps[name].sum(dtype=np.int64)) for name in ("num_tokens", "num_prefill_tokens")
    )
    if span_s <= 0.0:
        return f"tokens       {num_out:,} out, {num_prefill:,} of prefill"
    return (
        f"tokens       {num_out:,} out ({num_out / span_s:,.0f}/s),"
        f" {num_prefill:,} of prefill ({num_prefill / span_s:,.0f}/s)"
    )


def _step_times(steps: NDArray[Any], *, is_self_paced: bool) -> list[str]:
    seconds = step_seconds(steps)
    p50_s, p99_s = np.percentile(seconds, (50, 99)).tolist()
    what = "iteration" if is_self_paced else "step time"
    lines = [f"{what}    p50 {_ms(p50_s)}, p99 {_ms(p99_s)}, longest {_ms(float(seconds.max()))}"]
    is_predicted = np.isfinite(steps["predicted_s"]) & (seconds > 0.0)
    if is_predicted.any():
        measured = seconds[is_predicted]
        errors = steps["predicted_s"][is_predicted] / measured - 1.0
        lines.append(
            f"predicted    {int(is_predicted.sum()):,} steps: off by"
            f" {float(np.abs(errors).mean()):.1%} on average, {float(errors.mean()):+.1%} in all"
        )
    return lines


def _waited_for(steps: NDArray[Any]) -> str:
    """Return one line with the reasons why the request at the head of the queue waited, and the
    share of the total step time for each. "none" is the time of steps without such a reason.
    """
    seconds: Counter[str] = Counter()
    for reason, span_s in zip(
        steps["waits_for"].tolist(), step_seconds(steps).tolist(), strict=True
    ):
        seconds[waits_for(reason) or "none"] += span_s
    all_s = sum(seconds.values()) or 1.0
    parts = [f"{name} {span_s / all_s:.0%}" for name, span_s in seconds.most_common()]
    return f"waits for    {', '.join(parts)}"


def _requests(histories: list[RequestHistory], since_s: float, until_s: float) -> list[str]:
    seen = [history for history in histories if history.end_s >= since_s]
    ends = Counter(end_of(history) or "live at the end" for history in seen)
    counted = ", ".join(f"{num:,} {name}" for name, num in ends.most_common())
    num_preempted = sum(history.num_preemptions for history in seen)
    lines = [f"requests     {counted or 'none'}; {num_preempted:,} preemptions"]
    waited = sorted(seen, key=lambda history: -history.waited_s(until_s))[:_NUM_WAITERS]
    for history in waited:
        if history.waited_s(until_s) > 0.0:
            tenant = (
                f" of {history.details.tenant}"
                if history.details and history.details.tenant
                else ""
            )
            is_waiting = bool(history.waits) and history.waits[-1].end_s > until_s
            still = ", still waiting" if is_waiting else ""
            lines.append(
                f"waited       {_ms(history.waited_s(until_s))}: {history.name}{tenant}{still}"
            )
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
