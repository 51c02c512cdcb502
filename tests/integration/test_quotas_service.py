"""Quotas of a service: exact over all its fronts, and changed with the policy file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio

from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from support import tiny_tokenizers
from support.fronts import rich_error
from support.service import simulated, started
from support.timeout import TEST_TIMEOUT_S

NUM_CHANNELS = 8
LONG = 200
STEP_S = 0.1


def request(num_tokens: int) -> pb.GenerateRequest:
    message = pb.GenerateRequest()
    message.token_prompt.ids.extend((5, 6, 7, 8))
    message.stopping.max_tokens = num_tokens
    message.stopping.ignore_eos = True
    return message


KeptRequest = list[Any]
"""References to the calls that continue: gRPC cancels a call to which no reference is left."""


async def begin(channel: grpc.aio.Channel, kept: KeptRequest, tenant: str = "") -> str:
    """Send a long request, and keep it running. Return "" once it runs, or the error reason if it
    is rejected.
    """
    metadata = (("x-tenant", tenant),) if tenant else ()
    call: Any = pb_grpc.GenerationServiceStub(channel).Generate(request(LONG), metadata=metadata)
    kept.append(call)
    try:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            while (await call.read()).WhichOneof("event") != "tokens":
                pass
    except grpc.aio.AioRpcError as error:
        return rich_error(error).info.reason
    return ""


async def test_a_quota_is_exact_over_several_fronts(tmp_path: Path) -> None:
    model = tiny_tokenizers.write_model_folder(tmp_path / "tiny")
    flags = ("--fronts", "2", "--tenant-max-live", "5", "--max-num-seqs", "32")
    async with started("--model", str(model), *simulated(STEP_S), *flags) as service:
        kept: KeptRequest = []
        channels = [service.channel() for _ in range(NUM_CHANNELS)]
        reported = await asyncio.gather(*(begin(channel, kept) for channel in 3 * channels))
        assert sorted(reported) == [""] * 5 + ["QUOTA_EXCEEDED"] * (3 * NUM_CHANNELS - 5)
        for channel in channels:
            await channel.close()


async def test_limits_of_the_policy_file_apply_and_can_be_changed(tmp_path: Path) -> None:
    model = tiny_tokenizers.write_model_folder(tmp_path / "tiny")
    policy = tmp_path / "policy.toml"
    policy.write_text(policy_of(2), encoding="utf-8")
    flags = ("--tenant-metadata-key", "x-tenant", "--policy-file", str(policy))
    more = ("--max-num-seqs", "32", "--fronts", "1")
    async with started("--model", str(model), *simulated(STEP_S), *flags, *more) as service:
        kept: KeptRequest = []
        async with service.channel() as channel:
            assert [await begin(channel, kept, "a") for _ in range(3)] == ["", "", "QUOTA_EXCEEDED"]
            assert await begin(channel, kept, "b") == ""
            policy.write_text(policy_of(3), encoding="utf-8")
            await service.until_logged("engine[", "a new policy is in force")
            assert [await begin(channel, kept, "a") for _ in range(2)] == ["", "QUOTA_EXCEEDED"]


def policy_of(max_num_live: int) -> str:
    return f"version = 1\n\n[tenants.a]\nmax_num_live = {max_num_live}\n"
