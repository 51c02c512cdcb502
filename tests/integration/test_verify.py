"""Runs `penstock verify` with correct, faulty and missing services, and with `--serve`."""

import asyncio
import functools
import itertools
import json
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

import penstock.v1 as pb
from penstock.client import NO_RETRY, Client, HealthStatus
from penstock.tools.verify.all_checks import ALL_CHECKS
from penstock.tools.verify.check_result import CheckResult
from penstock.tools.verify.runner import run_checks
from penstock.tools.verify.subject import Subject
from support.cli_process import Result, ended, running
from support.service import simulated
from support.service import started as service_started
from support.timeout import TEST_TIMEOUT_S

# A gRPC proxy of a real service, which changes what a test configures.

GENERATE = "/penstock.v1.GenerationService/Generate"


def _no_change(_: Any) -> None:
    """Change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyChanges:
    """Changes that a proxy makes in place to each request and to each response."""

    request: Callable[[pb.GenerateRequest], None] = _no_change
    response: Callable[[pb.GenerateResponse], None] = _no_change


class ChangingProxy(grpc.GenericRpcHandler):
    """A proxy of a service that applies `changes` to its messages; the test may replace them
    between calls.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self.changes = ProxyChanges()
        self.address = ""

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        return grpc.stream_stream_rpc_method_handler(functools.partial(self._forward, method))

    async def _forward(
        self, method: str, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        changes = self.changes

        async def changed() -> AsyncIterator[bytes]:
            async for request in requests:
                yield _change(pb.GenerateRequest, changes.request, request, method)

        left_s = context.time_remaining()
        # gRPC reports the longest possible deadline for a call without one.
        timeout_s = left_s if left_s is not None and left_s < 1e6 else None
        stub: Any = self._channel.stream_stream(method)
        call = stub(changed(), timeout=timeout_s)
        try:
            async for response in call:
                yield _change(pb.GenerateResponse, changes.response, response, method)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details(), tuple(error.trailing_metadata()))
        finally:
            call.cancel()


def _change(message_type: Any, change: Callable[[Any], None], data: bytes, method: str) -> bytes:
    if method != GENERATE:
        return data
    message = message_type.FromString(data)
    change(message)
    changed: bytes = message.SerializeToString()
    return changed


@asynccontextmanager
async def lying_proxy(address: str) -> AsyncGenerator[ChangingProxy, None]:
    """Start a proxy of the service at `address`."""
    async with grpc.aio.insecure_channel(address) as channel:
        proxy = ChangingProxy(channel)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((proxy,))
        proxy.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield proxy
        finally:
            await server.stop(None)


NAMES = tuple(check.name for check in ALL_CHECKS)
# Few slots, so that some requests wait.
FEW_SEATS = ("--max-num-seqs", "4")
# Slow enough that a busy machine keeps pace.
SLOW_STEP_S = 0.08
ALL_CHECKS_S = 4 * TEST_TIMEOUT_S


def row_of(result: Result, name: str) -> list[str]:
    """Return the words of the row of one check: outcome, name, duration and reason."""
    [row] = [line for line in result.out.splitlines() if line.split()[1:2] == [name]]
    return row.split()


def outcomes_of(result: Result) -> dict[str, str]:
    rows = [line.split() for line in result.out.splitlines()]
    return {row[1]: row[0] for row in rows if row and row[0] in ("PASS", "FAIL", "SKIP")}


async def verify(*args: str, **environment: str) -> Result:
    async with running("verify", *args, variables=environment) as process:
        return await ended(process, limit_s=ALL_CHECKS_S)


def all_but(*names: str) -> list[str]:
    """Return flags that skip all checks except these, `health` and `model`."""
    kept = ("health", "model", *names)
    return [flag for name in NAMES if name not in kept for flag in ("--skip", name)]


async def test_the_embedded_executor_passes(tmp_path: Path) -> None:
    """All checks run against a service that `verify` starts, configured by flags and environment
    variables.
    """
    file = tmp_path / "report.json"

    result = await verify(
        *("--json", str(file), "--concurrency", "8"),
        *("--serve", "--", *FEW_SEATS, "--model", "demo"),
        PENSTOCK_MODEL_NAME="shakespeare",
    )

    assert result.code == 0, result.out + result.err
    outcomes = outcomes_of(result)
    assert list(outcomes) == ["start", *NAMES, "stop"]
    skipped = {name for name, outcome in outcomes.items() if outcome == "SKIP"}
    # The executor or the model does not support these.
    assert skipped <= {
        *("adapters", "cache-retention", "json-schema", "regex", "grammar", "choice")
    }
    document = json.loads(file.read_text())
    assert document["is_passed"] is True
    assert [check["name"] for check in document["checks"]] == list(outcomes)
    assert document["model"]["name"] == "shakespeare"
    assert document["model"]["executor"] == "torch"
    assert document["model"]["limits"]["vocab_size"] == 2048
    assert document["model"]["features"]["logit_bias"] is True
    assert document["service"]["exit_code"] == 0
    assert document["service"]["start_s"] > 0
    assert document["service"]["model_kind"] == "Hugging Face model"
    assert document["figures"]["8 at once"]["num_streams"] == 8
    assert document["figures"]["8 at once"]["num_tokens"] == 8 * 64
    text = file.read_text()
    for secret in (str(tmp_path), str(Path.home()), socket.gethostname(), "PENSTOCK_"):
        assert secret not in text


async def test_ties_between_half_precision_logits_pass() -> None:
    cuts = ("top-k", "top-p", "min-p")

    result = await verify(*all_but(*cuts), "--serve", "--", "--dtype", "bfloat16")

    assert result.code == 0, result.out + result.err
    assert {outcomes_of(result)[name] for name in cuts} == {"PASS"}


async def test_a_service_that_runs_is_left_running() -> None:
    checks = all_but("greedy", "priority", "unsupported")
    async with (
        service_started(*simulated(SLOW_STEP_S), *FEW_SEATS) as service,
        Client(service.address) as client,
    ):
        result = await verify("--address", service.address, *checks)
        assert await client.health() is HealthStatus.SERVING

    assert result.code == 0, result.out + result.err
    assert row_of(result, "priority")[0] == "PASS"
    assert row_of(result, "streaming")[0] == "SKIP"
    assert "start" not in outcomes_of(result)


async def test_a_service_with_wrong_responses_fails() -> None:
    def miscount(response: pb.GenerateResponse) -> None:
        if response.HasField("finished"):
            response.finished.usage.num_completion_tokens += 1

    async with (
        service_started(*simulated()) as service,
        lying_proxy(service.address) as proxy,
    ):
        proxy.changes = ProxyChanges(response=miscount)
        result = await verify("--address", proxy.address, *all_but("greedy", "accounts"))

    assert result.code == 1
    assert outcomes_of(result)["greedy"] == "PASS"
    assert row_of(result, "accounts")[0] == "FAIL"
    assert "usage 25, outputs 24, messages 24, ids 24" in " ".join(row_of(result, "accounts"))
    assert result.out.splitlines()[-1].startswith("FAILED: 3 passed, 1 failed")


COUNTER = itertools.count(1)


def without(group: str, field: str) -> ProxyChanges:
    """Return changes that remove an option from each request."""

    def forget(request: pb.GenerateRequest) -> None:
        getattr(request, group).ClearField(field)

    return ProxyChanges(request=forget)


def answering(change: Callable[[Any], None]) -> ProxyChanges:
    return ProxyChanges(response=change)


def other_seed(request: pb.GenerateRequest) -> None:
    request.sampling.seed = next(COUNTER)


def warm(request: pb.GenerateRequest) -> None:
    request.sampling.temperature = 2.0
    request.sampling.seed = next(COUNTER)


def one_more(request: pb.GenerateRequest) -> None:
    request.stopping.max_tokens += 1


def no_logprobs(response: Any) -> None:
    for record in response.tokens.records:
        record.logprob = 0.5


def nothing_cached(response: Any) -> None:
    if response.HasField("finished"):
        response.finished.usage.num_cached_prompt_tokens = 0


def garbled(response: Any) -> None:
    response.tokens.text = response.tokens.text.replace(" ", "")


# Keys: the name of a check, optionally a blank and the changed property.
LIES: Mapping[str, ProxyChanges] = {
    "greedy": ProxyChanges(request=warm),
    "text-of-tokens": answering(garbled),
    "max-tokens": ProxyChanges(request=one_more),
    "stop-token": without("stopping", "stop_token_ids"),
    "stop-string": ProxyChanges(
        request=lambda request: setattr(request.stopping, "include_stop_string", True)
    ),
    "min-tokens": without("stopping", "min_tokens"),
    "seed": ProxyChanges(request=other_seed),
    "logprobs": answering(no_logprobs),
    "logit-bias": without("sampling", "logit_bias"),
    "top-k": without("sampling", "top_k"),
    "top-p": without("sampling", "top_p"),
    "min-p": without("sampling", "min_p"),
    "penalties repetition": without("sampling", "repetition_penalty"),
    "penalties presence": without("sampling", "presence_penalty"),
    "penalties frequency": without("sampling", "frequency_penalty"),
    "outputs": without("sampling", "num_outputs"),
    "prefix-reuse": answering(nothing_cached),
    "unsupported": ProxyChanges(request=lambda request: request.ClearField("chat_prompt")),
    "priority": without("scheduling", "priority"),
}


@pytest.mark.nightly
async def test_every_kind_of_wrong_response_is_detected() -> None:
    honest: dict[str, str] = {}
    lying: dict[str, str] = {}
    async with (
        service_started(*FEW_SEATS) as service,
        lying_proxy(service.address) as proxy,
        Client(proxy.address, retry=NO_RETRY) as client,
    ):
        for name, changes in LIES.items():
            for reported, found in ((ProxyChanges(), honest), (changes, lying)):
                proxy.changes = reported
                found[name] = await outcome_of(name.split()[0], client, proxy.address)

    assert honest == dict.fromkeys(LIES, "PASS")
    assert {
        name: reported for name, reported in lying.items() if not reported.startswith("FAIL")
    } == {}


async def outcome_of(name: str, client: Client, address: str) -> str:
    subject = Subject(client=client, address=address, concurrency=8)
    subject.found_model = await client.get_model()
    results: list[CheckResult] = await run_checks(
        subject,
        [check for check in ALL_CHECKS if check.name == name],
        timeout_s=TEST_TIMEOUT_S,
        left_out=frozenset(),
        on_result=lambda result: None,
    )
    [result] = results
    passed = result.outcome.value == "PASS"
    return "PASS" if passed else f"{result.outcome.value}: {result.reason}"


async def test_without_a_service_verification_could_not_run() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        result = await verify("--address", f"127.0.0.1:{unused.getsockname()[1]}")

    assert result.code == 3
    assert "penstock verify: no service at 127.0.0.1:" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("args", "reported"),
    [
        (("--serve", "--", "--no-such-option"), "not valid for `penstock serve`"),
        (("--address", "a b"), "penstock verify: --address: must be"),
    ],
)
async def test_bad_usage_is_reported(args: tuple[str, ...], reported: str) -> None:
    result = await verify(*args)

    assert result.code == 2
    assert reported in result.err
    assert "Traceback" not in result.err


async def test_disabled_prefix_caching_is_not_a_failure() -> None:
    result = await verify(
        *all_but("prefix-reuse"), "--serve", "--", *simulated(), "--prefix-caching", "off"
    )

    assert result.code == 0, result.out + result.err
    assert " ".join(row_of(result, "prefix-reuse")).endswith("prefix caching is off")


async def test_a_service_that_cannot_start_could_not_be_verified() -> None:
    result = await verify("--serve", "--", "--model", "/nowhere/at/all")

    assert result.code == 2
    assert "the service ended before it was ready" in result.err
    assert "/nowhere/at/all is not a folder" in result.err
    assert "starting: penstock serve --model <path>" in result.out
    assert "Unknown child process" not in result.err


async def test_ctrl_c_stops_its_service() -> None:
    async with running("verify", "--serve", "--", *simulated()) as process:
        assert process.stdout is not None
        line = b""
        while not line.startswith(b"PASS  health"):
            line = await asyncio.wait_for(process.stdout.readline(), TEST_TIMEOUT_S)
            assert line, "it ended before the first check"
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), TEST_TIMEOUT_S)

    assert process.returncode == 130
    assert b"penstock verify: interrupted" in err
    assert b"Traceback" not in err
    assert len(family) >= 3  # supervisor, engine, front
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, TEST_TIMEOUT_S)
    assert alive == []


async def test_a_service_that_dies_fails_and_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    async with running("verify", "--json", str(file), "--serve", "--", *simulated()) as process:
        assert process.stdout is not None
        line = b""
        while not line.startswith(b"PASS  greedy"):
            line = await asyncio.wait_for(process.stdout.readline(), TEST_TIMEOUT_S)
            assert line, "it ended before it generated"
        supervisor = psutil.Process(process.pid).children()[0]
        family = supervisor.children(recursive=True)
        supervisor.kill()
        await asyncio.wait_for(process.communicate(), TEST_TIMEOUT_S)

    assert process.returncode == 1
    document = json.loads(file.read_text())
    assert document["service"]["exit_code"] == -9
    assert document["checks"][-1]["reason"] == "ended by itself with exit code -9"
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, TEST_TIMEOUT_S)
    assert alive == []
