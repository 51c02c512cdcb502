"""What `penstock serve` prints on stdout: a banner on a terminal, elsewhere lines for scripts.

Owns both forms. Log lines are not its: they go to stderr.
"""

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from penstock.server.cli.connection import default_address, default_operations_address
from penstock.server.cli.installation import version_of
from penstock.server.cli.report import printable
from penstock.server.observe.logs import leave_out_banner_lines

if TYPE_CHECKING:
    from penstock.server.config import ServerConfig
    from penstock.server.processes.supervisor import ServiceReady

_PROMPT = "Once upon a time"


def prepare_terminal(config: "ServerConfig") -> None:
    """On a terminal, print that the service starts, and drop log lines that repeat the banner."""
    if not sys.stdout.isatty():
        return
    if sys.stderr.isatty():
        leave_out_banner_lines()
    version = version_of("penstock") or "(version unknown)"
    _print([f"Penstock {version}: starting with {printable(str(config.model_path))} ..."])


def announce(ready: "ServiceReady") -> None:
    """Print that the service is ready, and where."""
    _print(banner_lines(ready) if sys.stdout.isatty() else script_lines(ready))


def script_lines(ready: "ServiceReady") -> list[str]:
    """A line for each address."""
    resources = f"; {ready.resources}" if ready.resources else ""
    lines = [
        f"penstock ready on {ready.address} (model {ready.model}, {_executor(ready)},"
        f" {ready.start_s:.1f} s{resources})"
    ]
    if ready.operations_address is not None:
        lines.append(f"penstock operations on {ready.operations_address}")
    if ready.metrics_url is not None:
        lines.append(f"penstock metrics on {ready.metrics_url}")
    return lines


def banner_lines(ready: "ServiceReady") -> list[str]:
    """Name and value of what a person needs, once, and what to type next."""
    rows = [
        ("model", f"{printable(ready.model)} ({_executor(ready)})"),
        ("device", ready.resources),
        ("address", f"{ready.address} (gRPC)"),
        ("status page", (ready.metrics_url or "").removesuffix("metrics")),
        *(("try" if first else "", command) for first, command in _commands(ready)),
        ("stop", "Ctrl-C"),
    ]
    shown = [f"  {name:<11}  {value}" for name, value in rows if value]
    return ["", f"Penstock is ready after {ready.start_s:.1f} s.", "", *shown, ""]


def _commands(ready: "ServiceReady") -> list[tuple[bool, str]]:
    """Commands to try in another terminal; with TLS, whose files are unknown, only a hint."""
    if ready.has_tls:
        return [(True, "penstock generate --help  (connection: --tls)")]
    commands = [(True, f'penstock generate "{_PROMPT}"')]
    if default_address(os.environ) != ready.address:
        commands = [(True, f"{commands[0][1]} --address {ready.address}")]
    if (operations := ready.operations_address) is not None:
        is_default = default_operations_address(os.environ) == operations
        commands.append(
            (False, "penstock top" + ("" if is_default else f" --address {operations}"))
        )
    return commands


def _executor(ready: "ServiceReady") -> str:
    fronts = "1 front" if ready.num_fronts == 1 else f"{ready.num_fronts} fronts"
    return f"{ready.executor} executor, {fronts}"


def _print(lines: list[str]) -> None:
    # The reader of stdout may be gone; the service continues.
    with contextlib.suppress(BrokenPipeError):
        print("\n".join(lines), flush=True)
