"""The accounts of requests, as far as calls and messages tell of them.

Owns the reading of trace context and peer from a call, and of what is told of a request from its
message. Nothing is read where no accounts are kept.
"""

from collections.abc import Iterable

from penstock.server.front.front import Front
from penstock.server.front.request_account import Outcome, RequestAccount
from penstock.server.rpc.handlers import Context
from penstock.server.telemetry.request_record import RequestOptions
from penstock.server.telemetry.trace_context import (
    TRACEPARENT_KEY,
    TRACESTATE_KEY,
    RemoteParent,
    parse_traceparent,
)
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1.options_pb2 import SamplingOptions

_DIGITS = 6
"""Options travel as single-precision numbers: 0.7 would be told as 0.699999988."""


class CallAccounts:
    """Accounts of the requests of one service's calls, over one front."""

    def __init__(self, front: Front, service_name: str) -> None:
        self._front = front
        self._service_name = service_name

    def open(self, method: str, context: Context) -> RequestAccount:
        """See `AccountKeeper`."""
        return self.open_under(method, peer_of(self._front, context), self.parent_of(context))

    def open_under(self, method: str, peer: str, parent: RemoteParent | None) -> RequestAccount:
        """The account of a request that does not have its call to itself."""
        front = self._front
        name = f"{self._service_name}/{method}"
        return front.accounts.open(name, arrival_s=front.clock(), peer=peer, parent=parent)

    def close(self, account: RequestAccount, outcome: Outcome) -> None:
        """See `AccountKeeper`."""
        self._front.close_account(account, outcome)

    def parent_of(self, context: Context) -> RemoteParent | None:
        """The span that a call's metadata names, if any is named well and only one."""
        if not self._front.accounts.is_tracing:
            return None
        metadata: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
        parents: list[str | bytes] = []
        states: list[str] = []
        for key, value in metadata:
            if key == TRACEPARENT_KEY:
                parents.append(value)
            elif key == TRACESTATE_KEY:
                states.append(value if isinstance(value, str) else value.decode("latin-1"))
        if len(parents) != 1:
            return None
        return parse_traceparent(parents[0], ",".join(states))

    def describe(
        self, account: RequestAccount, message: pb.GenerateRequest, *, is_stream: bool
    ) -> None:
        """What `message` asks for, whether or not it is then refused."""
        front = self._front
        if not front.accounts.are_kept:
            return
        # A name that is not ours could be anything, and would be a new series in every metric.
        if not message.HasField("model") or message.model in front.model_names:
            account.model = front.model
        account.options = _options_of(message, is_stream=is_stream)


def peer_of(front: Front, context: Context) -> str:
    """Where a call comes from, as gRPC writes it; empty where nobody asks."""
    return context.peer() if front.accounts.are_kept else ""


def _options_of(message: pb.GenerateRequest, *, is_stream: bool) -> RequestOptions:
    options = RequestOptions(message.WhichOneof("prompt") == "chat", is_stream)
    if message.HasField("sampling"):
        _read_sampling(message.sampling, options)
    if message.HasField("stopping") and message.stopping.HasField("max_tokens"):
        options.max_tokens = message.stopping.max_tokens
    if message.HasField("scheduling"):
        options.priority = message.scheduling.priority
    return options


def _read_sampling(sampling: SamplingOptions, options: RequestOptions) -> None:
    # Only what is set is listed, in one call for all.
    for descriptor, value in sampling.ListFields():
        match descriptor.name:
            case "n":
                options.num_outputs = value
            case "top_k" | "seed":
                setattr(options, descriptor.name, value)
            case "temperature" | "top_p" | "frequency_penalty" | "presence_penalty":
                setattr(options, descriptor.name, round(value, _DIGITS))
            case _:
                pass
