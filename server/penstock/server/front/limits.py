"""All bounds of requests, from the settings and the engine's hello.

Owns the arithmetic between them. Does not know how the bounds are published or checked.
"""

from dataclasses import dataclass

from penstock.scheduler.executor import ExecutorInfo, Feature
from penstock.server.front.config import FrontConfig

_CONSTRAINTS = frozenset({Feature.JSON_SCHEMA, Feature.REGEX, Feature.GRAMMAR, Feature.CHOICE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one model on one engine, in tokens unless the name has another unit.

    `max_total_tokens`: the context length, or the size of the KV cache if that is less.
    `max_engine_prompt_tokens`: the executor's own bound on prompts, None for none. `adapters`:
    names of the executor's adapters. `executor`: its name, for error messages.
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
    def of(config: FrontConfig, info: ExecutorInfo, vocab_size: int | None = None) -> "Limits":
        """Return the limits of an engine under these settings.

        `vocab_size`: of the tokenizer, if known; ids without a text are refused.
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
        """Whether the blocks of a session can be kept for its next turn."""
        return Feature.CACHE_RETENTION in self.features

    @property
    def max_total_tokens(self) -> int:
        """Maximum of prompt and output together."""
        return min(self.max_context_tokens, self.num_blocks * self.block_size)

    @property
    def max_context_prompt_tokens(self) -> int:
        """The longest prompt that the model and its executor accept, regardless of the cache size.

        One less than the context: a prompt without room for output is useless.
        """
        return self._bounded_prompt(self.max_context_tokens - 1)

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that also fits the cache."""
        return self._bounded_prompt(self.max_total_tokens - 1)

    @property
    def max_output_tokens(self) -> int:
        """Largest `max_tokens`: a prompt has at least one token."""
        most = max(1, self.max_total_tokens - 1)
        return min(self.config.max_output_tokens or most, most)

    @property
    def default_max_tokens(self) -> int:
        """`max_tokens` of a request that does not set it."""
        return min(self.config.default_max_tokens, self.max_output_tokens)

    @property
    def max_chunk_tokens(self) -> int:
        """Largest `min_chunk_tokens`: the backlog must hold the held tokens of all outputs."""
        config = self.config
        return max(
            1, min(config.max_chunk_tokens, config.max_backlog_tokens // config.max_num_outputs)
        )

    @property
    def max_constraint_bytes(self) -> int:
        """Largest constraint, in UTF-8 bytes; 0 if constraints are unsupported."""
        is_any = not self.features.isdisjoint(_CONSTRAINTS)
        return self.config.max_constraint_bytes if is_any else 0

    def _bounded_prompt(self, most: int) -> int:
        engine = self.max_engine_prompt_tokens
        return max(1, most if engine is None else min(most, engine))

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)


def _features_of(config: FrontConfig, info: ExecutorInfo) -> frozenset[Feature]:
    """Return the executor's features, and the scheduler's if it manages the blocks."""
    kept = frozenset({Feature.CACHE_RETENTION})
    if not config.is_prefix_caching:
        return info.features - kept
    return info.features if info.is_self_paced else info.features | kept
