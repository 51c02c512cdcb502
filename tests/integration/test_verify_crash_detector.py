"""Runs `penstock verify` while engines die, and with services that stop slowly."""

import json
import os
import signal
import sys

import pytest

from penstock.client import NO_RETRY, Client, HealthStatus, Tokens
from penstock.server.cli import serve
from penstock.server.cli.command import Parser
from penstock.tools.own_service import OwnService
from penstock.tools.verify.all_checks import ALL_CHECKS
from penstock.tools.verify.check import Check
from penstock.tools.verify.command import stop_timeout_s
from penstock.tools.verify.crash_detector import CrashDetector
from penstock.tools.verify.runner import run_checks
from penstock.tools.verify.subject import Subject
from support.service import simulated
from support.service import started as service_started
from support.timeout import TEST_TIMEOUT_S


async def test_an_engine_that_dies_fails_the_check_in_which_it_did() -> None:
    """The following checks wait for the next engine, and pass."""
    arguments = (*simulated(), "--max-replays", "0")
    async with service_started(*arguments) as service, Client(service.address) as client:
        engine = await service.next_pid("engine")
        client_checks = [check for check in ALL_CHECKS if check.name in ("greedy", "max-tokens")]

        async def kill(subject: Subject) -> str:
            is_alive = True
            async for event in subject.client.generate(subject.prompt(), max_tokens=900):
                if isinstance(event, Tokens) and is_alive:
                    os.kill(engine, signal.SIGKILL)
                    is_alive = False
            return "all came"

        async def kill_at_the_end(subject: Subject) -> str:
            os.kill(await service.next_pid("engine"), signal.SIGKILL)
            while await subject.client.health() is HealthStatus.SERVING:
                pass
            return "nothing noticed"

        async with Client(service.address, retry=NO_RETRY) as checking:
            subject = Subject(client=checking, address=service.address, concurrency=8)
            subject.found_model = await client.get_model()
            results = await run_checks(
                subject,
                [
                    Check(name="kills", run=kill),
                    *client_checks,
                    Check(name="kills-unseen", run=kill_at_the_end),
                    *client_checks,
                ],
                timeout_s=TEST_TIMEOUT_S,
                left_out=frozenset(),
                on_result=lambda result: None,
                crash_detector=CrashDetector(subject),
            )

    found = [(result.name, result.outcome.value) for result in results]
    assert found == [
        ("kills", "FAIL"),
        ("greedy", "PASS"),
        ("max-tokens", "PASS"),
        ("kills-unseen", "FAIL"),
        ("greedy", "PASS"),
        ("max-tokens", "PASS"),
    ], results
    assert results[0].reason.startswith("during kills the engine")
    assert "died and was replaced: " in results[0].reason
    assert results[3].reason.endswith("PASS, nothing noticed")


async def test_the_started_service_gets_its_configured_drain_time() -> None:
    """`verify` waits at least for the drain time of the service, which the environment may set."""
    reported: list[str] = []
    inherited = {key: value for key, value in os.environ.items() if key[:9] != "PENSTOCK_"}
    environment = {
        **inherited,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PENSTOCK_DRAIN_TIMEOUT_S": "41",
    }
    service = OwnService(
        simulated(), start_timeout_s=TEST_TIMEOUT_S, environment=environment, on_log=reported.append
    )
    async with service:
        pass

    drains = [line.rpartition("SIGTERM: ")[2] for line in reported if "SIGTERM: " in line]
    assert drains == ["draining, at most 41 s"]


@pytest.mark.parametrize(
    ("options", "least_s"),
    [
        ([], 120.0),
        (["--drain-timeout-s", "300"], 330.0),
        (
            [
                *("--executor", "trtllm", "--trtllm-config"),
                json.dumps({"watch": {"shutdown_timeout_s": 400}}),
            ],
            430.0,
        ),
        (["--model", "/nowhere/at/all"], 120.0),
    ],
)
def test_the_stop_timeout_covers_the_services_own_limits(
    options: list[str], least_s: float
) -> None:
    parser = Parser()
    serve.add_parser(parser.add_subparsers())
    given = vars(parser.parse_args(["serve", *options]))

    assert stop_timeout_s(serve.merge_settings(given, {})) >= least_s
