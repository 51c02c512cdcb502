"""Cases 28, 29, 31 and 34: a request that causes a fault does not affect other requests.

Covers the path from a client's stream to the executor and back. The outputs of other requests are
compared with the reference output.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.create import create_executor
from penstock.executor.fault import Fault, FaultKind
from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Completed, Preempted
from penstock.scheduler.request import FinishReason
from penstock.server.text.model_text import ModelText
from penstock.server.text.text_stream import StopMatcher, TextStream
from penstock.v1 import generation_service_pb2 as pb
from support.core import FakeClock, make_spec
from support.fronts import admitted, collect, rich_error, serving, text_of
from support.generate_requests import text_request
from support.simulated_output import simulated_output
from support.stepped_service import SteppedService, ids_of, request, stepped

POISON = 77
"""A token id that only the poisoned prompt contains."""
SECRET = "what a client wrote"
NUM_REQUESTS = 32
NUM_TOKENS = 12


def prompt_of(index: int) -> list[int]:
    """Return a prompt of 3 + `index` tokens. The longest prompts are still in prefill when the
    first requests decode.
    """
    return [100 + (7 * index + i) % 150 for i in range(3 + index)]


def reference(text: ModelText, prompt: Sequence[int]) -> list[int]:
    spec = make_spec(1, prompt, max_tokens=NUM_TOKENS, hashed=False)
    ids: list[int] = simulated_output(spec, text.files.vocab_size).tolist()
    return ids


async def outcome(call: Any) -> tuple[list[int], str, str]:
    """Return the token ids, the status and the error reason of one stream."""
    responses: list[pb.GenerateResponse] = []
    try:
        async for response in call:
            responses.append(response)
    except grpc.aio.AioRpcError as error:
        return ids_of(responses), error.code().name, rich_error(error).info.reason
    return ids_of(responses), "OK", ""


async def check_one_falls(service: SteppedService, text: ModelText, place: int) -> None:
    """Run 32 requests, of which the one at index `place` causes a fault. Check that this request
    ends with INTERNAL, that the others are unaffected, and that all are released.
    """
    prompts = [prompt_of(index) for index in range(NUM_REQUESTS)]
    prompts[place][1] = POISON
    calls = [service.stub.Generate(request(NUM_TOKENS, prompt)) for prompt in prompts]
    reading = [asyncio.ensure_future(outcome(call)) for call in calls]
    await service.until_live(NUM_REQUESTS)

    await service.until(lambda: all(one.done() for one in reading), steps=True)

    outcomes = [one.result() for one in reading]
    generated, status, reason = outcomes.pop(place)
    assert (status, reason) == ("INTERNAL", "EXECUTOR_REQUEST_FAILED")
    assert generated == reference(text, prompts.pop(place))[: len(generated)]
    assert [status for _, status, _ in outcomes] == ["OK"] * (NUM_REQUESTS - 1)
    assert [ids for ids, _, _ in outcomes] == [reference(text, prompt) for prompt in prompts]
    await service.until_released()
    service.read_commands()
    assert service.is_clean()


def faulty(text: ModelText, kind: FaultKind, at_output: int, depth: int) -> dict[str, Any]:
    fault = Fault(kind=kind, at_prompt_token=POISON, at_output=at_output)
    return {
        "num_blocks": 256,
        "max_num_seqs": NUM_REQUESTS,
        "pipeline_depth": depth,
        "scheduler": SchedulerConfig(max_num_waiting=64, max_num_batched_tokens=96),
        "simulated": SimulatedConfig(
            vocab_size=text.files.vocab_size, is_strict=True, faults=(fault,)
        ),
    }


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("place", "at_output"), [(0, 0), (17, 5), (31, 11)])
async def test_case_28_a_request_that_makes_the_step_raise_does_not_affect_others(
    place: int, at_output: int, depth: int, text: ModelText
) -> None:
    async with stepped(text, **faulty(text, FaultKind.STEP_RAISES, at_output, depth)) as service:
        await check_one_falls(service, text, place)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("place", "at_output"), [(0, 0), (17, 5)])
async def test_case_31_logits_that_are_not_finite_fail_one_request(
    place: int, at_output: int, depth: int, text: ModelText
) -> None:
    async with stepped(text, **faulty(text, FaultKind.NOT_FINITE, at_output, depth)) as service:
        await check_one_falls(service, text, place)


@pytest.fixture(params=["detokenizer", "plain path", "stop check"])
def broken_for_x(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make one stage of the conversion from tokens to text raise at every "x"; return the stage's
    name.
    """

    def breaks(owner: type[Any], name: str, is_hit: Callable[[Any, Any], bool]) -> None:
        inner = getattr(owner, name)

        def wrapped(self: Any, value: Any, **fields: Any) -> Any:
            if is_hit(self, value):
                raise RuntimeError(SECRET)
            return inner(self, value, **fields)

        monkeypatch.setattr(owner, name, wrapped)

    x = request.getfixturevalue("text").tokenizer.encode("x", add_special_tokens=False)[0]
    if request.param == "stop check":
        breaks(StopMatcher, "feed", lambda _matcher, piece: "x" in piece)
    elif request.param == "plain path":
        breaks(TextStream, "push_one", lambda _stream, token: token == x)
    else:
        breaks(TextStream, "push", lambda _stream, tokens: x in tokens)
    return str(request.param)


async def test_case_29_an_error_in_text_conversion_fails_one_request(
    broken_for_x: str, text: ModelText, caplog: pytest.LogCaptureFixture
) -> None:
    """The front cancels the request in the engine at once; later events for it have no effect."""
    message = text_request()
    if broken_for_x == "stop check":
        message.stopping.stop_strings.append("never")
    if broken_for_x == "detokenizer":
        message.output.return_token_ids = True
    async with serving(text) as served:
        calls, keys = [], []
        for _ in range(3):
            calls.append(served.stub.Generate(message))
            keys.append((await served.port.next_submission())[0].key)
        served.port.emit(changes=[admitted(key) for key in keys])
        for letters in ("aaa", "bxb", "cxc"):
            ids = [served.encode(letter)[0] for letter in letters]
            served.port.emit(tokens=list(zip(keys, ids, strict=True)))
        assert (keys[1],) in [gone for gone, _ in served.port.cancelled]
        for key in (keys[0], keys[2]):
            served.port.finish(key)

        first, second, third = await asyncio.gather(
            *(collect(call) for call in calls), return_exceptions=True
        )

        assert isinstance(first, list)
        assert isinstance(third, list)
        assert (text_of(first), text_of(third)) == ("abc", "abc")
        assert isinstance(second, grpc.aio.AioRpcError)
        assert second.code() is grpc.StatusCode.INTERNAL
        assert SECRET not in (second.details() or "")
        assert served.server.front.counters.num_internal_errors == 1
    assert SECRET not in caplog.text


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", list(AdmissionPolicy), ids=str)
def test_case_34_exhausted_blocks_delay_requests_and_lose_no_token(
    policy: AdmissionPolicy, seed: int
) -> None:
    """In some steps the test holds all free blocks, so that requests are preempted; they continue
    later.
    """
    executor = create_executor(
        ExecutorConfig(
            kind=ExecutorKind.SIMULATED,
            block_size=4,
            num_blocks=200,
            max_seq_len=64,
            max_num_seqs=8,
            simulated=SimulatedConfig(vocab_size=500, is_strict=True),
        )
    )
    engine = Engine(executor, SchedulerConfig(admission_policy=policy), FakeClock())
    specs = {key: make_spec(key, 3 + key, max_tokens=20) for key in range(1, 41)}
    for spec in specs.values():
        engine.submit((spec,))
    pool = engine.cache.pool
    random = np.random.default_rng(seed)
    generated: dict[int, list[int]] = {key: [] for key in specs}
    ends: dict[int, object] = {}
    num_failures = num_preemptions = 0
    for _ in range(10_000):
        if not engine.has_work:
            break
        taken = np.zeros(0, dtype=np.int32)
        if random.random() < 0.1:
            taken = pool.allocate(pool.num_available)
            num_failures += 1
        events = engine.step()
        pool.release(taken)
        engine.check_integrity()
        for key, token in zip(events.keys.tolist(), events.tokens.tolist(), strict=True):
            generated[key].append(token)
        num_preemptions += sum(isinstance(change, Preempted) for change in events.changes)
        ends |= {end.key: end for end in events.ends}

    assert num_failures > 0
    assert num_preemptions > 0
    assert set(ends) == set(specs)
    for key, spec in specs.items():
        end = ends[key]
        assert isinstance(end, Completed)
        assert end.reason is FinishReason.LENGTH
        np.testing.assert_array_equal(generated[key], simulated_output(spec, 500))
    assert pool.num_used == 0
