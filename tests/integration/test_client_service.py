"""Both clients with pool, batch and multiplex against a real `penstock serve`."""

import ast
import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from penstock.client import (
    DeadlineExceeded,
    FinishReason,
    Generation,
    InvalidArgument,
    MultiplexConfig,
    PoolConfig,
    RequestState,
    TokenPrompt,
    Tokens,
)
from support.client_faces import AsyncFace, Face, FakeTime, SyncFace, until_true
from support.pages import REPOSITORY
from support.service import Service, simulated, started

NOTEBOOK = REPOSITORY / "clients" / "examples" / "penstock.ipynb"
PROMPT = TokenPrompt(ids=(5, 6, 7, 8))
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[Service]:
    async with started(*simulated()) as service:
        yield service


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(
    params=[AsyncFace, SyncFace], ids=["async", "blocking"], loop_scope="module"
)
async def face(request: pytest.FixtureRequest, service: Service) -> AsyncIterator[Face]:
    face: Face = request.param(
        service.address,
        FakeTime(),
        multiplex=MultiplexConfig(window_tokens=4),
        pool=PoolConfig(num_channels=2, max_concurrent_calls=16),
    )
    yield face
    await face.close()


async def test_multiplexed_output_is_that_of_a_call_of_its_own(
    face: Face, service: Service
) -> None:
    plain = type(face)(service.address, FakeTime())

    own = await plain.call("generate_once", PROMPT, max_tokens=40, **GREEDY)
    shared = await face.call("generate_once", PROMPT, max_tokens=40, **GREEDY)

    assert shared.outputs == own.outputs
    assert len(shared.outputs[0].records) == 40
    await plain.close()


async def test_a_batch_over_shared_calls(face: Face) -> None:
    requests = [TokenPrompt(ids=(5, 6, 7, 8 + number)) for number in range(40)]

    results = await face.all_of(requests, max_concurrency=12, max_tokens=6, **GREEDY)

    assert [type(result) for result in results] == [Generation] * 40
    assert {result.finished.usage.num_completion_tokens for result in results} == {6}


async def test_an_early_end_frees_the_request(face: Face) -> None:
    await face.leave_after_output(PROMPT)

    (result,) = await face.all_of([PROMPT], max_concurrency=1, max_tokens=3, **GREEDY)
    assert result.finished.outputs[0].finish_reason is FinishReason.LENGTH


async def test_a_request_may_be_cancelled_by_its_id(face: Face) -> None:
    events: list[Any] = []
    name = f"cancelled-{type(face).__name__}"
    streaming = asyncio.create_task(
        face.events(PROMPT, into=events, request_id=name, max_tokens=400, ignore_eos=True)
    )
    await until_true(lambda: any(isinstance(event, Tokens) for event in events))

    assert await face.call("cancel", name) is RequestState.PROCESSING

    finished = (await asyncio.wait_for(streaming, 60))[-1]
    assert finished.outputs[0].finish_reason is FinishReason.CANCELLED


async def test_a_deadline_ends_one_request(face: Face) -> None:
    with pytest.raises(DeadlineExceeded):
        await face.events(PROMPT, deadline_s=0.2, max_tokens=400, ignore_eos=True)

    (result,) = await face.all_of([PROMPT], max_concurrency=1, max_tokens=3, **GREEDY)
    assert isinstance(result, Generation)


async def test_a_refusal_names_its_field(face: Face) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await face.events(PROMPT, temperature=-1.0)

    assert [bad.field for bad in caught.value.field_violations] == ["sampling.temperature"]


async def test_the_notebook_of_examples_runs(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_ADDRESS", service.address)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            code = compile(
                "".join(cell["source"]), cell["id"], "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            )
            running = eval(code, names)
            if running is not None:
                await running

    printed = capsys.readouterr().out
    assert "FinishReason.LENGTH" in printed
    assert "-> PromptTooLong" in printed
    assert "sampling.top_p: must be" in printed
