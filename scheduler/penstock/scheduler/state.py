"""Defines the states of a request, the events that change them, and every legal transition.

A request is PROCESSING if and only if it has a slot and blocks (checked by
`penstock.scheduler.integrity`). Why it ended is in its last event (events.py).

Prefill and decode are not states: they follow from how many of the request's tokens are computed. A
cancelled request is COMPLETED, so that ERROR counts server errors only.
"""

import enum


class RequestState(enum.IntEnum):
    """The state of a request. COMPLETED and ERROR are final."""

    PENDING = 1
    PROCESSING = 2
    COMPLETED = 3
    ERROR = 4


class RequestEvent(enum.Enum):
    """The events that change the state of a request."""

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
    """`TRANSITIONS` has no entry for this state and event. Always a bug, never a client error."""

    def __init__(self, state: RequestState, event: RequestEvent) -> None:
        super().__init__(f"{state.name} cannot take {event.name}")
        self.state = state
        self.event = event


def transition(state: RequestState, event: RequestEvent) -> RequestState:
    """Return the next state; raise IllegalTransition if there is none."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransition(state, event) from None
