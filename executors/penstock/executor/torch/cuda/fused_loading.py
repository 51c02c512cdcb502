"""Builds the executor that runs the fused step, from a loaded model.

`build_fused` recognises the module tree, verifies it in float32, joins its weights, compares logits
with the model's in float32, measures a step's memory, allocates the pages and captures the graphs.
If a check fails, NotFused is raised: the eager path then serves the model, or the model is rejected
if 8-bit settings are given.
"""

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.cuda.device_queue import DeviceQueue
from penstock.executor.torch.cuda.device_sampler import DeviceSampler
from penstock.executor.torch.cuda.eight_bit import check_eight_bit, measure_scales
from penstock.executor.torch.cuda.fused_executor import FusedExecutor, FusedParts
from penstock.executor.torch.cuda.fused_forward import CudaFusedForward, OuterWeights
from penstock.executor.torch.cuda.page_attention import HeadLayout, PageAttention
from penstock.executor.torch.cuda.trial_steps import (
    run_widest_step,
    trial_logits,
)
from penstock.executor.torch.cuda.wide_weights import with_wide_memory
from penstock.executor.torch.device_memory import fitting
from penstock.executor.torch.fused_weights import LayerWeights, fuse_weights
from penstock.executor.torch.health_probe import NUM_PROBE_BLOCKS
from penstock.executor.torch.kv_pages import KVPages, block_bytes, page_dtype
from penstock.executor.torch.loading import LoadedModel
from penstock.executor.torch.module_tree import DecoderTree, NotFused, read_module_tree
from penstock.executor.torch.num_blocks import num_device_blocks, size_setting
from penstock.executor.torch.quantised_weights import FP8, WideLayers, quantise_layers
from penstock.executor.torch.resources import weight_bytes
from penstock.executor.torch.rotary_table import RotaryTable, make_rotary_table
from penstock.executor.torch.serving_info import served_length, serving_info
from penstock.executor.torch.trial_reference import TrialReference, make_reference
from penstock.executor.torch.whole_sequence import NUM_TRIAL_TOKENS

logger = logging.getLogger(__name__)
_MIN_SLOTS = 2
"""Minimum number of slots: the health probe needs two."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parts:
    """The parts of the fused executor that do not depend on the number of pages."""

    layers: Sequence[LayerWeights]
    outer: OuterWeights
    layout: HeadLayout
    rotary: RotaryTable
    page_dtype: torch.dtype
    page_scales: tuple[Tensor, ...] | None = None


@torch.inference_mode()
def build_fused(config: ExecutorConfig, model: LoadedModel, queue: DeviceQueue) -> FusedExecutor:
    """Build the executor. Raises NotFused if the fused step does not support the model,
    UnsupportedModel for 8-bit settings without kernels, ValueError naming the setting if the device
    has too little memory.
    """
    tree = read_module_tree(model)
    check_eight_bit(
        config,
        dtype=model.dtype,
        capability=torch.cuda.get_device_capability(queue.device),
        linears=(*tree.layers[0].qkv, *tree.layers[0].out, *tree.layers[0].gate_up),
    )
    max_seq_len = served_length(config, model)
    with queue.active():
        with _fitting_weights(config, model.dtype):
            reference = make_reference(model, tree, NUM_TRIAL_TOKENS)
            queue.release_memory()
            layers = fuse_weights(tree)
            num_positions = max(max_seq_len, NUM_TRIAL_TOKENS) + 1
            parts = _parts(tree, layers, queue, num_positions=num_positions)
            logger.info("comparing the fused path with the model: a first start compiles kernels")
            with _errors_as_not_fused("its kernels"):
                wide = replace(parts, layers=WideLayers(layers, model.dtype))
                found, pages = _run_trial(config, model, wide, queue)
        if fault := reference.fault_of(found, model.dtype):
            raise NotFused(fault)
        error = reference.error_of(found)
        if (config.quantization, config.kv_cache_dtype) != ("none", "auto"):
            with fitting(_eight_bit_settings(config), config):
                parts = _in_eight_bits(config, tree, layers, parts, pages)
                _check_eight_bits(config, model, parts, queue, reference)
        with fitting("max_num_seqs", config):
            sampler = DeviceSampler(
                max_num_seqs=num_slots(config), vocab_size=model.vocab_size, device=queue.device
            )
        with fitting("max_num_batched_tokens", config):
            step_bytes = _step_bytes(config, model, parts, queue)
        bytes_each = block_bytes(model.shapes, config.block_size, parts.page_dtype)
        num_blocks = num_device_blocks(
            config,
            bytes_each=bytes_each,
            max_seq_len=max_seq_len,
            free_bytes=queue.free_bytes(),
            step_bytes=step_bytes,
        )
        info = serving_info(
            config, model, num_blocks=num_blocks, pipeline_depth=config.pipeline_depth or 2
        )
        with fitting(size_setting(config), config):
            num_pages = num_blocks + NUM_PROBE_BLOCKS
            built, _ = _build(config, model, parts, queue, num_pages, max_seq_len)
            executor = FusedExecutor(info, queue, model, built, sampler)
            # So that no request waits for the allocation of a step's memory.
            _run_step(config, model, built, queue, num_tokens=config.max_step_tokens)
            queue.synchronize()
    logger.debug(
        "the fused path serves this model: its logits differ from the model's in float32 by %.1e",
        error,
    )
    return executor


def _eight_bit_settings(config: ExecutorConfig) -> str:
    names = [] if config.quantization == "none" else ["quantization"]
    return " and ".join(names if config.kv_cache_dtype == "auto" else [*names, "kv_cache_dtype"])


def _in_eight_bits(
    config: ExecutorConfig,
    tree: DecoderTree,
    layers: list[LayerWeights],
    parts: _Parts,
    pages: KVPages,
) -> _Parts:
    """Return the parts in the configured 8-bit formats; `layers` are quantised in place.

    `pages`: KV pages written by a trial step, from which scales are measured.
    """
    dtype = tree.embedding.dtype
    if config.kv_cache_dtype != "auto":
        parts = replace(
            parts,
            page_dtype=page_dtype(config.kv_cache_dtype, dtype),
            page_scales=measure_scales(pages),
        )
    if config.quantization != "none":
        quantise_layers(tree, layers, config.quantization)
        if config.quantization == "int8":
            parts = replace(parts, layers=with_wide_memory(layers, dtype))
    return parts


def _check_eight_bits(
    config: ExecutorConfig,
    model: LoadedModel,
    parts: _Parts,
    queue: DeviceQueue,
    reference: TrialReference,
) -> None:
    """Compare the logits of the fused step in 8 bits with the reference.

    Raises NotFused if they differ. The caller then rejects the model, because the eager path does
    not support 8 bits.
    """
    with _errors_as_not_fused("its kernels in 8 bits"):
        found, _ = _run_trial(config, model, parts, queue)
    is_fp8 = "fp8" in (config.quantization, config.kv_cache_dtype)
    if fault := reference.fault_of(found, FP8 if is_fp8 else torch.int8):
        raise NotFused(f"in 8 bits {fault}")
    logger.debug(
        "in 8 bits its logits differ from the model's in float32 by %.1e", reference.error_of(found)
    )


@contextmanager
def _errors_as_not_fused(what: str) -> Generator[None]:
    """Convert errors, such as an unsupported device or a missing compiler, to NotFused with a
    message that starts with `what`.

    An out-of-memory error is raised unchanged: the eager path needs at least as much memory.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:
        raise NotFused(f"{what} do not run here: {failure}") from failure


@contextmanager
def _fitting_weights(config: ExecutorConfig, dtype: torch.dtype) -> Generator[None]:
    """Convert an out-of-memory error to a ValueError that names the settings with which the weights
    take less memory.

    `dtype`: the number format of the weights.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        narrower = " dtype bfloat16," if dtype == torch.float32 else ""
        raise ValueError(
            f"the weights and the checks at load require more memory than {config.device} has free:"
            f" set{narrower} a device with more free memory or a smaller model: {error}"
        ) from error


def num_slots(config: ExecutorConfig) -> int:
    """Return the number of slots in the device's tables, without the scratch slot."""
    return max(config.max_num_seqs, _MIN_SLOTS)


def _parts(
    tree: DecoderTree, layers: Sequence[LayerWeights], queue: DeviceQueue, *, num_positions: int
) -> _Parts:
    return _Parts(
        layers=layers,
        outer=OuterWeights(
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
    fused = CudaFusedForward(
        parts.layers, parts.outer, attention, table, last_tokens, block_size=config.block_size
    )
    weights = (one.weight for layer in parts.layers for one in layer.products)
    built = FusedParts(
        model=fused,
        table=table,
        last_tokens=last_tokens,
        num_weight_bytes=weight_bytes(model, weights),
        page_dtype=parts.page_dtype,
        max_step_tokens=config.max_step_tokens,
    )
    return built, pages


def _run_trial(
    config: ExecutorConfig, model: LoadedModel, parts: _Parts, queue: DeviceQueue
) -> tuple[Tensor, KVPages]:
    """Run the trial tokens through the fused step; return its logits and the pages that it
    wrote.
    """
    num_blocks = -(-NUM_TRIAL_TOKENS // config.block_size) + NUM_PROBE_BLOCKS
    built, pages = _build(config, model, parts, queue, num_blocks, NUM_TRIAL_TOKENS)
    return trial_logits(built.model, queue, config.block_size), pages


def _step_bytes(
    config: ExecutorConfig, model: LoadedModel, parts: _Parts, queue: DeviceQueue
) -> int:
    """Return the bytes that the largest step (measured) and the captured graphs need, without
    weights and pages.

    The graphs have their own memory: logits, and the other tensors of a step of `max_num_seqs`
    tokens. The size of the other tensors is proportional to the number of tokens.
    """
    budget = config.max_step_tokens
    built, _ = _build(config, model, parts, queue, 1, served_length(config, model))
    # Load the library kernels for every size of matrix product before the first request.
    for num_tokens in (2**power for power in range(4, budget.bit_length())):
        _run_step(config, model, built, queue, num_tokens=num_tokens)
    taken = queue.peak_bytes(lambda: _run_step(config, model, built, queue, num_tokens=budget))
    queue.release_memory()
    of_graphs = -(-taken * config.max_num_seqs // budget)
    return taken + of_graphs + config.max_num_seqs * model.vocab_size * model.dtype.itemsize


def _run_step(
    config: ExecutorConfig,
    model: LoadedModel,
    built: FusedParts,
    queue: DeviceQueue,
    *,
    num_tokens: int,
) -> None:
    run_widest_step(
        built.model,
        queue,
        num_tokens=num_tokens,
        max_rows=config.max_num_seqs,
        max_seq_len=served_length(config, model),
        block_size=config.block_size,
    )
