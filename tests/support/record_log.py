"""The request records that a front sent, decoded as the observer decodes them."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator
from typing import Any

from penstock.server.front.config import FrontConfig
from penstock.server.observe.request_record import RequestRecord, RequestRecorder, decode_record
from penstock.server.text.model_text import ModelText
from support.fronts import ServedFront, queued, serving
from support.timeout import TEST_TIMEOUT_S


class RecordLog:
    """Keeps everything that its `recorder` sends, as bytes and as records."""

    def __init__(self) -> None:
        self.recorder = RequestRecorder(self._take)
        self.data: list[bytes] = []
        self.records: list[RequestRecord] = []
        self._queue: asyncio.Queue[RequestRecord] = asyncio.Queue()

    async def next(self) -> RequestRecord:
        return await asyncio.wait_for(self._queue.get(), TEST_TIMEOUT_S)

    def _take(self, data: bytes) -> None:
        record = decode_record(data)
        self.data.append(data)
        self.records.append(record)
        self._queue.put_nowait(record)


def check_tiling(record: RequestRecord) -> None:
    """Check that the segments cover the record's time without a gap or an overlap, and that none is
    empty, unless it is the only one of a record without duration.
    """
    segments = record.segments
    assert segments[0].start_s == record.arrival_s
    assert segments[-1].end_s == record.end_s
    for before, after in itertools.pairwise(segments):
        assert before.end_s == after.start_s
    assert all(segment.end_s > segment.start_s for segment in segments) or (
        len(segments) == 1 and record.arrival_s == record.end_s
    )


def kinds(record: RequestRecord) -> list[str]:
    return [segment.kind.value for segment in record.segments]


@contextlib.asynccontextmanager
async def logged(
    text: ModelText, config: FrontConfig | None = None, **options: Any
) -> AsyncGenerator[tuple[ServedFront, RecordLog]]:
    log = RecordLog()
    options.setdefault("is_tracing", True)
    async with serving(text, config, recorder=log.recorder, **options) as served:
        served.port.is_answering = True
        yield served, log
    assert log.recorder.num_unreadable == 0


async def run_to_end(served: ServedFront, key: int) -> None:
    served.port.emit(changes=[queued(key, 3, 0.25)])
    served.port.admit(key, num_cached_tokens=2)
    served.port.send(key, served.encode("abc"))
    served.port.finish(key)
