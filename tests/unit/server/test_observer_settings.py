"""The operators' settings for ports, traces and the flight recorder, from flags and environment
variables.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.server.cli.variables import unknown_variables
from penstock.server.config import ObserverLaunch, decode_launch, encode_launch
from penstock.server.observe.config import FlightConfig, ObserverConfig, TracingConfig
from penstock.server.settings.sources import BadSetting
from support.serve_config import serve_config


def observer_of(*arguments: str, **environment: str) -> ObserverConfig:
    return serve_config(*arguments, **environment).observer


@pytest.mark.parametrize(
    ("port", "operations", "metrics"),
    [("50051", 50052, 50053), ("0", 0, 0), ("65534", 65535, 0), ("65535", 0, 0), ("7", 8, 9)],
)
def test_the_ports_lie_behind_the_service_s(port: str, operations: int, metrics: int) -> None:
    config = observer_of("--port", port)
    assert (config.operations_port, config.metrics_port) == (operations, metrics)
    assert config.operations_host == "127.0.0.1"


def test_ports_are_set_and_switched_off_one_by_one() -> None:
    config = observer_of("--operations-port", "off", "--metrics-port", "9100")
    assert (config.operations_port, config.metrics_port) == (None, 9100)
    config = observer_of(PENSTOCK_METRICS_PORT="off", PENSTOCK_OPERATIONS_HOST="::1")
    assert (config.operations_port, config.metrics_port) == (50052, None)
    assert config.operations_host == "::1"
    assert not observer_of("--operations-port", "off", "--metrics-port", "off").is_needed


def test_variables_of_services_of_these_names_are_no_settings() -> None:
    made_up = {
        "PENSTOCK_METRICS_PORT": "tcp://10.0.0.1:9",
        "PENSTOCK_OPERATIONS_PORT": "tcp://10.0.0.2:9",
        "PENSTOCK_METRICS_PORT_9_TCP": "tcp://10.0.0.1:9",
        "PENSTOCK_OPERATIONS_SERVICE_HOST": "10.0.0.2",
    }
    config = observer_of(**made_up)
    assert (config.operations_port, config.metrics_port) == (50052, 50053)
    assert unknown_variables(made_up) == []


@pytest.mark.parametrize("value", ["-1", "65536", "on", "", "1.5", "²"])
@pytest.mark.parametrize("option", ["operations-port", "metrics-port"])
def test_an_invalid_port_is_reported_by_its_option(option: str, value: str) -> None:
    with pytest.raises(BadSetting, match=f"{option} must be in 0..65535 or off, not"):
        observer_of(f"--{option}={value}")


@pytest.mark.parametrize(
    ("environment", "is_on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": " None "}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "false"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
    ],
)
def test_the_variables_of_opentelemetry_switch_traces_on(
    environment: dict[str, str], is_on: bool
) -> None:
    assert observer_of(**environment).tracing == TracingConfig(is_on=is_on)


@pytest.mark.parametrize(
    ("words", "is_wanted"),
    [("rpc", True), ("http, rpc/dup", True), ("http/dup", False), ("rpcs", False), ("", False)],
)
def test_the_next_keys_of_rpc_are_asked_for_by_their_variable(words: str, is_wanted: bool) -> None:
    tracing = observer_of(OTEL_SEMCONV_STABILITY_OPT_IN=words).tracing
    assert tracing.has_next_rpc_keys is is_wanted


def test_every_setting_of_traces() -> None:
    config = observer_of(
        *("--otlp-endpoint", "http://c:4317", "--trace-slow-ttft-s", "0.5"),
        *("--trace-slow-s", "20", "--trace-content", "on"),
    )
    assert config.tracing == TracingConfig(
        is_on=True,
        slow_ttft_s=0.5,
        slow_s=20.0,
        has_content=True,
        otlp_endpoint="http://c:4317",
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "why"),
    [
        (("--otlp-endpoint", "c:4317"), {}, "otlp-endpoint must begin with http://"),
        (
            ("--otlp-endpoint", "http://c"),
            {"OTEL_TRACES_EXPORTER": "none"},
            "otlp-endpoint has no effect while OTEL_TRACES_EXPORTER is none",
        ),
        (("--trace-content", "on"), {}, "trace-content requires traces"),
        (("--trace-slow-s", "1"), {}, "trace-slow-s requires traces"),
        (
            ("--trace-slow-ttft-s", "0", "--otlp-endpoint", "http://c"),
            {},
            "trace-slow-ttft-s must be above 0",
        ),
        (("--flight-steps", "100"), {}, "flight-steps must be a power of two, not 100"),
        (("--flight-steps", "32"), {}, "flight-steps must be in 64..1048576, not 32"),
        (
            ("--operations-host", "::1", "--operations-port", "off", "--metrics-port", "off"),
            {},
            "operations-host requires a port",
        ),
        (("--flight-folder", "/proc/nowhere/at/all"), {}, "flight-folder: "),
    ],
)
def test_invalid_values_are_reported_by_their_option(
    arguments: tuple[str, ...], environment: dict[str, str], why: str
) -> None:
    with pytest.raises(BadSetting, match=why):
        observer_of(*arguments, **environment)


@pytest.mark.parametrize("arguments", [("--otlp-endpoint", "http://c"), ()])
def test_a_bad_number_of_opentelemetry_is_reported_at_once_if_there_are_traces(
    arguments: tuple[str, ...],
) -> None:
    bad = {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "many"}
    on = {} if arguments else {"OTEL_TRACES_EXPORTER": "console"}
    with pytest.raises(BadSetting, match="OTEL_BSP_MAX_EXPORT_BATCH_SIZE must be"):
        observer_of(*arguments, **bad, **on)
    assert not observer_of(**bad).tracing.is_on


def test_a_switch_for_all_of_opentelemetry_leaves_other_settings_alone() -> None:
    config = observer_of("--trace-slow-s", "1", OTEL_SDK_DISABLED="true")
    assert config.tracing == TracingConfig(is_on=False, slow_s=1.0)


def test_flight_settings_are_applied_and_the_folder_is_private_to_its_owner(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    config = observer_of("--flight-steps", "128", "--flight-folder", str(folder))
    assert config.flight == FlightConfig(num_steps=128, folder=folder.resolve())
    assert folder.stat().st_mode & 0o077 == 0
    assert observer_of().flight == FlightConfig()


def test_an_observer_is_launched_with_all_it_needs() -> None:
    launch = ObserverLaunch(
        server=serve_config(),
        socket_path=Path("/s"),
        listener_fd=4,
        flight_fd=5,
        metrics_port=None,
        operations_port=7,
        started_s=1.5,
        board_fd=6,
    )
    assert decode_launch(ObserverLaunch, encode_launch(launch)) == launch


BEHIND_A_PROXY = ("--tenant-metadata-key", "x-tenant")


def test_tenants_that_metrics_distinguish_are_named() -> None:
    assert observer_of().metrics_tenants == ()
    config = observer_of(*BEHIND_A_PROXY, "--metrics-tenants", "atlas, borealis")
    assert config.metrics_tenants == ("atlas", "borealis")
    config = observer_of(*BEHIND_A_PROXY, PENSTOCK_METRICS_TENANTS="atlas")
    assert config.metrics_tenants == ("atlas",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--metrics-tenants", "a"), "metrics-tenants requires --tenant-metadata-key"),
        (
            (*BEHIND_A_PROXY, "--metrics-port", "off", "--metrics-tenants", "a"),
            "metrics-tenants requires --metrics-port",
        ),
        (
            (*BEHIND_A_PROXY, "--metrics-tenants", "a,,b"),
            "metrics-tenants must not contain an empty",
        ),
        (
            (*BEHIND_A_PROXY, "--metrics-tenants", "a,a"),
            "metrics-tenants must not contain a name twice",
        ),
        (
            (*BEHIND_A_PROXY, "--metrics-tenants", "other"),
            "metrics-tenants must not contain 'other'",
        ),
        (
            (*BEHIND_A_PROXY, "--metrics-tenants", ",".join(map(str, range(257)))),
            "metrics-tenants must be at most 256, not 257",
        ),
    ],
)
def test_invalid_tenants_of_metrics_are_reported(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        observer_of(*arguments)
