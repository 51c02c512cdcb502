"""The twenty scenarios by name, in order, and the driver's actions during two of them.

README.md next to this file specifies each one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class DriverAction(enum.Enum):
    """The action of the driver once the program reports that it is ready."""

    NOTHING = "nothing"
    KILL_ENGINE = "kill the engine"
    DRAIN = "drain the service, then say go"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario: its name in the protocol, and its requirement in one line."""

    name: str
    holds: str
    act: DriverAction = DriverAction.NOTHING


SCENARIOS = (
    Scenario(name="stream_in_order", holds="one accepted, tokens, one finished; no gap"),
    Scenario(name="once_equals_stream", holds="GenerateOnce has the text of the stream"),
    Scenario(name="token_prompt", holds="token ids in, the same ids out, twice"),
    Scenario(name="chat", holds="a conversation streams text"),
    Scenario(name="utf8_across_chunks", holds="whole characters in every chunk; the prompt echoed"),
    Scenario(name="large_prompt", holds="a prompt of 100,000 tokens"),
    Scenario(name="invalid_field", holds="INVALID_ARGUMENT names the field in BadRequest"),
    Scenario(name="unknown_model", holds="NOT_FOUND with ErrorInfo MODEL_NOT_FOUND"),
    Scenario(name="unimplemented_feature", holds="UNIMPLEMENTED names the feature"),
    Scenario(name="duplicate_request_id", holds="ALREADY_EXISTS; the first continues"),
    Scenario(name="cancel_after_first_token", holds="leaving the call ends the request"),
    Scenario(name="cancel_by_id", holds="Cancel ends a stream well, CANCELLED"),
    Scenario(name="deadline", holds="a deadline of 1 s: DEADLINE_EXCEEDED"),
    Scenario(name="queue_full", holds="RESOURCE_EXHAUSTED with RetryInfo and QUEUE_FULL"),
    Scenario(name="metadata", holds="traceparent sent, the trace id answered; the request id kept"),
    Scenario(name="multiplex", holds="nine requests on one stream: errors, cancel, credit by key"),
    Scenario(name="resume", holds="cut after 20 tokens, whole on a new connection"),
    Scenario(name="retry_after_rejection", holds="rejected for a full queue, served in the end"),
    Scenario(
        name="engine_killed",
        holds="the engine killed: no error, no gap",
        act=DriverAction.KILL_ENGINE,
    ),
    Scenario(
        name="drain",
        holds="new requests UNAVAILABLE, the running one whole",
        act=DriverAction.DRAIN,
    ),
)

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
