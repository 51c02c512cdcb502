"""The manifests of deploy/kubernetes agree with the service that they start and with each other."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from penstock.executor.trtllm.config import TrtllmConfig
from penstock.server.cli.serve import build_config, merge_settings
from penstock.server.cli.variables import unknown_variables
from penstock.server.config import SETTINGS, ServerConfig
from penstock.server.rpc.service_names import GENERATION
from penstock.server.security.policy_file import parse_policy
from penstock.server.security.security import check_exposure
from penstock.server.settings.json_values import from_json_value
from penstock.tools.command_line import build_parser
from support.kubernetes import (
    FOLDER,
    build,
    build_with,
    container_of,
    every_build,
    named_manifest,
    of_kind,
    pod_of,
    settings_of,
)

FRONTS_AFTER_DRAIN_S = 2.0
OBSERVER_AFTER_DRAIN_S = 3.7
Builds = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def builds() -> Builds:
    return every_build()


def config_of(manifests: list[dict[str, Any]]) -> ServerConfig:
    """Return the configuration that a pod's environment variables give. Settings that need files or
    an executor of the pod are left out.
    """
    settings = dict(settings_of(manifests))
    settings.pop("PENSTOCK_TRTLLM_CONFIG", None)
    if settings.pop("PENSTOCK_EXECUTOR", "") == "trtllm":
        settings.pop("PENSTOCK_MODEL")
    for name in ("POLICY_FILE", "TLS_CERT", "TLS_KEY"):
        # They are looked at when a configuration is made.
        settings.pop(f"PENSTOCK_{name}", None)
    return build_config(merge_settings({"allow_anonymous_network": "on"}, settings))


def probe_of(manifests: list[dict[str, Any]], name: str) -> dict[str, Any]:
    probe: dict[str, Any] = container_of(manifests)[f"{name}Probe"]
    return probe


def test_every_setting_is_known_and_accepted(builds: Builds) -> None:
    variables = {option.variable for option in SETTINGS}
    for name, manifests in builds.items():
        settings = settings_of(manifests)
        assert settings.keys() <= variables, name
        assert unknown_variables(settings) == []
        assert config_of(manifests).host == "0.0.0.0", name


def test_ports_agree_everywhere(builds: Builds) -> None:
    for name, manifests in builds.items():
        config = config_of(manifests)
        ports = {port["name"]: port["containerPort"] for port in container_of(manifests)["ports"]}
        assert ports == {
            "grpc": config.port,
            "operations": config.observer.operations_port,
            "metrics": config.observer.metrics_port,
        }, name
        for service in of_kind(manifests, "Service"):
            (port,) = service["spec"]["ports"]
            assert (port["port"], port["targetPort"]) == (config.port, "grpc")
        (policy,) = of_kind(manifests, "NetworkPolicy")
        asked = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        assert {"grpc", "metrics"} <= asked <= set(ports)
        for monitor in of_kind(manifests, "PodMonitor"):
            (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
            assert endpoint["port"] == "metrics"
        for pool in of_kind(manifests, "InferencePool"):
            assert pool["spec"]["targetPorts"] == [{"number": config.port}]


def test_probes_use_endpoints_of_the_service(builds: Builds) -> None:
    for name, manifests in builds.items():
        is_tls = "PENSTOCK_TLS_CERT" in settings_of(manifests)
        for probe in (probe_of(manifests, "startup"), probe_of(manifests, "readiness")):
            assert probe["timeoutSeconds"] < probe["periodSeconds"], name
            assert ("exec" in probe) == is_tls, "Kubernetes' own speak no TLS"
            if not is_tls:
                port = config_of(manifests).port
                assert probe["grpc"] == {"port": port, "service": GENERATION}
                continue
            program, *arguments = probe["exec"]["command"]
            assert program == "penstock"
            asked = build_parser().parse_args(arguments)
            assert asked.address == f"127.0.0.1:{config_of(manifests).port}"
            assert asked.service == GENERATION
            assert asked.deadline < probe["timeoutSeconds"]
            assert asked.server_name in {
                item["metadata"]["name"] for item in of_kind(manifests, "Service")
            }
        startup = probe_of(manifests, "startup")
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
        # An engine's restart must only make the pod unready, not restart it.
        liveness = probe_of(manifests, "liveness")
        assert liveness["tcpSocket"] == {"port": "grpc"}
        assert not {"grpc", "exec"} & liveness.keys()


def test_the_grace_period_of_a_pod_is_longer_than_its_drain(builds: Builds) -> None:
    for name, manifests in builds.items():
        pause_s = container_of(manifests)["lifecycle"]["preStop"]["sleep"]["seconds"]
        grace_s = pod_of(manifests)["spec"]["terminationGracePeriodSeconds"]
        drain_s = config_of(manifests).drain_timeout_s
        after_s = FRONTS_AFTER_DRAIN_S + OBSERVER_AFTER_DRAIN_S
        assert grace_s >= pause_s + drain_s + after_s + 5, name
        # Balancers have detected it by then: two periods of the slowest probe.
        assert pause_s >= 2 * probe_of(build("base"), "readiness")["periodSeconds"]


def test_selectors_match_the_pods(builds: Builds) -> None:
    for name, manifests in builds.items():
        labels = pod_of(manifests)["metadata"]["labels"]
        selectors = [item["spec"]["selector"] for item in of_kind(manifests, "Service")]
        selectors += [
            item["spec"]["selector"]["matchLabels"]
            for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor", "InferencePool")
            for item in of_kind(manifests, kind)
        ]
        selectors.append(
            named_manifest(manifests, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]
        )
        for spread in pod_of(manifests)["spec"]["topologySpreadConstraints"]:
            selectors.append(spread["labelSelector"]["matchLabels"])
        for selector in selectors:
            assert selector.items() <= labels.items(), name
        for monitor in of_kind(manifests, "PodMonitor"):
            # The alert rules ask for job="penstock".
            assert labels[monitor["spec"]["jobLabel"]] == "penstock"


def test_pods_are_as_restricted_as_can_be(builds: Builds) -> None:
    dockerfile = (FOLDER.parents[1] / "Dockerfile").read_text(encoding="utf-8")
    (user,) = re.findall(r"^USER (\d+)$", dockerfile, re.M)
    for name, manifests in builds.items():
        pod, container = pod_of(manifests)["spec"], container_of(manifests)
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert str(pod["securityContext"]["runAsUser"]) == user
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert container["resources"]["limits"]["memory"]
        assert "cpu" not in container["resources"]["limits"], "a throttled front is a slow one"


def test_variables_that_kubernetes_sets_for_services_are_no_settings(builds: Builds) -> None:
    """For each Service, Kubernetes sets variables such as PENSTOCK_PORT in all later pods."""
    made: dict[str, str] = {}
    for service in of_kind(builds["base"], "Service"):
        prefix = service["metadata"]["name"].upper().replace("-", "_")
        made |= {
            f"{prefix}_PORT": "tcp://10.0.0.1:50051",
            f"{prefix}_SERVICE_HOST": "10.0.0.1",
            f"{prefix}_SERVICE_PORT": "50051",
            f"{prefix}_SERVICE_PORT_GRPC": "50051",
        }
    assert merge_settings({}, made) == merge_settings({}, {})


def test_the_policy_admits_no_caller_until_it_is_filled() -> None:
    text = named_manifest(build("base"), "ConfigMap", "penstock-policy")["data"]["policy.toml"]
    policy = parse_policy(text, FOLDER)
    assert policy.has_credentials
    assert all(int.from_bytes(token.digest) < 10 for token in policy.tokens)


def test_behind_a_gateway_no_caller_needs_a_credential_and_only_it_gets_in() -> None:
    manifests = build_with("gateway")
    text = named_manifest(manifests, "ConfigMap", "penstock-policy")["data"]["policy.toml"]
    assert not parse_policy(text, FOLDER).has_credentials
    settings = settings_of(manifests)
    assert settings["PENSTOCK_ALLOW_ANONYMOUS_NETWORK"] == "on"
    assert settings["PENSTOCK_TENANT_METADATA_KEY"]
    rules = named_manifest(manifests, "NetworkPolicy")["spec"]["ingress"]
    asked = [peer for rule in rules for peer in rule["from"]]
    assert "penstock-client" not in str(asked)


def test_only_the_trial_and_the_gateway_serve_unauthenticated_callers(builds: Builds) -> None:
    open_ones = {
        name
        for name, manifests in builds.items()
        if settings_of(manifests).get("PENSTOCK_ALLOW_ANONYMOUS_NETWORK") == "on"
    }
    assert open_ones == {"overlays/trial", "components/gateway"}
    assert "PENSTOCK_POLICY_FILE" not in settings_of(builds["overlays/trial"])
    # Without that setting, the service itself rejects the trial's configuration.
    config = config_of(builds["overlays/trial"])
    with pytest.raises(ValueError, match="allow_anonymous_network"):
        check_exposure(
            type(config.security)(), host=config.host, operations_host=None, metrics_host=None,
            is_behind_proxy=False,
        )  # fmt: skip


def test_the_engines_settings_fit_the_gpus() -> None:
    manifests = build_with("gpu")
    text = named_manifest(manifests, "ConfigMap", "penstock-engine")["data"]["trtllm.toml"]
    config = from_json_value(TrtllmConfig, tomllib.loads(text), "trtllm.toml")
    num_gpus = config.tensor_parallel_size * config.pipeline_parallel_size
    limits = container_of(manifests)["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == num_gpus
    (shm,) = [item for item in pod_of(manifests)["spec"]["volumes"] if item["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    own = (FOLDER.parent / "trtllm" / "compose.yaml").read_text(encoding="utf-8")
    assert f"image: {container_of(manifests)['image']}\n" in own
