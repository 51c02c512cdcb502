"""The Python scenarios about the course of a request: cancels, deadlines, resumes and engine
deaths.
"""

from __future__ import annotations

import asyncio

from conformance.python_multiplex import multiplex
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
    DeadlineExceeded,
    FinishReason,
    RequestIdInUse,
    RequestState,
    RetryPolicy,
    Unavailable,
)

ENDED_WITHIN_S = 20.0


async def cancel_after_first_token(scenario: ScenarioInput) -> None:
    request_id = new_id()
    async with scenario.client() as client:
        options = greedy(LONG_TOKENS, request_id=request_id)
        checked = CheckedStream(client.generate(PROMPT, deadline_s=CALL_S, **options))
        await checked.until_tokens()
        await checked.leave()
        await _until_id_is_free(client, request_id)


async def _until_id_is_free(client: Client, request_id: str) -> None:
    try:
        async with asyncio.timeout(ENDED_WITHIN_S):
            while True:
                try:
                    await client.generate_once(PROMPT, **greedy(1, request_id=request_id))
                except RequestIdInUse:
                    continue
                return
    except TimeoutError:
        raise ExpectationFailed(
            f"the request is still live {ENDED_WITHIN_S:.0f} s after its call ended"
        ) from None


async def cancel_by_id(scenario: ScenarioInput) -> None:
    request_id = new_id()
    async with scenario.client() as client, scenario.client() as other:
        options = greedy(LONG_TOKENS, request_id=request_id)
        checked = CheckedStream(client.generate(PROMPT, deadline_s=CALL_S, **options))
        await checked.until_tokens()
        state = await other.cancel(request_id)
        require(state is RequestState.PROCESSING, f"Cancel found it in {state.name}")
        await checked.until_end()
    reason = checked.finish_reason
    require(reason is FinishReason.CANCELLED, f"the reason is {reason}, not CANCELLED")


async def deadline(scenario: ScenarioInput) -> None:
    async with scenario.client() as client:
        checked = CheckedStream(client.generate(PROMPT, deadline_s=1.0, **greedy(LONG_TOKENS)))
        try:
            async with asyncio.timeout(ENDED_WITHIN_S):
                await checked.until_end()
        except DeadlineExceeded:
            return
        except TimeoutError:
            raise ExpectationFailed(f"no end within {ENDED_WITHIN_S:.0f} s") from None
    raise ExpectationFailed("it ended well")


async def resume(scenario: ScenarioInput) -> None:
    num_tokens, num_before = 200, 20
    async with scenario.client() as client:
        lost = CheckedStream(client.generate(PROMPT, **greedy(num_tokens, resume_timeout_s=30.0)))
        await lost.until_tokens(num_before)
    # The client is closed, and its connection with it; nothing was cancelled.
    require(lost.finished is None, "it had ended before it was cut")
    async with scenario.client() as client:
        rest = CheckedStream(
            client.resume(lost.point, deadline_s=CALL_S),
            next_sequence=lost.point.next_sequence,
        )
        once, _ = await asyncio.gather(
            client.generate_once(PROMPT, deadline_s=CALL_S, **greedy(num_tokens)),
            rest.until_end(),
        )
    text = lost.text + rest.text
    require(text == once.text, f"{text!r} is not {once.text!r}")
    total = lost.num_tokens + rest.num_tokens
    require(total == num_tokens, f"{total} tokens, not {num_tokens}")


async def engine_killed(scenario: ScenarioInput) -> None:
    async with Client(scenario.address, retry=RetryPolicy(max_attempts=8)) as client:
        checked = CheckedStream(client.generate(PROMPT, deadline_s=CALL_S, **greedy(200)))
        await checked.until_tokens()
        scenario.ready()
        await checked.until_end()
        once = await client.generate_once(PROMPT, deadline_s=CALL_S, **greedy(200))
    require(checked.num_tokens == 200, f"{checked.num_tokens} tokens, not 200")
    require(checked.text == once.text, f"{checked.text!r} is not {once.text!r}")


async def drain(scenario: ScenarioInput) -> None:
    async with scenario.client() as client:
        checked = CheckedStream(client.generate(PROMPT, deadline_s=CALL_S, **greedy(300)))
        await checked.until_tokens()
        await scenario.until_go()
        try:
            await client.generate_once(PROMPT, deadline_s=CALL_S, **greedy(4))
        except Unavailable as error:
            if error.reason:
                require(error.reason == "DRAINING", f"the reason is {error.reason}")
        else:
            raise ExpectationFailed("a new request was served")
        await checked.until_end()
    require(checked.num_tokens == 300, f"{checked.num_tokens} tokens, not 300")


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        cancel_after_first_token,
        cancel_by_id,
        deadline,
        multiplex,
        resume,
        engine_killed,
        drain,
    )
}
