"""Starts a Ray node with a Penstock deployment, for `ray_gateway`.

    ray_gateway_site.py HTTP_PORT GRPC_PORT OPTION ...     options of `penstock serve`

A separate program, because Ray may be installed in another environment than the benchmarks. Prints
a line when it is ready, and ends when its stdin is closed.
"""

# Ray is an optional dependency.
# pyright: reportMissingImports=false

from __future__ import annotations

import sys

from usage import needing, print_usage


def main() -> None:
    with needing("ray"):
        import ray
        from ray import serve

        from penstock.gateway.ray.app import build

    http_port, grpc_port, *options = sys.argv[1:]
    ray.init(
        num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False
    )
    try:
        serve.start(
            http_options={"host": "127.0.0.1", "port": int(http_port)},
            grpc_options={
                "port": int(grpc_port),
                "grpc_servicer_functions": ["penstock.gateway.ray.methods.add_penstock_to_server"],
            },
        )
        serve.run(build({"serve_options": options}), name="penstock", route_prefix="/")
        print("ready", flush=True)
        sys.stdin.read()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    print_usage(__doc__, num_arguments=2)
    main()
