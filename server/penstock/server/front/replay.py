"""Replays the requests of a lost engine, so that the next engine continues them.

Decides which requests wait for the next engine and for how long, checks the deadlines of waiting
requests, and ends requests that cannot continue. `kept_requests.py` defines what is submitted. All
code runs on one event loop.
"""

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np

from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.events import Completed, Failed
from penstock.scheduler.executor import Feature
from penstock.scheduler.request import NO_TIME, FailureReason, FinishReason, RequestSpec
from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import ENGINE_DOWN
from penstock.server.front.kept_requests import submit, submit_result
from penstock.server.front.limits import Limits
from penstock.server.front.live_request import LiveRequest, LiveRequestOutput
from penstock.server.front.request_table import RequestTable
from penstock.server.front.submission import Submission
from penstock.server.ipc.ports import EnginePort, EngineUnavailable

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES: Final = 1024 * 1024
"""While the connection has more unsent bytes, no more requests are submitted. The engine reads
between steps, and thousands of requests would exceed its buffer."""
_MAX_AT_ONCE: Final = 32
_PAUSE_S: Final = 0.002


class Replays:
    """The requests of one front (gRPC server process) that wait for an engine.

    `port` returns the interface to the engine, None if there is none. `note_sent` is called for
    each request that was submitted.
    """

    def __init__(
        self,
        config: FrontConfig,
        table: RequestTable,
        port: Callable[[], EnginePort | None],
        clock: Callable[[], float],
        *,
        note_sent: Callable[[LiveRequest], None],
    ) -> None:
        self._config = config
        self._table = table
        self._port = port
        self._clock = clock
        self._note_sent = note_sent
        self._waiting: dict[LiveRequest, int] = {}
        # A heap of the due time, the number of the wait, and the request. The entry of a request
        # that no longer waits is removed when it is the earliest one.
        self._due: list[tuple[float, int, LiveRequest]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._sender: asyncio.TimerHandle | None = None
        self._limits: Limits | None = None
        self._has_new_keys = False
        self._is_disabled = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_enabled(self) -> bool:
        """True if requests continue after the loss of their engine."""
        return self._config.max_replays > 0 and not self._is_disabled

    def on_engine_lost(self, requests: Iterable[LiveRequest]) -> None:
        """Suspend the requests of a lost engine, or fail them if replays are off.

        `requests` are the live requests, the oldest first. With replays, requests that are still
        being prepared are left unchanged.
        """
        self._stop_sending()
        num_before = len(self._waiting)
        for request in requests:
            # Requests that are still being prepared have not been submitted.
            if request.outputs or not self.is_enabled:
                self.suspend(request)
        num_lost = len(self._waiting) - num_before
        if num_lost:
            noun = "request waits" if num_lost == 1 else "requests wait"
            logger.info("%d %s for the next engine", num_lost, noun)

    def suspend(self, request: LiveRequest) -> None:
        """Make a request wait for an engine, or end it if it cannot wait.

        A cancelled request ends as CANCELLED. If replays are off, or after `max_replays` replays,
        the request fails with ENGINE_DOWN. Does nothing if the request has ended or already waits.
        """
        if request.stream.is_closed or request in self._waiting:
            return
        now_s = self._clock()
        if request.is_cancelled:
            _end(request, FinishReason.CANCELLED, now_s)
        elif not self.is_enabled or request.num_replays >= self._config.max_replays:
            request.fail(ENGINE_DOWN, now_s)
        else:
            request.suspend(now_s)
            number = next(self._numbers)
            self._waiting[request] = number
            due_s = min(now_s + self._config.max_replay_wait_s, _next_due_s(request))
            heapq.heappush(self._due, (due_s, number, request))
            if self._due[0][1] == number:
                self._set_timer()

    def resubmit(self, limits: Limits, *, is_same_engine: bool) -> None:
        """Submit the waiting requests to a connected engine, as fast as it reads them.

        If `is_same_engine`, only the connection was lost. Requests then get new keys, because
        events of earlier submissions may still arrive.
        """
        self._limits = limits
        self._has_new_keys = is_same_engine
        self._send_some()

    def submit_attached(self, request: LiveRequest, limits: Limits | None) -> None:
        """Submit a request whose engine was lost while this front took over its stream.

        Suspends it instead if no engine is connected, and ends it if it was cancelled.
        """
        port = self._port()
        if port is None or limits is None or request.is_cancelled:
            self.suspend(request)
            return
        try:
            self._send(request, limits, port)
        except EngineUnavailable:
            self.suspend(request)

    def cancel(self, request: LiveRequest) -> bool:
        """End a waiting request as CANCELLED. Returns False if it does not wait."""
        if self._waiting.pop(request, None) is None:
            return False
        _end(request, FinishReason.CANCELLED, self._clock())
        return True

    def forget(self, request: LiveRequest) -> None:
        """Remove a request from the waiting requests. Idempotent."""
        self._waiting.pop(request, None)

    def disable(self) -> None:
        """Fail all waiting requests, and from now on each request that would have to wait, because
        no further engine will be started."""
        self._is_disabled = True
        self._stop_sending()
        waiting, self._waiting = self._waiting, {}
        now_s = self._clock()
        for request in waiting:
            request.fail(ENGINE_DOWN, now_s)
        self._due.clear()
        self._set_timer()

    def _stop_sending(self) -> None:
        self._limits = None
        if self._sender is not None:
            self._sender.cancel()
            self._sender = None

    def _send_some(self) -> None:
        self._sender = None
        limits, port = self._limits, self._port()
        if limits is None or port is None:
            return
        for _ in range(_MAX_AT_ONCE):
            if not self._waiting or port.num_unsent_bytes > MAX_UNSENT_BYTES:
                break
            request = next(iter(self._waiting))
            try:
                self._send(request, limits, port)
            except EngineUnavailable:
                return  # The engine was lost again, which is reported separately.
            self._waiting.pop(request, None)
        if self._waiting:
            pause_s = _PAUSE_S if port.num_unsent_bytes > MAX_UNSENT_BYTES else 0.0
            self._sender = asyncio.get_running_loop().call_later(pause_s, self._send_some)

    def _send(self, request: LiveRequest, limits: Limits, port: EnginePort) -> None:
        """Submit a request for continuation. For a request that has ended, submit only its result;
        fail a request that cannot be continued.

        Raises EngineUnavailable if no engine is connected.
        """
        now_s = self._clock()
        _end_complete(request, now_s)
        submission = request.submission
        if request.stream.is_closed or submission is None:
            submit_result(port, request)
            return
        if self._has_new_keys or not self._table.owns_keys(request):
            self._table.renew_keys(request)
        if not submit(port, request, replay_specs(request, limits)):
            request.fail(ENGINE_DOWN, now_s)
            return
        keys = {output.index: output.key for output in request.outputs}
        first = tuple(replace(spec, key=keys[spec.output_index]) for spec in submission.specs)
        request.resubmit(msgspec.structs.replace(submission, specs=first), now_s)
        self._note_sent(request)

    def _set_timer(self) -> None:
        """Set the timer to the earliest due time of a waiting request, or cancel it if no request
        waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._due and self._waiting.get(self._due[0][2]) != self._due[0][1]:
            heapq.heappop(self._due)
        if self._due:
            delay_s = max(0.0, self._due[0][0] - self._clock())
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        """End each waiting request whose deadline or maximum wait has passed."""
        now_s = self._clock()
        while self._due and self._due[0][0] <= now_s:
            _, number, request = heapq.heappop(self._due)
            if self._waiting.get(request) == number:
                del self._waiting[request]
                _time_out(request, now_s)
        self._set_timer()


def _next_due_s(request: LiveRequest) -> float:
    """Return the earliest deadline or time limit of a request. The deadline for the first token is
    ignored once that token has arrived."""
    leader = request.specs[0]
    ttft_s = leader.ttft_deadline_s if request.first_token_s == NO_TIME else NO_TIME
    return min(leader.deadline_s, leader.time_limit_s, ttft_s)


def _time_out(request: LiveRequest, now_s: float) -> None:
    """End a request whose deadline has passed, or whose wait for an engine has timed out.

    A deadline or time limit ends it as the engine would have; a wait that is too long ends it with
    ENGINE_DOWN.
    """
    leader = request.specs[0]
    if leader.time_limit_s <= now_s:
        _end(request, FinishReason.TIME_LIMIT, now_s)
    elif leader.deadline_s <= now_s:
        _fail(request, FailureReason.DEADLINE_EXCEEDED, leader.deadline_s, now_s)
    elif request.first_token_s == NO_TIME and leader.ttft_deadline_s <= now_s:
        _fail(request, FailureReason.TTFT_DEADLINE_EXCEEDED, leader.ttft_deadline_s, now_s)
    else:
        request.fail(ENGINE_DOWN, now_s)


def _fail(request: LiveRequest, reason: FailureReason, deadline_s: float, now_s: float) -> None:
    output = _live_outputs(request)[0]
    after_s = deadline_s - request.arrival_s
    request.on_failed(output, Failed(key=output.key, at_s=now_s, reason=reason, deadline_s=after_s))


def _end(request: LiveRequest, reason: FinishReason, now_s: float) -> None:
    """End all outputs of a request, with the tokens that they have."""
    for output in _live_outputs(request):
        request.on_completed(output, Completed(key=output.key, at_s=now_s, reason=reason), now_s)
    request.stream.wake()


def _end_complete(request: LiveRequest, now_s: float) -> None:
    """Finish outputs that have all their tokens. Only their end event was lost with the engine."""
    for output in _live_outputs(request):
        spec = request.specs[output.index]
        token_ids = output.token_ids
        reason, stop_id = FinishReason.LENGTH, -1
        if len(token_ids) > spec.min_tokens and token_ids and token_ids[-1] in spec.stop_ids:
            reason, stop_id = FinishReason.STOP, token_ids[-1]
        elif len(token_ids) < spec.max_tokens:
            continue
        end = Completed(key=output.key, at_s=now_s, reason=reason, stop_id=stop_id)
        output.num_repeating = 0
        request.on_completed(output, end, now_s)
        request.stream.wake()


def _live_outputs(request: LiveRequest) -> list[LiveRequestOutput]:
    return [output for output in request.outputs if output.is_live]


def replay_specs(request: LiveRequest, limits: Limits) -> tuple[RequestSpec, ...]:
    """Return a spec for each output that has not ended, in order, with its current key; empty if
    the request was never submitted.

    Also sets `num_repeating` of these outputs. Each output must have at least one more token to
    generate.
    """
    submission = request.submission
    if submission is None:
        return ()
    hashes = _prompt_hashes(submission, limits)
    specs: list[RequestSpec] = []
    for output in request.outputs:
        if not output.is_live:
            continue
        spec = submission.specs[output.index]
        is_first_due = request.first_token_s == NO_TIME
        sampling = spec.sampling
        is_kept = request.generation.resumption is not None
        # The next engine must also keep the stream of a resumable request.
        if request.head.prompt.is_delivered and not is_kept:
            sampling = replace(sampling, num_prompt_logprobs=-1)
        spec = replace(
            spec,
            key=output.key,
            # The leader may have ended.
            leader_key=specs[0].key if specs else 0,
            block_hashes=hashes,
            num_replays=request.num_replays + 1,
            ttft_deadline_s=spec.ttft_deadline_s if is_first_due else NO_TIME,
            sampling=sampling,
        )
        specs.append(_continued(spec, output, limits, is_kept=is_kept))
    return tuple(specs)


def _prompt_hashes(submission: Submission, limits: Limits) -> tuple[bytes, ...]:
    """Return the block hashes of the client's prompt, without output tokens, for the block size of
    `limits`."""
    leader = submission.specs[0]
    if not leader.hash_salt or submission.block_size == limits.block_size:
        return leader.block_hashes
    return hash_blocks(leader.prompt_ids, limits.block_size, chain_root(leader.hash_salt))


def _continued(
    spec: RequestSpec, output: LiveRequestOutput, limits: Limits, *, is_kept: bool
) -> RequestSpec:
    """Return `spec` with the tokens of the output so far appended to its prompt, so that the engine
    generates only the tokens after them.

    Returns `spec` unchanged if the output must be generated again from its start. Sets
    `output.num_repeating`. `is_kept` is True for a resumable request.
    """
    num_tokens = len(output.token_ids)
    output.num_repeating = 0
    if not num_tokens:
        return spec
    has_logprobs = spec.sampling.num_logprobs >= 0 and Feature.SEED in limits.features
    if _must_restart(spec, num_tokens, limits) or (is_kept and has_logprobs):
        # Log probabilities are not kept, and a resuming client needs them, so they are computed
        # again.
        output.num_repeating = num_tokens
        return spec
    prompt_ids = np.concatenate((spec.prompt_ids, np.array(output.token_ids, dtype=np.int32)))
    hashes = spec.block_hashes
    if spec.hash_salt:
        previous = hashes[-1] if hashes else chain_root(spec.hash_salt)
        rest = prompt_ids[len(hashes) * limits.block_size :]
        hashes = (*hashes, *hash_blocks(rest, limits.block_size, previous))
    return replace(spec, prompt_ids=prompt_ids, num_replayed=num_tokens, block_hashes=hashes)


def _must_restart(spec: RequestSpec, num_tokens: int, limits: Limits) -> bool:
    """Return True if the output must be generated again from its start.

    A constraint is tracked from the start of the output, and an executor may limit prompts to less
    than its context length.
    """
    most = limits.max_engine_prompt_tokens
    is_too_long = most is not None and spec.num_prompt_tokens + num_tokens > most
    return spec.constraint is not None or is_too_long
