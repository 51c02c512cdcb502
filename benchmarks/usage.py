"""Usage errors of benchmarks: wrong arguments and missing packages.

For programs that a benchmark starts and that read their arguments by position, and for benchmarks
that need more packages than Penstock.
"""

import contextlib
import sys
from collections.abc import Generator


def tell_usage(doc: str | None, *, num_arguments: int) -> None:
    """Print the usage `doc` and exit if `-h` is given or arguments are missing.

    For `-h` it goes to stdout and the exit code is 0.
    """
    given = sys.argv[1:]
    if given[:1] in (["-h"], ["--help"]):
        print(doc)
        raise SystemExit(0)
    if len(given) < num_arguments:
        raise SystemExit(doc)


@contextlib.contextmanager
def needing(extra: str) -> Generator[None]:
    """Exit with the extra to install if an import in this block does not find its package."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed: install penstock[{extra}]"
        raise SystemExit(message) from error
