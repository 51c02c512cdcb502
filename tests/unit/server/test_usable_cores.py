"""How many cores a process may use: the smaller of its CPU quota and its affinity mask."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.server.usable_cores import num_usable_cores


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        # A fraction of a core is none, but one is the least.
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        # The narrowest of the groups around it.
        ("0::/pods/one\n", {"pods/cpu.max": "300000 100000", "pods/one/cpu.max": "max 100000"}, 3),
        # The path of the host, which a container does not see.
        ("0::/kubepods/pod7\n", {"cpu.max": "400000 100000"}, 4),
        (
            "4:memory:/\n1:cpu,cpuacct:/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "150000", "cpu,cpuacct/cpu.cfs_period_us": "50000"},
            3,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ("1:cpu:/\n", {}, 64),
    ],
)
def test_a_quota_limits_the_cores(
    groups: str,
    files: dict[str, str],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(64), raising=False)
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "mount" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    assert num_usable_cores(tmp_path / "groups", tmp_path / "mount") == expected


def test_without_control_groups_the_affinity_mask_applies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(5), raising=False)

    assert num_usable_cores(tmp_path / "none", tmp_path) == 5
