"""The `OTEL_*` variables have their standard meaning, each tested in a separate process."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from penstock.server.observe.config import TracingConfig
from penstock.server.processes.spawn_context import observer_environment
from support.otlp_receiver import Receiver, grpc_receiver, http_receiver
from support.traced_process import Outcome, run_traced

SPANS_PER_REQUEST = 6
NUM_REQUESTS = 3
ALL_SPANS = SPANS_PER_REQUEST * NUM_REQUESTS
PATIENT = {"OTEL_EXPORTER_OTLP_TIMEOUT": "60"}
"""On a busy machine an export may take longer than the usual timeout, which would drop it."""


def traced(variables: Mapping[str, str], *, num_requests: int = NUM_REQUESTS) -> Outcome:
    return run_traced(PATIENT | dict(variables), num_requests=num_requests)


def resource_of(receiver: Receiver) -> dict[str, object]:
    (first, *others) = receiver.resources()
    assert all(other == first for other in others)
    return first


def test_the_default_is_otlp_over_grpc_from_penstock() -> None:
    with grpc_receiver() as receiver:
        outcome = traced({"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint})
        assert len(receiver.spans()) == ALL_SPANS
        resource = resource_of(receiver)
    assert resource["service.name"] == "penstock"
    assert resource["service.version"]
    assert len(str(resource["service.instance.id"])) == 36
    assert resource["telemetry.sdk.language"] == "python"
    assert outcome.counters["spans_exported"] == ALL_SPANS
    assert outcome.errors == ""


def test_service_name_and_resource_attributes() -> None:
    with grpc_receiver() as receiver:
        traced(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
                "OTEL_SERVICE_NAME": "llm-east",
                "OTEL_RESOURCE_ATTRIBUTES": (
                    "service.name=hidden,service.version=9,service.instance.id=seven,zone=b"
                ),
            }
        )
        resource = resource_of(receiver)
    assert resource["service.name"] == "llm-east"
    assert resource["service.version"] == "9"
    assert resource["service.instance.id"] == "seven"
    assert resource["zone"] == "b"


@pytest.mark.parametrize(
    "protocol_variable", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"]
)
def test_http_and_its_path(protocol_variable: str) -> None:
    with http_receiver() as receiver:
        traced(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
                protocol_variable: "http/protobuf",
            }
        )
        assert len(receiver.spans()) == ALL_SPANS
        assert receiver.metadata[0]["path"] == "/v1/traces"
        assert receiver.metadata[0]["content-type"] == "application/x-protobuf"


def test_the_endpoint_of_traces_and_the_headers() -> None:
    with grpc_receiver() as receiver:
        traced(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": receiver.endpoint,
                "OTEL_EXPORTER_OTLP_HEADERS": "x-team=platform,x-key=two%20words",
            }
        )
        assert len(receiver.spans()) == ALL_SPANS
        assert receiver.metadata[0]["x-team"] == "platform"
        assert receiver.metadata[0]["x-key"] == "two words"


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize(
    "variable", ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"]
)
def test_a_malformed_header_is_reported_without_its_value(variable: str, protocol: str) -> None:
    outcome = traced(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            variable: "Authorization Bearer CANARY,x-other CANARY",
        },
        num_requests=0,
    )
    assert "CANARY" not in outcome.errors + outcome.output
    assert "Bearer" not in outcome.errors
    assert f"{variable}: what is not name=value in it is left out" in outcome.errors


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_the_option_wins_over_both_variables_of_the_endpoint(protocol: str) -> None:
    with grpc_receiver() if protocol == "grpc" else http_receiver() as receiver:
        elsewhere = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1/v1/traces",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        }
        config = TracingConfig(is_on=True, otlp_endpoint=receiver.endpoint)
        traced(elsewhere | observer_environment(config))
        assert len(receiver.spans()) == ALL_SPANS


def test_several_exporters_and_the_console() -> None:
    with grpc_receiver() as receiver:
        outcome = traced(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
                "OTEL_TRACES_EXPORTER": "console, otlp",
            }
        )
        assert len(receiver.spans()) == ALL_SPANS
    assert outcome.output.count('"trace_id"') == ALL_SPANS
    assert outcome.counters["spans_exported"] == 2 * ALL_SPANS


def test_a_disabled_sdk_makes_no_spans() -> None:
    with grpc_receiver() as receiver:
        outcome = traced(
            {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_SDK_DISABLED": "true"}
        )
        assert receiver.num_calls == 0
    assert outcome.counters["traces_sampled_out"] == NUM_REQUESTS
