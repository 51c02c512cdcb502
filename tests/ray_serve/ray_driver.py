"""Two Ray nodes on this machine with Penstock deployed, controlled by lines on stdin.

    ray_driver.py HTTP_PORT GRPC_PORT

It is a program so that the tests do not import Ray, which may be in another environment. Each line
of stdin is a command, a JSON object with a `do`; each line of stdout that begins with `> ` is its
answer. The cluster is stopped at the end of stdin. Ray's processes read their settings from the
environment.
"""

# Ray comes with an extra.
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.cluster_utils import Cluster

DEPLOYMENT = "Penstock"
TEST_TIMEOUT_S = 55.0
_POLL_INTERVAL_S = 0.1
_NODE = {"num_cpus": 3, "object_store_memory": 100 << 20, "node_ip_address": "127.0.0.1"}


class Driver:
    """The cluster, and the commands that it executes."""

    def __init__(self, http_port: int, grpc_port: int) -> None:
        self._application = ""
        head = {**_NODE, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._cluster.add_node(**_NODE)
        ray.init(address=self._cluster.address, namespace="serve", log_to_driver=False)
        # The nodes have the environment; from here on it is this program's own. A handle that is
        # used outside of an event loop needs a separate loop.
        os.environ.pop("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", None)
        self._serve: Any = importlib.import_module("ray.serve")
        self._build: Callable[..., Any] = importlib.import_module("penstock.gateway.ray.app").build
        self._serve.start(
            proxy_location="EveryNode",
            http_options={"host": "127.0.0.1", "port": http_port},
            grpc_options={
                "port": grpc_port,
                "grpc_servicer_functions": ["penstock.gateway.ray.methods.add_penstock_to_server"],
            },
        )

    def answer(self, line: str) -> dict[str, Any]:
        order = json.loads(line)
        orders = {"deploy": self.deploy, "until": self.until}
        try:
            return {"ok": orders[order["do"]](order)}
        except Exception as error:  # every error is reported to the tests
            return {"error": f"{type(error).__name__}: {error}"}

    def deploy(self, order: dict[str, Any]) -> None:
        """Deploy the `application` named in the order with its `args` and Serve's `options`, or
        update it if it is already deployed; delete an earlier application of another name first.
        """
        if self._application not in ("", order["application"]):
            self._serve.delete(self._application)
        self._application = order["application"]
        application = self._build(order["args"], **order["options"])
        self._serve.run(application, name=self._application, route_prefix="/")

    def until(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        without = set(order["without"])
        deadline_s = time.monotonic() + TEST_TIMEOUT_S
        states = replicas = None
        while time.monotonic() < deadline_s:
            application = self._serve.status().applications[self._application]
            states = application.deployments[DEPLOYMENT].replica_states
            if states == {"RUNNING": order["num_replicas"]}:
                replicas = self._about()
                is_all = len(replicas) == order["num_replicas"]
                if is_all and not without & {each["replica"] for each in replicas}:
                    return replicas
            # Serve does not report new replicas; they must be polled.
            threading.Event().wait(_POLL_INTERVAL_S)
        raise TimeoutError(f"replicas: {states}, of which told: {replicas}")

    def end(self) -> None:
        self._serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()

    def _about(self) -> list[dict[str, Any]]:
        handle = self._serve.get_deployment_handle(DEPLOYMENT, self._application)
        asked = handle.broadcast("about")
        reported: list[Any] = asked.results(timeout_s=TEST_TIMEOUT_S, return_exceptions=True)
        return [each for each in reported if isinstance(each, dict)]


def main() -> None:
    driver = Driver(int(sys.argv[1]), int(sys.argv[2]))
    try:
        print('> {"ok": "ready"}', flush=True)
        for line in sys.stdin:
            print(">", json.dumps(driver.answer(line)), flush=True)
    finally:
        driver.end()


if __name__ == "__main__":
    main()
