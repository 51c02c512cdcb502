"""The stream of one request that outlives its calls, as an engine keeps it.

Owns its form and how many bytes it takes: it is kept as the step news that made it, with the tokens
between two events put together. A front that gets it takes it in as it takes any other news. Holds
outputs, and sends them to no front.
"""

from array import array
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np

from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.events import (
    Admitted,
    Failed,
    Finished,
    Preempted,
    PrefixFound,
    Queued,
    StepEvents,
)
from penstock.scheduler.request import NO_TIME, RequestSpec
from penstock.server.link.resume_frames import KeptRequest, ResumeSpec

NO_FRONT: Final = 0
_Change: TypeAlias = Queued | Admitted | Preempted | PrefixFound
# Measured, objects and all.
_STREAM_BYTES: Final = 1280
_OUTPUT_BYTES: Final = 128
_EVENT_BYTES: Final = 512
_LOGPROBS_BYTES: Final = 512
"""Of one `TokenLogprobs`, besides its rows."""
_TOKEN_BYTES: Final = 12
_LOGPROB_BYTES: Final = 8


class KeptStream:
    """One stream. `keys`: of its outputs, by index. `live`: of those that have not ended.

    `front_id`: its front, or NO_FRONT. `is_read`: a client reads it there; otherwise it is
    kept until `expires_s`. `is_lost`: what came of it was too much to be kept.
    """

    __slots__ = (
        "_at_s",
        "_keys",
        "_rows",
        "_segments",
        "_step",
        "_tokens",
        "expires_s",
        "front_id",
        "has_failed",
        "is_lost",
        "is_read",
        "keys",
        "live",
        "name",
        "num_bytes",
        "resume_spec",
        "tenant",
    )

    def __init__(self, kept: KeptRequest, front_id: int, specs: Iterable[RequestSpec]) -> None:
        specs = tuple(specs)
        self.name = kept.name
        self.tenant = kept.tenant
        self.resume_spec: ResumeSpec = kept.resume_spec
        self.keys = kept.keys
        self.live = {spec.key for spec in specs}
        self.front_id = front_id
        self.is_read = True
        self.expires_s = NO_TIME
        self.is_lost = self.has_failed = False
        self.num_bytes = (
            _STREAM_BYTES + len(kept.keys) * _OUTPUT_BYTES + len(kept.resume_spec.message)
        )
        num_top = max((spec.sampling.num_logprobs for spec in specs), default=-1)
        self._segments: list[StepEvents] = []
        self._step = 0
        self._at_s = 0.0
        self._keys = array("q")
        self._tokens = array("i")
        self._rows = None if num_top < 0 else _LogprobRows(num_top)
        if kept.history is not None:
            history = kept.history.value()
            self._append(history, _EVENT_BYTES + len(history.tokens) * _TOKEN_BYTES)

    @property
    def has_come_to_something(self) -> bool:
        """Whether the engine has accepted it: a rejected one cannot be resumed."""
        return bool(self._tokens) or any(
            segment.changes or len(segment.tokens) for segment in self._segments
        )

    def add_token(self, events: StepEvents, key: int, token: int, row: int) -> None:
        """Add a token, the `row`th of a step's events."""
        if self.is_lost:
            return
        if not self._tokens:
            self._step, self._at_s = events.step, events.at_s
            self.num_bytes += _EVENT_BYTES + (0 if self._rows is None else _LOGPROBS_BYTES)
        self._keys.append(key)
        self._tokens.append(token)
        self.num_bytes += _TOKEN_BYTES
        if self._rows is not None and events.logprobs is not None:
            self._rows.append(events.logprobs, row)
            self.num_bytes += _LOGPROB_BYTES * (1 + self._rows.num_top)

    def add_change(self, events: StepEvents, change: _Change) -> None:
        """What happened to an output besides tokens."""
        self._append(StepEvents(step=events.step, at_s=events.at_s, changes=(change,)))

    def add_prompt(self, events: StepEvents, entry: tuple[int, int, TokenLogprobs]) -> None:
        """The engine's results for the prompt."""
        rows = entry[2]
        num_values = len(rows.chosen) * (1 + rows.top_ids.shape[1])
        size = _EVENT_BYTES + _LOGPROBS_BYTES + num_values * _LOGPROB_BYTES
        news = StepEvents(step=events.step, at_s=events.at_s, prompt_logprobs=(entry,))
        self._append(news, size)

    def add_end(self, events: StepEvents, end: Finished | Failed) -> None:
        """An output has ended."""
        self.live.discard(end.key)
        self.has_failed = self.has_failed or isinstance(end, Failed)
        self._append(StepEvents(step=events.step, at_s=events.at_s, ends=(end,)))

    def history(self) -> tuple[StepEvents, ...]:
        """All events so far."""
        self._seal()
        return tuple(self._segments)

    def lose(self) -> None:
        """Drop the events: the request continues, and its stream cannot be resumed any more."""
        self.is_lost = True
        self._segments.clear()
        self._keys, self._tokens, self._rows = array("q"), array("i"), None
        self.resume_spec = replace(self.resume_spec, message=b"")
        self.num_bytes = 0  # no more than the request itself, of which there are only so many

    def _append(self, events: StepEvents, num_bytes: int = _EVENT_BYTES) -> None:
        if not self.is_lost:
            self._seal()
            self._segments.append(events)
            self.num_bytes += num_bytes

    def _seal(self) -> None:
        if not self._tokens:
            return
        self._segments.append(
            StepEvents(
                step=self._step,
                at_s=self._at_s,
                keys=np.array(self._keys, dtype=np.int64),
                tokens=np.array(self._tokens, dtype=np.int32),
                logprobs=None if self._rows is None else self._rows.take(),
            )
        )
        self._keys, self._tokens = array("q"), array("i")


class _LogprobRows:
    """Rows of one stream's tokens, `num_top` tokens wide; a separate array for each row would
    take twenty times their memory.
    """

    __slots__ = ("_chosen", "_ranks", "_top_ids", "_top_logprobs", "num_top")

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self._clear()

    def append(self, logprobs: TokenLogprobs, row: int) -> None:
        """Append a row of a step. A step has as many columns as its widest request, or more."""
        top = slice(self.num_top)
        self._chosen.append(logprobs.chosen[row])
        self._ranks.append(logprobs.ranks[row])
        self._top_ids.extend(logprobs.top_ids[row, top].tolist())
        self._top_logprobs.extend(logprobs.top_logprobs[row, top].tolist())

    def take(self) -> TokenLogprobs | None:
        """Remove and return all rows; None if there are none."""
        num_rows = len(self._chosen)
        if not num_rows:
            return None
        shape = (num_rows, len(self._top_ids) // num_rows)
        rows = TokenLogprobs(
            chosen=np.array(self._chosen, dtype=np.float32),
            ranks=np.array(self._ranks, dtype=np.int32),
            top_ids=np.array(self._top_ids, dtype=np.int32).reshape(shape),
            top_logprobs=np.array(self._top_logprobs, dtype=np.float32).reshape(shape),
        )
        self._clear()
        return rows

    def _clear(self) -> None:
        self._chosen, self._top_logprobs = array("f"), array("f")
        self._ranks, self._top_ids = array("i"), array("i")
