from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.executor.config import INSTRUCTION_SETS
from penstock.executor.torch.cpu_kernels import native

PROGRAM = Path(__file__).parents[2] / "sanitize/guard_pages.py"
SETS = [*filter(native.is_supported, INSTRUCTION_SETS)]


@pytest.mark.skipif(not SETS, reason="no compiled kernels here")
def test_no_product_reads_or_writes_outside_its_matrices() -> None:
    command = [sys.executable, "-X", "faulthandler", str(PROGRAM)]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, (done.stdout.splitlines()[-1:], done.stderr)
    assert {line.partition(" ")[0] for line in done.stdout.splitlines()} == set(SETS)
