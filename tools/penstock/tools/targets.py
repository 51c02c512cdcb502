"""Targets of a good request, measured or simulated."""

from dataclasses import dataclass

from penstock.scheduler.setting import check, setting

SLOW_GAP_SHARE = 0.01
"""Share of the gaps between a good request's tokens that may be longer than the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Targets of a good request: its TTFT, and the p99 of the gaps between its tokens."""

    ttft_s: float = setting(
        1.0, "targets", "seconds to the first token", name="target_ttft_s", above=0
    )
    itl_s: float = setting(
        0.1,
        "targets",
        "milliseconds between two tokens",
        name="target_itl_ms",
        scale=1e-3,
        above=0,
    )

    def __post_init__(self) -> None:
        """Raise SettingError naming the field that is out of range."""
        check(self)
