"""Nothing passes by its word alone: what a scenario asks for has to have left its traces."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import grpc
import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from conformance.evidence import DRIVER_PREFIX, EVIDENCE, Evidence, Root, Trail, roots_of
from conformance.house import House
from conformance.runs import Run
from conformance.sweep import NAMES
from penstock.client import Client, Failure, QueueFull

LIAR = """
import json, sys
for line in sys.stdin:
    if line.split() and line.split()[0] not in ("address", "go"):
        if line.strip() in ("drain", "engine_killed"):
            print(json.dumps({"scenario": line.strip(), "event": "ready"}), flush=True)
        print(json.dumps({"scenario": line.strip(), "outcome": "passed"}), flush=True)
"""
STREAMED = Root(method="Generate", code="OK", finish="length", num_asked_tokens=4, num_tokens=4)


def span(parent: bytes = b"", **values: str | int | float | list[str]) -> Span:
    """A span as the exporter writes it; two underscores in a key stand for a dot."""
    pairs: list[KeyValue] = []
    for key, value in values.items():
        if isinstance(value, str):
            told = AnyValue(string_value=value)
        elif isinstance(value, int):
            told = AnyValue(int_value=value)
        elif isinstance(value, float):
            told = AnyValue(double_value=value)
        else:
            parts = [AnyValue(string_value=part) for part in value]
            told = AnyValue(array_value=ArrayValue(values=parts))
        pairs.append(KeyValue(key=key.replace("__", "."), value=told))
    return Span(parent_span_id=parent, attributes=pairs)


def test_every_scenario_leaves_something() -> None:
    assert list(EVIDENCE) == list(NAMES)
    for name in NAMES:
        assert EVIDENCE[name].lacks([]), name


def test_a_root_is_read_from_its_span() -> None:
    method = "penstock.v1.GenerationService/Generate"
    told = span(
        b"12345678",
        rpc__method=method,
        rpc__response__status_code="OK",
        penstock__error__reason="DRAINING",
        gen_ai__response__finish_reasons=["length"],
        gen_ai__operation__name="chat",
        gen_ai__response__id="mine",
        gen_ai__request__temperature=-1.0,
        gen_ai__request__max_tokens=9,
        gen_ai__usage__output_tokens=8,
        gen_ai__usage__input_tokens=7,
        penstock__messages=6,
        penstock__replays=5,
    )
    drivers = span(rpc__method=method, gen_ai__response__id=f"{DRIVER_PREFIX}1")

    assert roots_of([told, drivers, span(penstock__decode__tokens=4)]) == [
        Root(
            method="Generate",
            code="OK",
            reason="DRAINING",
            finish="length",
            operation="chat",
            request_id="mine",
            temperature=-1.0,
            num_asked_tokens=9,
            num_tokens=8,
            num_prompt_tokens=7,
            num_messages=6,
            num_replays=5,
            is_of_callers_trace=True,
        )
    ]


@pytest.mark.parametrize(
    ("trail", "other"),
    [
        (Trail(methods=("Generate",)), replace(STREAMED, method="Multiplex")),
        (Trail(code="OK"), replace(STREAMED, code="CANCELLED")),
        (Trail(finish="length"), replace(STREAMED, finish="cancelled")),
        (Trail(num_tokens=4), replace(STREAMED, num_tokens=3)),
        (Trail(num_tokens=4, num=2), STREAMED),
        (Trail(is_cut=True), replace(STREAMED, num_messages=7)),
    ],
)
def test_what_is_of_another_kind_is_no_evidence(trail: Trail, other: Root) -> None:
    wanted = Evidence(trails=(trail,))

    assert wanted.lacks([other]) == f"no {trail}"
    assert wanted.lacks([STREAMED] * trail.num) == ""


def test_two_requests_have_to_have_one_id() -> None:
    wanted = Evidence(trails=(), one_id=True)
    mine = replace(STREAMED, request_id="mine")

    assert wanted.lacks([mine, replace(mine, request_id="other"), STREAMED, STREAMED])
    assert wanted.lacks([mine, mine]) == ""


@pytest.mark.parametrize("name", ["deadline", "engine_killed"])
async def test_a_program_that_only_says_passed_fails(name: str) -> None:
    house = House(evidence_s=0.5)
    async with Run([sys.executable, "-c", LIAR], house=house) as run:
        result = await run.ask(name)

    assert result.outcome == "failed"
    assert result.why.startswith("it passed, but at the service there was no 1 × Generate")


async def test_a_queue_that_was_full_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = [QueueFull(Failure(code=grpc.StatusCode.RESOURCE_EXHAUSTED, message="full"))] * 2
    generate_once = Client.generate_once

    async def refused_at_first(client: Client, *args: Any, **options: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return await generate_once(client, *args, **options)

    monkeypatch.setattr(Client, "generate_once", refused_at_first)
    house = House()
    try:
        await house.address()
        assert await house.why_not_idle() == ""
    finally:
        await house.close()
    assert not refusals
