"""Exit codes of the commands that call a service. `serve` documents its own."""

import enum


class ExitCode(enum.IntEnum):
    """How a command ended."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNAVAILABLE = 3
    DEADLINE = 4
    INPUT_OUTPUT = 5
    BUG = 70
    INTERRUPTED = 130
    BROKEN_PIPE = 141


EXIT_CODES_HELP = """\
exit codes:
  0    done (health: serving)
  1    the request was refused or failed (health: not serving)
  2    bad usage, or more was asked for than this machine can hold
  3    no service at the address, or it takes no requests
  4    a deadline passed
  5    the input could not be read, or the output not written; the request was cancelled
  70   internal error of penstock; the message gives the location
  130  interrupted by Ctrl-C; the request was cancelled
  141  the reader of the output has exited; the request was cancelled
"""
