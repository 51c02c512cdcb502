"""Checks under load: many concurrent streams, with measured figures, and the effect of priority on
a full queue.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from penstock.client import (
    Accepted,
    Event,
    Finished,
    GenerationOptions,
    Progress,
    PromptLike,
    RequestState,
    Tokens,
)
from penstock.tools.verify.check import Check
from penstock.tools.verify.check_result import (
    CheckSkipped,
    require,
)
from penstock.tools.verify.subject import Subject
from penstock.tools.verify.transcript import Transcript

_NUM_TOKENS = 64
_TIMEOUT_S = 180.0
_MIN_NUM_WAITING = 4
_SETTLE_TIMEOUT_S = 15.0
_NUM_SETTLED_MESSAGES = 8
_LOW, _HIGH = -10, 10


async def _concurrency(subject: Subject) -> str:
    num_streams = _fitting(subject, subject.concurrency)
    # One stream alone: the reference for the figures under load.
    for num in (1, num_streams):
        started_s = time.monotonic()
        transcripts = await asyncio.gather(
            *(subject.greedy(_NUM_TOKENS, _prompt(subject, num, i)) for i in range(num))
        )
        figures = _figures(transcripts, time.monotonic() - started_s)
        subject.figures[f"{num} at once"] = figures
        for transcript in transcripts:
            wanted = subject.clamp_output_tokens(_NUM_TOKENS)
            require(
                transcript.num_tokens == wanted,
                f"a stream of {num} had {transcript.num_tokens} tokens of {wanted}",
            )
    figures = subject.figures[f"{num_streams} at once"]
    less = "" if num_streams == subject.concurrency else ", the queue's limit"
    return (
        f"{num_streams} streams{less}: {figures['tokens_per_s']:.0f} tokens/s, TTFT p50"
        f" {figures['ttft_p50_ms']:.0f} ms, ITL p50 {figures['itl_p50_ms']:.1f} ms"
    )


def _fitting(subject: Subject, wanted: int) -> int:
    """Return `wanted`, a number of streams, but at most the number of pending requests that the
    service allows.
    """
    max_pending = subject.model.limits.max_pending_requests
    return wanted if max_pending is None else max(1, min(wanted, max_pending))


def _prompt(subject: Subject, num: int, index: int) -> PromptLike:
    return subject.prompt(f"Stream {index + 1} of {num}. Once upon a time")


def _figures(transcripts: Sequence[Transcript], wall_s: float) -> dict[str, Any]:
    """Return the throughput and the latencies, as measured by the client.

    ITL: the gap before a message divided by its number of tokens, counted once for each token.
    """
    ttfts_s = [one.token_times_s[0][0] for one in transcripts if one.token_times_s]
    gaps_s = [
        (at_s - before_s) / num_tokens
        for one in transcripts
        for (before_s, _), (at_s, num_tokens) in zip(
            one.token_times_s, one.token_times_s[1:], strict=False
        )
        for _ in range(num_tokens)
    ]
    num_tokens = sum(one.num_tokens for one in transcripts)
    named = {
        f"{name}_p{percent}_ms": percentile(values_s, percent) * 1e3
        for name, values_s in (("ttft", ttfts_s), ("itl", gaps_s))
        for percent in (50, 90, 99)
    }
    return {
        "num_streams": len(transcripts),
        "num_tokens": num_tokens,
        "tokens_per_s": num_tokens / wall_s if wall_s > 0 else 0.0,
        **named,
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile; 0 if empty."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


class _QueueFill:
    """Fills the batch and the queue with low-priority requests, of which some run and the others
    wait. They are started when the object is created.
    """

    def __init__(self, subject: Subject, num: int, *, num_tokens: int) -> None:
        self._subject = subject
        self._num_tokens = num_tokens
        self._accepted: set[int] = set()
        self._admitted: set[int] = set()
        self._num_messages: Counter[int] = Counter()
        self._changed = asyncio.Condition()
        self.is_any_done = False
        self.tasks = [asyncio.create_task(self._run(index)) for index in range(num)]

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not admitted yet."""
        return len(self.tasks) - len(self._admitted)

    async def wait_until_settled(self) -> None:
        """Wait until all requests are accepted and no more of them are being admitted, or until one
        has ended. Raises TimeoutError after 15 s.

        Admission is taken to be over if no request was admitted while a running one received 8
        messages, because a request that fits is admitted in the next step.
        """
        async with asyncio.timeout(_SETTLE_TIMEOUT_S), self._changed:
            await self._changed.wait_for(lambda: len(self._accepted) == len(self.tasks))
            await self._changed.wait_for(lambda: bool(self._num_messages))
            lead = next(iter(self._num_messages))
            while not self.is_any_done:
                num_waiting = self.num_waiting
                await self._wait_for_messages(
                    lead, self._num_messages[lead] + _NUM_SETTLED_MESSAGES
                )
                if self.num_waiting == num_waiting:
                    return

    async def _wait_for_messages(self, index: int, num_messages: int) -> None:
        """Wait until request number `index` has received `num_messages` messages with tokens, or
        any request has ended.
        """
        await self._changed.wait_for(
            lambda: self._num_messages[index] >= num_messages or self.is_any_done
        )

    async def cancel(self) -> None:
        """Cancel the remaining requests and wait for their end."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _run(self, index: int) -> None:
        # Each is longer than the one before, so that slots become free one by one.
        options: GenerationOptions = {
            "max_tokens": self._subject.clamp_output_tokens(self._num_tokens + 4 * index),
            "temperature": 0.0,
            "ignore_eos": True,
            "priority": _LOW,
        }
        prompt = _prompt(self._subject, len(self.tasks), index)
        async with self._subject.streaming(prompt, Transcript(), **options) as events:
            async for event in events:
                await self._note(index, event)

    async def _note(self, index: int, event: Event) -> None:
        async with self._changed:
            if isinstance(event, Accepted):
                self._accepted.add(index)
            elif isinstance(event, Progress) and event.state is RequestState.PROCESSING:
                self._admitted.add(index)
            elif isinstance(event, Tokens):
                self._admitted.add(index)
                self._num_messages[index] += 1
            elif isinstance(event, Finished):
                self.is_any_done = True
            self._changed.notify_all()


class _EndedEarly(CheckSkipped):
    """A request ended before the others were queued, because its output was too short for the
    speed of the service.
    """


async def _priority(subject: Subject) -> str:
    try:
        return await _overtake(subject, num_tokens=_NUM_TOKENS)
    except _EndedEarly:
        return await _overtake(subject, num_tokens=4 * _NUM_TOKENS)


async def _overtake(subject: Subject, *, num_tokens: int) -> str:
    num = _fitting(subject, 2 * subject.concurrency)
    queue_fill = _QueueFill(subject, num, num_tokens=num_tokens)
    try:
        return await _run_urgent(subject, queue_fill)
    finally:
        await queue_fill.cancel()


async def _run_urgent(subject: Subject, queue_fill: _QueueFill) -> str:
    try:
        await queue_fill.wait_until_settled()
    except TimeoutError as error:
        raise CheckSkipped("the queue could not be filled in time") from error
    num_waiting = queue_fill.num_waiting
    if queue_fill.is_any_done:
        raise _EndedEarly(f"a request ended while {num_waiting} waited: no queue")
    if num_waiting < _MIN_NUM_WAITING:
        raise CheckSkipped(f"of {len(queue_fill.tasks)} requests {num_waiting} waited: no queue")
    overtaken: int | None = None

    def on_event(event: Event, _: Transcript) -> None:
        nonlocal overtaken
        if isinstance(event, Tokens) and overtaken is None:
            overtaken = queue_fill.num_waiting

    await subject.generate(
        priority=_HIGH, max_tokens=1, temperature=0.0, ignore_eos=True, on_event=on_event
    )
    require(bool(overtaken), f"an urgent request began after all {num_waiting} waiting requests")
    return f"an urgent request began before {overtaken} of {num_waiting} waiting requests"


CHECKS = (
    Check(name="concurrency", run=_concurrency, timeout_s=_TIMEOUT_S),
    Check(name="priority", run=_priority, feature="priority"),
)
