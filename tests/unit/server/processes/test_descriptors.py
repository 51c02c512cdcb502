from __future__ import annotations

import resource

import pytest

from penstock.server.processes.front_process import MAX_OPEN_FILES, allow_many_descriptors

NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [
        (1024, 4096, 4096),
        (1024, 1 << 20, MAX_OPEN_FILES),
        (1024, NO_LIMIT, MAX_OPEN_FILES),
        (1 << 17, 1 << 20, 1 << 17),
        (NO_LIMIT, NO_LIMIT, NO_LIMIT),
    ],
)
def test_the_soft_limit_is_raised(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, then: int
) -> None:
    limits = (soft, hard)

    def set_limits(_: int, wanted: tuple[int, int]) -> None:
        nonlocal limits
        limits = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    assert allow_many_descriptors() == then
    assert limits == (then, hard)
