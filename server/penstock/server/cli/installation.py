"""Collects the versions of packages, kernel and driver, and the GPUs of this machine.

Contains the list of relevant packages. Imports none of them, and does not read the host name.
"""

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from penstock.executor.trtllm.gpus import found_gpus

PARTS = ("penstock", "grpcio", "protobuf", "numpy", "torch", "transformers", "tensorrt-llm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """The installed packages and the machine.

    `versions` has the package versions by name. `machine` has kernel, CPUs, GPUs, driver and CUDA
    as plain values.
    """

    versions: dict[str, str]
    machine: dict[str, Any]


def collect_installation() -> Installation:
    """Return the versions of packages and the hardware of this machine. May take a second, because
    it runs nvidia-smi."""
    gpus = found_gpus()
    kernel = os.uname()
    return Installation(
        versions={
            "python": platform.python_version(),
            **{name: version for name in PARTS if (version := version_of(name))},
        },
        machine={
            "kernel": f"{kernel.sysname} {kernel.release} {kernel.machine}",
            "num_cpus": os.cpu_count(),
            "gpus": [
                {
                    "name": gpu.name,
                    "memory_mib": gpu.memory_mib,
                    "compute_capability": gpu.compute_capability,
                }
                for gpu in gpus.gpus
            ],
            "driver": gpus.driver,
            "cuda": gpus.cuda,
        },
    )


def version_of(name: str) -> str | None:
    """Return the version of an installed distribution, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
