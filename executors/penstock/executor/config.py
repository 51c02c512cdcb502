"""The executor's settings: which one, which model, how much of the machine.

Owns the fields, their ranges and their JSON form. Imports nothing heavy: the server reads these in
every process, long before an executor is built.
"""

import enum
import re
from dataclasses import dataclass, field
from pathlib import Path

from penstock.executor.fault import Fault
from penstock.executor.trtllm.config import TrtllmConfig
from penstock.scheduler.cost_model import CostModel

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "fp8", "int8")
KV_CACHE_DTYPES = ("auto", "fp8", "int8")
_EXIT_SLACK_S = 15.0
"""Beyond the engine's own shutdown: the loop around it, and the process."""
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_DEFAULT_CACHE_BYTES = 512 * 1024 * 1024


class ExecutorKind(enum.StrEnum):
    """The executors one can choose."""

    TORCH = "torch"
    SIMULATED = "simulated"
    TRTLLM = "trtllm"


class SimulatedPace(enum.StrEnum):
    """How a simulated step passes the time that the cost model gives it."""

    IMMEDIATE = "immediate"
    """Not at all (a scripted slow step still waits)."""
    REAL_TIME = "real_time"
    """It waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """What the simulated executor pretends to be. Raises ValueError naming the field.

    `vocab_size` None: the model folder's, or 32,000 without one. `kv_bytes_per_token`: what one
    token's keys and values would take, to turn `kv_cache_bytes` into blocks.
    `min_output_tokens`, `max_output_tokens`: a request that has stop ids ends with its first one
    as its k-th output token, k hashed from its prompt evenly within the two (both the same: k is
    scripted), later when `min_tokens` bars it; `max_output_tokens` None: never, every request runs
    to its `max_tokens`. `is_strict`: keep a shadow of every key and value written and check in
    each step that what is read is what was written (a scheduler's paging bug raises; costs a
    pass over the context).
    """

    vocab_size: int | None = None
    kv_bytes_per_token: int = 65_536
    cost: CostModel = field(default_factory=CostModel)
    pace: SimulatedPace = SimulatedPace.IMMEDIATE
    min_output_tokens: int = 1
    max_output_tokens: int | None = None
    is_strict: bool = False
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        _at_least("vocab_size", self.vocab_size, 2)
        _at_least("kv_bytes_per_token", self.kv_bytes_per_token, 1)
        _at_least("min_output_tokens", self.min_output_tokens, 1)
        _at_least("max_output_tokens", self.max_output_tokens, self.min_output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """Everything an executor is built from. Raises ValueError naming the field.

    `model_path`: a Hugging Face folder (see `penstock.executor.models.resolve_model`), required
    by torch and trtllm; the simulated executor takes vocabulary and length limits from it when
    given. `tokenizer_path`: a folder with the tokenizer, for executors that need one; None: the
    model's. For trtllm every other setting is in its section, under its own name; the two that the
    server reads, `max_num_seqs` and `max_seq_len`, repeat what stands there.

    `device`: "cpu", "cuda" or "cuda:<i>". `dtype`: one of DTYPES, "auto" the executor's choice for
    model and device. `quantization`: of the layers' weights, one of QUANTIZATIONS;
    `kv_cache_dtype`: one of KV_CACHE_DTYPES, "auto" the model's number format. Both are refused at
    load where device or model has no such path. `block_size`: tokens per block. `num_blocks` None:
    as many as `kv_cache_bytes` holds. `kv_cache_bytes` None: 512 MiB on a CPU; on a CUDA device
    `kv_memory_fraction` of what is free there beside the weights and a step of
    `max_num_batched_tokens`. `max_num_batched_tokens`: the scheduler's token budget of one step,
    None for the device's usual one. `max_seq_len` None: the model's own. `num_threads` None: as
    many as the cores that a service's fronts leave free. `pipeline_depth` None: the executor's
    choice for the device, else 1 or 2.
    """

    kind: ExecutorKind = ExecutorKind.TORCH
    model_path: Path | None = None
    tokenizer_path: Path | None = None
    device: str = "cpu"
    dtype: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    kv_memory_fraction: float = 0.9
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_seq_len: int | None = None
    num_threads: int | None = None
    pipeline_depth: int | None = None
    simulated: SimulatedConfig = field(default_factory=SimulatedConfig)
    trtllm: TrtllmConfig = field(default_factory=TrtllmConfig)

    def __post_init__(self) -> None:
        if self.kind is not ExecutorKind.SIMULATED and self.model_path is None:
            raise ValueError(f"model_path must be given for the {self.kind} executor")
        if not _DEVICE.fullmatch(self.device):
            raise ValueError(f"device must be cpu, cuda or cuda:<index>, not {self.device!r}")
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.kind is ExecutorKind.SIMULATED and self.quantization != "none":
            raise ValueError("quantization must be none for the simulated executor")
        _at_least("block_size", self.block_size, 1)
        _at_least("num_blocks", self.num_blocks, 1)
        _at_least("kv_cache_bytes", self.kv_cache_bytes, 1)
        if not 0.0 < self.kv_memory_fraction <= 1.0:
            raise ValueError(
                f"kv_memory_fraction must be above 0 and at most 1, not {self.kv_memory_fraction}"
            )
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("max_seq_len", self.max_seq_len, 2)
        _at_least("num_threads", self.num_threads, 1)
        if self.pipeline_depth not in (None, 1, 2):
            raise ValueError(f"pipeline_depth must be 1 or 2, not {self.pipeline_depth}")

    @property
    def host_cache_bytes(self) -> int:
        """Bytes of pages where nobody looks how much memory is free."""
        return _DEFAULT_CACHE_BYTES if self.kv_cache_bytes is None else self.kv_cache_bytes

    @property
    def max_exit_s(self) -> float:
        """How long the executor may take to give everything back, seconds."""
        if self.kind is ExecutorKind.TRTLLM:
            return self.trtllm.watch.shutdown_timeout_s + _EXIT_SLACK_S
        return 0.0


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _at_least(name: str, value: int | None, lowest: int) -> None:
    if value is not None and value < lowest:
        raise ValueError(f"{name} must be at least {lowest}, not {value}")
