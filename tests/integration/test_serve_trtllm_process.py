"""`penstock serve --executor trtllm` as a process, and the tokenizer of another folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from penstock.executor.models import resolve_model
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from support.fake_trtllm import child_environment
from support.service import Service, launched, simulated, started
from support.timeout import TEST_TIMEOUT_S
from support.trtllm_folders import engine_folder


async def startup_error(service: Service) -> str:
    """Return the error of a failed start, which must be the last line of stderr and the
    only error.
    """
    assert await service.ended() == 2
    assert service.stdout == []
    rejections = [line for line in service.stderr if line.startswith("penstock serve: ")]
    assert rejections == service.stderr[-1:]
    return rejections[0]


async def test_without_the_package_the_service_states_what_to_install() -> None:
    async with launched("--executor", "trtllm") as service:
        message = await startup_error(service)

    assert "pip install '.[trtllm]'" in message
    assert "nvidia/tensorrt-llm/release" in message


async def test_configuration_errors_are_reported_before_any_process_starts(
    tmp_path: Path,
) -> None:
    engine = str(engine_folder(tmp_path / "engine"))
    arguments = ("--executor", "trtllm", "--model", engine)
    async with launched(*arguments, environment=child_environment()) as service:
        message = await startup_error(service)

    assert "max_batch_size must be at most 64, the engine's, not 256" in message
    assert not any("starting: " in line for line in service.stderr)


async def answer(service: Service, text: str) -> str:
    async with service.channel() as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        request = pb.GenerateOnceRequest()
        request.generation.text_prompt.text = text
        request.generation.stopping.max_tokens = 8
        response = await stub.GenerateOnce(request, timeout=TEST_TIMEOUT_S)
    return "".join(output.text for output in response.outputs)


async def test_fronts_read_the_tokenizer_of_the_folder_that_is_given(tmp_path: Path) -> None:
    demo = resolve_model("demo")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(demo / "config.json", bare)
    arguments = ("--model", str(bare), "--tokenizer", str(demo), "--fronts", "1")

    async with started(*simulated(), *arguments) as service:
        assert await answer(service, "To be, or not") != ""


async def test_without_a_tokenizer_folder_the_missing_file_is_named(tmp_path: Path) -> None:
    shutil.copy(resolve_model("demo") / "config.json", tmp_path)

    async with launched(*simulated(), "--model", str(tmp_path)) as service:
        assert "tokenizer.json: the file is missing" in await startup_error(service)
