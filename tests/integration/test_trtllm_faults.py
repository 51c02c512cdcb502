"""Faults of one request, and faults that end the TensorRT-LLM engine although its health check
passes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.executor.trtllm.config import AdapterConfig, LoraSettings
from penstock.scheduler.executor import ExecutorDied
from penstock.scheduler.request import FailureReason
from support.trtllm_engine import (
    RESPONSE_TIMEOUT_S,
    BuildHarness,
    fake_module,
    greedy_spec,
    reference,
    wrapped,
)


def test_an_exception_from_a_result_fails_only_its_request(build: BuildHarness) -> None:
    slipping, other = greedy_spec(1, max_tokens=9), greedy_spec(2, max_tokens=9)
    harness = build(fake={"slip_token": slipping.prompt_ids.tolist()[1]})
    harness.submit(slipping, other)
    harness.run_until_idle()

    assert harness.failure(1) is FailureReason.EXECUTOR_REQUEST_FAILED
    assert harness.tokens(2) == reference(harness, other.prompt_ids.tolist(), 9)
    assert len(harness.control.aborted) == 1
    harness.check_clean()


@pytest.mark.parametrize("text", ["CUDA error: device-side assert triggered"])
def test_an_error_that_ends_the_cuda_context_counts_as_death_at_once(
    build: BuildHarness, text: str
) -> None:
    harness = build(fake={"fail_message": text})
    harness.submit(greedy_spec(1))
    harness.round(2)
    harness.control.inject("fail_all")
    harness.control.wait_for_iteration(harness.view().iteration + 1)
    harness.settle()

    with pytest.raises(ExecutorDied, match="device-side assert"):
        harness.engine.step()


def with_adapters(folder: Path, num_adapters: int) -> LoraSettings:
    paths = [folder / f"lora-{index}" for index in range(num_adapters)]
    for path in paths:
        path.mkdir()
    return LoraSettings(
        adapters=tuple(
            AdapterConfig(name=path.name, path=path, id=index)
            for index, path in enumerate(paths, start=1)
        )
    )


def test_every_adapter_is_tried_at_the_start(build: BuildHarness, tmp_path: Path) -> None:
    harness = build(lora_config=with_adapters(tmp_path, 3))

    tried = [item.lora_request for item in harness.control.submitted if item.lora_request]
    assert [request.lora_name for request in tried] == ["lora-0", "lora-1", "lora-2"]


def test_an_adapter_that_ends_the_engine_is_reported_at_the_start(
    build: BuildHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = with_adapters(tmp_path, 2)
    llm_class = fake_module("llmapi.llm").LLM

    def vanish(generate: Any, llm: Any, **arguments: Any) -> Any:
        # After the adapter's settings were read, and before it is loaded.
        if "lora_request" in arguments and settings.adapters[1].path.exists():
            settings.adapters[1].path.rmdir()
        return generate(llm, **arguments)

    wrapped(monkeypatch, llm_class, "generate_async", vanish)
    with pytest.raises(ExecutorDied, match="'lora-1' cannot be used"):
        build(lora_config=settings, watch={"limits_timeout_s": 3.0})


def test_a_shutdown_that_raises_after_a_death_is_expected_and_ends_the_processes(
    build: BuildHarness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = with_adapters(tmp_path, 1)
    harness = build(lora_config=adapters)
    session = harness.llm.mpi_session
    adapters.adapters[0].path.rmdir()
    harness.submit(replace(greedy_spec(1), adapter="lora-0"))
    harness.turn()
    harness.control.resume()
    harness.join_engine_loop()
    harness.clock.now_s += RESPONSE_TIMEOUT_S + 0.1
    with pytest.raises(ExecutorDied, match="returned nothing for"):
        harness.engine.step()
    harness.executor.close()

    assert session.is_ended
    assert "Traceback" not in caplog.text
