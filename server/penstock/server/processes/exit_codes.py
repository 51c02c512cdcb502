"""Exit codes of the service and of its processes.

`penstock serve` ends with
  0        asked to stop: every front drained, or was never ready
  1        gave up: a process kept dying, or did not survive the drain
  2        could not start; one line on stderr has the reason
  128 + n  signal n came a second time: streams were cut
"""

EXIT_OK = 0
EXIT_GAVE_UP = 1
EXIT_CANNOT_START = 2
EXIT_SIGNAL_BASE = 128

# Exit codes of child processes, for the supervisor's log.
EXIT_ENGINE_DIED = 70
EXIT_BOOKS_WRONG = 71
EXIT_ORPHANED = 72

_MEANINGS = {
    EXIT_OK: "it ended",
    EXIT_CANNOT_START: "it could not start",
    EXIT_ENGINE_DIED: "its executor, or a step of it, failed",
    EXIT_BOOKS_WRONG: "its integrity check failed",
    EXIT_ORPHANED: "its supervisor was gone",
}


def describe_exit(code: int) -> str:
    """Describe a child's exit code (negative: killed by that signal)."""
    if code < 0:
        return f"killed by signal {-code}"
    return f"exit code {code} ({_MEANINGS[code]})" if code in _MEANINGS else f"exit code {code}"
