"""Both clients with pool, batch and multiplex against a real `penstock serve`."""

import ast
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from penstock.client import (
    Generation,
    MultiplexConfig,
    PoolConfig,
    TokenPrompt,
)
from support.client_adapters import AsyncAdapter, ClientAdapter, FakeTime, SyncAdapter
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
    params=[AsyncAdapter, SyncAdapter], ids=["async", "blocking"], loop_scope="module"
)
async def adapter(request: pytest.FixtureRequest, service: Service) -> AsyncIterator[ClientAdapter]:
    adapter: ClientAdapter = request.param(
        service.address,
        FakeTime(),
        multiplex=MultiplexConfig(window_tokens=4),
        pool=PoolConfig(num_channels=2, max_concurrent_calls=16),
    )
    yield adapter
    await adapter.close()


async def test_multiplexed_output_equals_that_of_a_single_call(
    adapter: ClientAdapter, service: Service
) -> None:
    plain = type(adapter)(service.address, FakeTime())

    own = await plain.call("generate_once", PROMPT, max_tokens=40, **GREEDY)
    shared = await adapter.call("generate_once", PROMPT, max_tokens=40, **GREEDY)

    assert shared.outputs == own.outputs
    assert len(shared.outputs[0].records) == 40
    await plain.close()


async def test_a_batch_over_shared_calls(adapter: ClientAdapter) -> None:
    requests = [TokenPrompt(ids=(5, 6, 7, 8 + number)) for number in range(40)]

    results = await adapter.all_of(requests, max_concurrency=12, max_tokens=6, **GREEDY)

    assert [type(result) for result in results] == [Generation] * 40
    assert {result.finished.usage.num_completion_tokens for result in results} == {6}


async def test_the_notebook_of_examples_runs(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_ADDRESS", service.address)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert all(output["output_type"] == "stream" for output in cell["outputs"])
            code = compile(
                "".join(cell["source"]), cell["id"], "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            )
            running = eval(code, names)
            if running is not None:
                await running

    printed = capsys.readouterr().out
    assert "FinishReason.LENGTH" in printed
    assert "-> PromptTooLong" in printed
    assert "\nfirst: " in printed
    assert "\nsecond:" in printed
    assert "sampling.top_p: must be" in printed
