"""`penstock serve --record` writes a file that can be replayed and used for calibration."""

import asyncio
import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

from penstock.client import NO_RETRY, Client, Finished, TokenPrompt
from penstock.server.cli.serve import merge_settings
from penstock.tools.simulation.calibration import read_steps
from penstock.tools.simulation.trace_files import read_trace
from support.cli_process import finished
from support.service import launched, simulated, started
from support.timeout import TEST_TIMEOUT_S

COST = {
    "step_s": 0.004,
    "prefill_token_s": 2e-5,
    "decode_slot_s": 1e-4,
    "context_token_s": 1e-7,
}
PREFIX = tuple(range(100, 148))


def request_shapes() -> list[tuple[tuple[int, ...], int]]:
    """Return (prompt, number of output tokens) of requests of many lengths; every second prompt
    starts with the same prefix.
    """
    prompts: list[tuple[int, ...]] = []
    for number in range(24):
        start = PREFIX if number % 2 else (number + 1,) * len(PREFIX)
        prompts.append(start + (number + 500,) * (7 * number))
    return [(prompt, 1 + number) for number, prompt in enumerate(prompts)]


async def ask(client: Client, prompt: tuple[int, ...], num_output: int, priority: int) -> None:
    async for event in client.generate(
        TokenPrompt(ids=prompt),
        max_tokens=num_output,
        ignore_eos=True,
        priority=priority,
        deadline_s=60.0,
    ):
        if isinstance(event, Finished):
            assert event.usage.num_completion_tokens == num_output


async def record(folder: Path) -> None:
    options = ("--record", str(folder), "--num-blocks", "512", "--max-num-seqs", "8")
    async with (
        started(*options, *simulated(cost=COST)) as service,
        Client(service.address, retry=NO_RETRY) as client,
    ):
        # The first request ends before the others, so that they find its blocks.
        await ask(client, *request_shapes()[1], priority=0)
        others = [one for number, one in enumerate(request_shapes()) if number != 1]
        await asyncio.gather(*(ask(client, *one, priority=2) for one in others))
        service.process.terminate()
        assert await service.ended() == 0


async def test_a_recorded_service_can_be_replayed(tmp_path: Path) -> None:
    folder = tmp_path / "record"
    await record(folder)

    steps, trace = folder / "steps.jsonl", folder / "requests.jsonl"
    requests = list(read_trace(trace))
    lengths = [(one.num_prompt_tokens, one.num_output_tokens) for one in requests]
    assert sorted(lengths) == sorted((len(prompt), num) for prompt, num in request_shapes())
    assert lengths[0] == (len(request_shapes()[1][0]), 2)
    assert [one.priority for one in requests] == [0] + 23 * [2]
    # gRPC rounds a deadline up on the wire, so it is not exact.
    assert all(50.0 < one.deadline_s < 61.0 for one in requests)
    assert {one.prefix_block_tokens for one in requests} == {16}
    assert sum(one.prefix_ids[:3] == requests[0].prefix_ids[:3] for one in requests) == 12

    counts, _ = read_steps(steps)
    # The first token of each output comes from the last step of its prompt.
    assert counts[:, 1].sum() == sum(num - 1 for _, num in request_shapes())
    num_cached = sum(len(prompt) for prompt, _ in request_shapes()) - int(counts[:, 0].sum())
    assert num_cached == 11 * len(PREFIX)

    fitted = finished("simulate", "--calibrate-from", steps)
    assert fitted.returncode == 0, fitted.stderr
    printed = fitted.stdout.decode()
    model: dict[str, Any] = json.loads(printed)
    assert dataclasses.asdict(merge_settings({"step_cost": printed}, {}).get("step_cost")) == model
    limits = ("--num-blocks", 512, "--max-num-seqs", 8, "--front-ms", 5, "--json")
    for cost_options in (("--cost", printed), ("--calibrate-from", steps)):
        played = finished("simulate", "--trace", trace, *cost_options, *limits)
        assert played.returncode == 0, played.stderr
        document = json.loads(played.stdout)
        assert document["settings"]["cost"] == model
        assert document["settings"]["front_s"] == 0.005
        assert document["figures"]["num_completed"] == 24
        assert document["figures"]["prefix_hit_rate"] > 0.0


async def test_a_folder_that_cannot_be_created_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async with launched("--record", str(tmp_path / "file" / "below"), *simulated()) as service:
        assert await service.ended() == 2

    assert "record: " in "".join(service.stderr)
    assert not service.stdout


async def test_a_lost_record_folder_does_not_stop_the_service(tmp_path: Path) -> None:
    """The record folder is lost after it was checked at the start. The restart of an engine must
    not depend on it.
    """
    folder = tmp_path / "record"
    async with started("--record", str(folder), *simulated()) as service:
        engine_pid = await service.next_pid("engine")
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        folder.write_text("not a folder any more")
        os.kill(engine_pid, signal.SIGKILL)
        await service.until_logged("recording is disabled")
        await service.next_pid("engine")
        async with Client(service.address, retry=NO_RETRY) as client:
            await client.wait_until_serving(deadline_s=TEST_TIMEOUT_S)
            await ask(client, (1, 2, 3), 2, priority=0)
