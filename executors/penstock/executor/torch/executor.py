"""The torch executor that computes a step within `launch`: on a CPU, and on CUDA with the modules
of transformers (the eager path).

A step has four parts: apply releases and admissions, run the forward pass (`step_forward`), sample,
report failures. The executor is called from one thread. `launch` waits for the step on CUDA too,
because it copies the tokens to the host.

Failures are per request: a request whose logits, keys or values are not finite is reported with the
step that produced them, and the keys and values that it wrote are cleared immediately. A request
that must not run (`SlotRules`) is computed with valid placeholder tokens and reported as failed. A
step that raises is repeated in parts (`penstock.executor.isolation`), as long as the device still
runs the health probe.
"""

import ctypes
import platform
from collections import deque
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.executor.config import ExecutorConfig
from penstock.executor.isolation import run_isolated
from penstock.executor.torch.computed_step import compute_step, rows_of, step_result
from penstock.executor.torch.device_memory import free_bytes, peak_bytes
from penstock.executor.torch.eager_memory import eager_step_bytes
from penstock.executor.torch.errors import UnsupportedModel
from penstock.executor.torch.health_probe import NUM_PROBE_BLOCKS, HealthProbe
from penstock.executor.torch.kv_pages import KVPages, block_bytes, page_dtype
from penstock.executor.torch.loading import LoadedModel, load_configured
from penstock.executor.torch.module_forward import eager_path
from penstock.executor.torch.num_blocks import num_device_blocks, num_host_blocks
from penstock.executor.torch.resources import describe_resources
from penstock.executor.torch.serving_info import served_length, serving_info
from penstock.executor.torch.slot_rules import SlotRules
from penstock.executor.torch.step_forward import ForwardPath, ForwardResult
from penstock.executor.torch.step_inputs import Ints
from penstock.scheduler.batch import Batch, StepResult
from penstock.scheduler.executor import ExecutorDied, ExecutorInfo

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 1 << 30
_TRIM_THRESHOLD_BYTES = 2**31 - 1


class TorchExecutor:
    """An `Executor` for a Hugging Face folder.

    `model`: the model, if it is already loaded. `path`: how steps are computed, by default with the
    model's modules.

    Raises ModelLoadError or UnsupportedModel (penstock.executor.torch.errors) when it cannot serve
    the model, ValueError naming the field when the settings do not fit the model or the memory, and
    ValueError if `cpu_kernels` is an instruction set that does not run here.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        model: LoadedModel | None = None,
        path: ForwardPath | None = None,
    ) -> None:
        if config.pipeline_depth not in (None, 1):
            raise ValueError("pipeline_depth must be 1 for the torch executor")
        self._model = model or load_configured(config)
        if self._model.device.type == "cpu":
            keep_freed_memory()
        path = path or eager_path(self._model)
        _check_eight_bit(config, self._model, path)
        bytes_each = block_bytes(self._model.shapes, config.block_size, path.kv_dtype)
        info = serving_info(
            config,
            self._model,
            num_blocks=_num_blocks(config, self._model, path, bytes_each),
            pipeline_depth=1,
        )
        self._info = replace(
            info,
            resources=describe_resources(
                self._model,
                page_bytes=info.num_blocks * bytes_each,
                path=path.name,
                num_weight_bytes=path.num_weight_bytes,
                quantization=path.quantization,
                page_dtype=path.kv_dtype,
            ),
        )
        self._pages = KVPages(
            self._model.shapes,
            num_blocks=self._info.num_blocks + NUM_PROBE_BLOCKS,
            block_size=config.block_size,
            dtype=path.kv_dtype,
            device=self._model.device,
        )
        self._probe = HealthProbe(self._info)
        self._forward = path.make(self._pages)
        self._rules = SlotRules(
            vocab_size=self._model.vocab_size, num_embeddings=self._model.num_embeddings
        )
        self._results: deque[StepResult] = deque()
        self._is_closed = False
        # So that the first request does not wait for the start of threads and operators.
        with torch.inference_mode():
            self._run(self._probe.batch, self._probe.rules)

    @property
    def info(self) -> ExecutorInfo:
        """Limits and features, fixed after construction."""
        return self._info

    @property
    def ready_fd(self) -> int | None:
        """None: `launch` waits for the step, so `collect` never blocks."""
        return None

    @torch.inference_mode()
    def launch(self, batch: Batch) -> None:
        """Run one step; if it raises, run it again, in parts if necessary. Raises ExecutorDied if
        the executor is closed, or if the step raises and the health probe fails too.
        """
        if self._is_closed:
            raise ExecutorDied("the executor is closed")
        self._rules.update(batch)
        if batch.num_rows == 0:
            self._results.append(
                StepResult(slots=batch.sampled_slots, tokens=np.zeros(0, dtype=np.int32))
            )
            return
        self._results.append(run_isolated(batch, self._run_part, self._recover))

    def collect(self) -> StepResult:
        """Return the oldest launched step's result. Raises IndexError if there is none."""
        return self._results.popleft()

    def close(self) -> None:
        """Release model, pages and results. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._results.clear()
            del self._model, self._pages, self._forward

    def _run_part(self, batch: Batch) -> StepResult:
        try:
            return self._run(batch, self._rules)
        except Exception:
            # The step is incomplete: keys and values written by the failed rows must be cleared.
            self._clear(batch, np.arange(batch.num_rows))
            raise

    def _recover(self, error: Exception) -> None:
        """Run the health probe; on CUDA, first wait for the device and release cached memory.
        Raises ExecutorDied if this fails, because every later operation would fail.
        """
        try:
            if self._model.device.type == "cuda":
                torch.cuda.synchronize(self._model.device)
                torch.cuda.empty_cache()
            self._run(self._probe.batch, self._probe.rules)
        except Exception as broken:
            raise ExecutorDied(
                f"{type(error).__name__}: {error}; then, of the health probe, "
                f"{type(broken).__name__}: {broken}"
            ) from error

    def _run(self, batch: Batch, rules: SlotRules) -> StepResult:
        step = compute_step(self._forward, batch, rules)
        slots, sampled = batch.sampled_slots, step.sampled
        failures = self._failures(batch, step.forwarded, slots[~sampled.is_good], rules)
        return step_result(slots, sampled.tokens, sampled.logprobs, step.prompt_logprobs, failures)

    def _failures(
        self,
        batch: Batch,
        forwarded: ForwardResult,
        not_finite: NDArray[np.int32],
        rules: SlotRules,
    ) -> dict[int, str]:
        """Return the slots that failed in this step, with reasons; clear the keys and values that
        they wrote.
        """
        failures = {int(slot): "logits are not finite" for slot in not_finite}
        is_token_good = forwarded.is_token_good
        if is_token_good is not None and not bool(is_token_good.all()):
            is_bad = ~is_token_good.cpu().numpy()
            for row in range(batch.num_rows):
                last = int(forwarded.last_of_row[row])
                if is_bad[last + 1 - int(batch.num_tokens[row]) : last + 1].any():
                    failures[int(batch.slots[row])] = "keys or values are not finite"
        if rules.rejections:
            for slot in batch.slots.tolist():
                if slot in rules.rejections:
                    failures[slot] = rules.rejections[slot]
        if failures:
            self._clear(batch, rows_of(batch, np.array(list(failures), dtype=np.int32)))
        return failures

    def _clear(self, batch: Batch, rows: Ints) -> None:
        """Zero the keys and values that `rows` of the batch wrote, in all layers."""
        counts = batch.num_tokens[rows].astype(np.int64)
        firsts = batch.starts[rows] + counts - np.cumsum(counts)
        positions = np.arange(int(counts.sum())) + np.repeat(firsts, counts)
        slots = np.repeat(batch.slots[rows], counts)
        blocks, offsets = np.divmod(positions, self._pages.block_size)
        blocks = batch.arrays.block_table[slots, blocks].astype(np.int64)
        device = self._pages.device
        self._pages.zero_tokens(
            torch.from_numpy(blocks).to(device), torch.from_numpy(offsets).to(device)
        )


def _check_eight_bit(config: ExecutorConfig, model: LoadedModel, path: ForwardPath) -> None:
    """Raise UnsupportedModel for 8-bit settings that the path does not support, so that no setting
    is ignored.
    """
    if config.quantization != path.quantization:
        raise UnsupportedModel(
            f"quantization {config.quantization}: the {path.name} path does not support it"
        )
    if page_dtype(config.kv_cache_dtype, model.dtype) is not path.kv_dtype:
        raise UnsupportedModel(
            f"kv_cache_dtype {config.kv_cache_dtype}: the {path.name} path does not support it"
        )


def _num_blocks(
    config: ExecutorConfig, model: LoadedModel, path: ForwardPath, bytes_each: int
) -> int:
    max_seq_len = served_length(config, model)
    if model.device.type == "cpu":
        return num_host_blocks(config, bytes_each=bytes_each, max_seq_len=max_seq_len)
    step_bytes = eager_step_bytes(
        config,
        model,
        path,
        num_keys=free_bytes(model.device) // bytes_each * config.block_size,
        peak_of=partial(peak_bytes, model.device),
    )
    torch.cuda.empty_cache()
    return num_device_blocks(
        config,
        bytes_each=bytes_each,
        max_seq_len=max_seq_len,
        free_bytes=free_bytes(model.device),
        step_bytes=step_bytes,
    )


def keep_freed_memory() -> bool:
    """Configure glibc to keep freed memory for the next step; return whether glibc accepted this.

    A step allocates and frees temporaries of several megabytes. By default, glibc would return this
    memory to the kernel, and the next step would fault it in again. Applies to the whole process.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    is_kept: bool = mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES) == 1
    is_kept &= mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES) == 1
    return is_kept
