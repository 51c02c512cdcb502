"""The checks of `penstock verify` for constrained output, adapters and cache retention, with a
scripted server.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

import penstock.v1 as pb
from penstock.client import NO_RETRY, Client
from penstock.tools.verify.all_checks import ALL_CHECKS
from penstock.tools.verify.check_result import CheckResult
from penstock.tools.verify.runner import run_checks
from penstock.tools.verify.subject import Subject
from support.scripted_server import ScriptedServer, ServedCall, finished_message

FORMS = ("json_schema", "regex", "grammar", "choice")
FEATURES = (*FORMS, "adapters", "text_prompt", "cache_retention")
STOP = pb.FinishReason.FINISH_REASON_STOP
LENGTH = pb.FinishReason.FINISH_REASON_LENGTH


def answering(
    text: str, reason: pb.FinishReason.ValueType = STOP
) -> Callable[[ServedCall], Awaitable[None]]:
    async def answer(call: ServedCall) -> None:
        await call.accepted()
        await call.tokens(text)
        end = pb.OutputEnd(finish_reason=reason, num_completion_tokens=1)
        usage = pb.TokenUsage(num_prompt_tokens=3, num_completion_tokens=1)
        finished = pb.RequestFinished(outputs=[end], usage=usage)
        await call.send(finished=finished)

    return answer


async def checked(server: ScriptedServer, name: str, *adapters: str) -> CheckResult:
    async with Client(server.address, retry=NO_RETRY) as client:
        model = await client.get_model()
        features = tuple((feature, True) for feature in FEATURES)
        subject = Subject(
            client=client,
            address=server.address,
            concurrency=2,
            found_model=replace(model, features=features, adapters=adapters),
        )
        [result] = await run_checks(
            subject,
            [check for check in ALL_CHECKS if check.name == name],
            timeout_s=30.0,
            left_out=frozenset(),
            on_result=lambda result: None,
        )
    return result


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("json-schema", "json_schema", '{"size": "small", "grade": 2, "is_wet": true}\n'),
        ("regex", "regex", "ABC-0123"),
        ("grammar", "grammar", "([y])"),
        ("choice", "choice", "turbine"),
    ],
)
async def test_output_that_fits_passes(
    server: ScriptedServer, name: str, kind: str, text: str
) -> None:
    server.scripts.append(answering(text))

    result = await checked(server, name)

    assert result.outcome.value == "PASS", result.reason
    assert server.requests[0].request.constraint.WhichOneof("kind") == kind


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json-schema", "Certainly! Here is"),
        ("json-schema", "[]"),
        ("json-schema", '{"size": "small", "grade": 2}'),
        ("json-schema", '{"size": "tiny", "grade": 2, "is_wet": true}'),
        ("json-schema", '{"size": "small", "grade": "2", "is_wet": true}'),
        ("json-schema", '{"size": "small", "grade": 2, "is_wet": true, "more": 1}'),
        ("regex", "ABC-01234"),
        ("regex", "\nABC-0123"),
        ("grammar", "([x)]"),
        ("choice", "turbine "),
    ],
)
async def test_output_that_does_not_fit_fails(server: ScriptedServer, name: str, text: str) -> None:
    server.scripts.append(answering(text))

    assert (await checked(server, name)).outcome.value == "FAIL"


async def test_truncated_output_fails(server: ScriptedServer) -> None:
    server.scripts.append(answering("turbine", LENGTH))

    result = await checked(server, "choice")

    assert (result.outcome.value, result.reason) == ("FAIL", "ended by LENGTH with 'turbine'")


def ids(*token_ids: int) -> Callable[[ServedCall], Awaitable[None]]:
    async def answer(call: ServedCall) -> None:
        await call.accepted()
        records = [pb.TokenRecord(id=token_id) for token_id in token_ids]
        tokens = pb.TokenDelta(text="x", num_tokens=len(token_ids), records=records)
        await call.send(tokens=tokens)
        await call.finished(len(token_ids))

    return answer


async def test_listed_adapters_are_used(server: ScriptedServer) -> None:
    server.scripts.extend((ids(5, 6), ids(5, 7), ids(8, 6)))

    result = await checked(server, "adapters", "legal", "medical")

    assert result.outcome.value == "PASS", result.reason
    assert [call.request.adapter.name for call in server.requests] == ["", "legal", "medical"]


async def test_an_adapter_that_changes_nothing_fails_by_name(server: ScriptedServer) -> None:
    server.scripts.extend((ids(5, 6), ids(5, 7), ids(5, 6)))

    result = await checked(server, "adapters", "legal", "medical")

    assert result.outcome.value == "FAIL"
    assert result.reason.startswith("medical: the same 2 greedy tokens as without an adapter")


def cached(num_tokens: int) -> Callable[[ServedCall], Awaitable[None]]:
    async def answer(call: ServedCall) -> None:
        await call.accepted()
        await call.tokens("x")
        finished = finished_message(1)
        finished.usage.num_cached_prompt_tokens = num_tokens
        await call.send(finished=finished)

    return answer


@pytest.mark.parametrize(("num_found", "outcome"), [(3, "PASS"), (0, "FAIL")])
async def test_cache_retention_is_requested_and_its_effect_checked(
    server: ScriptedServer, num_found: int, outcome: str
) -> None:
    server.scripts.extend((cached(0), cached(num_found)))

    result = await checked(server, "cache-retention")

    assert result.outcome.value == outcome, result.reason
    asked = [call.request.cache for call in server.requests]
    assert [cache.HasField("retention") for cache in asked] == [True, False]
    assert asked[0].retention.level == 80


async def test_without_adapters_the_adapter_check_is_skipped(server: ScriptedServer) -> None:
    assert (await checked(server, "adapters")).outcome.value == "SKIP"
