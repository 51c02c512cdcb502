"""The accounts of requests, as far as calls and messages describe them.

Reads trace context and peer from a call, and the options of a request from its message. Nothing is
read where no accounts are kept.
"""

from collections.abc import Iterable

from penstock.server.front.front import Front
from penstock.server.front.request_account import Outcome, RequestAccount
from penstock.server.observe.request_record import RequestOptions
from penstock.server.observe.trace_context import (
    NOT_TRACED,
    TRACEPARENT_KEY,
    TRACESTATE_KEY,
    RemoteParent,
    parse_traceparent,
)
from penstock.server.rpc.handlers import Context
from penstock.v1 import generation_service_pb2 as pb

_OPTION_DIGITS = 6
"""They arrive in single precision: 0.7 would be recorded as 0.699999988."""


class CallAccounts:
    """Accounts of the requests of one service's calls, over one front."""

    def __init__(self, front: Front, service_name: str) -> None:
        self._front = front
        self._accounts = front.accounts
        self._model = front.model
        self._model_names = front.model_names
        self._service_name = service_name

    def open(self, method: str, context: Context) -> RequestAccount:
        """See `AccountKeeper`."""
        if not self._accounts.are_kept:
            return RequestAccount(method, "", self._front.clock(), NOT_TRACED)
        return self.open_under(method, context.peer(), self.parent_of(context))

    def open_under(self, method: str, peer: str, parent: RemoteParent | None) -> RequestAccount:
        """The account of a request that shares its call with others."""
        name = f"{self._service_name}/{method}"
        arrival_s = self._front.clock()
        return self._accounts.open(name, arrival_s=arrival_s, peer=peer, parent=parent)

    def close(self, account: RequestAccount, outcome: Outcome) -> None:
        """See `AccountKeeper`."""
        if self._accounts.are_kept:
            self._front.close_account(account, outcome)

    def parent_of(self, context: Context) -> RemoteParent | None:
        """The span in a call's metadata, if there is exactly one valid value."""
        if not self._accounts.is_tracing:
            return None
        metadata: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
        traceparent: str | bytes | None = None
        states: list[str] = []
        for key, value in metadata:
            if key == TRACEPARENT_KEY:
                if traceparent is not None:
                    return None
                traceparent = value
            elif key == TRACESTATE_KEY:
                states.append(value if isinstance(value, str) else value.decode("latin-1"))
        if traceparent is None:
            return None
        return parse_traceparent(traceparent, ",".join(states) if states else "")

    def describe(
        self, account: RequestAccount, message: pb.GenerateRequest, *, is_stream: bool
    ) -> None:
        """Record the options of `message`, whether or not it is refused later."""
        if not self._accounts.are_kept:
            return
        # Another name could be anything, and would add a series to every metric.
        if not message.HasField("model") or message.model in self._model_names:
            account.model = self._model
        account.options = _options_of(message, is_stream=is_stream)


def peer_of(front: Front, context: Context) -> str:
    """The address of the peer, as gRPC writes it; empty without accounts."""
    return context.peer() if front.accounts.are_kept else ""


def _options_of(message: pb.GenerateRequest, *, is_stream: bool) -> RequestOptions:
    sampling, stopping = message.sampling, message.stopping
    is_set = sampling.HasField
    return RequestOptions(
        message.HasField("chat_prompt"),
        is_stream,
        sampling.num_outputs if is_set("num_outputs") else 1,
        stopping.max_tokens if stopping.HasField("max_tokens") else None,
        round(sampling.temperature, _OPTION_DIGITS) if is_set("temperature") else None,
        round(sampling.top_p, _OPTION_DIGITS) if is_set("top_p") else None,
        sampling.top_k if is_set("top_k") else None,
        round(sampling.frequency_penalty, _OPTION_DIGITS) if is_set("frequency_penalty") else None,
        round(sampling.presence_penalty, _OPTION_DIGITS) if is_set("presence_penalty") else None,
        sampling.seed if is_set("seed") else None,
        message.scheduling.priority,
    )
