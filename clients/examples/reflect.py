"""Lists, describes and calls methods of any gRPC server with reflection, in JSON.

Similar to grpcurl, with Python packages and without generated code. Independent of Penstock: the
descriptors come from the server.

    python reflect.py 127.0.0.1:50051 list
    python reflect.py 127.0.0.1:50051 describe penstock.v1.TextPrompt
    python reflect.py 127.0.0.1:50051 call penstock.v1.ModelService/ListModels '{}'

Consecutive JSON objects are separate messages, for methods that take a stream. A status other than
OK is reported with its details, and the exit code is then 1.
"""

import argparse
import base64
import binascii
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf import descriptor_pb2, json_format, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_status import rpc_status

from google.rpc import error_details_pb2


class Server:
    """The services and message types of a server, as reflection returns them."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = DescriptorPool(cast(Any, self._database))

    def method_names(self) -> Iterator[str]:
        """Yield the names of all methods, as `service/method`. Raises grpc.RpcError."""
        for service in self._database.get_services():
            for method in self._pool.FindServiceByName(service).methods:
                yield f"{service}/{method.name}"

    def describe(self, symbol: str) -> str:
        """Return the descriptor of a top-level service, message or enumeration, as text. Raises
        KeyError for any other symbol, and grpc.RpcError."""
        file = self._pool.FindFileContainingSymbol(symbol)
        found: Any
        for kind in ("services_by_name", "message_types_by_name", "enum_types_by_name"):
            found = getattr(file, kind).get(symbol.removeprefix(f"{file.package}."))
            if found is not None:
                proto = _PROTOS[kind]()
                found.CopyToProto(proto)
                return f"// {file.name}\n{proto}"
        raise KeyError("not a service, a message or an enumeration")

    def call(self, name: str, text: str) -> Iterator[str]:
        """Call the method `name` with the JSON objects in `text`, or with an empty message if there
        are none, and yield the responses as JSON.

        Raises grpc.RpcError, KeyError for an unknown method, and ValueError or
        json_format.ParseError for invalid JSON.
        """
        method = self._method(name)
        request_class = message_factory.GetMessageClass(method.input_type)
        requests = [
            json_format.ParseDict(value, request_class(), descriptor_pool=self._pool)
            for value in _json_values(text)
        ]
        response_class = message_factory.GetMessageClass(method.output_type)
        # In HTTP/2 a single message is a stream of one message.
        multi = self._channel.stream_stream(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=_serialized,
            response_deserializer=response_class.FromString,
        )
        for response in multi(iter(requests or [request_class()])):
            yield json_format.MessageToJson(response, descriptor_pool=self._pool)

    def _method(self, name: str) -> MethodDescriptor:
        """Return the method with the name `service/method`.

        Raises KeyError for an unknown service or method, and grpc.RpcError.
        """
        service_name, slash, method_name = name.removeprefix("/").partition("/")
        if not (service_name and slash and method_name):
            raise KeyError("not SERVICE/METHOD")
        methods = self._pool.FindServiceByName(service_name).methods_by_name
        if method_name not in methods:
            raise KeyError(f"no such method; {service_name} has {', '.join(sorted(methods))}")
        return methods[method_name]


# The import adds these types to the descriptor pool of this process.
_GOOGLE_RPC = error_details_pb2.DESCRIPTOR
_PROTOS: dict[str, Any] = {
    "services_by_name": descriptor_pb2.ServiceDescriptorProto,
    "message_types_by_name": descriptor_pb2.DescriptorProto,
    "enum_types_by_name": descriptor_pb2.EnumDescriptorProto,
}


def _details(error: grpc.RpcError) -> Iterator[str]:
    """Yield the details of a status as JSON; for a detail of an unknown type, only its type URL."""
    status = cast(Any, rpc_status).from_call(error)
    for detail in () if status is None else status.details:
        try:
            yield json_format.MessageToJson(detail, indent=None)
        except (TypeError, KeyError):
            yield json.dumps({"@type": detail.type_url})


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


def _json_values(text: str) -> Iterator[Any]:
    """Yield the JSON values in `text`, one by one. Raises ValueError for invalid JSON."""
    decoder = json.JSONDecoder()
    rest = text.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        yield value
        rest = rest[end:].lstrip()


Header: TypeAlias = tuple[str, str | bytes]


class _WithMetadata(grpc.ClientCallDetails):
    """A copy of the call details with additional metadata; gRPC's own details are immutable."""

    def __init__(self, details: grpc.ClientCallDetails, metadata: list[Header]) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = (*(details.metadata or ()), *metadata)
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = details.compression


class _Headers(grpc.StreamStreamClientInterceptor):
    """Adds metadata to all calls, including reflection calls, because a server may require
    authorization for them."""

    def __init__(self, headers: list[Header]) -> None:
        self._metadata = headers

    def intercept_stream_stream(
        self,
        continuation: Callable[[grpc.ClientCallDetails, Any], Any],
        client_call_details: grpc.ClientCallDetails,
        request_iterator: Iterator[Any],
    ) -> Any:
        return continuation(_WithMetadata(client_call_details, self._metadata), request_iterator)


def _channel(args: argparse.Namespace) -> grpc.Channel:
    if args.ca is None:
        channel = grpc.insecure_channel(args.address)
    else:
        channel = grpc.secure_channel(args.address, grpc.ssl_channel_credentials(args.ca))
    return grpc.intercept_channel(channel, _Headers(args.header))


def _header(text: str) -> Header:
    """Parse `NAME: VALUE` as metadata. If a name ends in -bin, its value is bytes, encoded in
    base64.

    Raises ArgumentTypeError for other texts.
    """
    name, colon, value = text.partition(":")
    name, value = name.strip().lower(), value.strip()
    if not colon:
        raise argparse.ArgumentTypeError(f"not NAME: VALUE: {text!r}")
    if not re.fullmatch(r"[0-9a-z_.-]+", name):
        raise argparse.ArgumentTypeError(f"a name has letters, digits and _ . - only: {name!r}")
    if not name.endswith("-bin"):
        if not (value.isascii() and value.isprintable()):
            raise argparse.ArgumentTypeError(f"{name}: a value is printable ASCII")
        return name, value
    try:
        return name, base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise argparse.ArgumentTypeError(f"{name}: not base64: {error}") from error


def _read_authorities(path: str) -> bytes:
    """Return the content of a PEM file. Raises ArgumentTypeError if it cannot be read or contains
    no certificate."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from error
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise argparse.ArgumentTypeError(f"{path}: no certificate in PEM")
    return content


def _parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Call a gRPC server by reflection.")
    parser.add_argument("address", help="HOST:PORT")
    parser.add_argument("action", choices=("list", "describe", "call"))
    parser.add_argument("name", nargs="?", help="a symbol, or SERVICE/METHOD")
    parser.add_argument("data", nargs="?", help="JSON; - reads it from stdin")
    parser.add_argument(
        "--ca", type=_read_authorities, metavar="FILE", help="PEM file with authorities, for TLS"
    )
    parser.add_argument(
        "--header", type=_header, action="append", default=[], metavar="NAME: VALUE",
        help="sent with every call",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.action != "list" and args.name is None:
        parser.error(f"{args.action} requires a name")
    if args.action == "list" and args.name is not None:
        parser.error("list takes no arguments")
    if args.action != "call" and args.data is not None:
        parser.error(f"{args.action} takes no data")
    return args


def main(argv: list[str]) -> int:
    """Run the program and return the exit code."""
    args = _parse_args(argv)
    with _channel(args) as channel:
        server = Server(channel)
        try:
            if args.action == "list":
                answers = server.method_names()
            elif args.action == "describe":
                answers = iter((server.describe(args.name),))
            else:
                data = sys.stdin.read() if args.data == "-" else args.data
                answers = server.call(args.name, data or "")
            for answer in answers:
                print(answer, flush=True)
        except grpc.RpcError as error:
            call = cast(Any, error)
            print(f"{call.code().name}: {call.details()}", *_details(error), sep="\n",
                  file=sys.stderr)  # fmt: skip
            return 1
        except (KeyError, ValueError, json_format.ParseError) as error:
            # str() of a KeyError would quote its message.
            reason = error.args[0] if isinstance(error, KeyError) else error
            print(f"{args.name}: {reason}", file=sys.stderr)
            return 1
        except BrokenPipeError:
            # The reader of the pipe, e.g. `head`, has exited.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
