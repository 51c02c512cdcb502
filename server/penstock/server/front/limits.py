"""The limits of requests, computed from the settings and the engine's description of its executor.

Other modules publish and check them.
"""

from dataclasses import dataclass

from penstock.scheduler.executor import ExecutorInfo, Feature
from penstock.server.front.config import FrontConfig

_CONSTRAINTS = frozenset({Feature.JSON_SCHEMA, Feature.REGEX, Feature.GRAMMAR, Feature.CHOICE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one model on one engine, in tokens unless the name has another unit.

    Attributes:
        vocab_size: Token ids in requests must be below it.
        block_size, num_blocks: Tokens per block of the KV cache, and number of blocks.
        max_context_tokens: The context length of the model on its executor.
        max_engine_prompt_tokens: The executor's limit of the prompt length; None if it has none.
        features: The features that clients may use.
        adapters: Names of the executor's adapters.
        executor: The name of the executor, for error messages.
    """

    config: FrontConfig
    vocab_size: int
    block_size: int
    num_blocks: int
    max_context_tokens: int
    features: frozenset[Feature]
    max_engine_prompt_tokens: int | None = None
    adapters: tuple[str, ...] = ()
    executor: str = ""

    @staticmethod
    def from_config(
        config: FrontConfig, info: ExecutorInfo, vocab_size: int | None = None
    ) -> "Limits":
        """Return the limits for the settings in `config`, and for an engine whose executor `info`
        describes.

        `vocab_size` is the vocabulary size in the model's files, None if unknown. If it is smaller
        than the executor's vocabulary size, it applies instead.
        """
        return Limits(
            config=config,
            vocab_size=min(info.vocab_size, vocab_size or info.vocab_size),
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_context_tokens=info.max_seq_len,
            features=_features_of(config, info),
            max_engine_prompt_tokens=info.max_prompt_tokens,
            adapters=info.adapters,
            executor=info.name,
        )

    @property
    def has_sessions(self) -> bool:
        """True if the KV cache blocks of a session can be kept for its next request."""
        return Feature.CACHE_RETENTION in self.features

    @property
    def max_total_tokens(self) -> int:
        """Maximum number of tokens of prompt and output together: the context length, or the size
        of the KV cache if that is smaller."""
        return min(self.max_context_tokens, self.num_blocks * self.block_size)

    @property
    def max_context_prompt_tokens(self) -> int:
        """Maximum length of a prompt that the model and its executor accept, regardless of the
        cache size.

        It is at most the context length minus 1, because at least one output token must fit.
        """
        return self._bounded_prompt(self.max_context_tokens - 1)

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum length of a prompt that the model, its executor and the KV cache accept."""
        return self._bounded_prompt(self.max_total_tokens - 1)

    @property
    def max_output_tokens(self) -> int:
        """The largest accepted `max_tokens`, if the prompt is short enough for it."""
        most = max(1, self.max_total_tokens - 1)
        return min(self.config.max_output_tokens or most, most)

    @property
    def default_max_tokens(self) -> int:
        """The value of `max_tokens` for a request that does not set it; lower if less space remains
        after the prompt."""
        return min(self.config.default_max_tokens, self.max_output_tokens)

    @property
    def max_chunk_tokens(self) -> int:
        """The largest accepted `min_chunk_tokens`.

        The backlog of unsent tokens must have space for the tokens that all outputs of a request
        hold back.
        """
        config = self.config
        return max(
            1, min(config.max_chunk_tokens, config.max_backlog_tokens // config.max_num_outputs)
        )

    @property
    def max_constraint_bytes(self) -> int:
        """Maximum length of a constraint, in UTF-8 bytes; 0 if constraints are unsupported."""
        is_any = not self.features.isdisjoint(_CONSTRAINTS)
        return self.config.max_constraint_bytes if is_any else 0

    def _bounded_prompt(self, most: int) -> int:
        engine = self.max_engine_prompt_tokens
        return max(1, most if engine is None else min(most, engine))

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)


def _features_of(config: FrontConfig, info: ExecutorInfo) -> frozenset[Feature]:
    """Return the features that clients may use.

    These are the features of the executor. CACHE_RETENTION is removed without prefix caching, and
    otherwise added if the scheduler manages the blocks.
    """
    kept = frozenset({Feature.CACHE_RETENTION})
    if not config.is_prefix_caching:
        return info.features - kept
    return info.features if info.is_self_paced else info.features | kept
