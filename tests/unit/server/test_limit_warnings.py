"""The engine's log warnings about limits below the requested ones."""

import logging

import pytest

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.scheduler.executor import ExecutorInfo
from penstock.server.processes.engine_process import warn_of_limits


@pytest.mark.parametrize(
    ("asked", "num_blocks", "numbers"),
    [
        (None, 64, []),
        (1024, 64, []),
        (5000, 64, [("1024", "5000")]),
        (None, 1, [("16 tokens", "1024")]),
        (5000, 63, [("1024", "5000"), ("1008 tokens", "1024")]),
    ],
)
def test_limits_below_what_was_asked_for_are_told(
    asked: int | None,
    num_blocks: int,
    numbers: list[tuple[str, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = ExecutorConfig(kind=ExecutorKind.SIMULATED, max_seq_len=asked)
    info = ExecutorInfo(
        name="any",
        vocab_size=100,
        block_size=16,
        num_blocks=num_blocks,
        max_seq_len=1024,
        max_num_seqs=4,
    )

    warn_of_limits(config, info)

    assert [record.levelno for record in caplog.records] == [logging.WARNING] * len(numbers)
    for record, (first, second) in zip(caplog.records, numbers, strict=True):
        assert first in record.getMessage()
        assert second in record.getMessage()
