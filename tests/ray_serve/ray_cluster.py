"""The two Ray nodes of `ray_driver`, controlled by tests.

Ray is imported from the environment of the tests or, if PENSTOCK_RAY_PYTHON is set, of that Python.
"""

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc.aio

from support.service import simulated
from support.timeout import TEST_TIMEOUT_S

REPOSITORY = Path(__file__).parents[2]
PYTHON = os.environ.get("PENSTOCK_RAY_PYTHON", sys.executable)
ROOTS = ("protos", "scheduler", "executors", "server", "clients", "gateways")


@cache
def has_ray() -> bool:
    asked = subprocess.run(
        [PYTHON, "-c", "import importlib.util as u; assert u.find_spec('ray.serve')"],
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return asked.returncode == 0


def recommended_environment() -> dict[str, str]:
    lines = (REPOSITORY / "deploy/ray/ray.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What a replica reports about itself."""

    replica: str
    node: str
    pid: int
    service_pid: int
    address: str
    operations: str


class RayCluster:
    """A running cluster. `addresses`: HOST:PORT of the ingress of each node."""

    def __init__(self, process: "subprocess.Popen[str]", addresses: tuple[str, ...]) -> None:
        self.addresses = addresses
        self._process = process
        self._deployed: tuple[object, ...] = ()
        self._answer()

    def deploy(self, *serve_options: str, **options: Any) -> list[Replica]:
        """Deploy these options unless they are already deployed; return the replicas once they run.

        `options`: deployment options of Ray Serve. Ray Serve replaces earlier replicas one by one.
        """
        wanted = (serve_options, json.dumps(options))
        if wanted != self._deployed:
            # An ingress that has called an application keeps its router, so that another router
            # needs another application name.
            application = "with-router" if "request_router_config" in options else "penstock"
            self._deployed = ()
            self._ask(
                do="deploy",
                application=application,
                args={"serve_options": serve_options, "stop_timeout_s": 20.0},
                options={"ray_actor_options": {"num_cpus": 1}, **options},
            )
            self._deployed = wanted
        num_replicas: int = options.get("num_replicas", 1)
        return self.until(num_replicas)

    def until(self, num_replicas: int, without: Sequence[str] = ()) -> list[Replica]:
        """Wait until exactly `num_replicas` replicas run, none of them in `without`;
        return them.
        """
        reported = self._ask(do="until", num_replicas=num_replicas, without=list(without))
        return [Replica(**replica) for replica in reported]

    def channel(self, node: int = 0) -> grpc.aio.Channel:
        """Return a channel with its own connection to a node's ingress."""
        return grpc.aio.insecure_channel(
            self.addresses[node], options=[("grpc.use_local_subchannel_pool", 1)]
        )

    def _ask(self, **order: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        while select.select([self._process.stdout], [], [], TEST_TIMEOUT_S)[0]:
            line = self._process.stdout.readline()
            if line.startswith("> "):
                reported = json.loads(line[2:])
                assert "ok" in reported, reported["error"]
                return reported["ok"]
            assert line, f"the cluster ended with {self._process.wait()}"
        raise AssertionError("the cluster does not answer")


@contextlib.contextmanager
def ray_cluster(ports: Sequence[int]) -> Generator[RayCluster]:
    """Start the cluster without a deployment. `ports`: the HTTP and the gRPC port of each node."""
    http, grpc_port, other_http, other_grpc = ports
    folder = tempfile.mkdtemp(prefix="pr-")  # Ray's sockets are in it, so its name is short
    environment = {
        **os.environ,
        **recommended_environment(),
        "PYTHONPATH": os.pathsep.join(str(REPOSITORY / root) for root in ROOTS),
        "RAY_TMPDIR": folder,
        # This setting, meant for desktops, makes Ray listen only on this machine.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(other_http),
        "RAY_SERVE_WORKER_PROXY_GRPC_PORT": str(other_grpc),
        # Autoscaling decides within a second instead of ten.
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.2",
    }
    with (Path(folder) / "driver.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [PYTHON, "-u", Path(__file__).with_name("ray_driver.py"), str(http), str(grpc_port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        )
    try:
        yield RayCluster(process, (f"127.0.0.1:{grpc_port}", f"127.0.0.1:{other_grpc}"))
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(TEST_TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            shutil.rmtree(folder, ignore_errors=True)


def slow_steps(**settings: Any) -> list[str]:
    """Return options of a simulated service whose steps take 10 ms, without a metrics port."""
    return [*simulated(**settings), "--metrics-port", "off", "--drain-timeout-s", "5"]
