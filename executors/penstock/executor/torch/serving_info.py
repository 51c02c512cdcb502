"""Determines the limits and features that an executor reports to the scheduler. They are computed
in the same way for the eager and the fused path.
"""

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.kv_pages import page_dtype
from penstock.executor.torch.loading import LoadedModel
from penstock.scheduler.executor import ExecutorInfo, Feature

_FEATURES = frozenset(
    {
        Feature.SEED,
        Feature.MIN_P,
        Feature.MIN_TOKENS,
        Feature.LOGPROBS,
        Feature.PROMPT_LOGPROBS,
        Feature.LOGIT_BIAS,
        Feature.PENALTIES,
    }
)


def served_length(config: ExecutorConfig, model: LoadedModel) -> int:
    """Return the maximum length of prompt plus output, in tokens: the limit of the model, or the
    setting if it is lower.
    """
    longest = model.architecture.max_seq_len
    return longest if config.max_seq_len is None else min(longest, config.max_seq_len)


def serving_info(
    config: ExecutorConfig, model: LoadedModel, *, num_blocks: int, pipeline_depth: int
) -> ExecutorInfo:
    """Return the `ExecutorInfo` of an executor that serves `model`."""
    return ExecutorInfo(
        name="torch",
        vocab_size=model.vocab_size,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_seq_len=served_length(config, model),
        max_num_seqs=config.max_num_seqs,
        pipeline_depth=pipeline_depth,
        features=_FEATURES,
        quantization=config.quantization,
        kv_cache_dtype=str(page_dtype(config.kv_cache_dtype, model.dtype)).removeprefix("torch."),
    )
