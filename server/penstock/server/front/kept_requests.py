"""Submits requests to the engine; the engine keeps the streams of resumable requests.

Converts a resumable request to a `KeptRequest` each time it is submitted to an engine. After a
restart of the engine, this includes the history (the tokens and ends so far), so that another front
(gRPC server process) can resume the request. Also stores the results of ended requests, to submit
them to the next engine.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from penstock.scheduler.events import Completed, StepEvents
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.server.front.live_request import LiveRequest
from penstock.server.ipc.frames import KEPT_TOKEN_BYTES, EngineHello, KeptRequest, ResumeSpec
from penstock.server.ipc.ports import EnginePort
from penstock.server.ipc.step_frames import StepFrame
from penstock.server.tenants import TenantBytes, engine_request_id


@dataclass(frozen=True, slots=True, eq=False)
class Attachment:
    """A kept stream that is being attached to a request of this front: the keys of its outputs, the
    events not yet applied, and the first frame (hello) of its engine."""

    resume_spec: ResumeSpec
    keys: tuple[int, ...]
    events: deque[StepEvents]
    hello: EngineHello | None


def submit(port: EnginePort, request: LiveRequest, specs: tuple[RequestSpec, ...]) -> bool:
    """Submit the `specs` of a request to the engine and return True.

    Returns False, without submitting, if the request has no reader and cannot be resumed. Raises
    EngineUnavailable if no engine is connected.
    """
    kept = kept_of(request)
    if kept is None and request.is_detached:
        return False
    port.submit(specs, kept)
    return True


def kept_of(request: LiveRequest) -> KeptRequest | None:
    """Return the part of a submission that makes the engine keep the stream of a started request
    for Resume.

    Returns None if the request ends with its call, or if it has a history (see `_history_of`) and
    its client requested log probabilities, because a history does not contain them.
    """
    resumption = request.generation.resumption
    if resumption is None:
        return None
    history = _history_of(request)
    if history is not None and request.generation.output.num_logprobs >= 0:
        return None
    first = request.specs[0]
    return KeptRequest(
        name=engine_request_id(request.tenant, request.request_id),
        resume_spec=ResumeSpec(
            request_id=request.request_id,
            seed=first.sampling.seed,
            arrival_s=request.arrival_s,
            deadline_s=first.deadline_s,
            resume_timeout_s=resumption.resume_timeout_s,
            message=resumption.message,
        ),
        keys=tuple(output.key for output in request.outputs),
        tenant=request.tenant,
        is_read=not request.is_detached,
        history=history,
    )


def result_of(request: LiveRequest) -> KeptRequest | None:
    """Return the part of a submission that makes another engine keep the stream of an ended request
    for Resume.

    Returns None if an output has not ended or has ended with neither STOP nor LENGTH, or if
    `kept_of` returns None.
    """
    own = (FinishReason.STOP, FinishReason.LENGTH)
    if not request.ends or any(end.reason not in own for end in request.ends):
        return None
    kept = kept_of(request)
    return None if kept is None else replace(kept, is_read=False)


def submit_result(port: EnginePort, request: LiveRequest) -> None:
    """If an ended request has a result, send the result to a new engine; the engine keeps it.
    Raises EngineUnavailable if no engine is connected."""
    result = result_of(request)
    if result is not None:
        port.submit((), result)


def _history_of(request: LiveRequest) -> StepFrame | None:
    """Return the tokens and ends so far of the outputs that the next engine does not generate
    again; None if there are no tokens and no ends."""
    delivered = [output for output in request.outputs if not output.num_repeating]
    keys = [np.full(len(output.token_ids), output.key, dtype=np.int64) for output in delivered]
    tokens = [np.array(output.token_ids, dtype=np.int32) for output in delivered]
    ends = tuple(
        Completed(
            key=output.key,
            at_s=request.first_token_s,
            reason=output.end.reason,
            stop_id=-1 if output.end.stop_token_id is None else output.end.stop_token_id,
        )
        for output in delivered
        if output.end is not None
    )
    if not ends and not any(map(len, tokens)):
        return None
    return StepFrame.from_events(
        StepEvents(
            step=0,
            at_s=request.first_token_s,
            keys=np.concatenate(keys),
            tokens=np.concatenate(tokens),
            ends=ends,
        )
    )


_RESULT_BYTES: Final = 1536


class KeptResults:
    """Results of ended requests, by `engine_request_id`, for as long as the engine keeps their
    streams.

    `max_bytes` limits the size of all results. Above it the oldest results of the tenant with the
    most bytes are removed; removed results are lost if the engine dies.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_name: dict[str, KeptRequest] = {}
        self._names: dict[str, dict[str, None]] = {}  # By tenant, oldest first.
        self._bytes = TenantBytes()

    @property
    def num_bytes(self) -> int:
        """Total size of all results, in bytes."""
        return self._bytes.total

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[KeptRequest]:
        """Iterate over a snapshot, oldest first."""
        return iter(tuple(self._by_name.values()))

    def add(self, result: KeptRequest) -> None:
        """Add a result. It replaces an earlier result with the same name."""
        self._remove(result.name)
        self._by_name[result.name] = result
        self._names.setdefault(result.tenant, {})[result.name] = None
        self._bytes.add(result.tenant, _size_of(result))
        while self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._names[self._bytes.largest])))

    def forget(self, name: str, keys: tuple[int, ...]) -> None:
        """Remove the result with this name and these keys, because another front has taken the
        stream over or the engine has dropped it."""
        result = self._by_name.get(name)
        if result is not None and result.keys == keys:
            self._remove(name)

    def _remove(self, name: str) -> None:
        result = self._by_name.pop(name, None)
        if result is None:
            return
        self._bytes.add(result.tenant, -_size_of(result))
        names = self._names[result.tenant]
        del names[name]
        if not names:
            del self._names[result.tenant]


def _size_of(result: KeptRequest) -> int:
    num_tokens = 0 if result.history is None else len(result.history.tokens)
    return _RESULT_BYTES + len(result.resume_spec.message) + num_tokens * KEPT_TOKEN_BYTES
