"""Engines of a service under test that start their own workers, or load badly.

Owns the way to them: the environment of the service. What they do is in `engine_site`.
"""

import json
import os
from pathlib import Path
from typing import Literal

_SITE = Path(__file__).parent / "engine_site"

Worker = Literal["child", "detached", "stubborn", "tree"]
Load = Literal["works", "raises", "exits", "crashes", "sticks"]


def engine_conduct(
    folder: Path, worker: Worker | None = None, load: Load = "works", sticks_from_life: int = 1
) -> dict[str, str]:
    """The environment for `support.service`. `folder`: an empty one, for the workers to report.

    Workers: a child of the engine, one that cut itself loose, one that also ignores SIGTERM, or
    one separate with workers. Each holds a lock that the next engine's needs.
    """
    conduct = {
        "folder": str(folder),
        "worker": worker,
        "load": load,
        "sticks_from_life": sticks_from_life,
    }
    inherited = os.environ.get("PYTHONPATH")
    path = str(_SITE) if inherited is None else f"{_SITE}{os.pathsep}{inherited}"
    return {"PYTHONPATH": path, "ENGINE_CONDUCT": json.dumps(conduct)}


def workers_in(folder: Path) -> set[int]:
    """The pids of all workers there have been."""
    return {int(path.name.removeprefix("worker-")) for path in folder.glob("worker-*")}


def is_worker_of(pid: int, folder: Path) -> bool:
    """True if this pid still is such a worker."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return str(folder).encode() in arguments
