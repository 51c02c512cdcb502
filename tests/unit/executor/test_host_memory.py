"""The memory that a process may still allocate: the machine's, or less in a control group."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.executor.torch.num_blocks import available_bytes

MACHINE = "MemTotal:        4000 kB\nMemFree:    100 kB\nMemAvailable:    3000 kB\n"
STAT = "anon 7\ninactive_file 1000\nactive_file 500\n"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {}, 3000 * 1024),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "77\n"}, 3000 * 1024),
        ("0::/\n", {"memory.max": "50000\n", "memory.current": "20000\n"}, 30_000),
        # The page cache can be dropped.
        (
            "0::/pods/one\n",
            {
                "pods/memory.max": "50000",
                "pods/memory.current": "20000",
                "pods/memory.stat": STAT,
                "pods/one/memory.max": "max",
            },
            31_500,
        ),
        ("0::/\n", {"memory.max": "50", "memory.current": "60"}, 0),
        (
            "2:cpu:/\n4:memory:/\n",
            {
                "memory/memory.limit_in_bytes": "50000",
                "memory/memory.usage_in_bytes": "20000",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 200\n",
            },
            30_200,
        ),
    ],
)
def test_a_control_group_limits_the_memory(
    groups: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    for name, text in {"meminfo": MACHINE, "groups": groups}.items():
        (tmp_path / name).write_text(text)
    for name, text in files.items():
        file = tmp_path / "mount" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    found = available_bytes(tmp_path / "meminfo", tmp_path / "groups", tmp_path / "mount")

    assert found == expected


def test_a_system_that_reports_none_has_no_bound(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none", tmp_path / "none", tmp_path) is None
