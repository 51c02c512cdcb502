"""Exit codes of the service and of its processes."""

EXIT_OK = 0
EXIT_GAVE_UP = 1
EXIT_CANNOT_START = 2
EXIT_SIGNAL_BASE = 128
SERVICE_EXIT_CODES_HELP = f"""\
exit codes:
  {EXIT_OK}        stopped on request: all fronts drained, or were never ready
  {EXIT_GAVE_UP}        failed: a process crashed repeatedly, or crashed or hung during the drain
  {EXIT_CANNOT_START}        could not start; one line on stderr has the reason
  {EXIT_SIGNAL_BASE} + n  signal n arrived a second time: streams were interrupted
"""

# Exit codes of child processes, for the log of the supervisor.
EXIT_ENGINE_DIED = 70
EXIT_INTEGRITY_FAILED = 71
EXIT_ORPHANED = 72

_MEANINGS = {
    EXIT_OK: "it ended",
    EXIT_CANNOT_START: "it could not start",
    EXIT_ENGINE_DIED: "its executor, or a step of it, failed",
    EXIT_INTEGRITY_FAILED: "its integrity check failed",
    EXIT_ORPHANED: "its supervisor had died",
}


def describe_exit(code: int) -> str:
    """Return a description of a child's exit code. The code is negative if a signal killed the
    child."""
    if code < 0:
        return f"killed by signal {-code}"
    return f"exit code {code} ({_MEANINGS[code]})" if code in _MEANINGS else f"exit code {code}"
