"""Measures the CPU time that a front (gRPC server process) spends on a request's record, from which
metrics and traces are computed.

Runs only this code, on one thread, without gRPC and without an engine: opens the request's account
(the data for the record) with the caller's trace context, records the message's parameters, closes
the account when the request has ended, creates and encodes the record, and sends it in batches to a
reading process. Compares this with the same calls in a front process without an observer (the
process that receives the records and exports traces). The request (`LiveRequest`) is created before
the clock starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import uvloop
from numpy.typing import NDArray

from penstock.scheduler.events import Queued, Residency, Wait
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.server.front.accounts import Accounts, Outcome
from penstock.server.front.events import OutputEnd
from penstock.server.front.generation import GenerationSpec, TokenInput
from penstock.server.front.live_output import LiveOutput
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.submission import Submission
from penstock.server.observe.exporter import Exporter
from penstock.server.observe.frames import Hello
from penstock.server.observe.request_record import RequestRecorder
from penstock.server.rpc.handlers import CallAccounts
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import options_pb2, prompt_pb2
from report import RunFailed
from services import expect_ready, process

_NUM_BATCH = 500
_NUM_TOKENS = 16
_OK = Outcome(code=0)
_PAUSE_S = 0.06
"""Pause between batches, seconds; longer than the delay with which records are sent."""
_READER = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
front, _ = listener.accept()
while front.recv(1 << 20):
    pass
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPath:
    """Microseconds per request: `watched` is the total with an observer, `unwatched` the total
    without one, and `added` the difference.

    The parts of `watched`: `begin` (open the account under the call's trace), `describe` (record
    the message's parameters), `close` (create, encode, count and offer the record), `flush` (send
    it).
    """

    watched: float
    unwatched: float
    added: float
    begin: float
    describe: float
    close: float
    flush: float


class _Context:
    """A stand-in for the context of a call, with the attributes that accounts read."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:50123"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (
            ("user-agent", "grpc-python-asyncio/1.85.1"),
            ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        )


def _message() -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_prompt=prompt_pb2.TokenPrompt(ids=range(64)),
        sampling=options_pb2.SamplingOptions(temperature=0.7, top_p=0.9, seed=7),
        stopping=options_pb2.StoppingOptions(max_tokens=_NUM_TOKENS, ignore_eos=True),
    )


def _ended_request(number: int) -> LiveRequest:
    """Return a request that was queued, ran, and has ended."""
    arrival_s = 100.0 + number
    generation = GenerationSpec(prompt=TokenInput(ids=(1, 2, 3)), prompt_path="token_ids")
    live = LiveRequest(f"request-{number}", generation, arrival_s)
    spec = RequestSpec(
        key=number,
        request_id=live.request_id,
        prompt_ids=np.arange(64, dtype=np.int32),
        max_tokens=_NUM_TOKENS,
    )
    text = cast(Any, SimpleNamespace(num_tokens=_NUM_TOKENS, is_plain=True, finish=None))
    submission = Submission(specs=(spec,), seed=7, deadline_kind="server", block_size=16)
    live._submission = submission  # noqa: SLF001
    live.outputs = (LiveOutput(live, 0, number, text, live.stream),)
    live.head.queue_position = Queued(
        key=number, at_s=arrival_s, num_ahead=3, estimated_queue_s=0.01
    )
    phases = live.phases
    phases.note_submitted(arrival_s + 0.001)
    wait = Wait(blocks_s=0.0, slots_s=0.004, token_budget_s=0.001, other_s=0.0, num_passed_by=0)
    phases.note_admitted(arrival_s + 0.006, wait=wait)
    phases.note_token(arrival_s + 0.011)
    phases.add_details(
        residency=Residency(num_chunks=1, num_steps=16, min_batch_size=40, max_batch_size=60)
    )
    phases.stop(arrival_s + 0.09)
    live.first_token_s = arrival_s + 0.011
    live.has_engine_end = True
    reason = FinishReason.LENGTH
    live.ends = (OutputEnd(output_index=0, reason=reason, num_completion_tokens=_NUM_TOKENS),)
    return live


class _Front:
    """A stand-in for a front, with the attributes that the accounts of its calls read."""

    def __init__(self, recorder: RequestRecorder | None) -> None:
        self.accounts = Accounts(
            recorder, is_tracing=recorder is not None, front_id=1, has_content=False
        )
        self.model = "model"
        self.model_names = frozenset({"model"})
        self.is_engine_up = True
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s


async def _batch_us(
    recorder: RequestRecorder | None, requests: list[LiveRequest], message: pb.GenerateRequest
) -> NDArray[np.float64]:
    """Return the microseconds per request, float64 [4], that a batch takes on this thread: begin,
    describe, close, flush.
    """
    front = _Front(recorder)
    calls = CallAccounts(cast(Any, front), "penstock.v1.GenerationService")
    context = cast(Any, _Context())
    edges_ns = [time.thread_time_ns()]
    accounts = [calls.open("Generate", context) for _ in requests]
    edges_ns.append(time.thread_time_ns())
    for account in accounts:
        calls.describe(account, message, is_stream=True)
    edges_ns.append(time.thread_time_ns())
    for account, request in zip(accounts, requests, strict=True):
        account.request = request
        front.now_s = request.arrival_s + 0.091
        calls.close(account, _OK)
    edges_ns.append(time.thread_time_ns())
    # The cost of the idle loop during the pause is negligible.
    await asyncio.sleep(_PAUSE_S)
    edges_ns.append(time.thread_time_ns())
    return np.diff(edges_ns) / len(requests) * 1e-3


async def _measured(path: Path, num_batches: int) -> RecordPath:
    """Return the costs, measured with records sent to the reader at the socket `path`."""
    exporter = Exporter(
        path, Hello(front_id=1, pid=1), request_views=lambda: (), execute=lambda _, __: None
    )
    await exporter.start()
    recorder = RequestRecorder(exporter.offer)
    requests, message = [_ended_request(n) for n in range(1, _NUM_BATCH + 1)], _message()
    gc.collect()
    gc.freeze()
    both: list[list[NDArray[np.float64]]] = []
    for _ in range(num_batches + 1):
        unwatched = await _batch_us(None, requests, message)
        both.append([unwatched, await _batch_us(recorder, requests, message)])
    gc.unfreeze()
    if sum(exporter.dropped.values()) or recorder.num_unreadable:
        raise RunFailed(
            f"records were dropped: {exporter.dropped}, unreadable: {recorder.num_unreadable}"
        )
    await exporter.close(1.0)
    times_us = np.array(both[1:])  # the first batch of each is warm-up
    parts_us = np.median(times_us[:, 1], axis=0)
    all_us = times_us.sum(axis=2)
    return RecordPath(
        watched=float(np.median(all_us[:, 1])),
        unwatched=float(np.median(all_us[:, 0])),
        added=float(np.median(all_us[:, 1] - all_us[:, 0])),
        begin=float(parts_us[0]),
        describe=float(parts_us[1]),
        close=float(parts_us[2]),
        flush=float(parts_us[3]),
    )


@contextlib.contextmanager
def _reader() -> Generator[Path]:
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = Path(folder) / "observer.sock"
        with process(sys.executable, "-c", _READER, str(path)) as started:
            expect_ready(started)
            yield path


def measure_record_path(num_batches: int) -> RecordPath:
    """Return medians over `num_batches` batches of 500 requests. Raises RunFailed."""
    with _reader() as path:
        return uvloop.run(_measured(path, num_batches))
