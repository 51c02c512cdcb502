"""Runs the workload of `trtllm_overhead`, a closed loop of requests, and measures it.

Also passes loads and results between processes.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

import numpy as np

from report import percentile_ms

ANSWER = "answer "
"""Prefix of a line for the parent process; other lines are printed by libraries."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: `prompt` ids and `num_tokens` of output, sent `pause_s` seconds after an earlier
    one has ended or, for the first ones, after the start.
    """

    prompt: list[int]
    num_tokens: int
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load of `num_requests` requests, `concurrency` of them at any time.

    Output lengths are uniform between `min_output_tokens` and `max_output_tokens`: with equal
    lengths, requests that began in the same step would always end in the same step. Each request,
    including the first ones, is sent after a uniform pause of one to two steps. Without the pause
    all would arrive at the start of a step, and thread timing would decide whether they join that
    step or wait for the next.
    """

    concurrency: int
    num_requests: int
    num_prompt_tokens: int
    min_output_tokens: int
    max_output_tokens: int
    step_s: float
    vocab_size: int
    seed: int

    def requests(self) -> list[Request]:
        """Return the requests, the same on every call; their prompts are random, so that the prefix
        cache has no hits."""
        random = np.random.default_rng(self.seed)
        shape = (self.num_requests, self.num_prompt_tokens)
        bounds = self.min_output_tokens, self.max_output_tokens + 1
        prompts: list[list[int]] = random.integers(3, self.vocab_size, shape).tolist()
        lengths: list[int] = random.integers(*bounds, self.num_requests).tolist()
        pauses: list[float] = random.uniform(1.0, 2.0, self.num_requests).tolist()
        pauses_s = [pause * self.step_s for pause in pauses]
        return list(map(Request, prompts, lengths, pauses_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """The results of one run. Times are in milliseconds, unless stated otherwise.

    Attributes:
        burst_*: TTFT of the first `concurrency` requests.
        ttft_*: TTFT of the other requests.
        itl_*: Times between tokens, of all requests.
        client_us: CPU time of the client process per token, microseconds.
    """

    burst_mean: float
    burst_p99: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    itl_mean: float
    itl_p50: float
    itl_p99: float
    tokens_per_s: float
    num_tokens: int
    client_us: float


class Records:
    """Records arrivals of tokens. If several tokens arrive together, the first has the whole gap
    and the others have gaps of 0.
    """

    def __init__(self, load: Load) -> None:
        self._num_in_burst = load.concurrency
        self._num_requests = load.num_requests
        self._burst: set[int] = set()
        self._started: dict[int, float] = {}
        self._latest: dict[int, float] = {}
        self._burst_s: list[float] = []
        self._ttft_s: list[float] = []
        self._itl_s: list[float] = []
        self._num_ended = 0
        self._num_tokens = 0
        self._cpu_s = time.process_time()
        self._begin_s = time.perf_counter()

    @property
    def is_complete(self) -> bool:
        """Whether all requests have ended."""
        return self._num_ended == self._num_requests

    def start(self, key: int) -> None:
        """Record that request `key` is sent now."""
        if len(self._burst) < self._num_in_burst:
            self._burst.add(key)
        self._started[key] = time.perf_counter()

    def tokens(self, key: int, count: int) -> None:
        """Record that `count` tokens of `key` arrive now."""
        if count < 1:
            return
        now_s = time.perf_counter()
        latest_s = self._latest.get(key)
        if latest_s is None:
            times_s = self._burst_s if key in self._burst else self._ttft_s
            times_s.append(now_s - self._started[key])
        else:
            self._itl_s.append(now_s - latest_s)
        if count > 1:
            self._itl_s += [0.0] * (count - 1)
        self._latest[key] = now_s
        self._num_tokens += count

    def end(self, key: int) -> None:
        """Record that `key` has ended."""
        del self._latest[key]
        self._num_ended += 1

    def summary(self) -> LoadSummary:
        """Return the summary. All requests must have ended."""
        elapsed_s, cpu_s = time.perf_counter() - self._begin_s, time.process_time() - self._cpu_s
        burst, ttft, itl = self._burst_s, self._ttft_s, self._itl_s
        return LoadSummary(
            burst_mean=float(np.mean(burst)) * 1e3,
            burst_p99=percentile_ms(burst, 99),
            ttft_mean=float(np.mean(ttft)) * 1e3,
            ttft_p50=percentile_ms(ttft, 50),
            ttft_p99=percentile_ms(ttft, 99),
            itl_mean=float(np.mean(itl)) * 1e3,
            itl_p50=percentile_ms(itl, 50),
            itl_p99=percentile_ms(itl, 99),
            tokens_per_s=self._num_tokens / elapsed_s,
            num_tokens=self._num_tokens,
            client_us=cpu_s * 1e6 / self._num_tokens,
        )


async def closed_loop(
    load: Load, generate: Callable[[Records, int, Request], Awaitable[None]]
) -> LoadSummary:
    """Run `load` with one task per request in flight; return the summary.

    `generate` sends one request and records its start, tokens and end under its key.
    """
    waiting = iter(list(enumerate(load.requests())))
    records = Records(load)

    async def one_after_another() -> None:
        for key, request in waiting:
            await asyncio.sleep(request.pause_s)
            await generate(records, key, request)

    async with asyncio.TaskGroup() as group:
        for _ in range(load.concurrency):
            group.create_task(one_after_another())
    return records.summary()


async def answer_loads(run: Callable[[Load], Awaitable[LoadSummary]]) -> None:
    """Run the loads read from stdin, one JSON object per line, until it is closed; print the
    results of each.
    """
    # As the engine process does: existing objects are long-lived.
    gc.collect()
    gc.freeze()
    print_json({})
    while line := await asyncio.to_thread(sys.stdin.readline):
        print_json(asdict(await run(Load(**json.loads(line)))))


def print_json(data: dict[str, float]) -> None:
    """Print one line of JSON, marked with ANSWER for the parent process."""
    print(ANSWER + json.dumps(data), flush=True)
