"""The time limit of waits in tests, seconds: only a failing test waits that long."""

from __future__ import annotations

PATIENCE_S = 100.0
