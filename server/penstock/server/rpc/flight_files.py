"""Flight recordings for operators: StepRecord messages, or a trace file.

Slow for many steps: run it off the event loop.
"""

from penstock.server.observe.flight.reader import FlightReader
from penstock.server.observe.flight.timeline import timeline_json
from penstock.server.rpc.mapping_flight import step_records
from penstock.v1 import stats_pb2


def record_steps(data: bytes, max_steps: int | None) -> list[stats_pb2.StepRecord]:
    """The latest steps of a recording, oldest first; all of them without `max_steps`."""
    return list(step_records(FlightReader(data).recording(), max_steps))


def perfetto_file(data: bytes, max_steps: int | None) -> bytes:
    """The recording as a Chrome trace in JSON."""
    return b"".join(timeline_json(FlightReader(data).recording(), num_steps=max_steps))
