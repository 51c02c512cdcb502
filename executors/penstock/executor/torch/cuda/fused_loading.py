"""Builds the executor over the fused step from a loaded model.

Owns the order: recognise the module tree, verify it in float32, join its weights, compare logits,
measure a step's memory, allocate the pages, capture the graphs. Raises NotFused as long as the
eager path can still serve the model.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.executor.config import ExecutorConfig
from penstock.executor.device_defaults import device_defaults
from penstock.executor.torch.cuda.device_queue import DeviceQueue
from penstock.executor.torch.cuda.device_sampler import DeviceSampler
from penstock.executor.torch.cuda.eight_bit_check import check_eight_bit
from penstock.executor.torch.cuda.fused_executor import FusedExecutor, FusedParts
from penstock.executor.torch.cuda.fused_model import Ends, FusedModel
from penstock.executor.torch.cuda.page_attention import HeadLayout, PageAttention
from penstock.executor.torch.cuda.page_scales import measure_scales
from penstock.executor.torch.cuda.trial_steps import (
    NUM_TRIAL_TOKENS,
    run_widest_step,
    trial_logits,
)
from penstock.executor.torch.fused_weights import LayerWeights, fuse_weights
from penstock.executor.torch.health_probe import NUM_PROBE_BLOCKS
from penstock.executor.torch.kv_pages import KVPages, block_bytes, page_dtype
from penstock.executor.torch.loading import LoadedModel
from penstock.executor.torch.module_tree import DecoderTree, NotFused, read_module_tree
from penstock.executor.torch.num_blocks import num_device_blocks, size_setting
from penstock.executor.torch.quantised_weights import FP8, quantise_layers
from penstock.executor.torch.resources import weight_bytes
from penstock.executor.torch.rotary_table import RotaryTable, make_rotary_table
from penstock.executor.torch.serving_info import served_length, serving_info
from penstock.executor.torch.trial_reference import TrialReference, make_reference

_log = logging.getLogger(__name__)
_MIN_SLOTS = 2
"""Slots that the health probe needs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parts:
    """The parts that do not depend on the number of pages."""

    layers: tuple[LayerWeights, ...]
    ends: Ends
    layout: HeadLayout
    rotary: RotaryTable
    page_dtype: torch.dtype
    page_scales: tuple[Tensor, ...] | None = None


@torch.inference_mode()
def build_fused(config: ExecutorConfig, model: LoadedModel, queue: DeviceQueue) -> FusedExecutor:
    """Build the executor. Raises NotFused if the fused step does not support the model."""
    tree = read_module_tree(model)
    check_eight_bit(
        config,
        dtype=model.dtype,
        capability=torch.cuda.get_device_capability(queue.device),
        linears=(*tree.layers[0].qkv, tree.layers[0].out, *tree.layers[0].gate_up),
    )
    max_seq_len = served_length(config, model)
    with queue.active():
        reference = make_reference(model, tree, NUM_TRIAL_TOKENS)
        queue.release_memory()
        parts = _parts(tree, queue, num_positions=max(max_seq_len, NUM_TRIAL_TOKENS) + 1)
        try:
            found, pages = _try(config, model, parts, queue)
        except Exception as failure:  # a device that a kernel does not support, or no compiler
            raise NotFused(f"its kernels do not run here: {failure}") from failure
        if fault := reference.fault_of(found, model.dtype):
            raise NotFused(fault)
        error = reference.error_of(found)
        if (config.quantization, config.kv_cache_dtype) != ("none", "auto"):
            with _fitting(_eight_bit_settings(config), config):
                parts = _in_eight_bits(config, model, tree, parts, pages)
                _check_eight_bits(config, model, parts, queue, reference)
        with _fitting("max_num_seqs", config):
            sampler = DeviceSampler(
                max_num_seqs=num_slots(config), vocab_size=model.vocab_size, device=queue.device
            )
        with _fitting("max_num_batched_tokens", config):
            step_bytes = _step_bytes(config, model, parts, queue)
        num_blocks = num_device_blocks(
            config,
            bytes_each=block_bytes(model.shapes, config.block_size, parts.page_dtype),
            max_seq_len=max_seq_len,
            step_bytes=step_bytes,
            free_bytes=queue.free_bytes(),
        )
        info = serving_info(
            config, model, num_blocks=num_blocks, pipeline_depth=config.pipeline_depth or 2
        )
        with _fitting(size_setting(config), config):
            num_pages = num_blocks + NUM_PROBE_BLOCKS
            built, _ = _build(config, model, parts, queue, num_pages, max_seq_len)
            executor = FusedExecutor(info, queue, model, built, sampler)
    _log.info(
        "the fused path serves this model: its logits differ from the model's in float32 by %.1e",
        error,
    )
    return executor


def _eight_bit_settings(config: ExecutorConfig) -> str:
    names = [] if config.quantization == "none" else ["quantization"]
    return " and ".join(names if config.kv_cache_dtype == "auto" else [*names, "kv_cache_dtype"])


def _in_eight_bits(
    config: ExecutorConfig, model: LoadedModel, tree: DecoderTree, parts: _Parts, pages: KVPages
) -> _Parts:
    """Return the parts in the configured formats. `pages`: written by a trial."""
    if config.kv_cache_dtype != "auto":
        dtype = page_dtype(config.kv_cache_dtype, model.dtype)
        parts = replace(parts, page_dtype=dtype, page_scales=measure_scales(pages))
    if config.quantization != "none":
        layers = quantise_layers(tree, parts.layers, config.quantization, model.stored)
        parts = replace(parts, layers=layers)
    return parts


def _check_eight_bits(
    config: ExecutorConfig,
    model: LoadedModel,
    parts: _Parts,
    queue: DeviceQueue,
    reference: TrialReference,
) -> None:
    """Compare logits. Raises NotFused, which refuses the model: the eager path has no 8 bits."""
    try:
        found, _ = _try(config, model, parts, queue)
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:
        raise NotFused(f"its kernels in 8 bits do not run here: {failure}") from failure
    is_fp8 = "fp8" in (config.quantization, config.kv_cache_dtype)
    if fault := reference.fault_of(found, FP8 if is_fp8 else torch.int8):
        raise NotFused(f"in 8 bits {fault}")
    _log.info(
        "in 8 bits its logits differ from the model's in float32 by %.1e", reference.error_of(found)
    )


@contextmanager
def _fitting(setting: str, config: ExecutorConfig) -> Generator[None]:
    """Convert an out-of-memory error to a ValueError naming the setting to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"{setting} asks for more memory than {config.device} has next to the weights: {error}"
        ) from error


def num_slots(config: ExecutorConfig) -> int:
    """Return the number of slots in the device's tables, without the scratch slot."""
    return max(config.max_num_seqs, _MIN_SLOTS)


def _parts(tree: DecoderTree, queue: DeviceQueue, *, num_positions: int) -> _Parts:
    return _Parts(
        layers=fuse_weights(tree),
        ends=Ends(
            embedding=tree.embedding, head=tree.head, final_norm=tree.final_norm, eps=tree.eps
        ),
        layout=HeadLayout(
            num_heads=tree.num_heads,
            num_kv_heads=tree.num_kv_heads,
            head_dim=tree.head_dim,
            scaling=tree.scaling,
            eps=tree.eps,
        ),
        rotary=make_rotary_table(
            tree.inverse_frequencies,
            tree.rotary_scaling,
            num_positions=num_positions,
            device=queue.device,
        ),
        page_dtype=tree.embedding.dtype,
    )


def _build(
    config: ExecutorConfig,
    model: LoadedModel,
    parts: _Parts,
    queue: DeviceQueue,
    num_blocks: int,
    max_seq_len: int,
) -> tuple[FusedParts, KVPages]:
    pages = KVPages(
        model.shapes,
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=parts.page_dtype,
        device=queue.device,
    )
    slots = num_slots(config) + 1
    table = torch.zeros(
        (slots, -(-max_seq_len // config.block_size)), dtype=torch.int32, device=queue.device
    )
    last_tokens = torch.zeros(2 * slots, dtype=torch.int32, device=queue.device)
    attention = PageAttention(
        parts.layout,
        pages,
        table,
        parts.rotary,
        dtype=model.dtype,
        max_rows=num_slots(config),
        scales=parts.page_scales,
    )
    fused = FusedModel(
        parts.layers, parts.ends, attention, table, last_tokens, block_size=config.block_size
    )
    layers = [(layer.qkv, layer.out, layer.gate_up, layer.down) for layer in parts.layers]
    weights = [projection.weight for layer in layers for projection in layer]
    built = FusedParts(
        model=fused,
        table=table,
        last_tokens=last_tokens,
        num_weight_bytes=weight_bytes(model, weights),
        page_dtype=parts.page_dtype,
    )
    return built, pages


def _try(
    config: ExecutorConfig, model: LoadedModel, parts: _Parts, queue: DeviceQueue
) -> tuple[Tensor, KVPages]:
    """Run the trial tokens; return the fused step's logits and the pages that it wrote."""
    num_blocks = -(-NUM_TRIAL_TOKENS // config.block_size) + NUM_PROBE_BLOCKS
    built, pages = _build(config, model, parts, queue, num_blocks, NUM_TRIAL_TOKENS)
    return trial_logits(built.model, queue, config.block_size), pages


def _step_bytes(
    config: ExecutorConfig, model: LoadedModel, parts: _Parts, queue: DeviceQueue
) -> int:
    """Measure the memory of the largest step and of captured logits, without weights and pages."""
    budget = config.max_num_batched_tokens
    if budget is None:
        budget = device_defaults(config.device).max_num_batched_tokens
    max_seq_len = served_length(config, model)
    built, _ = _build(config, model, parts, queue, 1, max_seq_len)

    def run(num_tokens: int) -> None:
        run_widest_step(
            built.model,
            queue,
            num_tokens=num_tokens,
            max_rows=config.max_num_seqs,
            max_seq_len=max_seq_len,
            block_size=config.block_size,
        )

    # Matrix products of every size are loaded before the first request needs them.
    for num_tokens in (2**power for power in range(4, budget.bit_length())):
        run(num_tokens)
    taken = queue.peak_bytes(lambda: run(budget))
    queue.release_memory()
    return taken + config.max_num_seqs * model.vocab_size * model.dtype.itemsize
