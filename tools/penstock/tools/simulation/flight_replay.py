"""Flight recordings as input in place of a trace or measured steps.

Owns their report. Their layout is the flight package's.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.server.cli.connection import UsageError

if TYPE_CHECKING:
    from penstock.server.observe.recording.trace import TraceRequest
    from penstock.tools.simulation.calibration import Calibration


def flight_trace_of(path: Path) -> "Iterator[TraceRequest]":
    """The requests of a recording, and on stderr what is not among them. Raises UsageError."""
    from penstock.server.observe.flight.layout import FlightError
    from penstock.tools.simulation.flight_trace import flight_trace

    try:
        trace = flight_trace(path)
    except FlightError as error:
        raise UsageError(f"{path}: {error}") from error
    print(
        f"{path}: a flight recording of {len(trace.requests):,} requests,"
        f" {trace.num_left_out:,} left out; what prompts have in common is not in it",
        file=sys.stderr,
    )
    return iter(trace.requests)


def calibrate_from_flight(path: Path) -> "Calibration":
    """Prices fitted to the steps of a recording. Raises UsageError."""
    from penstock.tools.simulation.calibration import fit_cost
    from penstock.tools.simulation.flight_trace import flight_steps

    try:
        return fit_cost(*flight_steps(path))
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
