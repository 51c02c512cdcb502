"""Reads trace files, also compressed ones (.gz), as a stream.

Checks the order of arrivals. Holds only one line at a time in memory.
"""

import gzip
import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from penstock.server.observe.recording.trace import TraceError, TraceRequest
from penstock.tools.simulation.trace_formats import TraceFormat, format_of, parser_of


def read_trace(path: Path, trace_format: TraceFormat | None = None) -> Iterator[TraceRequest]:
    """Yield the requests of a file in order of arrival; `trace_format` None: detected from the
    first line.

    Raises TraceError for a file without requests and, with the line number, for an invalid line or
    a request that arrives before the previous one; OSError if the file cannot be read.
    """
    with _opened(path) as file:
        lines = _numbered_lines(path, file)
        first = next(lines, None)
        if first is None:
            raise TraceError(f"{path}: contains no requests")
        number = first[0]
        latest_s = 0.0
        has_requests = False
        try:
            parser = parser_of(trace_format or format_of(first[1]))
            for line_number, line in itertools.chain((first,), lines):
                number = line_number
                request = parser.parse(line)
                if request is None:
                    continue
                if request.arrival_s < latest_s:
                    raise ValueError("arrives before the request above it")  # noqa: TRY301
                latest_s = request.arrival_s
                has_requests = True
                yield request
        except TraceError:
            raise
        except ValueError as error:
            raise TraceError(f"{path}:{number}: {error}") from error
        if not has_requests:
            raise TraceError(f"{path}: contains no requests")


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return cast("IO[str]", gzip.open(path, "rt", encoding="utf-8"))
    return path.open(encoding="utf-8")


def _numbered_lines(path: Path, file: IO[str]) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their line numbers from 1. Raises TraceError for
    text that is not UTF-8 or a broken gzip file.
    """
    number = 0
    try:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}:{number + 1}: is not UTF-8 text") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        reason = f"is not a gzip file, or a broken one: {error}"
        raise TraceError(f"{path}:{number + 1}: {reason}") from error
    except EOFError as error:
        raise TraceError(f"{path}:{number + 1}: the compressed file is cut off") from error
