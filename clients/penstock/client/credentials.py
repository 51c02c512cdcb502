"""Creates a client's credentials: the bearer token of its calls, and TLS or mutual TLS.

Reads PEM and token files, and enforces that a token does not cross a network in plain text.
"""

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc

from penstock.client.argument_types import require_type

Token: TypeAlias = str | Callable[[], str]
"""A bearer token, or a function that returns one. The function is called for each call, because
tokens expire."""

MAX_TOKEN_BYTES = 16384
"""Maximum size of a token file, in bytes. The limit of servers is lower."""
_UNIX_SCHEMES = ("unix:", "unix-abstract:")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """TLS with PEM files, which are read when a client is created.

    Raises ValueError if only one of `cert` and `key` is given.

    Attributes:
        ca: Certificates of the trusted authorities; None: the authorities trusted by the system.
        cert: The client's certificate chain, for mutual TLS.
        key: The client's private key, for mutual TLS.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key: each requires the other")

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials for gRPC. Raises OSError for a file that cannot be read."""
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))


def token_from(path: Path) -> Callable[[], str]:
    """Return a function that reads a bearer token from a file at each call, because the file may
    change.

    The function raises OSError if the file cannot be read, and ValueError if it is too large or
    contains no valid token.
    """

    def read() -> str:
        with path.open("rb") as file:
            data = file.read(MAX_TOKEN_BYTES + 1)
        if len(data) > MAX_TOKEN_BYTES:
            raise ValueError(f"token: {path} is too large for a token file")
        try:
            token = data.decode("ascii").strip()
        except UnicodeDecodeError:
            raise ValueError(f"token: {path} contains no token") from None
        _check_form(token)
        return token

    return read


def channel_credentials(
    tls: bool | TlsConfig, credentials: grpc.ChannelCredentials | None
) -> grpc.ChannelCredentials | None:
    """Return channel credentials; None for plain text. If `tls` is True, the system's certificate
    authorities are trusted.

    Raises ValueError if both are given, TypeError for another type, and OSError for a file that
    cannot be read.
    """
    require_type(tls, "tls", bool, TlsConfig)
    require_type(credentials, "credentials", grpc.ChannelCredentials, None)
    if tls is False:
        return credentials
    if credentials is not None:
        raise ValueError("tls and credentials: only one of them can be given")
    return (TlsConfig() if tls is True else tls).credentials()


def check_token(token: Token | None, targets: Sequence[str], *, is_encrypted: bool) -> None:
    """Raise ValueError for a token that is invalid or would cross a network in plain text, and
    TypeError unless it is a str, a function or None. A token function is not called, so only the
    targets are checked for it."""
    if not callable(token):
        require_type(token, "token", str, None)
    if token is None:
        return
    if isinstance(token, str):
        _check_form(token)
    if is_encrypted:
        return
    for target in targets:
        if not _is_local(target):
            raise ValueError(
                f"token: would cross the network to {target} in plain text; set tls, or send it"
                " as metadata if that is intended"
            )


def authorization(token: Token) -> tuple[str, str]:
    """Return the metadata pair with the token; a token function is called. Raises ValueError for an
    invalid token, and the errors of the function."""
    text = token if isinstance(token, str) else token()
    _check_form(text)
    return "authorization", f"Bearer {text}"


def _check_form(token: str) -> None:
    # The token is not quoted, because the message may be logged.
    if not (token and token.isascii() and token.isprintable() and " " not in token):
        raise ValueError("token: must be printable ASCII without a space, and not empty")


def _is_local(target: str) -> bool:
    if target.startswith(_UNIX_SCHEMES):
        return True
    text = target.removeprefix("dns:").removeprefix("ipv4:").removeprefix("ipv6:")
    hosts = [part.rsplit(":", 1)[0].strip("[]") for part in text.lstrip("/").split(",")]
    return all(_is_loopback(host) for host in hosts)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
