"""Runs `penstock build` as a process, with a scripted builder."""

import asyncio
import json
import os
import select
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from support.cli_process import Result, ended, running
from support.timeout import TEST_TIMEOUT_S

FAKES = Path(__file__).resolve().parents[1] / "fakes" / "bin"
CHECKPOINT = {
    "architecture": "LlamaForCausalLM",
    "dtype": "bfloat16",
    "vocab_size": 128,
    "mapping": {"world_size": 2, "tp_size": 2, "pp_size": 1},
    "quantization": {"quant_algo": None},
}


class Harness:
    """A checkpoint, an engine cache, and the log of builds."""

    def __init__(self, root: Path) -> None:
        self.model, self.cache, self._log = root / "llama", root / "cache", root / "log"
        self.fifo = root / "fifo"
        os.mkfifo(self.fifo)
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(CHECKPOINT))
        (self.model / "rank0.safetensors").write_bytes(b"weights")

    @property
    def builds(self) -> list[dict[str, Any]]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [json.loads(line) for line in lines]

    @property
    def visible(self) -> list[str]:
        names = [path.name for path in self.cache.iterdir()] if self.cache.exists() else []
        return sorted(name for name in names if not name.endswith(".lock"))

    def started(
        self, *args: str, **environment: str
    ) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
        """Start a build with the scripted builder; kill it at the end of the block if it still
        runs.
        """
        variables = {
            "PATH": os.pathsep.join((str(FAKES), os.environ["PATH"])),
            "FAKE_BUILD_LOG": str(self._log),
            "FAKE_BUILD_FIFO": str(self.fifo),
            **environment,
        }
        folders = ("--model", str(self.model), "--output", str(self.cache))
        return running("build", *folders, *args, variables=variables)

    async def build(self, *args: str, **environment: str) -> Result:
        async with self.started(*args, **environment) as process:
            return await ended(process)


async def until_printed(process: asyncio.subprocess.Process, text: bytes) -> None:
    assert process.stderr is not None
    line = b""
    while text not in line:
        line = await asyncio.wait_for(process.stderr.readline(), TEST_TIMEOUT_S)
        assert line, f"ended before it said {text!r}"


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


async def test_a_checkpoint_is_built_once(harness: Harness) -> None:
    first = await harness.build("--max-batch-size", "8", "--option", "gemm_plugin=auto")
    second = await harness.build("--max-batch-size", "8", "--option", "gemm_plugin=auto")

    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert first.out == second.out
    engine = Path(first.out.splitlines()[-1])
    assert engine.parent == harness.cache
    assert (engine / "rank0.engine").read_bytes() == b"a whole engine"
    assert "building all engines" in first.err
    assert "cached: built before" in second.err
    assert len(harness.builds) == 1
    assert harness.builds[0]["max_batch_size"] == "8"
    assert harness.builds[0]["gemm_plugin"] == "auto"
    assert harness.visible == [engine.name]
    manifest = json.loads((engine / "penstock-build.json").read_text())
    assert manifest["inputs"]["settings"] == {"max_batch_size": "8", "gemm_plugin": "auto"}
    assert [file["name"] for file in manifest["inputs"]["files"]] == [
        "config.json",
        "rank0.safetensors",
    ]
    assert manifest["command"][1:3] == ["--checkpoint_dir", str(harness.model)]
    assert manifest["duration_s"] >= 0


async def test_other_settings_or_weights_give_another_engine(harness: Harness) -> None:
    paths = [(await harness.build("--max-batch-size", "8")).out]
    paths.append((await harness.build("--max-batch-size", "16")).out)
    (harness.model / "rank0.safetensors").write_bytes(b"WEIGHTS")
    paths.append((await harness.build("--max-batch-size", "8")).out)

    assert len(set(paths)) == 3
    assert len(harness.builds) == 3


async def test_a_cached_engine_needs_no_builder(harness: Harness) -> None:
    built = await harness.build()
    again = await harness.build(PATH="/nowhere")

    assert again.code == 0, again.err
    assert again.out == built.out


async def test_without_a_builder_it_states_what_to_install(harness: Harness) -> None:
    result = await harness.build(PATH="/nowhere")

    assert result.code == 2
    assert "pip install '.[trtllm]'" in result.err
    assert "container" in result.err
    assert result.out == ""


async def test_a_flag_the_builder_lacks_is_rejected_by_name(harness: Harness) -> None:
    result = await harness.build("--max-num-tokens", "64", FAKE_BUILD_WITHOUT="max_num_tokens")
    other = await harness.build("--option", "warp_drive=1")

    assert (result.code, other.code) == (2, 2)
    assert "max_num_tokens: trtllm-build of this version has no --max_num_tokens" in result.err
    assert "warp_drive" in other.err
    assert harness.builds == []


async def test_parallel_sizes_must_match_the_checkpoint(harness: Harness) -> None:
    wrong = await harness.build("--tensor-parallel-size", "4")
    right = await harness.build("--tensor-parallel-size", "2")

    assert wrong.code == 2
    assert "tensor_parallel_size: the checkpoint was converted for 2, not 4" in wrong.err
    assert right.code == 0, right.err


@pytest.mark.parametrize(
    ("mode", "reported"),
    [
        ("fail", "CUDA error: out of memory"),
        ("empty", "succeeded but left no engine"),
        ("one rank", "left no engine: rank1.engine is missing, of 2 ranks"),
    ],
)
async def test_a_builder_that_fails_leaves_nothing(
    harness: Harness, mode: str, reported: str
) -> None:
    result = await harness.build(FAKE_BUILD=mode)

    assert result.code == 1
    assert reported in result.err.splitlines()[-1]
    assert result.out == ""
    assert harness.visible == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
async def test_a_build_that_is_interrupted_ends_the_builder(
    harness: Harness, number: signal.Signals, code: int
) -> None:
    async with harness.started(FAKE_BUILD="wait") as process:
        await until_printed(process, b"building engine")
        builder = os.pidfd_open(harness.builds[0]["pid"])
        process.send_signal(number)
        result = await ended(process)

    try:
        # The builder has ended: not even signal 0 can be sent to it.
        with pytest.raises(ProcessLookupError):
            signal.pidfd_send_signal(builder, 0)
    finally:
        os.close(builder)
    assert result.code == code
    assert "Traceback" not in result.err
    assert harness.visible == []


async def test_a_killed_build_ends_its_builder_and_leaves_no_engine(
    harness: Harness,
) -> None:
    async with harness.started(FAKE_BUILD="wait") as process:
        await until_printed(process, b"building engine")
        builder = os.pidfd_open(harness.builds[0]["pid"])
        process.kill()
        await process.communicate()
    try:
        # A pidfd is readable once its process has ended; this one would not end by itself.
        ready, _, _ = await asyncio.to_thread(select.select, [builder], [], [], TEST_TIMEOUT_S)
    finally:
        os.close(builder)
    half = harness.visible
    result = await harness.build("--wait-s", "5")

    assert ready
    assert len(half) == 1
    assert ".building-" in half[0]
    assert result.code == 0, result.err
    assert harness.visible == [Path(result.out.strip()).name]
    assert len(harness.builds) == 2


async def test_a_waiting_build_names_the_running_one_and_can_time_out(harness: Harness) -> None:
    async with harness.started(FAKE_BUILD="wait") as first:
        await until_printed(first, b"building engine")
        second = await harness.build("--wait-s", "0.1")
        await asyncio.to_thread(harness.fifo.write_text, "go on")
        assert (await ended(first)).code == 0

    assert second.code == 1
    holder = f"process {first.pid}, its builder {harness.builds[0]['pid']}"
    assert f"another build of this engine runs ({holder})" in second.err
    last = second.err.splitlines()[-1]
    assert "another build of this engine still runs after" in last
    assert last.endswith(f"({holder})")
    assert second.out == ""


def lose(engine: Path) -> None:
    (engine / "rank1.engine").unlink()


def cut(engine: Path) -> None:
    (engine / "rank1.engine").write_bytes(b"a whole")


def break_config(engine: Path) -> None:
    (engine / "config.json").write_text("{")


def change_config(engine: Path) -> None:
    text = (engine / "config.json").read_text()
    (engine / "config.json").write_text(text.replace("bfloat16", "bfloat61"))


def break_manifest(engine: Path) -> None:
    (engine / "penstock-build.json").write_text("{}")


DAMAGES: dict[Callable[[Path], None], str] = {
    lose: "rank1.engine is missing",
    cut: "rank1.engine has 7 bytes instead of 14",
    break_config: "config.json is not valid JSON",
    change_config: "config.json was changed",
    break_manifest: "penstock-build.json cannot be used",
}


async def test_a_damaged_engine_is_built_again(harness: Harness) -> None:
    engine = Path((await harness.build()).out.strip())
    for damage, reported in DAMAGES.items():
        damage(engine)

        again = await harness.build()

        assert again.code == 0, again.err
        assert reported in again.err
        assert "building it again" in again.err
        assert again.out == f"{engine}\n"
        assert (engine / "rank1.engine").read_bytes() == b"a whole engine"
        assert harness.visible == [engine.name]
    assert len(harness.builds) == 1 + len(DAMAGES)


async def test_concurrent_builds_of_one_engine_build_once(harness: Harness) -> None:
    async with harness.started(FAKE_BUILD="wait") as first:
        await until_printed(first, b"building engine")
        async with harness.started() as second:
            await until_printed(second, b"another build of this engine runs")
            await asyncio.to_thread(harness.fifo.write_text, "go on")
            results = [await ended(first), await ended(second)]

    assert [result.code for result in results] == [0, 0]
    assert results[0].out == results[1].out
    assert "cached: built meanwhile" in results[1].err
    assert len(harness.builds) == 1


async def test_a_hugging_face_folder_needs_no_build(harness: Harness) -> None:
    (harness.model / "rank0.safetensors").unlink()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (harness.model / "config.json").write_text(json.dumps(config))

    plain = await harness.build()
    (harness.model / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    quantised = await harness.build()

    for result in (plain, quantised):
        assert result.code == 0, result.err
        assert "PyTorch backend" in result.err
        assert result.out == f"{harness.model}\n"
    assert "FP8" in quantised.err
    assert harness.builds == []


async def test_an_engine_folder_needs_no_build(harness: Harness) -> None:
    built = Path((await harness.build()).out.strip())
    shutil.rmtree(harness.model)
    shutil.copytree(built, harness.model)

    result = await harness.build()

    assert result.code == 0, result.err
    assert "is a TensorRT engine" in result.err
    assert result.out == f"{harness.model}\n"


async def test_an_unknown_folder_and_bad_settings_are_rejected(harness: Harness) -> None:
    bad_size = await harness.build("--max-batch-size", "0")
    bad_option = await harness.build("--option", "gemm_plugin")
    own_option = await harness.build("--option", "output_dir=/tmp")
    (harness.model / "config.json").write_text("{}")
    unknown = await harness.build()

    results = (bad_size, bad_option, own_option, unknown)
    assert [result.code for result in results] == [2, 2, 2, 2]
    assert "--max-batch-size must be at least 1" in bad_size.err
    assert "--option: must be NAME=VALUE" in bad_option.err
    assert "output_dir: has its own setting" in own_option.err
    assert "model_type" in unknown.err
    assert harness.builds == []


async def test_a_folder_of_other_origin_is_not_overwritten(harness: Harness) -> None:
    engine = Path((await harness.build()).out.strip())
    (engine / "penstock-build.json").unlink()

    result = await harness.build()

    assert result.code == 2
    assert "this cache did not create it" in result.err
    assert (engine / "rank0.engine").exists()
