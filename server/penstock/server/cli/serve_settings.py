"""Derives settings of `penstock serve` from files, packages, the device and other settings.

Also checks the security, the gateway and the scheduling of a configuration. Defines the default
ports, the defaults of slots and token budget, the settings that have a separate key in the
TensorRT-LLM section, and the OpenTelemetry variables that enable tracing.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.conventions import MAX_PORT, METRICS_OFFSET, OPERATIONS_OFFSET
from penstock.executor.config import ExecutorKind, SimulatedConfig
from penstock.executor.device_defaults import device_defaults
from penstock.executor.torch.thread_environment import NUM_THREADS_VARIABLE, num_threads_of
from penstock.executor.trtllm.config import TrtllmConfig
from penstock.executor.trtllm.preflight import check_before_load, check_tokenizer
from penstock.scheduler.config import AdmissionPolicy, SchedulingOrder
from penstock.scheduler.setting import SettingError
from penstock.server.gateways import NO_GATEWAY, load_gateway
from penstock.server.observe.logs.limits import ALWAYS
from penstock.server.security.security import Security, check_exposure, is_loopback
from penstock.server.settings.sources import BadSetting, Sources
from penstock.server.tenants import tenant_fault
from penstock.server.usable_cores import num_usable_cores

if TYPE_CHECKING:
    from penstock.server.config import ServerConfig


logger = logging.getLogger(__name__)
_FAIR_ONLY = ("tenant_weights", "aging_s", "max_num_running_per_tenant", "max_prefill_share")
_CACHE_ONLY = (
    *("eviction", "session_ttl_s", "session_retention_level", "max_session_share"),
    *("max_session_tokens", "max_retention_share", "max_tenant_retention_share"),
    *("max_retention_s", "share_prefixes_across_tenants"),
)
_QUOTAS = ("tenant_max_live", "tenant_requests_per_minute", "tenant_tokens_per_minute")
_CACHE_SIZES = ("num_blocks", "kv_cache_mib", "kv_memory_fraction")
_TRTLLM_KEYS = {
    "max_num_seqs": "max_batch_size",
    "max_num_batched_tokens": "max_num_tokens",
    "max_seq_len": "max_seq_len",
    "admission_policy": "scheduler_config.capacity_scheduler_policy",
    "block_size": "kv_cache_config.tokens_per_block",
    "num_blocks": "kv_cache_config.max_tokens",
    "kv_cache_mib": "kv_cache_config.free_gpu_memory_fraction",
    "kv_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "dtype": "dtype",
    "kv_cache_dtype": "kv_cache_config.dtype",
    "pipeline_depth": "disable_overlap_scheduler",
}
"""Settings of the other executors, with the key of the TensorRT-LLM section that replaces each."""
_PLANS_STEPS = "the engine plans its own steps"
_EVICTS_BLOCKS = "the engine evicts its own blocks; it supports retention but not sessions"
_WITHOUT_EFFECT = {
    "device": "GPUs are chosen by CUDA_VISIBLE_DEVICES and tensor_parallel_size",
    **dict.fromkeys(("threads", "cpu_kernels"), "it does not use the CPU"),
    "quantization": "it serves checkpoints as they are quantised",
    **dict.fromkeys(
        ("target_itl_ms", "max_prefill_share", "deadline_admission", "min_deadline_chance"),
        _PLANS_STEPS,
    ),
    "step_cost": _PLANS_STEPS,
    **dict.fromkeys(
        ("eviction", "max_session_share", "max_tenant_session_share", "max_session_tokens"),
        _EVICTS_BLOCKS,
    ),
}
_OFFSETS = {"operations_port": OPERATIONS_OFFSET, "metrics_port": METRICS_OFFSET}
_MAX_THREADS_PER_CORE = 4
"""With more threads per core the threads would only wait for each other."""
_EXPORTER_VARIABLE = "OTEL_TRACES_EXPORTER"
_OPT_IN_VARIABLE = "OTEL_SEMCONV_STABILITY_OPT_IN"
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def check_security(config: "ServerConfig") -> None:
    """Raise ValueError if the policy file or a TLS file is invalid, or if unauthenticated callers
    could get access by accident. Logs a warning if tokens are accepted without TLS."""
    security, observer = config.security, config.observer
    is_behind_proxy = bool(config.front.tenant_metadata_key)
    host = observer.operations_host
    check_exposure(
        security,
        host=config.host,
        operations_host=None if observer.operations_port is None else host,
        metrics_host=None if observer.metrics_port is None else host,
        is_behind_proxy=is_behind_proxy,
    )
    try:
        opened = Security(security, is_behind_proxy=is_behind_proxy)
    except OSError as error:
        path = error.filename
        what = f"{path} cannot be read: {error.strerror}"
        for name in ("policy_file", "tls_cert", "tls_key", "tls_client_ca"):
            if str(getattr(security, name)) == str(path):
                raise SettingError(f"{{}}: {what}", name) from error
        raise ValueError(what) from error
    if opened.authenticator is not None and not security.has_tls and not is_loopback(config.host):
        logger.warning(
            "tokens cross the network in plain text: set --tls-cert and --tls-key, or terminate TLS"
            " in front of %s",
            config.host,
            extra=ALWAYS,
        )


def check_gateway(config: "ServerConfig") -> None:
    """Raise ValueError if the gateway is unknown or lacks a package. Logs a warning if its traffic
    would use only one of several gRPC server processes, or lack the TLS or credentials that the
    port requires."""
    if config.gateway == NO_GATEWAY:
        return
    load_gateway(config.gateway).check_installed()
    security = config.security
    what = [
        *(["TLS"] if security.has_tls else []),
        *(["credentials"] if security.policy_file is not None else []),
    ]
    if config.num_fronts > 1:
        logger.warning(
            "the %s gateway keeps one connection to this worker, so one of its %d fronts gets all"
            " requests: --fronts 1 is enough here, and more workers add throughput",
            config.gateway,
            config.num_fronts,
            extra=ALWAYS,
        )
    if what:
        logger.warning(
            "the port requires %s, and the %s gateway sends none: it needs a separate proxy that"
            " adds them",
            " and ".join(what),
            config.gateway,
            extra=ALWAYS,
        )


def check_scheduling(sources: Sources, *, is_caching: bool) -> None:
    """Raise ValueError for a setting of the scheduler or of tenants that is invalid or would have
    no effect. `is_caching` is True if the executor caches prefixes."""
    if sources.get("order") is SchedulingOrder.FCFS:
        sources.reject(_FAIR_ONLY, "has no effect with the order fcfs")
    if not (is_caching and sources.value("prefix_caching")):
        sources.reject(_CACHE_ONLY, "requires prefix caching")
    if not sources.value("deadline_admission"):
        sources.reject(["min_deadline_chance"], "requires --deadline-admission on")
    if "policy_file" in sources:
        sources.reject(
            ["tenant_weights"], "cannot be combined with --policy-file, which has the weights"
        )
        sources.reject(_QUOTAS, "cannot be combined with --policy-file, which has the limits")
    if "tenant_metadata_key" not in sources:
        sources.reject(
            ["tenant_weights"],
            "requires --tenant-metadata-key: without it there is only one tenant",
        )
    for name in sources.get("tenant_weights", {}):
        fault = tenant_fault(name) if name else None
        if fault is not None:
            spelling = sources.spell("tenant_weights")
            raise ValueError(f"{spelling}: {name!r} is not a valid tenant name: it {fault}")


def executor_settings(sources: Sources) -> dict[str, Any]:
    """Return the derived settings of an executor for which Penstock's scheduler forms the batches
    (all except TensorRT-LLM), keyed by the path of the configuration field.

    Raises ValueError for an invalid setting.
    """
    kind, device = sources.value("executor"), sources.value("device")
    budget, num_seqs = sources.get("max_num_batched_tokens"), sources.get("max_num_seqs")
    sources.reject(["trtllm_config"], f"has no effect with the {kind} executor")
    derived: dict[str, Any] = {}
    if "threads" in sources:
        _check_threads(sources.spell("threads"), sources.get("threads"))
    elif kind is ExecutorKind.TORCH:
        _check_threads(NUM_THREADS_VARIABLE, num_threads_of(sources.environment) or 1)
    if kind is not ExecutorKind.SIMULATED:
        sources.reject(["simulated_config"], f"has no effect with the {kind} executor")
    else:
        sources.reject(["cpu_kernels"], f"has no effect with the {kind} executor")
        if "simulated_config" not in sources:
            # Simulated steps take real time, so that the latencies of the service are realistic.
            derived["executor.simulated"] = SimulatedConfig(is_real_time=True)
    if kind is ExecutorKind.TORCH and device.startswith("cuda"):
        sources.reject(["cpu_kernels"], f"has no effect with the device {device}")
        usual = device_defaults(device)
        if num_seqs is None:
            num_seqs = usual.max_num_seqs if budget is None else min(usual.max_num_seqs, budget)
        if budget is None:
            budget = max(usual.max_num_batched_tokens, num_seqs)
        derived["executor.max_num_seqs"] = num_seqs
    else:
        sources.reject(["kv_memory_fraction"], "requires a GPU; without one set --kv-cache-mib")
    sizes = [sources.spell(name) for name in _CACHE_SIZES if name in sources]
    if len(sizes) > 1:
        raise BadSetting(f"{' and '.join(sizes)} exclude each other: set one of them")
    if budget is not None:
        derived["executor.max_num_batched_tokens"] = budget
        derived["scheduler.max_num_batched_tokens"] = budget
    return derived


def _check_threads(spelling: str, num_threads: int) -> None:
    most = _MAX_THREADS_PER_CORE * num_usable_cores()
    if num_threads > most:
        raise BadSetting(
            f"{spelling} must be at most {most},"
            f" {_MAX_THREADS_PER_CORE} for each usable core, not {num_threads}"
        )


def trtllm_settings(
    sources: Sources, model_path: Path, tokenizer_path: Path | None
) -> dict[str, Any]:
    """Return the settings derived from the TensorRT-LLM section, keyed by the path of the
    configuration field, after checks against the flags and the model. Logs warnings. Raises
    ValueError if a check fails.

    The scheduler must predict which requests the engine admits, so both use the admission policy of
    the TensorRT-LLM section.
    """
    for name, key in _TRTLLM_KEYS.items():
        sources.reject([name], f"is set for the trtllm executor by {key} in --trtllm-config")
    for name, reason in _WITHOUT_EFFECT.items():
        sources.reject([name], f"has no effect with the trtllm executor: {reason}")
    sources.reject(["simulated_config"], "has no effect with the trtllm executor")
    config: TrtllmConfig = sources.get("trtllm_config", TrtllmConfig())
    caching, reuse = sources.get("prefix_caching"), config.kv_cache_config.enable_block_reuse
    if caching is not None and caching is not reuse:
        raise ValueError(
            f"{sources.spell('prefix_caching')} is {'on' if caching else 'off'} and"
            f" --trtllm-config.kv_cache_config.enable_block_reuse is {str(reuse).lower()}: they"
            " must agree"
        )
    findings = check_before_load(model_path, config, os.environ)
    check_tokenizer(findings.folder, tokenizer_path)
    logger.info("%s", findings.folder.explanation)
    for notice in findings.notices:
        logger.warning("%s", notice, extra=ALWAYS)
    policy = config.scheduler_config.capacity_scheduler_policy.name.lower()
    return {
        "executor.max_num_seqs": config.max_batch_size,
        "executor.max_seq_len": config.max_seq_len,
        "scheduler.max_num_batched_tokens": config.max_num_tokens,
        "scheduler.admission_policy": AdmissionPolicy(policy),
        "front.is_prefix_caching": reuse,
    }


def observer_settings(sources: Sources) -> dict[str, Any]:
    """Return the derived settings of the observer (the process with the operations and metrics
    ports), keyed by the path of the configuration field. Raises ValueError for an invalid
    setting."""
    ports: dict[str, int | None] = {}
    for name, offset in _OFFSETS.items():
        port = sources.value("port")
        # There is no port after the last one.
        behind = port + offset if 0 < port <= MAX_PORT - offset else 0
        ports[name] = sources.get(name) if name in sources else behind
    if not any(port is not None for port in ports.values()):
        sources.reject(["operations_host"], "requires a port")
    if ports["metrics_port"] is None:
        sources.reject(["metrics_tenants"], "requires --metrics-port")
    if "tenant_metadata_key" not in sources and "policy_file" not in sources:
        sources.reject(
            ["metrics_tenants"],
            "requires --tenant-metadata-key or --policy-file: without one there is only one tenant",
        )
    is_next = any(
        word.strip() in ("rpc", "rpc/dup")
        for word in sources.environment.get(_OPT_IN_VARIABLE, "").split(",")
    )
    return {
        **{f"observer.{name}": port for name, port in ports.items()},
        "observer.tracing.is_on": _has_traces(sources),
        "observer.tracing.has_next_rpc_keys": is_next,
    }


def _has_traces(sources: Sources) -> bool:
    """Return True if tracing is enabled by a setting or by an OpenTelemetry variable. Raises
    ValueError for a setting without effect or an invalid variable."""
    environment = sources.environment
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environment.get(_EXPORTER_VARIABLE, "").strip().lower()
    if exporter == "none":
        sources.reject(["otlp_endpoint"], f"has no effect while {_EXPORTER_VARIABLE} is none")
    is_on = exporter != "none" and (
        bool(exporter)
        or "otlp_endpoint" in sources
        or any(environment.get(name, "").strip() for name in _ENDPOINT_VARIABLES)
    )
    if is_on:
        _check_numbers(environment)
    else:
        sources.reject(
            ["trace_slow_ttft_s", "trace_slow_s", "trace_content"],
            "requires traces: set --otlp-endpoint or OTEL_EXPORTER_OTLP_ENDPOINT",
        )
    return is_on


def _check_numbers(environment: Mapping[str, str]) -> None:
    from penstock.server.observe.spans.variables import check_numbers

    check_numbers(environment)
