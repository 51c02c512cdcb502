"""Usage errors of benchmarks: wrong arguments and missing packages.

For the sides of a benchmark, which are started by it and read their arguments by position, and for
benchmarks that need more than Penstock itself does.
"""

import contextlib
import sys
from collections.abc import Generator


def tell_usage(doc: str | None, *, num_arguments: int) -> None:
    """End the program with `doc`, its usage, if that is asked for or too few arguments are there.

    Asked for, it goes to stdout and the exit code is 0.
    """
    given = sys.argv[1:]
    if given[:1] in (["-h"], ["--help"]):
        print(doc)
        raise SystemExit(0)
    if len(given) < num_arguments:
        raise SystemExit(doc)


@contextlib.contextmanager
def needing(extra: str) -> Generator[None]:
    """End the program with what to install when an import in this block finds no such package."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed: install penstock[{extra}]"
        raise SystemExit(message) from error
