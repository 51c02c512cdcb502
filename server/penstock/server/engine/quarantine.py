"""Quarantine for requests that may have crashed an engine.

The supervisor decides which requests are suspected, and passes their keys to the next engine. That
engine runs them one at a time (probation), together with requests that are not suspected, or
rejects them. A request passes its probation when each of its outputs has ended or has generated
`num_probation_tokens` tokens (one token if that output is not suspected). If the engine dies again,
the supervisor decides whether the request is rejected.

Uses no status board, no sockets and no clock.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.scheduler.events import Completed, Failed, StepEvents
from penstock.scheduler.request import FailureReason, FinishReason, RequestSpec
from penstock.scheduler.state import RequestState

_QUARANTINE_DETAIL = "it was in two engines when they died, in the second one alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectedRequest:
    """One output that was running in an engine when the engine died, identified by its `key`.

    `num_probation_tokens` is the number of tokens that it must generate, while no other suspected
    request runs, before it is considered harmless. If `is_poison`, it must be rejected. An invalid
    value raises ValueError, which names the field.
    """

    key: int
    num_probation_tokens: int = 2
    is_poison: bool = False

    def __post_init__(self) -> None:
        if self.key <= 0:
            raise ValueError(f"key must be positive, not {self.key}")
        if self.num_probation_tokens < 1:
            raise ValueError(
                f"num_probation_tokens must be at least 1, not {self.num_probation_tokens}"
            )


@dataclass(slots=True, eq=False)
class _HeldRequest:
    """A request in quarantine. `specs` are its outputs that have not ended, in order."""

    front_id: int
    specs: tuple[RequestSpec, ...]


class Quarantine:
    """Holds suspected requests that were submitted again. Not thread-safe.

    `mark_probation` is called with the keys of a request before it runs on probation, and with no
    keys after its probation.
    """

    def __init__(
        self, suspects: Iterable[SuspectedRequest], mark_probation: Callable[[Sequence[int]], None]
    ) -> None:
        self._suspects = {suspect.key: suspect for suspect in suspects}
        self._mark_probation = mark_probation
        self._held: deque[_HeldRequest] = deque()
        self._on_probation: dict[int, int] = {}
        self._ended: list[tuple[RequestSpec, FinishReason | None]] = []

    @property
    def has_work(self) -> bool:
        """True if the next step has a request to submit or an end to report."""
        return bool(self._ended or (self._held and not self._on_probation))

    def intercept(self, front_id: int, specs: tuple[RequestSpec, ...]) -> bool:
        """Hold or reject the request, and return True, if one of its outputs is suspected; return
        False otherwise."""
        if not self._suspects:
            return False
        suspects = [self._suspects[spec.key] for spec in specs if spec.key in self._suspects]
        if not suspects:
            return False
        if any(suspect.is_poison for suspect in suspects):
            self._ended.extend((spec, None) for spec in specs)
        else:
            self._held.append(_HeldRequest(front_id, specs))
        return True

    def next_probation(self) -> tuple[RequestSpec, ...]:
        """Start the probation of the next held request, and return its outputs; the caller submits
        them. Return () if no request is held or another request is on probation."""
        if self._on_probation or not self._held:
            return ()
        specs = self._held.popleft().specs
        for spec in specs:
            suspect = self._suspects.get(spec.key)
            self._on_probation[spec.key] = 1 if suspect is None else suspect.num_probation_tokens
        self._mark_probation(tuple(self._on_probation))
        return specs

    def with_ends(self, events: StepEvents) -> StepEvents:
        """Count the tokens of a step, and return its events together with the ends of requests that
        were rejected, or cancelled while they were held."""
        if self._on_probation:
            self._count_tokens(events)
        if not self._ended:
            return events
        ends = tuple(_end_of(spec, reason, events.at_s) for spec, reason in self._ended)
        self._ended.clear()
        return replace(events, ends=events.ends + ends)

    def cancel(self, key: int, reason: FinishReason) -> bool:
        """End a held output; the next `with_ends` reports its end. Return False if this output is
        not held."""
        for held in self._held:
            for spec in held.specs:
                if spec.key == key:
                    self._end_held(held, spec, reason)
                    return True
        return False

    def cancel_by_id(self, request_id: str) -> RequestState | None:
        """End a held request and return its state, PENDING; return None if it is not held."""
        for held in self._held:
            if held.specs[0].request_id == request_id:
                self._ended.extend((spec, FinishReason.CANCELLED) for spec in held.specs)
                self._held.remove(held)
                return RequestState.PENDING
        return None

    def front_disconnected(self, front_id: int, kept: Container[int] = ()) -> None:
        """Drop the held requests of a disconnected front (gRPC server process), except requests
        whose first output has a key in `kept`."""
        self._held = deque(
            held for held in self._held if held.front_id != front_id or held.specs[0].key in kept
        )

    def _end_held(self, held: _HeldRequest, ended: RequestSpec, reason: FinishReason) -> None:
        self._ended.append((ended, reason))
        rest = tuple(spec for spec in held.specs if spec is not ended)
        if not rest:
            self._held.remove(held)
            return
        if ended is held.specs[0]:
            leader, *others = rest
            others = [replace(spec, leader_key=leader.key) for spec in others]
            rest = (replace(leader, leader_key=0), *others)
        held.specs = rest

    def _count_tokens(self, events: StepEvents) -> None:
        for key, num_left in tuple(self._on_probation.items()):
            num_left -= int((events.keys == key).sum())
            if num_left > 0:
                self._on_probation[key] = num_left
            else:
                del self._on_probation[key]
        for end in events.ends:
            self._on_probation.pop(end.key, None)
        if not self._on_probation:
            self._mark_probation(())


def _end_of(spec: RequestSpec, reason: FinishReason | None, at_s: float) -> Completed | Failed:
    """Return the end event of `spec`: `Completed` with `reason`. If `reason` is None, the request
    is rejected and the event is `Failed`."""
    if reason is not None:
        return Completed(key=spec.key, at_s=at_s, reason=reason)
    return Failed(
        key=spec.key,
        at_s=at_s,
        reason=FailureReason.EXECUTOR_REQUEST_FAILED,
        request_id=spec.request_id,
        trace_id=spec.trace_id,
        detail=_QUARANTINE_DETAIL,
    )
