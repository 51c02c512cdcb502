import pytest

from penstock.server.cli.report import summary_line
from support.load_events import finished


@pytest.mark.parametrize(
    ("queue_s", "start"),
    [
        (0.002, "queue 2.0 ms | TTFT 500.0 ms | 2.0 tokens/s | finish length | 2 tokens"),
        (5.0031, "queue 5.00 s, also after the first token | TTFT 500.0 ms | "),
    ],
)
def test_a_queue_time_above_the_ttft_is_explained(queue_s: float, start: str) -> None:
    assert summary_line(finished(queue_s=queue_s)).startswith(start)
