"""The Python scenarios about rejections: each status has all the details that the contract
specifies.

They check the client's exceptions, which contain the decoded google.rpc details.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from conformance.python_scenario import (
    CALL_S,
    LONG_TOKENS,
    PROMPT,
    Check,
    CheckedStream,
    ExpectationFailed,
    ScenarioInput,
    greedy,
    new_id,
    require,
)
from penstock.client import (
    Client,
    FeatureUnsupported,
    InvalidArgument,
    JsonSchemaConstraint,
    ModelNotFound,
    PenstockError,
    QueueFull,
    RequestIdInUse,
    RetryPolicy,
)

NUM_PLACES = 4
NUM_WAITING = 4
BLOCKING_TOKENS = 300
"""Output tokens of each request that fills the queue. The retry delay that the service suggests
depends on how long these requests take.
"""
ErrorT = TypeVar("ErrorT", bound=PenstockError)


async def rejected(kind: type[ErrorT], call: Coroutine[Any, Any, object]) -> ErrorT:
    """Return the exception of a call. Raises ExpectationFailed if it is of another class or there
    is none."""
    try:
        await call
    except kind as error:
        return error
    except PenstockError as error:
        raise ExpectationFailed(f"{type(error).__name__} ({error}), not {kind.__name__}") from None
    raise ExpectationFailed(f"it was answered, not rejected with {kind.__name__}")


async def invalid_field(scenario: ScenarioInput) -> None:
    async with scenario.client() as client:
        error = await rejected(
            InvalidArgument, client.generate_once(PROMPT, deadline_s=CALL_S, temperature=-1.0)
        )
    fields = [violation.field for violation in error.field_violations]
    require("sampling.temperature" in fields, f"the fields are {fields}")
    require(error.reason == "INVALID_ARGUMENT", f"the reason is {error.reason!r}")


async def unknown_model(scenario: ScenarioInput) -> None:
    async with scenario.client() as client:
        error = await rejected(
            ModelNotFound, client.generate_once(PROMPT, deadline_s=CALL_S, model="no-such-model")
        )
    model = error.metadata.get("model")
    require(model == "no-such-model", f"ErrorInfo names the model {model!r}")


async def unimplemented_feature(scenario: ScenarioInput) -> None:
    schema = JsonSchemaConstraint(schema='{"type": "object"}')
    async with scenario.client() as client:
        error = await rejected(
            FeatureUnsupported, client.generate_once(PROMPT, deadline_s=CALL_S, constraint=schema)
        )
    feature = error.metadata.get("feature")
    require(feature == "json_schema", f"ErrorInfo names the feature {feature!r}")


async def duplicate_request_id(scenario: ScenarioInput) -> None:
    request_id = new_id()
    async with scenario.client() as client:
        first = CheckedStream(
            client.generate(PROMPT, deadline_s=CALL_S, **greedy(100, request_id=request_id))
        )
        await first.until_tokens()
        await rejected(
            RequestIdInUse,
            client.generate_once(PROMPT, deadline_s=CALL_S, **greedy(4, request_id=request_id)),
        )
        await first.until_end()
    require(first.num_tokens == 100, f"the first had {first.num_tokens} tokens, not 100")


@contextlib.asynccontextmanager
async def full_queue(client: Client, num_tokens: int) -> AsyncGenerator[list[CheckedStream]]:
    """Provide long requests that fill the service: four that have tokens, and four that wait."""
    blockers: list[CheckedStream] = []
    try:
        for number in range(NUM_PLACES + NUM_WAITING):
            events = client.generate(PROMPT, deadline_s=CALL_S, **greedy(num_tokens))
            blockers.append(CheckedStream(events))
            await blockers[-1].until_accepted()
            if number < NUM_PLACES:
                await blockers[-1].until_tokens()
        yield blockers
    finally:
        for blocker in blockers:
            await blocker.leave()


async def queue_full(scenario: ScenarioInput) -> None:
    async with scenario.client() as client, full_queue(client, LONG_TOKENS):
        error = await rejected(
            QueueFull, client.generate_once(PROMPT, deadline_s=CALL_S, **greedy(4))
        )
    wait_s = error.retry_after_s
    require(wait_s is not None and wait_s > 0, f"RetryInfo has {wait_s} s")


async def retry_after_rejection(scenario: ScenarioInput) -> None:
    is_rejected = asyncio.Event()

    async def sleep(seconds: float) -> None:
        is_rejected.set()
        await asyncio.sleep(seconds)

    policy = RetryPolicy(max_attempts=10)
    retrying_client = Client(scenario.address, retry=policy, sleep=sleep)
    async with scenario.client() as client, retrying_client as retrying:
        async with full_queue(client, BLOCKING_TOKENS):
            late = asyncio.create_task(
                retrying.generate_once(PROMPT, deadline_s=CALL_S, **greedy(8))
            )
            await is_rejected.wait()
        answer = await late
    num_tokens = answer.finished.usage.num_completion_tokens
    require(num_tokens == 8, f"{num_tokens} tokens, not 8")


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        invalid_field,
        unknown_model,
        unimplemented_feature,
        duplicate_request_id,
        queue_full,
        retry_after_rejection,
    )
}
