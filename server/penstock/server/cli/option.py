"""One setting of `penstock serve`: its flag, its variable, its default.

Owns the value. The tables of settings are elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ENVIRONMENT_PREFIX = "PENSTOCK_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One setting: `--flag`, also read from `PENSTOCK_<FLAG>`; the flag wins."""

    flag: str
    parse: Callable[[str], Any]
    default: Any
    help: str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """Its name in the parsed arguments."""
        return self.flag.replace("-", "_")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return ENVIRONMENT_PREFIX + self.name.upper()
