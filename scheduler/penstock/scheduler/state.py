"""The states of a request: four states, five events, one table.

Owns every legal transition. Does not know why a request ended (the request stores that), nor which
requests hold blocks; `penstock.scheduler.integrity` checks that a request is `PROCESSING` if and
only if it owns a slot and blocks.

Prefill and decode are not states: they follow from the number of computed tokens and the request's
total. A cancelled request is COMPLETED, so that ERROR counts server errors only.
"""

import enum


class RequestState(enum.IntEnum):
    """The state of a request. COMPLETED and ERROR are final."""

    PENDING = 1
    PROCESSING = 2
    COMPLETED = 3
    ERROR = 4


class RequestEvent(enum.Enum):
    """The events of a request."""

    ADMIT = "admit"
    PREEMPT = "preempt"
    FINISH = "finish"
    CANCEL = "cancel"
    FAIL = "fail"


TRANSITIONS: dict[RequestState, dict[RequestEvent, RequestState]] = {
    RequestState.PENDING: {
        RequestEvent.ADMIT: RequestState.PROCESSING,
        RequestEvent.CANCEL: RequestState.COMPLETED,
        RequestEvent.FAIL: RequestState.ERROR,
    },
    RequestState.PROCESSING: {
        RequestEvent.PREEMPT: RequestState.PENDING,
        RequestEvent.FINISH: RequestState.COMPLETED,
        RequestEvent.CANCEL: RequestState.COMPLETED,
        RequestEvent.FAIL: RequestState.ERROR,
    },
    RequestState.COMPLETED: {},
    RequestState.ERROR: {},
}


class IllegalTransition(Exception):
    """The table has no transition for this state and event: a bug, never a client error."""

    def __init__(self, state: RequestState, event: RequestEvent) -> None:
        super().__init__(f"{state.name} cannot take {event.name}")
        self.state = state
        self.event = event


def transition(state: RequestState, event: RequestEvent) -> RequestState:
    """Return the next state; raise IllegalTransition on an empty cell."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransition(state, event) from None
