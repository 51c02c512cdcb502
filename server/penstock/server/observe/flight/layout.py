"""How the flight recorder lies in memory, and so in its files.

Owns the rows. A recording is three rings, each of a power of two of rows, behind a header
(geometry.py): steps, events (what happened once to one request) and requests (who they are).
Sequence numbers count from 0; row n lies at index n % size, so the newest `size` of each are there.
Written by one process and read by others while it writes: a row is valid if it was not overwritten
meanwhile, which the reader tells from the counts in the header, read before and after.

Times are seconds on the machine's monotonic clock. No prompt, no output, no token id is in it.
"""

import enum
import struct

import numpy as np

MAGIC = b"penstock-flight\n"
LAYOUT_VERSION = 1
NO_REASON = 0
"""In `waits_for`: nobody waited. Other values are those of `WaitReason`."""


class EventKind(enum.IntEnum):
    """What happened to one request.

    CHUNK is written when its step is launched, so that a step which never came back has left who
    was in it; everything else when the step's result is in. PREFIX_FOUND: the executor's own cache
    held so much of the prompt, in place of what ADMITTED foresaw.
    """

    QUEUED = 1
    ADMITTED = 2
    CHUNK = 3
    FIRST_TOKEN = 4
    PREEMPTED = 5
    FINISHED = 6
    FAILED = 7
    PREFIX_FOUND = 8


STEP = np.dtype(
    [
        ("step", "<u8"),
        # Planning began; the executor was given the step; its result was there, and was taken in.
        ("begun_s", "<f8"),
        ("launched_s", "<f8"),
        ("collected_s", "<f8"),
        ("updated_s", "<f8"),
        # The gap between tokens: from the result of the step before to this one's, for the
        # `num_itl` rows that decoded in it and got a token; NaN when there was none. Every decode
        # row of a step had its last token from the step before. Whoever comes back from a
        # preemption gets its next token from a prefill, so that gap is not among these. Of an
        # engine that paces itself: the mean over those who got tokens in this turn, each since the
        # turn that brought it the ones before; without those who ended in it.
        ("itl_s", "<f8"),
        ("predicted_s", "<f4"),
        ("num_itl", "<u4"),
        # A prompt that an engine which paces itself has not answered counts in its first step only.
        ("num_prefill_tokens", "<u4"),
        ("num_prefill_rows", "<u4"),
        ("num_decodes", "<u4"),
        ("num_context_tokens", "<u8"),  # of all rows, their positions at the end of the step
        ("num_tokens", "<u4"),  # that came out
        ("num_running", "<u4"),
        ("num_waiting", "<u4"),
        ("num_waiting_tokens", "<u4"),
        ("num_used_blocks", "<u4"),
        ("num_cached_blocks", "<u4"),
        ("num_free_blocks", "<u4"),
        ("num_admitted", "<u2"),
        ("num_preempted", "<u2"),
        ("num_finished", "<u2"),
        ("num_failed", "<u2"),
        ("waits_for", "<u1"),
    ]
)
"""One step whose result is in."""

EVENT = np.dtype(
    [
        ("at_s", "<f8"),
        ("step", "<u8"),  # CHUNK: the one it is part of; else the last one whose result was in
        ("key", "<i8"),
        ("slot", "<i4"),  # -1: none
        # CHUNK: tokens computed. ADMITTED, PREFIX_FOUND: of its prompt, found cached. QUEUED:
        # requests ahead. PREEMPTED, FINISHED and FAILED: tokens of output so far.
        ("count", "<u4"),
        ("kind", "<u1"),
        ("reason", "<u1"),  # FINISHED: FinishReason, FAILED: FailureReason
    ]
)
"""What happened once to one request."""

REQUEST = np.dtype(
    [
        ("key", "<i8"),
        ("arrival_s", "<f8"),
        ("ttft_deadline_s", "<f8"),
        ("deadline_s", "<f8"),
        ("num_prompt_tokens", "<u4"),
        ("max_tokens", "<u4"),
        ("priority", "<i4"),
        ("output_index", "<u2"),
        ("trace_id", "u1", (16,)),  # zeros: not traced
        ("request_id", "S64"),
        ("tenant", "S32"),
    ]
)
"""One output that was submitted. Names are cut to what fits."""

TOTALS = (
    "num_steps",
    "num_events",
    "num_requests",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "num_admitted",
    "num_preempted",
    "num_finished",
    "num_failed",
)
"""Counts since the engine's start, in the header, `<u8` each; the first three also say how much of
each ring is written. Prompt tokens, and those of them that were found cached, are of requests that
had their first token, counted then."""

_CODES = {"u": {1: "B", 2: "H", 4: "I", 8: "Q"}, "i": {4: "i", 8: "q"}, "f": {4: "f", 8: "d"}}


def row_struct(row: "np.dtype[np.void]") -> struct.Struct:
    """What packs one row: ten times faster than assigning to a structured array's row."""
    codes: list[str] = []
    for name in row.names or ():
        field = row[name]
        is_text = field.kind == "S" or field.shape
        codes.append(f"{field.itemsize}s" if is_text else _CODES[field.kind][field.itemsize])
    return struct.Struct("<" + "".join(codes))
