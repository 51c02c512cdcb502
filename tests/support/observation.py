"""A service with its observer, and helpers that wait for what the observer received."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

from penstock.client import ModelStats, OperationsClient, ServerStats
from support.service import Service, started
from support.timeout import TEST_TIMEOUT_S

ENDPOINT_OPTIONS = ("--operations-port", "0", "--metrics-port", "0")


@contextlib.asynccontextmanager
async def observed(
    *arguments: str, environment: dict[str, str] | None = None
) -> AsyncGenerator[tuple[Service, OperationsClient]]:
    """Start `penstock serve` with an operations and a metrics port, and a client of the operations
    service.
    """
    async with (
        started(*arguments, *ENDPOINT_OPTIONS, environment=environment) as service,
        OperationsClient(await service.printed_address("operations")) as operations,
    ):
        yield service, operations


async def until_stats(
    operations: OperationsClient, is_so: Callable[[ServerStats], bool]
) -> ServerStats:
    """Watch the service's statistics until they satisfy the condition, and return them. Raises
    AssertionError at the time limit.
    """
    last: ServerStats | None = None
    try:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            async for stats in operations.watch_stats(interval_s=0.1):
                last = stats
                if is_so(stats):
                    return stats
    except TimeoutError:
        raise AssertionError(f"it did not come to that: {last}") from None
    raise AssertionError("the watch ended")


def num_completed(stats: ServerStats) -> int:
    return sum(model.totals.num_completed for model in stats.models)


def is_quiet(stats: ServerStats) -> bool:
    """Return whether no request is live and no cache block is in use."""
    return not any(
        model.num_processing or model.num_pending or model.cache.num_used_blocks
        for model in stats.models
    ) and not any(front.num_live_requests for front in stats.fronts)


def model_of(stats: ServerStats) -> ModelStats:
    (model,) = stats.models
    return model


async def logged_path(service: Service, text: str) -> Path:
    return Path((await service.until_logged(text)).rpartition(": ")[2].strip())


def flight_files(folder: Path) -> Sequence[Path]:
    """Return the flight records of a folder, oldest first."""
    return sorted(folder.glob("penstock-flight-*.bin"))
