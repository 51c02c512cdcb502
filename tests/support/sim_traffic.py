"""Traffic for sweeps of simulations, where other processes can import it."""

from collections.abc import Iterable, Sequence

from penstock.server.observe.recording.trace import TraceRequest


def every_second(trace: Sequence[TraceRequest]) -> Iterable[TraceRequest]:
    return trace[::2]


def failing(trace: Sequence[TraceRequest]) -> Iterable[TraceRequest]:
    raise LookupError("no such traffic")
