"""Reports usage errors of benchmarks: missing arguments and missing packages.

Used by programs with positional arguments that a benchmark starts, and by benchmarks that need
additional packages.
"""

import contextlib
import sys
from collections.abc import Generator


def print_usage(doc: str | None, *, num_arguments: int) -> None:
    """Print the usage `doc` and exit if `-h` is given or arguments are missing.

    For `-h` the usage is printed to stdout and the exit code is 0.
    """
    given = sys.argv[1:]
    if given[:1] in (["-h"], ["--help"]):
        print(doc)
        raise SystemExit(0)
    if len(given) < num_arguments:
        raise SystemExit(doc)


@contextlib.contextmanager
def needing(extra: str) -> Generator[None]:
    """Exit with the name of the extra to install if an import in this block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed: pip install '.[{extra}]'"
        raise SystemExit(message) from error
