"""`penstock build`: builds TensorRT engines ahead of time, for models that need one.

Progress and the builder's output are written to stderr; the last line of stdout is the path to
serve. The module `penstock.executor.trtllm.engine_build` does the build.
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from penstock.server.cli.command import ExitCode, Parser, Subparsers
from penstock.server.cli.connection import UsageError, run_reporting, seconds
from penstock.tools.flags import add_settings, read_settings

if TYPE_CHECKING:
    from penstock.executor.trtllm.engine_build import BuildSettings

_EXIT_CODES = """\
exit codes:
  0    the last line of stdout is the path to serve: built now, built before, or needs no build
  1    the builder failed; its last lines are on stderr. Or another build of the same engine
       took longer than --wait-s
  2    bad usage, an unknown kind of folder, no builder, or an unsupported setting
  5    a file could not be read or written
  130  interrupted by Ctrl-C; the builder was terminated and its files were removed
  143  terminated by SIGTERM; as for 130
"""


class _Terminated(BaseException):
    """SIGTERM was received. A BaseException, so that an `except Exception` does not catch it."""


def add_parser(subparsers: Subparsers) -> None:
    """Add `build` to the command line."""
    parser = subparsers.add_parser(
        "build",
        help="build a TensorRT engine ahead of time, where a model needs one",
        description="Build a TensorRT engine from a TensorRT-LLM checkpoint with the installed\n"
        "version's own builder, once: engines are kept by a hash of the model's files, the\n"
        "settings, the GPUs and the version. Hugging Face folders, quantised or not, need no\n"
        "build. `penstock serve` never builds.",
        epilog=_EXIT_CODES,
    )
    parser.fill = _add_options


def _add_options(parser: Parser) -> None:
    from penstock.executor.trtllm.engine_build import BuildSettings

    parser.add_argument(
        "--model", type=Path, required=True, metavar="FOLDER", help="kind of engine to build"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where engines are kept (default: penstock/engines in $XDG_CACHE_HOME or ~/.cache)",
    )
    add_settings(parser, BuildSettings)
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other flag of the builder, by its own name; repeatable",
    )
    parser.add_argument(
        "--wait-s",
        type=seconds,
        metavar="SECONDS",
        help="maximum wait for another build of the same engine, seconds (default: no limit)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit code."""

    def terminate(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        return run_reporting("build", lambda: _build(args))
    except _Terminated:
        print("penstock build: terminated", file=sys.stderr, flush=True)
        return 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)


def _build(args: argparse.Namespace) -> int:
    from penstock.executor.trtllm.builder_process import BuilderUnusable
    from penstock.executor.trtllm.engine_build import (
        BadBuild,
        BuildFailed,
        BuildReporter,
        build_engine,
    )
    from penstock.executor.trtllm.engine_cache import (
        CacheBusy,
        CacheUnusable,
        EngineCache,
        default_cache_folder,
    )

    folder = args.output or default_cache_folder(os.environ)
    try:
        built = build_engine(
            args.model.expanduser().resolve(),
            _settings_of(args),
            EngineCache(folder.expanduser().resolve()),
            BuildReporter(log=_log_line, show=_show),
            max_wait_s=args.wait_s,
        )
    except (BadBuild, BuilderUnusable, CacheUnusable) as error:
        raise UsageError(str(error)) from error
    except (BuildFailed, CacheBusy) as error:
        _log_line(str(error))
        return ExitCode.FAILED
    _log_line(built.explanation)
    print(built.path, flush=True)
    return ExitCode.OK


def _settings_of(args: argparse.Namespace) -> "BuildSettings":
    from penstock.executor.trtllm.engine_build import BuildSettings

    options: dict[str, str] = {}
    for option in args.option:
        name, is_pair, value = option.partition("=")
        if not (name and is_pair):
            raise UsageError(f"--option: must be NAME=VALUE, not {option!r}")
        options[name.removeprefix("--")] = value
    return read_settings(args, BuildSettings, {"options": options})


def _log_line(line: str) -> None:
    print(f"penstock build: {line}", file=sys.stderr, flush=True)


def _show(output: bytes) -> None:
    sys.stderr.buffer.write(output)
    sys.stderr.buffer.flush()
