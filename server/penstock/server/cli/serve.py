"""`penstock serve`: runs a service on this machine until it is stopped.

Contains the command, the settings that depend on other settings, on the model or on the device, and
the output on stdout: a banner on a terminal, otherwise lines for scripts. Imports large modules
only in `run`.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.server.cli.command import Parser, Subparsers
from penstock.server.cli.connection import default_address, default_operations_address
from penstock.server.cli.installation import version_of
from penstock.server.cli.report import printable
from penstock.server.cli.variables import CONFIG_VARIABLE, unknown_variable_warnings
from penstock.server.observe.logs import leave_out_banner_lines
from penstock.server.processes.exit_codes import EXIT_CANNOT_START, SERVICE_EXIT_CODES_HELP
from penstock.server.settings.table import add_flags

if TYPE_CHECKING:
    from penstock.server.config import ServerConfig
    from penstock.server.processes.supervisor import ServiceReady
    from penstock.server.settings.sources import Sources

_DEFAULT_MODEL = "demo"
_DESCRIPTION = """\
Run a service. Each option can also be set by PENSTOCK_<OPTION>, and in a TOML file that --config
names: docs/settings.md has its keys. Flags override variables, which override the file.
"""
_PROMPT = "Once upon a time"
READY_LINE = re.compile(r"^penstock ready on (\S+) ")
OPERATIONS_LINE = re.compile(r"^penstock operations on (\S+)")
"""Patterns for the beginnings of two `script_lines`. Group 1 is the address."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the `serve` subcommand."""
    parser = subparsers.add_parser(
        "serve",
        help="run a service",
        usage="%(prog)s [options]",
        description=_DESCRIPTION,
        epilog=SERVICE_EXIT_CODES_HELP,
    )
    parser.fill = _add_flags


def _add_flags(parser: Parser) -> None:
    from penstock.server.config import GROUPS, SETTINGS

    add_flags(parser, SETTINGS, GROUPS)


def report_start(words: Sequence[str]) -> None:
    """On a terminal, print that the service starts, unless the command line `words` has -h or
    --help. The imports that follow may take seconds."""
    if sys.stdout.isatty() and not {"-h", "--help"} & set(words):
        _print([f"Penstock {version_of('penstock') or ''} is starting ..."])


def run(args: argparse.Namespace) -> int:
    """Serve until stopped, and return the exit code."""
    from penstock.server.config import SETTINGS
    from penstock.server.settings.sources import BadSetting, Sources

    try:
        sources = merge_settings(vars(args), os.environ)
    except BadSetting as error:
        # The log has the default settings, because a setting of the log may be the invalid one.
        _start_log(Sources(SETTINGS, {}))
        return _cannot_start(str(error))
    _start_log(sources)
    # The next line is printed after imports, which may take seconds.
    if not sys.stdout.isatty():
        logging.getLogger(__name__).info("penstock %s is starting", version_of("penstock") or "")
    try:
        config = build_config(sources)
    except BadSetting as error:
        return _cannot_start(str(error))
    from penstock.server.processes.supervisor import CannotStart, Supervisor

    prepare_terminal(config)
    try:
        code = asyncio.run(Supervisor(config, announce).run())
    except CannotStart as error:
        return _cannot_start(with_setting_flags(str(error)))
    if sys.stdout.isatty():
        _print(["Penstock has stopped."])
    return code


def _start_log(sources: "Sources") -> None:
    """Configure logging, and report unknown environment variables. Called before anything else can
    fail, because a misspelt variable is often the cause of an error."""
    from penstock.server.observe.logs import configure_logging
    from penstock.server.observe.logs.limits import ALWAYS

    configure_logging(
        "supervisor",
        sources.value("log_level"),
        form=sources.value("log_format"),
        has_exception_messages=sources.value("log_exception_messages"),
    )
    logger = logging.getLogger(__name__)
    for warning in unknown_variable_warnings(os.environ):
        logger.warning("%s", warning, extra=ALWAYS)


def merge_settings(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> "Sources":
    """Merge the settings: arguments override environment variables, which override a file.

    Raises BadSetting if a setting is invalid, or if the file cannot be read.
    """
    from penstock.server.config import SETTINGS
    from penstock.server.settings.sources import GivenFile, gather

    flag, variable = arguments.get("config"), environment.get(CONFIG_VARIABLE)
    spelling = "--config" if flag else CONFIG_VARIABLE
    path = flag or variable
    file = GivenFile(Path(path).expanduser(), spelling) if path else None
    return gather(SETTINGS, arguments, environment, file)


def build_config(sources: "Sources") -> "ServerConfig":
    """Build the configuration of the service. Raises BadSetting if a setting is invalid."""
    from penstock.executor.models import ModelNotFound
    from penstock.scheduler.setting import SettingError
    from penstock.server.cli.serve_settings import check_gateway, check_security
    from penstock.server.config import ServerConfig
    from penstock.server.settings.sources import BadSetting

    try:
        config = sources.build(ServerConfig, _derived(sources))
        check_security(config)
        check_gateway(config)
    except SettingError as error:
        raise BadSetting(error.spelled(sources.spell)) from error
    except (ModelNotFound, ValueError) as error:
        raise BadSetting(str(error)) from error
    return config


def _derived(sources: "Sources") -> dict[str, Any]:
    """Return the values of configuration fields that are derived from other settings, keyed by the
    path of the field, such as `executor.model_path`. Raises ModelNotFound or ValueError."""
    from penstock.executor.config import ExecutorKind
    from penstock.executor.models import resolve_model
    from penstock.server.cli.serve_settings import (
        check_scheduling,
        executor_settings,
        observer_settings,
        trtllm_settings,
    )

    model_path = resolve_model(sources.get("model", _DEFAULT_MODEL))
    tokenizer_path = _tokenizer_path(sources)
    is_trtllm = sources.get("executor") is ExecutorKind.TRTLLM
    derived: dict[str, Any] = {
        "model": sources.get("model_name") or model_path.name,
        **{f"{section}model_path": model_path for section in ("", "executor.")},
        **{f"{section}tokenizer_path": tokenizer_path for section in ("", "executor.")},
        **(
            trtllm_settings(sources, model_path, tokenizer_path)
            if is_trtllm
            else executor_settings(sources)
        ),
        **observer_settings(sources),
        **_files(sources),
    }
    check_scheduling(sources, is_caching=derived.get("front.is_prefix_caching", True))
    return derived


def _tokenizer_path(sources: "Sources") -> Path | None:
    given: Path | None = sources.get("tokenizer")
    if given is None:
        return None
    path = given.expanduser().resolve()
    for name in ("tokenizer.json", "config.json"):
        if not (path / name).is_file():
            raise ValueError(f"{sources.spell('tokenizer')}: {path} contains no {name}")
    return path


def _files(sources: "Sources") -> dict[str, Any]:
    """Return the paths of files and folders, keyed by the path of the configuration field. Creates
    missing folders, so that missing write access is reported at the start. Raises ValueError if a
    folder is not writable, or if a setting has no effect."""
    if "record" not in sources:
        sources.reject(["record_max_mib"], f"requires {sources.spell('record')}")
    paths: dict[str, Any] = {}
    for name, field in (("record", "record_path"), ("flight_folder", "observer.flight.folder")):
        if name in sources:
            paths[field] = _writable_folder(sources, name)
    for name in ("policy_file", "tls_cert", "tls_key", "tls_client_ca"):
        if name in sources:
            # Not resolved, because Kubernetes mounts symlinks whose targets change.
            paths[f"security.{name}"] = sources.get(name).expanduser().absolute()
    return paths


def _writable_folder(sources: "Sources", name: str) -> Path:
    path: Path = sources.get(name).expanduser().resolve()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = "it is not a folder" if path.exists() else error.strerror
        raise ValueError(f"{sources.spell(name)}: {path} cannot be created: {why}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"{sources.spell(name)}: {path} cannot be written to")
    return path


def with_setting_flags(message: str) -> str:
    """Return a message from a process of the service, with the names of configuration fields
    replaced by flags."""
    from penstock.server.config import SETTINGS

    flags = {item.path.rpartition(".")[2]: f"--{item.flag}" for item in SETTINGS}
    flags |= {item.name: f"--{item.flag}" for item in SETTINGS}
    # A single word is the name of a field if a value of that field follows.
    values = [
        rf"{item.path.rpartition('.')[2]}(?= (?:{'|'.join(item.choices)})\b)"
        for item in SETTINGS
        if item.choices
    ]
    values.append(r"device(?= (?:cpu|cuda)\b)")
    return re.sub(
        rf"(?<![\w.'\"/-])(?:{'|'.join(values)}|[a-z]+(?:_[a-z]+)+(?![\w./'\"-]))",
        lambda match: flags.get(match[0], match[0]),
        message,
    )


def _cannot_start(reason: str) -> int:
    print(f"penstock serve: {reason}", file=sys.stderr, flush=True)
    return EXIT_CANNOT_START


def prepare_terminal(config: "ServerConfig") -> None:
    """On a terminal, print which model is being loaded. If stderr is a terminal too, drop log lines
    that repeat the banner."""
    if not sys.stdout.isatty():
        return
    if sys.stderr.isatty():
        leave_out_banner_lines()
    _print([f"Loading {printable(str(config.model_path))} ..."])


def announce(ready: "ServiceReady") -> None:
    """Print that the service is ready, with its addresses."""
    _print(banner_lines(ready) if sys.stdout.isatty() else script_lines(ready))


def script_lines(ready: "ServiceReady") -> list[str]:
    """Return one line per address, for scripts."""
    resources = f"; {ready.resources}" if ready.resources else ""
    lines = [
        f"penstock ready on {ready.address} (model {ready.model}, {_executor(ready)},"
        f" {ready.start_s:.1f} s{resources})"
    ]
    if ready.operations_address is not None:
        lines.append(f"penstock operations on {ready.operations_address}")
    if ready.metrics_url is not None:
        lines.append(f"penstock metrics on {ready.metrics_url}")
    return lines


def banner_lines(ready: "ServiceReady") -> list[str]:
    """Return the banner: what was started, where it listens, and commands to try."""
    rows = [
        ("model", f"{printable(ready.model)} ({_executor(ready)})"),
        ("device", ready.resources),
        ("address", f"{ready.address} (gRPC)"),
        ("operations", ready.operations_address),
        ("status page", (ready.metrics_url or "").removesuffix("metrics")),
        *(("try" if first else "", command) for first, command in _commands(ready)),
        ("stop", "Ctrl-C"),
    ]
    shown = [f"  {name:<11}  {value}" for name, value in rows if value]
    return ["", f"Penstock is ready after {ready.start_s:.1f} s.", "", *shown, ""]


def _commands(ready: "ServiceReady") -> list[tuple[bool, str]]:
    """Return commands to try in another terminal, each with True for a client's command and False
    for an operator's.

    With TLS, only the help is suggested, because the commands need files whose paths are unknown
    here.
    """
    program = _program()
    if ready.has_tls:
        return [(True, f"{program} generate --help  (connection: --tls)")]
    commands = [(True, f'{program} generate "{_PROMPT}"')]
    if default_address(os.environ) != ready.address:
        commands = [(True, f"{commands[0][1]} --address {ready.address}")]
    if (operations := ready.operations_address) is not None and find_spec("rich"):
        is_default = default_operations_address(os.environ) == operations
        commands.append(
            (False, f"{program} top" + ("" if is_default else f" --address {operations}"))
        )
    return commands


def _program() -> str:
    """Return how a shell calls penstock: by name if it is on PATH, otherwise as this process was
    called.
    """
    if shutil.which("penstock"):
        return "penstock"
    if Path(sys.argv[0]).name == "penstock":
        return shlex.quote(sys.argv[0])
    return f"{shlex.quote(sys.executable)} -m penstock.tools"


def _executor(ready: "ServiceReady") -> str:
    fronts = "1 front" if ready.num_fronts == 1 else f"{ready.num_fronts} fronts"
    return f"{ready.executor} executor, {fronts}"


def _print(lines: list[str]) -> None:
    # If stdout has no reader, the service continues.
    with contextlib.suppress(BrokenPipeError):
        print("\n".join(lines), flush=True)
