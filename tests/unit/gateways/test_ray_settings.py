"""The settings of a deployment on Ray, and the files that contain them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.gateway.ray.methods import METHODS, add_penstock_to_server
from penstock.gateway.ray.scaling import QueueTimePolicy
from penstock.gateway.ray.service import Settings, command_line, settings_of
from penstock.server.config import SETTINGS
from penstock.v1 import generation_service_pb2, model_service_pb2

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "ray"


def config() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((FOLDER / "serve.yaml").read_text(encoding="utf-8"))
    return read


def test_the_config_file_has_only_supported_settings() -> None:
    (application,) = config()["applications"]
    settings = settings_of(application["args"])
    (deployment,) = application["deployments"]

    known = {f"--{option.flag}" for option in SETTINGS}
    assert {option for option in settings.serve_options if option.startswith("--")} <= known
    assert settings.stop_timeout_s < deployment["graceful_shutdown_timeout_s"]
    policy = deployment["autoscaling_config"]["policy"]
    assert policy["policy_function"] == f"{QueueTimePolicy.__module__}:{QueueTimePolicy.__name__}"
    QueueTimePolicy(**policy["policy_kwargs"])
    functions = config()["grpc_options"]["grpc_servicer_functions"]
    name = add_penstock_to_server.__name__
    assert functions == [f"{add_penstock_to_server.__module__}.{name}"]


def test_the_drain_timeout_of_the_service_fits_into_the_replicas() -> None:
    (application,) = config()["applications"]
    settings = settings_of(application["args"])
    drain_timeout_s = float(
        settings.serve_options[settings.serve_options.index("--drain-timeout-s") + 1]
    )

    assert drain_timeout_s + 2.0 < settings.stop_timeout_s


def test_every_method_of_the_contract_passes() -> None:
    services = (
        generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"],
        model_service_pb2.DESCRIPTOR.services_by_name["ModelService"],
    )
    wanted = {
        f"/{service.full_name}/{method.name}": (method.client_streaming, method.server_streaming)
        for service in services
        for method in service.methods
    }
    wanted["/grpc.health.v1.Health/Check"] = (False, False)

    assert {
        method.path: (method.is_request_stream, method.is_response_stream)
        for method in METHODS.values()
    } == wanted


def test_ports_and_addresses_are_the_replicas_own() -> None:
    line = command_line(("--model", "demo"))

    assert line[-2:] == ("--model", "demo")
    assert line[line.index("--host") + 1] == "127.0.0.1"
    assert line[line.index("--port") + 1] == "0"
    for option in ("--port", "--host=0.0.0.0", "--operations-port"):
        with pytest.raises(ValueError, match=option.partition("=")[0]):
            Settings(serve_options=(option, "1"))


def test_one_front_by_default() -> None:
    assert command_line(()).count("--fronts") == 1
    assert command_line(("--fronts", "2")).count("--fronts") == 1
    assert command_line(("--fronts=2",)).count("--fronts") == 0


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ({"serve_option": []}, "serve_option"),
        ({"serve_options": "--model demo"}, "serve_options"),
        ({"serve_options": ["--drain-timeout-s", 60]}, "serve_options: 60"),
        ({"start_timeout_s": 0}, "start_timeout_s"),
        ({"stop_timeout_s": "1"}, "stop_timeout_s"),
        ({"stop_timeout_s": True}, "stop_timeout_s"),
        ({"start_timeout_s": float("nan")}, "start_timeout_s"),
    ],
)
def test_an_invalid_value_is_named(args: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        settings_of(args)
