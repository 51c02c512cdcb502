"""How long a test waits for what must happen: only a failing test waits that long."""

from __future__ import annotations

PATIENCE_S = 100.0
