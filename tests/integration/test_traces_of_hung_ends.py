import asyncio
import os
import signal

import grpc
import pytest

from support.observation import model_of, observed, until_stats
from support.otlp_receiver import grpc_receiver
from support.service import Stream, simulated

NUM_ENDED = 12
NUM_LIVE = 3
NUM_EXPORTED = 60
"""Number of spans that cause an export: those of ten requests. This export opens the connection to
the collector, which on a busy machine could take much of the last second.
"""
NEVER_BY_ITSELF = {
    "OTEL_BSP_SCHEDULE_DELAY": "600000",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": str(NUM_EXPORTED),
    "OTEL_EXPORTER_OTLP_TIMEOUT": "60",
}


@pytest.mark.parametrize(
    ("hung", "num_live"),
    [
        pytest.param(("engine",), NUM_LIVE, id="engine"),
        pytest.param(("engine", "front"), 0, id="both"),
    ],
)
async def test_traces_are_exported_although_processes_hang_at_the_end(
    hung: tuple[str, ...], num_live: int
) -> None:
    with grpc_receiver() as collector:
        arguments = ("--fronts", "1", "--drain-timeout-s", "1")
        environment = {**NEVER_BY_ITSELF, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
        async with (
            observed(*simulated(step_s=0.05), *arguments, environment=environment) as (
                service,
                operations,
            ),
            service.channel() as channel,
        ):
            for first in range(NUM_ENDED):
                assert await Stream(channel, 2, first).outcome() is grpc.StatusCode.OK
            live = [Stream(channel, 900, first) for first in range(num_live)]
            for one in live:
                await one.until_running()
            # A stopped front keeps what it has not sent.
            await until_stats(
                operations, lambda stats: model_of(stats).ttft.num_values >= NUM_ENDED
            )
            exported = await asyncio.to_thread(collector.wait_for_spans, NUM_EXPORTED)
            assert len(exported) == NUM_EXPORTED
            for role in hung:
                os.kill(await service.next_pid(role), signal.SIGSTOP)
            service.signal(signal.SIGTERM)
            assert await service.ended() != 0
        roots = [span for span in collector.spans() if not span.parent_span_id]
    assert len(roots) == NUM_ENDED + num_live
    assert not [line for line in service.stderr if "the observer did not end in time" in line]
