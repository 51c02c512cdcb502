"""`penstock serve`: run a service on this machine until it is told to stop.

Owns the way from arguments and environment to the service's settings. Imports what is heavy only
in `run`.
"""

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.server.cli.command import Subparsers
from penstock.server.cli.connection import ADDRESS_VARIABLE, OPERATIONS_VARIABLE
from penstock.server.cli.connection_options import CONNECTION_VARIABLES
from penstock.server.cli.facade_options import check_facade
from penstock.server.cli.life_options import life_settings
from penstock.server.cli.observer_options import (
    bad_tracing_number,
    observer_config,
    tracing_by_variables,
    wants_next_rpc_keys,
)
from penstock.server.cli.option import ENVIRONMENT_PREFIX, Option
from penstock.server.cli.replay_options import replay_settings
from penstock.server.cli.resume_options import resume_settings
from penstock.server.cli.security_options import check_security, security_config
from penstock.server.cli.serve_options import OPTIONS, told_by_flag
from penstock.server.cli.transport_options import transport_config
from penstock.server.logs import configure_logging
from penstock.server.logs.rate import ALWAYS

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.executor.config import ExecutorConfig, SimulatedConfig
    from penstock.executor.trtllm.config import TrtllmConfig
    from penstock.scheduler.config import SchedulerConfig
    from penstock.server.config import ServerConfig
    from penstock.server.front.config import FrontConfig

T = TypeVar("T")
_PORTS = ("port", "operations_port", "metrics_port")

_EXIT_CODES = """\
exit codes:
  0        asked to stop (SIGTERM or SIGINT) and drained
  1        gave up: a process kept dying, or did not survive the drain
  2        could not start; one line on stderr says why
  128 + n  signal n came a second time: streams were cut
"""


class BadSetting(Exception):
    """A setting is wrong; the message names it."""


def add_parser(subparsers: Subparsers) -> None:
    """Add `serve` to the command line."""
    parser = subparsers.add_parser(
        "serve",
        help="run a service",
        description="Run a service. Each option can also be set by PENSTOCK_<OPTION>.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option in OPTIONS:
        shown = "" if option.default is None else f" (default: {option.default})"
        parser.add_argument(
            f"--{option.flag}",
            type=option.parse,
            default=None,
            choices=option.choices,
            metavar=option.metavar or (None if option.choices else option.parse.__name__.upper()),
            help=option.help + shown,
        )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; the exit code."""
    try:
        settings = merge_settings(vars(args), os.environ)
        # Told before anything can fail: a misspelt variable is often why it does.
        configure_logging(
            "supervisor",
            settings["log_level"],
            form=settings["log_format"],
            has_foreign_text=settings["log_foreign_text"] == "on",
        )
        for variable in unknown_variables(os.environ):
            logging.getLogger(__name__).warning(
                "%s is set and means nothing here", variable, extra=ALWAYS
            )
        config = build_config(settings)
    except BadSetting as error:
        return _cannot_start(str(error))
    import asyncio

    from penstock.server.processes.supervisor import CannotStart, Supervisor

    try:
        return asyncio.run(Supervisor(config, _announce).run())
    except CannotStart as error:
        return _cannot_start(told_by_flag(str(error)))


def merge_settings(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments over environment over defaults. Raises BadSetting naming the variable."""
    settings: dict[str, Any] = {}
    for option in OPTIONS:
        value = arguments.get(option.name)
        if value is None:
            value = _from_environment(option, environment)
        settings[option.name] = option.default if value is None else value
    if settings["log_format"] == "auto":
        settings["log_format"] = "short" if sys.stderr.isatty() else "text"
    settings["tracing"] = tracing_by_variables(environment)
    settings["bad_tracing_number"] = bad_tracing_number(environment)
    settings["has_next_rpc_keys"] = wants_next_rpc_keys(environment)
    return settings


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables with our prefix that are no setting: misspelt, most likely.

    Not those of the other commands, nor what Kubernetes makes up for services called penstock,
    penstock-metrics or penstock-operations.
    """
    ours = (option.variable for option in OPTIONS)
    known = {ADDRESS_VARIABLE, OPERATIONS_VARIABLE, *CONNECTION_VARIABLES, *ours}
    made_up = tuple(
        f"PENSTOCK_{name}{kind}"
        for name in ("", "METRICS_", "OPERATIONS_")
        for kind in ("SERVICE_", "PORT_")
    )
    return sorted(
        name
        for name in environment
        if name.startswith(ENVIRONMENT_PREFIX)
        and name not in known
        and not name.startswith(made_up)
    )


def build_config(settings: Mapping[str, Any]) -> "ServerConfig":
    """The service's settings. Raises BadSetting naming what is off."""
    from penstock.executor.models import ModelNotFound, resolve_model
    from penstock.server.cli.serve_device import with_device_defaults
    from penstock.server.config import ServerConfig

    try:
        settings = with_device_defaults(settings)
        model_path = resolve_model(settings["model"])
        tokenizer_path = _tokenizer_path(settings["tokenizer"])
        trtllm = _trtllm_config(settings, model_path, tokenizer_path)
        config = _told(
            ServerConfig,
            model=settings["model_name"] or model_path.name,
            model_path=model_path,
            tokenizer_path=tokenizer_path,
            executor=_executor_config(settings, model_path, tokenizer_path, trtllm),
            scheduler=_scheduler_config(settings, trtllm),
            front=_front_config(settings, trtllm),
            observer=_told(observer_config, settings=settings),
            security=_told(security_config, settings=settings),
            host=settings["host"],
            port=settings["port"],
            log_level=settings["log_level"],
            log_format=settings["log_format"],
            log_foreign_text=settings["log_foreign_text"] == "on",
            facade=settings["facade"],
            **life_settings(settings),
            **_given(
                num_fronts=settings["fronts"],
                drain_grace_s=settings["drain_grace_s"],
                record_path=_record_path(settings["record"]),
                record_max_bytes=_record_max_bytes(settings),
            ),
        )
        check_security(config)
        check_facade(config)
    except (ModelNotFound, ValueError) as error:
        raise BadSetting(str(error)) from error
    return config


def _tokenizer_path(text: str | None) -> "Path | None":
    from pathlib import Path

    if text is None:
        return None
    path = Path(text).expanduser().resolve()
    for name in ("tokenizer.json", "config.json"):
        if not (path / name).is_file():
            raise BadSetting(f"tokenizer: {path} holds no {name}")
    return path


def _record_path(text: str | None) -> "Path | None":
    """The folder, made if need be: whoever asks for a record is told now if there can be none."""
    from pathlib import Path

    if text is None:
        return None
    path = Path(text).expanduser().resolve()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BadSetting(f"record: {error}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise BadSetting(f"record: {path} cannot be written to")
    return path


def _record_max_bytes(settings: Mapping[str, Any]) -> int | None:
    count: int | None = settings["record_max_mib"]
    num_bytes = _mebibytes("record-max-mib", count)
    if count is not None and settings["record"] is None:
        raise BadSetting("record-max-mib means nothing without record")
    return num_bytes


def _trtllm_config(
    settings: Mapping[str, Any], model_path: "Path", tokenizer_path: "Path | None"
) -> "TrtllmConfig | None":
    """The section of the TensorRT-LLM executor, checked against its model; None for the others."""
    from penstock.executor.config import ExecutorKind

    executor = settings["executor"]
    if executor != ExecutorKind.TRTLLM:
        if settings["trtllm_config"] is not None:
            raise BadSetting(f"trtllm-config means nothing to the {executor} executor")
        return None
    from penstock.server.cli.serve_trtllm import check_model, trtllm_config

    config = trtllm_config(settings)
    check_model(model_path, config, tokenizer_path)
    return config


def _executor_config(
    settings: Mapping[str, Any],
    model_path: "Path",
    tokenizer_path: "Path | None",
    trtllm: "TrtllmConfig | None",
) -> "ExecutorConfig":
    from penstock.executor.config import ExecutorConfig, ExecutorKind

    simulated = _simulated_config(settings["executor"], settings["simulated_config"])
    if trtllm is not None:
        return ExecutorConfig(
            kind=ExecutorKind.TRTLLM,
            model_path=model_path,
            tokenizer_path=tokenizer_path,
            max_num_seqs=trtllm.max_batch_size,
            max_seq_len=trtllm.max_seq_len,
            trtllm=trtllm,
        )
    return _told(
        ExecutorConfig,
        **_given(
            kind=ExecutorKind(settings["executor"]),
            model_path=model_path,
            tokenizer_path=tokenizer_path,
            device=settings["device"],
            dtype=settings["dtype"],
            quantization=settings["quantization"],
            kv_cache_dtype=settings["kv_cache_dtype"],
            block_size=settings["block_size"],
            num_blocks=settings["num_blocks"],
            kv_cache_bytes=_mebibytes("kv-cache-mib", settings["kv_cache_mib"]),
            kv_memory_fraction=settings["kv_memory_fraction"],
            max_num_seqs=settings["max_num_seqs"],
            max_num_batched_tokens=settings["max_num_batched_tokens"],
            max_seq_len=settings["max_seq_len"],
            num_threads=settings["threads"],
            pipeline_depth=settings["pipeline_depth"],
            simulated=simulated,
        ),
    )


def _simulated_config(executor: str, text: str | None) -> "SimulatedConfig | None":
    from penstock.executor.config import ExecutorKind, SimulatedConfig, SimulatedPace
    from penstock.executor.config_json import from_json_value, parse_json

    if executor != ExecutorKind.SIMULATED:
        if text is not None:
            raise BadSetting(f"simulated-config means nothing to the {executor} executor")
        return None
    try:
        data: Any = parse_json("{}" if text is None else text)
    except ValueError as error:
        raise BadSetting(f"simulated-config is no JSON: {error}") from error
    config = from_json_value(SimulatedConfig, data, "simulated-config")
    # A service is there to be looked at: its steps take their time unless told otherwise.
    return config if "pace" in data else replace(config, pace=SimulatedPace.REAL_TIME)


def _scheduler_config(
    settings: Mapping[str, Any], trtllm: "TrtllmConfig | None"
) -> "SchedulerConfig":
    from penstock.server.cli.serve_scheduling import scheduler_config

    budget, policy = settings["max_num_batched_tokens"], settings["admission_policy"]
    is_caching = settings["prefix_caching"] != "off"
    if trtllm is not None:
        # Our scheduler admits for the engine's: they follow one policy, the one set there.
        budget = trtllm.max_num_tokens
        policy = trtllm.scheduler_config.capacity_scheduler_policy.name.lower()
        is_caching = trtllm.kv_cache_config.enable_block_reuse
    return scheduler_config(
        settings,
        max_num_batched_tokens=budget,
        admission_policy=policy,
        is_prefix_caching=is_caching,
    )


def _front_config(settings: Mapping[str, Any], trtllm: "TrtllmConfig | None") -> "FrontConfig":
    from penstock.server.front.config import FrontConfig

    aliases, caching = settings["model_aliases"], settings["prefix_caching"]
    sharing = settings["share_prefixes_across_tenants"]
    if trtllm is not None:
        caching = "on" if trtllm.kv_cache_config.enable_block_reuse else "off"
    return _told(
        FrontConfig,
        **_given(
            model_aliases=None if aliases is None else tuple(aliases.split(",")),
            is_prefix_caching=None if caching is None else caching == "on",
            shares_prefixes_across_tenants=None if sharing is None else sharing == "on",
            default_max_tokens=settings["default_max_tokens"],
            max_output_tokens=settings["max_output_tokens"],
            default_deadline_s=settings["default_deadline_s"],
            max_deadline_s=settings["max_deadline_s"],
            max_text_bytes_per_tenant=settings["max_text_bytes_per_tenant"],
            max_backlog_tokens=settings["max_backlog_tokens"],
            max_reader_stall_s=settings["max_reader_stall_s"],
            tenant_metadata_key=settings["tenant_metadata_key"],
            **replay_settings(settings),
            **resume_settings(settings),
            transport=_told(transport_config, settings=settings),
        ),
    )


def _from_environment(option: Option, environment: Mapping[str, str]) -> Any:
    text = environment.get(option.variable)
    if text is None:
        return None
    if option.name in _PORTS and text.startswith("tcp://"):
        # Kubernetes sets PENSTOCK_PORT so for a service that is called penstock, and
        # PENSTOCK_METRICS_PORT for penstock-metrics.
        return None
    try:
        value = option.parse(text)
    except ValueError as error:
        wanted = "an integer" if option.parse is int else "a number"
        raise BadSetting(f"{option.variable} must be {wanted}, not {text!r}") from error
    if option.choices is not None and value not in option.choices:
        raise BadSetting(f"{option.variable} must be one of {', '.join(option.choices)}")
    return value


def _told(kind: Callable[..., T], /, **settings: Any) -> T:
    """A dataclass of ours; its complaints name the flags that its fields come from."""
    try:
        return kind(**settings)
    except ValueError as error:
        raise ValueError(told_by_flag(str(error))) from None


def _given(**settings: Any) -> dict[str, Any]:
    """Only what was set: the rest takes the dataclasses' defaults."""
    return {name: value for name, value in settings.items() if value is not None}


def _mebibytes(flag: str, count: int | None) -> int | None:
    if count is not None and count < 1:
        raise BadSetting(f"{flag} must be at least 1, not {count}")
    return None if count is None else count * 1024 * 1024


def _announce(line: str) -> None:
    # Whoever read our stdout may have left; the service goes on.
    with contextlib.suppress(BrokenPipeError):
        print(line, flush=True)
        if line.startswith("penstock ready on ") and sys.stdout.isatty():
            address = line.split()[3]
            print(f"  try: penstock generate 'Once upon a time' --address {address}", flush=True)


def _cannot_start(reason: str) -> int:
    from penstock.server.processes.exit_codes import EXIT_CANNOT_START

    print(f"penstock serve: {reason}", file=sys.stderr, flush=True)
    return EXIT_CANNOT_START
