"""Measures the time to encode and to decode the frames between a front (gRPC server process) and
the engine.

Measures two requests, with 512 and 8,192 prompt tokens, and two steps of 256 tokens, one of which
also ends eight requests. Uses one thread and no socket.

    python benchmarks/ipc_frames.py [--full] [--json FILE]
"""

from __future__ import annotations

import timeit
from argparse import Namespace
from typing import Any

import numpy as np

from penstock.scheduler.events import Completed, Residency, StepEvents, Wait
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.server.ipc.frames import Frame, Submit, decode, encode
from penstock.server.ipc.wire import FrameBuffer
from report import Outcome, arguments, at_most, print_rows, run

NUM_CALLS = 5000
BLOCK_SIZE = 16
GOALS_US = {"submit, 512 tokens": 9.0, "step, 256 tokens, 8 ends": 14.0}
"""Goals for decoding one frame, microseconds: a third of the time of hand-written Python decoders
on the same machine.
"""


def submit(num_tokens: int) -> Submit:
    """Return a frame that submits one request with a prompt of `num_tokens` tokens."""
    digests = tuple(number.to_bytes(16, "big") for number in range(num_tokens // BLOCK_SIZE))
    spec = RequestSpec(
        key=1 << 32 | 7,
        request_id="0123456789abcdef0123456789abcdef",
        prompt_ids=np.arange(num_tokens, dtype=np.int32),
        max_tokens=100,
        stop_ids=(1, 2),
        block_hashes=digests,
        hash_salt=bytes(16),
        tenant="tenant",
        trace_id=bytes(16),
    )
    return Submit(specs=(spec,))


def step(num_ends: int) -> StepEvents:
    """Return a frame with the events of a step: one token for each of 256 requests, of which the
    first `num_ends` end.
    """
    keys = (1 << 32) + np.arange(256)
    wait, residency = Wait(0.1, 0.2, 0.3), Residency(1, 100, 3, 256)
    ends = tuple(
        Completed(key=int(key), at_s=1.5, reason=FinishReason.STOP, wait=wait, residency=residency)
        for key in keys[:num_ends]
    )
    tokens = np.arange(256, dtype=np.int32)
    return StepEvents(step=3, at_s=1.5, keys=keys, tokens=tokens, ends=ends)


FRAMES: dict[str, Frame] = {
    "submit, 512 tokens": submit(512),
    "submit, 8192 tokens": submit(8192),
    "step, 256 tokens": step(0),
    "step, 256 tokens, 8 ends": step(8),
}


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Return the size of a frame in bytes, and the microseconds to encode and to decode it (best of
    the rounds).
    """
    frame = FRAMES[name]
    data = encode(frame)
    (body,) = FrameBuffer().feed(data)
    writing_s = min(timeit.repeat(lambda: encode(frame), number=NUM_CALLS, repeat=rounds))
    reading_s = min(timeit.repeat(lambda: decode(body), number=NUM_CALLS, repeat=rounds))
    times = {"write us": writing_s / NUM_CALLS * 1e6, "read us": reading_s / NUM_CALLS * 1e6}
    return {"frame": name, "bytes": len(data), **times}


def measure(options: Namespace) -> Outcome:
    """Measure all frames."""
    rows = [measured(name, 20 if options.full else 5) for name in FRAMES]
    print_rows("Frames between processes", rows)
    return rows, [
        at_most(f"read {row['frame']}", row["read us"], GOALS_US[row["frame"]], "us")
        for row in rows
        if row["frame"] in GOALS_US
    ]


if __name__ == "__main__":
    run(arguments(__doc__), measure)
