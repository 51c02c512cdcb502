"""How the flight recorder lies in memory, and so in its files.

Owns the rows. A recording is three rings, each of a power of two of rows, behind a header: steps,
events (what happened once to one request) and requests (who they are). Sequence numbers count from
0; row n lies at index n % size, so the newest `size` of each are there. Written by one process and
read by others while it writes: a row is valid if it was not overwritten meanwhile, which the
reader tells from the counts in the header, read before and after.

Times are seconds on the machine's monotonic clock. No prompt, no output, no token id is in it.
"""

import enum

import numpy as np

MAGIC = b"penstock-flight\n"
LAYOUT_VERSION = 1
NO_REASON = 0
"""In `waits_for`: nobody waited. Other values are those of `WaitReason`."""


class EventKind(enum.IntEnum):
    """What happened to one request."""

    QUEUED = 1
    ADMITTED = 2
    CHUNK = 3
    FIRST_TOKEN = 4
    PREEMPTED = 5
    FINISHED = 6
    FAILED = 7


STEP = np.dtype(
    [
        ("step", "<u8"),
        ("begun_s", "<f8"),
        ("launched_s", "<f8"),
        ("collected_s", "<f8"),
        ("updated_s", "<f8"),
        # Between this step's result and that of the step before, for those who got a token of both;
        # NaN when there was nobody.
        ("itl_s", "<f8"),
        ("predicted_s", "<f4"),
        ("num_itl", "<u4"),
        ("num_prefill_tokens", "<u4"),
        ("num_prefill_rows", "<u4"),
        ("num_decodes", "<u4"),
        ("num_context_tokens", "<u8"),
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
        ("step", "<u8"),
        ("key", "<i8"),
        ("slot", "<i4"),  # -1: none
        # CHUNK: tokens computed. ADMITTED: of its prompt, found cached. QUEUED: requests ahead.
        # FINISHED and FAILED: tokens of output.
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
each ring is written."""
