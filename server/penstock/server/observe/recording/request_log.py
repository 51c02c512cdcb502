"""Converts the submissions and events of an engine to a workload trace. The trace has the lengths,
arrival times and shared prefixes of the requests.

A trace contains no text and no token ids, and tenants are renamed `tenant-1`, `tenant-2` and so on.
It contains no block hashes either, because a reader could verify a guessed prompt with them. Uses
neither files nor threads.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.events import Completed, Failed
from penstock.scheduler.request import FailureReason, FinishReason, RequestSpec
from penstock.server.observe.recording.trace import TraceRequest

MAX_NUM_HELD = 100_000
"""Maximum number of ended requests that wait for an earlier live request. Beyond it the live
request is left out of the trace."""
_ID_BYTES = 6
_FIRST_PRIVATE_ID = 1 << (8 * _ID_BYTES)
CAPACITY_FAILURES = frozenset(
    (
        FailureReason.QUEUE_FULL,
        FailureReason.TENANT_OVER_QUOTA,
        FailureReason.TTFT_DEADLINE_EXCEEDED,
        FailureReason.DEADLINE_EXCEEDED,
        FailureReason.TTFT_DEADLINE_UNREACHABLE,
        FailureReason.DEADLINE_UNREACHABLE,
    )
)
"""Failure reasons that are caused by lack of capacity."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    """A submitted output of a request. `num_output_tokens` is None while it is live, and 0 if it is
    left out of the trace."""

    spec: RequestSpec
    num_output_tokens: int | None = None


class RequestLog:
    """Receives submissions, tokens and ends in order; returns requests in order of arrival.

    `secret` (up to 64 bytes) is the key from which prefix ids are derived; equal secrets give equal
    ids.

    The output length of a request is the number of tokens that it generated. A request that failed
    for lack of capacity before its first token is part of the load, but its output length is
    unknown. It is set to the mean output length of the requests completed before, or to
    `max_tokens` if that is less or if no request was completed. All other requests without a token,
    such as invalid ones, are left out and counted in `num_left_out`. If a request continues after
    an engine crash, its earlier output is part of its prompt, because the engine computes it again.
    """

    def __init__(self, *, block_size: int, secret: bytes, max_num_held: int = MAX_NUM_HELD) -> None:
        self.num_left_out = 0
        self._block_size = block_size
        self._secret = secret
        self._max_num_held = max_num_held
        self._order: deque[_Entry] = deque()
        self._live: dict[int, _Entry] = {}
        self._num_tokens: Counter[int] = Counter()
        self._tenants: dict[str, str] = {"": ""}
        self._start_s: float | None = None
        self._latest_s = 0.0
        self._num_completed = 0
        self._num_completed_tokens = 0
        self._num_private_ids = 0

    @property
    def num_live(self) -> int:
        """Number of live requests."""
        return len(self._live)

    def add(self, specs: Iterable[RequestSpec]) -> None:
        """Add the outputs of submitted requests, in order of submission."""
        for spec in specs:
            entry = _Entry(spec=spec)
            self._live[spec.key] = entry
            self._order.append(entry)

    def add_tokens(self, keys: NDArray[np.int64]) -> None:
        """Add one generated token for each key of an output in `keys` (int64 [n]). A key may occur
        several times."""
        self._num_tokens.update(keys.tolist())

    def end(self, end: Completed | Failed) -> None:
        """End an output. Call this after its tokens. Unknown keys are ignored."""
        entry = self._live.pop(end.key, None)
        num_tokens = self._num_tokens.pop(end.key, 0)
        if entry is None:
            return
        if isinstance(end, Completed) and end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._num_completed += 1
            self._num_completed_tokens += num_tokens
        if not num_tokens and end.reason in CAPACITY_FAILURES and isinstance(end, Failed):
            num_tokens = self._likely_tokens(entry.spec)
        entry.num_output_tokens = num_tokens

    def take(self) -> list[TraceRequest]:
        """Remove and return the ended requests in order of arrival, up to the first request that is
        still live.

        If more than `max_num_held` requests are stored, the earliest live ones are left out of the
        trace, so that they do not hold back later requests.
        """
        ready: list[TraceRequest] = []
        order = self._order
        while order and (order[0].num_output_tokens is not None or len(order) > self._max_num_held):
            entry = order.popleft()
            if entry.num_output_tokens:
                ready.append(self._request(entry.spec, entry.num_output_tokens))
                continue
            self.num_left_out += 1
            if entry.num_output_tokens is None:
                del self._live[entry.spec.key]
        return ready

    def _likely_tokens(self, spec: RequestSpec) -> int:
        if not self._num_completed:
            return spec.max_tokens
        mean = round(self._num_completed_tokens / self._num_completed)
        return min(spec.max_tokens, max(1, mean))

    def _request(self, spec: RequestSpec, num_output_tokens: int) -> TraceRequest:
        if self._start_s is None:
            self._start_s = spec.arrival_s
        # Fronts set the arrival time and the engine sets the order. A request that reached the
        # engine late gets the arrival time of the requests with which it was queued.
        self._latest_s = max(self._latest_s, spec.arrival_s - self._start_s)
        return TraceRequest(
            arrival_s=round(self._latest_s, 6),
            num_prompt_tokens=spec.num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            tenant=self._tenant(spec.tenant),
            priority=spec.priority,
            ttft_deadline_s=max(spec.ttft_deadline_s - spec.arrival_s, 1e-6),
            deadline_s=max(spec.deadline_s - spec.arrival_s, 1e-6),
            prefix_ids=self._prefix_ids(spec),
            prefix_block_tokens=self._block_size,
        )

    def _tenant(self, name: str) -> str:
        return self._tenants.setdefault(name, f"tenant-{len(self._tenants)}")

    def _prefix_ids(self, spec: RequestSpec) -> tuple[int, ...]:
        if not spec.block_hashes:
            return ()
        ids = [
            int.from_bytes(
                blake2b(digest, digest_size=_ID_BYTES, key=self._secret).digest(), "little"
            )
            for digest in spec.block_hashes
        ]
        if len(ids) * self._block_size < spec.num_prompt_tokens:
            # A partial block is not shared.
            ids.append(_FIRST_PRIVATE_ID + self._num_private_ids)
            self._num_private_ids += 1
        return tuple(ids)
