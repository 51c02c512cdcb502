"""Defines the latency targets that a completed request must meet to count as goodput."""

from dataclasses import dataclass

from penstock.scheduler.setting import check, setting

SLOW_GAP_SHARE = 0.01
"""Maximum share of the gaps between a good request's tokens that may exceed the ITL target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Upper limits for a good request: `ttft_s` for its TTFT, `itl_s` for the p99 of the gaps
    between its tokens.
    """

    ttft_s: float = setting(1.0, "targets", "TTFT target, seconds", name="target_ttft_s", above=0)
    itl_s: float = setting(
        0.1,
        "targets",
        "ITL target, milliseconds",
        name="target_itl_ms",
        scale=1e-3,
        above=0,
    )

    def __post_init__(self) -> None:
        """Raise SettingError, naming the field, if one is out of range."""
        check(self)
