"""The executor settings of `penstock serve` that depend on model and device.

Owns the defaults of slots and token budget, and which settings have a separate key in the
section of TensorRT-LLM. The dataclasses of that section document its keys.
"""

import logging
import os
from pathlib import Path
from typing import Any

from penstock.executor.config import ExecutorKind, SimulatedConfig, SimulatedPace
from penstock.executor.device_defaults import device_defaults
from penstock.executor.trtllm.config import TrtllmConfig
from penstock.executor.trtllm.preflight import check_before_load, check_tokenizer
from penstock.scheduler.config import AdmissionPolicy
from penstock.server.observe.logs.limits import ALWAYS
from penstock.server.settings.sources import Sources

log = logging.getLogger(__name__)

_KEYS = {
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
"""Settings of the other executors, and the key that replaces each."""
_OWN_PACE = "the engine plans its own steps"
_OWN_CACHE = "the engine evicts its own blocks, and supports retention but no sessions"
_MEANINGLESS = {
    "device": "GPUs are chosen by CUDA_VISIBLE_DEVICES and tensor_parallel_size",
    "threads": "it does not use the CPU",
    "quantization": "it serves checkpoints as they are quantised",
    **dict.fromkeys(
        ("target_itl_ms", "max_prefill_share", "foresee_deadlines", "min_deadline_chance"),
        _OWN_PACE,
    ),
    "step_prices": _OWN_PACE,
    **dict.fromkeys(
        ("eviction", "max_session_share", "max_tenant_session_share", "max_session_tokens"),
        _OWN_CACHE,
    ),
}


def executor_settings(sources: Sources) -> dict[str, Any]:
    """Settings of executors that our scheduler batches for. Raises ValueError naming a setting."""
    kind, device = sources.get("executor", ExecutorKind.TORCH), sources.get("device", "cpu")
    budget, num_seqs = sources.get("max_num_batched_tokens"), sources.get("max_num_seqs")
    sources.refuse(["trtllm_config"], f"has no effect with the {kind} executor")
    derived: dict[str, Any] = {}
    if kind is not ExecutorKind.SIMULATED:
        sources.refuse(["simulated_config"], f"has no effect with the {kind} executor")
    elif "simulated_config" not in sources:
        # The service shows realistic timings: its steps take time.
        derived["executor.simulated"] = SimulatedConfig(pace=SimulatedPace.REAL_TIME)
    if kind is ExecutorKind.TORCH and device.startswith("cuda"):
        usual = device_defaults(device)
        if num_seqs is None:
            num_seqs = usual.max_num_seqs if budget is None else min(usual.max_num_seqs, budget)
        if budget is None:
            budget = max(usual.max_num_batched_tokens, num_seqs)
        derived["executor.max_num_seqs"] = num_seqs
    else:
        sources.refuse(["kv_memory_fraction"], "requires a GPU; without one set --kv-cache-mib")
    if budget is not None:
        derived["executor.max_num_batched_tokens"] = budget
        derived["scheduler.max_num_batched_tokens"] = budget
    return derived


def trtllm_settings(
    sources: Sources, model_path: Path, tokenizer_path: Path | None
) -> dict[str, Any]:
    """Settings of TensorRT-LLM, checked against the flags and the model. Raises ValueError.

    Our scheduler must predict the engine's admissions: both use one policy, the one set there.
    """
    for name, key in _KEYS.items():
        sources.refuse([name], f"is set for the trtllm executor by {key} in --trtllm-config")
    for name, reason in _MEANINGLESS.items():
        sources.refuse([name], f"has no effect with the trtllm executor: {reason}")
    sources.refuse(["simulated_config"], "has no effect with the trtllm executor")
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
    log.info("%s", findings.folder.explanation)
    for notice in findings.notices:
        log.warning("%s", notice, extra=ALWAYS)
    policy = config.scheduler_config.capacity_scheduler_policy.name.lower()
    return {
        "executor.max_num_seqs": config.max_batch_size,
        "executor.max_seq_len": config.max_seq_len,
        "scheduler.max_num_batched_tokens": config.max_num_tokens,
        "scheduler.admission_policy": AdmissionPolicy(policy),
        "front.is_prefix_caching": reuse,
    }
