"""Lists the GPUs of this machine with nvidia-smi.

Does not initialise CUDA, so no device memory is allocated.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass

_FIELDS = "name,memory.total,compute_cap,driver_version"
_CUDA = re.compile(r"CUDA Version:\s*([0-9.]+)")
_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. `compute_capability`: for example "9.0". `memory_mib`: its total memory, None if
    unknown.
    """

    name: str
    memory_mib: int | None
    compute_capability: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGpus:
    """All GPUs; `driver`: the version of the NVIDIA driver; `cuda`: the newest CUDA version that
    the driver supports. "" if unknown.
    """

    gpus: tuple[Gpu, ...]
    driver: str
    cuda: str


def found_gpus() -> FoundGpus:
    """Return what nvidia-smi reports; no GPUs and empty versions if it is missing, fails or lists
    no GPU.
    """
    table = _query(f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line]
    rows = [row for row in rows if len(row) == _FIELDS.count(",") + 1]
    if not rows:
        return FoundGpus(gpus=(), driver="", cuda="")
    cuda = _CUDA.search(_query())
    return FoundGpus(
        gpus=tuple(
            Gpu(
                name=name,
                memory_mib=int(memory) if memory.isdecimal() else None,
                compute_capability=capability,
            )
            for name, memory, capability, _ in rows
        ),
        driver=rows[0][-1],
        cuda=cuda.group(1) if cuda else "",
    )


def _query(*arguments: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        answer = subprocess.run(
            [program, *arguments], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""
