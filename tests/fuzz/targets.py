"""The decoders of untrusted bytes, each as a function of bytes that raises only if there is a bug.

Contains the list of targets, and the errors that each decoder may raise for invalid bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz.corpus import MULTIPLEX, seeds
from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import Failure, RequestError
from penstock.server.front.limits import Limits
from penstock.server.observe.trace_context import parse_traceparent
from penstock.server.rpc.mapping_in.generation import read_generation, valid_request_id
from penstock.server.rpc.multiplex_service import apply_command
from penstock.server.rpc.parsing import num_unknown_fields, parse, parse_request
from penstock.server.rpc.statuses import abort_of
from penstock.server.security.policy_file import BadPolicy, parse_policy
from penstock.server.security.web_tokens import BadKeySet, read_key_set
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import model_service_pb2 as model_pb
from support.fronts import INFO

Target = Callable[[bytes], None]
LIMITS = Limits.from_config(FrontConfig(max_prompt_bytes=2000), INFO)
_MESSAGES: tuple[type[Any], ...] = (
    pb.CancelRequest,
    pb.ResumeRequest,
    pb.GenerateOnceRequest,
    model_pb.TokenizeRequest,
    model_pb.DetokenizeRequest,
    model_pb.ListModelsRequest,
    model_pb.GetModelRequest,
)


def read_request(data: bytes) -> None:
    """Read the bytes as a GenerateRequest of an unauthenticated caller, up to the point where it
    needs an engine.
    """
    try:
        message = parse(pb.GenerateRequest, data)
        num_unknown_fields(message)
        valid_request_id(message)
        read_generation(message, LIMITS, ("tiny", "demo"))
    except RequestError as error:
        # The error message is within the limit and can be encoded.
        abort = abort_of(error.failure)
        assert len(abort.message.encode()) <= 1024


def parse_messages(data: bytes) -> None:
    for message_type in _MESSAGES:
        try:
            num_unknown_fields(parse(message_type, data))
        except RequestError as error:
            abort_of(error.failure)


def _check_status(error: Exception) -> None:
    assert str(error)


class _Table:
    """Accepts the commands of a Multiplex call, and decodes submissions as the real request table
    does.
    """

    def submit(self, submit: Any, failure: Failure | None) -> None:
        if failure is not None:
            raise RequestError(failure)
        read_generation(submit.generation, LIMITS, ("tiny", "demo"))

    def cancel(self, key: int) -> None:
        assert key >= 0

    def give_credit(self, key: int, num_tokens: int) -> None:
        assert key >= 0
        assert num_tokens >= 1


def read_command(data: bytes) -> None:
    table: Any = _Table()
    try:
        apply_command(*parse_request(pb.MultiplexRequest, data), table)
    except RequestError as error:
        abort_of(error.failure)


def read_trace_headers(data: bytes) -> None:
    """Parse the bytes up to the first line feed as a traceparent and the rest as a tracestate; then
    parse both again as text.
    """
    parent, _, state = data.partition(b"\n")
    for one, other in ((parent, state), (parent.decode("latin-1"), state.decode("latin-1"))):
        found = parse_traceparent(one, other)
        assert found is None or len(found.trace_id) == 16


def read_policy(data: bytes) -> None:
    """Parse a policy file: an invalid one must raise BadPolicy, because other errors would end a
    service.
    """
    try:
        parse_policy(data.decode("utf-8", "replace"), Path("/nowhere"))
    except BadPolicy as error:
        _check_status(error)


def read_keys(data: bytes) -> None:
    try:
        read_key_set(data, ("RS256", "ES256", "EdDSA"))
    except BadKeySet as error:
        _check_status(error)


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        read_request,
        parse_messages,
        read_command,
        read_trace_headers,
        read_policy,
        read_keys,
    )
}
_POLICY = b"""version = 1
[tenants.acme]
rights = ["generate", "cancel"]
max_priority = 10
weight = 2.0
max_num_live = 5
tokens = [{ sha256 = "%s" }]
certificates = ["cn:acme"]
[jwt]
jwks_file = "keys.json"
issuer = "https://issuer.example"
audience = "penstock"
""" % (b"0" * 64)
_KEYS = b"""{"keys": [
 {"kty": "OKP", "crv": "Ed25519", "kid": "1", "alg": "EdDSA",
  "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"},
 {"kty": "oct", "k": "c2VjcmV0"}, {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}]}"""


def corpus(name: str) -> list[bytes]:
    """Return the initial inputs for fuzzing a target."""
    wire = seeds()
    of_messages = [data for path, some in wire.items() for data in some if path != MULTIPLEX]
    return {
        "read_request": wire["/penstock.v1.GenerationService/Generate"],
        "parse_messages": of_messages,
        "read_command": wire[MULTIPLEX],
        "read_trace_headers": [
            b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\nrojo=00f067aa0ba902b7",
            b"cc-" + b"f" * 32 + b"-" + b"1" * 16 + b"-09-what-comes-later\n" + b"a=1," * 40,
        ],
        "read_policy": [_POLICY],
        "read_keys": [_KEYS],
    }[name]
