"""Copies of requests that were given away, until it is certain that they go on elsewhere.

Owns how long and how many are kept: for their grace, and the oldest go first where they are too
many or too large. Nothing runs here: a copy is used when nobody else has the request. Holds prompts
and outputs, and shows them to nobody. Times are seconds on the engine's clock.
"""

from collections.abc import Callable
from dataclasses import replace

from penstock.server.front.config import FrontConfig
from penstock.server.link.resume_frames import Inheritance


class Spares:
    """By the engine's names for requests. Bounds: those of parked requests and of their logs."""

    def __init__(self, config: FrontConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._copies: dict[str, tuple[Inheritance, float]] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._copies)

    def put(self, name: str, inheritance: Inheritance) -> None:
        """Keep a copy; an earlier one goes."""
        self.drop(name)
        expires_s = self._clock() + inheritance.keepsake.grace_s
        self._copies[name] = replace(inheritance, is_spare=True), expires_s
        self.num_bytes += inheritance.num_bytes
        while self._is_too_much() and len(self._copies) > 1:
            self.drop(next(iter(self._copies)))

    def get(self, name: str) -> Inheritance | None:
        """The copy of this request, None where there is none; it stays."""
        inheritance, expires_s = self._copies.get(name, (None, 0.0))
        return inheritance if expires_s > self._clock() else None

    def drop(self, name: str) -> None:
        """It goes on elsewhere. Idempotent."""
        inheritance, _ = self._copies.pop(name, (None, 0.0))
        if inheritance is not None:
            self.num_bytes -= inheritance.num_bytes

    def sweep(self, now_s: float) -> None:
        """To be called now and then: what nobody came for in time is forgotten."""
        for name in [name for name, (_, due_s) in self._copies.items() if due_s <= now_s]:
            self.drop(name)

    def _is_too_much(self) -> bool:
        config = self._config
        too_many = len(self._copies) > config.max_parked_requests
        return too_many or self.num_bytes > config.max_resume_bytes
