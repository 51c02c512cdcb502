"""Connection options in addition to the address: TLS, certificates, token.

Defines these options, their environment variables, and the resulting arguments for clients.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.scheduler.setting import setting
from penstock.server.cli.connection import UsageError, connection_error, describe_error
from penstock.server.settings.table import ON, add_to, declared

if TYPE_CHECKING:
    import grpc.aio

    from penstock.client import Client, PenstockError, SyncClient
    from penstock.client.call_settings import Pairs
    from penstock.server.settings.sources import Sources

_GROUP: Final = "connection"
_LONG_WAIT_S = 3.0
_ClientT = TypeVar("_ClientT")


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """The connection options of a command, except for the address."""

    tls: bool = setting(False, _GROUP, "use TLS, with the authorities that this system trusts")
    token_file: Path | None = setting(
        None, _GROUP, "file with a bearer token, read before each call"
    )
    ca: Path | None = setting(
        None, _GROUP, "PEM file with the authorities for the service's certificate; implies TLS"
    )
    cert: Path | None = setting(
        None, _GROUP, "PEM file with a certificate chain to show, where TLS is mutual"
    )
    key: Path | None = setting(None, _GROUP, "PEM file with its key")
    server_name: str | None = setting(
        None,
        _GROUP,
        "the name in the service's certificate, if it is not the host of the address",
        metavar="NAME",
    )


_SETTINGS: Final = tuple(
    replace(item, setting=replace(item.setting, shown=f"${item.variable}"))
    for item in declared(ConnectionOptions)
)
CONNECTION_VARIABLES: Final = tuple(item.variable for item in _SETTINGS)


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each of the connection options."""
    group = parser.add_argument_group(_GROUP)
    for item in _SETTINGS:
        if item.kind is bool:
            text = f"{item.setting.help} (default: {item.shown_default})"
            group.add_argument(f"--{item.flag}", action="store_const", const=ON, help=text)
        else:
            add_to(group, [item])


def reject_connection_options(args: argparse.Namespace, reason: str) -> None:
    """Raise UsageError if a connection option was passed as a flag."""
    for item in _SETTINGS:
        if getattr(args, item.name) is not None:
            raise UsageError(f"--{item.flag} cannot be combined with {reason}")


def read_connection_options(args: argparse.Namespace) -> ConnectionOptions:
    """Return the connection options that flags or environment variables set; an empty variable sets
    no file or name. Raises UsageError if the variable of `--tls` is neither on nor off."""
    return _sources(args).build(ConnectionOptions, {})


def _sources(args: argparse.Namespace) -> "Sources":
    from penstock.server.settings.sources import BadSetting, gather

    texts = {item.variable for item in _SETTINGS if item.kind is not bool}
    environment = {name: text for name, text in os.environ.items() if text or name not in texts}
    try:
        return gather(_SETTINGS, vars(args), environment)
    except BadSetting as error:
        raise UsageError(str(error)) from None


def client_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return arguments for any client: `token` and `tls`.

    The server name is an option of `ChannelConfig` instead. Raises UsageError if a file is missing
    or unreadable, or if the options are inconsistent.
    """
    options = sender_options(args)
    tls, token_file = options["tls"], options["token_file"]
    spelling = _sources(args).spell("token_file")
    token = None if token_file is None else _token_reader(spelling, token_file)
    return {"tls": False if tls is None else tls, "token": token}


def sender_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return `tls`, `server_name` and `token_file` for load generators. Raises UsageError as
    `client_options` does."""
    from penstock.client import TlsConfig

    sources = _sources(args)
    options = sources.build(ConnectionOptions, {})
    files = {"ca": options.ca, "cert": options.cert, "key": options.key}
    is_tls = options.tls or any(files.values())
    if options.server_name is not None and not is_tls:
        raise UsageError(f"{sources.spell('server_name')} requires --tls or --ca")
    try:
        tls = TlsConfig(**files) if is_tls else None
    except ValueError:
        given, lacking = ("cert", "key") if options.key is None else ("key", "cert")
        raise UsageError(f"{sources.spell(given)} requires --{lacking}") from None
    for name, path in files.items():
        if path is not None:
            _check_pem(sources.spell(name), path, is_key=name == "key")
    if options.token_file is not None:
        _token_reader(sources.spell("token_file"), options.token_file)
    return {"tls": tls, "server_name": options.server_name, "token_file": options.token_file}


def connect(args: argparse.Namespace) -> "SyncClient":
    """Create a client for the service at the address in the arguments. Raises UsageError if the
    address or a connection option is invalid."""
    from penstock.client import SyncClient

    return _connect(SyncClient, args)


def connect_for_streams(args: argparse.Namespace) -> "Client":
    """Create an asyncio client for the running event loop; otherwise the same as `connect`.

    Ctrl-C during a stream is only safe with asyncio, because asyncio cancels the task. In the
    blocking client, KeyboardInterrupt may leave locks of gRPC's streams held.
    """
    from penstock.client import Client

    return _connect(Client, args)


def _connect(kind: Callable[..., _ClientT], args: argparse.Namespace) -> _ClientT:
    from penstock.client import ChannelConfig, RetryPolicy

    options = client_options(args)
    channel = ChannelConfig(server_name=read_connection_options(args).server_name)
    retry = RetryPolicy(on_retry=report_retry)
    try:
        return kind(args.address, channel=channel, retry=retry, **options)
    except (ValueError, OSError) as error:
        raise connection_error(args, error) from error


def report_retry(error: "PenstockError", wait_s: float) -> None:
    """Report on stderr that a request is retried after a wait of at least `_LONG_WAIT_S` seconds.
    Without this report the command would seem to hang."""
    if wait_s >= _LONG_WAIT_S:
        # Without the wait that the service suggests: the line has one already.
        cause = describe_error(type(error)(replace(error.failure, retry_after_s=None)))
        line = f"penstock: {cause}: trying again in {wait_s:.0f} s; Ctrl-C to stop"
        print(line, file=sys.stderr, flush=True)


def bare_channel(
    address: str, options: Mapping[str, Any], server_name: str | None
) -> "Callable[[], tuple[grpc.aio.Channel, Pairs]]":
    """Return a function that opens a channel as a client with these arguments would.

    The function returns the channel and the metadata of a call.
    """
    import grpc.aio

    from penstock.client.channel import ChannelConfig, grpc_target
    from penstock.client.credentials import authorization, channel_credentials

    def opened() -> "tuple[grpc.aio.Channel, Pairs]":
        target, token = grpc_target(address), options.get("token")
        channel_options = ChannelConfig(server_name=server_name).options(target)
        credentials = channel_credentials(options.get("tls", False), None)
        metadata = () if token is None else (authorization(token),)
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=channel_options), metadata
        return grpc.aio.secure_channel(target, credentials, options=channel_options), metadata

    return opened


def _check_pem(spelling: str, path: Path, *, is_key: bool) -> None:
    """Raise UsageError if a file is unreadable or is not the expected PEM file. gRPC would only
    report a failed connection."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{spelling}: {path} cannot be read: {error.strerror}") from None
    what = b"PRIVATE KEY-----" if is_key else b"-----BEGIN CERTIFICATE-----"
    if what not in data:
        wanted = "private key" if is_key else "certificate"
        raise UsageError(f"{spelling}: {path} contains no {wanted} in PEM form")


def _token_reader(spelling: str, path: Path) -> Callable[[], str]:
    from penstock.client.credentials import token_from

    reader = token_from(path)

    def read() -> str:
        try:
            return reader()
        except OSError as error:
            raise UsageError(f"{spelling}: {path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"{spelling} {path}: {error}") from None

    read()
    return read
