"""Submits resumable requests, so that the engine keeps their streams.

Owns the conversion of a live request to a `KeptRequest`, for its first engine and for later ones.
For a later engine it includes the history, for the front that resumes the request. Pure, apart from
sending.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from penstock.scheduler.events import Finished, StepEvents
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.server.front.live_request import LiveRequest
from penstock.server.link.frames import KeptRequest, ResumeSpec
from penstock.server.link.ports import EnginePort
from penstock.server.link.step_frames import StepFrame
from penstock.server.tenants import TenantBytes, engine_request_id


def submit(port: EnginePort, request: LiveRequest, specs: tuple[RequestSpec, ...]) -> bool:
    """Submit the `specs` of a request to the engine. Raises EngineUnavailable.

    Return False, without effect, for a request without a reader that cannot be resumed.
    """
    kept = kept_of(request)
    if kept is not None:
        port.submit_kept(specs, kept)
    elif request.is_detached:
        return False
    else:
        port.submit(specs)
    return True


def kept_of(request: LiveRequest) -> KeptRequest | None:
    """Return the `KeptRequest` of a started request; None if it ends with its call.

    Also None after an engine's death if log probabilities were delivered, since they are not kept.
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
            grace_s=resumption.grace_s,
            message=resumption.message,
        ),
        keys=tuple(output.key for output in request.outputs),
        tenant=request.tenant,
        is_read=not request.is_detached,
        history=history,
    )


def result_of(request: LiveRequest) -> KeptRequest | None:
    """Return the `KeptRequest` of a request that ended with STOP or LENGTH, else None."""
    own = (FinishReason.STOP, FinishReason.LENGTH)
    if not request.ends or any(end.reason not in own for end in request.ends):
        return None
    kept = kept_of(request)
    return None if kept is None else replace(kept, is_read=False)


def submit_result(port: EnginePort, request: LiveRequest) -> None:
    """Make the engine keep what an earlier engine generated. Raises EngineUnavailable."""
    result = result_of(request)
    if result is not None:
        port.submit_kept((), result)


def _history_of(request: LiveRequest) -> StepFrame | None:
    """Return the events of earlier engines that will not be repeated."""
    delivered = [output for output in request.outputs if not output.num_repeating]
    keys = [np.full(len(output.token_ids), output.key, dtype=np.int64) for output in delivered]
    tokens = [np.array(output.token_ids, dtype=np.int32) for output in delivered]
    ends = tuple(
        Finished(
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
    return StepFrame.of(
        StepEvents(
            step=0,
            at_s=request.first_token_s,
            keys=np.concatenate(keys),
            tokens=np.concatenate(tokens),
            ends=ends,
        )
    )


_RESULT_BYTES: Final = 1536
_TOKEN_BYTES: Final = 12


class KeptResults:
    """Results of ended requests, by the engine's request names, as long as the engine keeps them.

    `max_bytes`: of all results. Above it the oldest results of the tenant with the most bytes are
    removed; they cannot be restored if the engine dies.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_name: dict[str, KeptRequest] = {}
        self._names: dict[str, dict[str, None]] = {}  # by tenant, oldest first
        self._bytes = TenantBytes()

    @property
    def num_bytes(self) -> int:
        """Total bytes of all results."""
        return self._bytes.total

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[KeptRequest]:
        """Iterate over a snapshot, oldest first."""
        return iter(tuple(self._by_name.values()))

    def add(self, result: KeptRequest) -> None:
        """Add a result; it replaces an earlier one of the same name."""
        self._remove(result.name)
        self._by_name[result.name] = result
        self._names.setdefault(result.tenant, {})[result.name] = None
        self._bytes.add(result.tenant, _size_of(result))
        while self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._names[self._bytes.largest])))

    def forget(self, name: str, keys: tuple[int, ...]) -> None:
        """Remove the result of a request that the engine has dropped."""
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
    return _RESULT_BYTES + len(result.resume_spec.message) + num_tokens * _TOKEN_BYTES
