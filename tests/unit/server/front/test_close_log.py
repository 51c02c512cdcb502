import logging

import pytest

from penstock.server.front.event_router import CloseLog

NAME = "penstock.test.cuts"


def test_streams_closed_together_are_one_warning_with_a_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuts = CloseLog(logging.getLogger(NAME))
    with caplog.at_level(logging.WARNING, NAME):
        for number in range(500):
            cuts.report(10.0 + number / 1000, f"request {number}", "it hangs", {})
        cuts.report_remaining(10.9)
        assert [record.getMessage() for record in caplog.records] == [
            "request 0: stalled reader disconnected: it hangs"
        ]
        cuts.report_remaining(11.0)
        cuts.report_remaining(12.0)

    assert [record.getMessage() for record in caplog.records[1:]] == [
        "499 more stalled readers disconnected in the last 1.0 s"
    ]


def test_a_client_that_disconnects_a_second_later_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuts = CloseLog(logging.getLogger(NAME))
    with caplog.at_level(logging.WARNING, NAME):
        for at_s in (0.0, 0.5, 1.0):
            cuts.report(at_s, f"request {at_s}", "it hangs", {"request_id": str(at_s)})

    assert [record.getMessage() for record in caplog.records] == [
        "request 0.0: stalled reader disconnected: it hangs",
        "1 more stalled readers disconnected in the last 1.0 s",
        "request 1.0: stalled reader disconnected: it hangs",
    ]
    assert getattr(caplog.records[-1], "request_id", None) == "1.0"
