"""The memory of rejected messages is freed with their call, not by the garbage collector."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import grpc
import pytest

from penstock.server.text.model_text import ModelText
from support.fronts import serving
from support.timeout import TEST_TIMEOUT_S

_MIB = 1 << 20
_NUM_CALLS = 8


@pytest.mark.parametrize("method", ["Generate", "GenerateOnce", "Cancel"])
async def test_bytes_of_a_rejected_call_are_freed(text: ModelText, method: str) -> None:
    garbage = b"\xff" * _MIB
    async with serving(text) as served:
        channel: Any = served.channel
        begin = channel.unary_stream if method == "Generate" else channel.unary_unary

        async def reject() -> None:
            call = begin(f"/penstock.v1.GenerationService/{method}")(
                garbage, timeout=TEST_TIMEOUT_S
            )
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

        await reject()
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(_NUM_CALLS):
                await reject()
            held_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
    assert held_bytes < _NUM_CALLS * _MIB / 2
