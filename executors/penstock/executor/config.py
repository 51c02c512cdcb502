"""The settings that select an executor, its model and its resources.

Defines the fields, their ranges and their command-line flags. Imports no large packages, because
every process of the service reads the settings before an executor is built.
"""

import enum
import re
from dataclasses import dataclass, field
from pathlib import Path

from penstock.executor import limit_texts
from penstock.executor.device_defaults import ON_CPU, ON_CUDA, device_defaults
from penstock.executor.fault import Fault
from penstock.executor.trtllm.config import DTYPES, TrtllmConfig
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.setting import SettingError, check, from_factory, setting

DEFAULT_BLOCK_SIZE = 16
INSTRUCTION_SETS = ("amx", "avx512_bf16", "avx512", "avx2", "baseline")
"""Instruction sets for which the CPU kernels are compiled, best first."""
QUANTIZATIONS = ("none", "fp8", "int8")
KV_CACHE_DTYPES = ("auto", "fp8", "int8")
_EXIT_SLACK_S = 15.0
"""Seconds added to the engine's shutdown timeout, for its event-loop thread and its process
to end.
"""
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_MIB = 1024 * 1024
_DEFAULT_CACHE_BYTES = 512 * _MIB


class ExecutorKind(enum.StrEnum):
    """The executors: TORCH, SIMULATED (no model) and TRTLLM (TensorRT-LLM)."""

    TORCH = "torch"
    SIMULATED = "simulated"
    TRTLLM = "trtllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """Properties of the simulated executor. Raises SettingError naming the invalid field.

    With `max_output_tokens`, a request with stop ids gets `stop_ids[0]` as its k-th output token,
    or later if `min_tokens` excludes it there. k is a hash of the prompt and, unless decoding is
    greedy, the seed, uniformly distributed from `min_output_tokens` to `max_output_tokens`. If
    these are equal, k is their value.
    """

    vocab_size: int | None = setting(
        None,
        text="number of token ids",
        at_least=2,
        shown="the model folder's, 32,000 without a folder",
    )
    kv_bytes_per_token: int = setting(
        65_536,
        text="simulated size of one token's keys and values; converts --kv-cache-mib into blocks",
        at_least=1,
    )
    cost: CostModel = field(default_factory=CostModel)
    is_real_time: bool = setting(
        False,
        text="whether a step takes the time that the cost model predicts; otherwise only a scripted"
        " slow step takes time",
    )
    is_readable: bool = setting(
        True,
        text="whether only tokens whose text is printable ASCII are generated, if the model folder"
        " has a tokenizer",
    )
    min_output_tokens: int = setting(
        1, text="earliest place of the end-of-sequence token in an output, from 1", at_least=1
    )
    max_output_tokens: int | None = setting(
        None,
        text="its latest place; a hash of the prompt chooses it in between",
        shown="no such token: requests run to their max_tokens",
    )
    is_strict: bool = setting(
        False,
        text="whether each step checks that every read returns the written value: detects paging"
        " bugs of a scheduler, and reads the whole context in each step",
    )
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        check(self)
        most = self.max_output_tokens
        if most is not None and most < self.min_output_tokens:
            raise SettingError(
                f"{{}} must be at least {self.min_output_tokens}, not {most}", "max_output_tokens"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """The settings of an executor. Raises SettingError naming the invalid field.

    The trtllm executor reads its settings from `trtllm`, except the paths of model and tokenizer;
    the fields of `trtllm` have TensorRT-LLM's names. The command line copies
    `trtllm.max_batch_size` and `trtllm.max_seq_len` to `max_num_seqs` and `max_seq_len`, because
    the server reads these.

    Attributes:
        model_path: A Hugging Face folder (see `penstock.executor.models.resolve_model`), required
            by torch and trtllm. The simulated executor uses its vocabulary and length limits when
            given; its tokenizer determines which tokens are readable.
        tokenizer_path: A folder with the tokenizer, for executors that need one; None: the model
            folder.
        kv_cache_bytes: Size of the KV cache, ignored if `num_blocks` is set; the torch executor
            uses less if `max_num_seqs` sequences of full length need less. None: 512 MiB on a CPU;
            on a CUDA device, `kv_memory_fraction` determines the size.
        max_num_batched_tokens: The scheduler's token budget of a step; None: the device's default.
    """

    kind: ExecutorKind = setting(
        ExecutorKind.TORCH,
        "model",
        "which executor runs the model",
        name="executor",
        is_everyday=True,
    )
    model_path: Path | None = None
    tokenizer_path: Path | None = None
    device: str = setting(
        "cpu", "executor", "cpu, cuda or cuda:<index>", metavar="DEVICE", is_everyday=True
    )
    dtype: str = setting(
        "auto", "executor", "number format of weights and KV cache", choices=DTYPES
    )
    quantization: str = setting(
        "none",
        "executor",
        "number format of the layers' weights: fp8 and int8 on CUDA, int8 on a CPU",
        choices=QUANTIZATIONS,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "cache",
        "number format of the KV cache: fp8 on CUDA, int8 on a CPU",
        choices=KV_CACHE_DTYPES,
        shown="auto, the model's",
    )
    block_size: int = setting(DEFAULT_BLOCK_SIZE, "cache", limit_texts.BLOCK_SIZE, at_least=1)
    num_blocks: int | None = setting(
        None,
        "cache",
        limit_texts.NUM_BLOCKS,
        at_least=1,
        shown="by kv-cache-mib or kv-memory-fraction",
    )
    kv_cache_bytes: int | None = setting(
        None,
        "cache",
        "largest KV cache in MiB: smaller if max-num-seqs sequences of full length need less;"
        " not with num-blocks or kv-memory-fraction",
        name="kv_cache_mib",
        scale=_MIB,
        at_least=1,
        is_everyday=True,
        shown=f"{_DEFAULT_CACHE_BYTES // _MIB}, on a GPU by kv-memory-fraction",
    )
    kv_memory_fraction: float = setting(
        0.9,
        "cache",
        "KV cache's share of the GPU memory left free by the weights and a reserve: the largest"
        " step, the graphs and 1 GiB",
        above=0,
        at_most=1,
    )
    max_num_seqs: int = setting(
        ON_CPU.max_num_seqs,
        "batching",
        limit_texts.MAX_NUM_SEQS,
        at_least=1,
        is_everyday=True,
        shown=f"{ON_CPU.max_num_seqs}, on a GPU {ON_CUDA.max_num_seqs}",
    )
    max_num_batched_tokens: int | None = setting(None, at_least=1)
    max_seq_len: int | None = setting(
        None,
        "batching",
        limit_texts.MAX_SEQ_LEN,
        at_least=2,
        is_everyday=True,
        shown="the model's",
    )
    num_threads: int | None = setting(
        None,
        "executor",
        "number of compute threads on a CPU",
        name="threads",
        at_least=1,
        shown="the cores that fronts leave free",
    )
    cpu_kernels: str = setting(
        "auto",
        "executor",
        "instruction set of the compiled CPU kernels; none: PyTorch's operators",
        choices=("auto", *INSTRUCTION_SETS, "none"),
        shown="auto, the processor's best",
    )
    pipeline_depth: int | None = setting(
        None,
        "executor",
        "maximum number of steps in flight",
        at_least=1,
        at_most=2,
        shown="the executor's choice",
    )
    simulated: SimulatedConfig = from_factory(
        SimulatedConfig,
        "executor",
        "settings of the simulated executor; docs/settings.md lists the keys",
        name="simulated_config",
        base={"is_real_time": True},
        shown="none",
    )
    trtllm: TrtllmConfig = from_factory(
        TrtllmConfig,
        "executor",
        "settings of the trtllm executor; docs/settings.md lists the keys",
        name="trtllm_config",
        shown="none",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.kind is not ExecutorKind.SIMULATED and self.model_path is None:
            raise SettingError(f"{{}} must be given for the {self.kind} executor", "model_path")
        if not _DEVICE.fullmatch(self.device):
            raise SettingError(
                f"{{}} must be cpu, cuda or cuda:<index>, not {self.device!r}", "device"
            )
        if self.kind is ExecutorKind.SIMULATED:
            for name, usual in (("quantization", "none"), ("kv_cache_dtype", "auto")):
                if getattr(self, name) != usual:
                    raise SettingError(f"{{}} must be {usual} for the simulated executor", name)
        if self.kind is ExecutorKind.TORCH and self.device == "cpu":
            self._check_cpu()

    def _check_cpu(self) -> None:
        for name in ("quantization", "kv_cache_dtype"):
            if getattr(self, name) == "fp8":
                raise SettingError("{} fp8 requires a GPU: a CPU computes in int8", name)
        if self.pipeline_depth not in (None, 1):
            raise SettingError(
                f"{{}} must be 1 for the torch executor on a CPU, not {self.pipeline_depth}",
                "pipeline_depth",
            )

    @property
    def max_step_tokens(self) -> int:
        """Token budget of a step: the setting, or the device's default."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return device_defaults(self.device).max_num_batched_tokens

    @property
    def host_cache_bytes(self) -> int:
        """Size of a KV cache in host memory, in bytes: `kv_cache_bytes`; 512 MiB if it is None."""
        return _DEFAULT_CACHE_BYTES if self.kv_cache_bytes is None else self.kv_cache_bytes

    @property
    def max_exit_s(self) -> float:
        """Maximum time for the executor to shut down, in seconds; 0 except for trtllm."""
        if self.kind is ExecutorKind.TRTLLM:
            return self.trtllm.watch.shutdown_timeout_s + _EXIT_SLACK_S
        return 0.0
