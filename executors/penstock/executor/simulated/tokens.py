"""The simulated model: every token is a hash of the prompt, the seed (of requests that are not
greedy) and its position.

The output of a request does not depend on batch, chunk, slot, restarts, blocks or time.
"""

from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.executor.config import SimulatedConfig
from penstock.executor.splitmix import GOLDEN, mix64
from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.request import MAX_STOP_IDS, RequestSpec

NEVER: Final = np.iinfo(np.int64).max
"""A position that is never reached."""


def origin_of(prompt_ids: NDArray[np.int32], seed: int = 0) -> int:
    """Return the origin of a generation: a 64-bit hash of prompt ids and seed. It determines all
    tokens of the generation.
    """
    data = np.ascontiguousarray(prompt_ids, dtype=np.int32).tobytes()
    key = seed.to_bytes(8, "little")
    return int.from_bytes(blake2b(data, digest_size=8, key=key).digest(), "little")


def request_origin(spec: RequestSpec) -> int:
    """Return the origin of a request: the hash of its original prompt and, unless it is greedy, its
    seed.

    Replayed tokens are left out, so that a request continues after a restart with the same output.
    """
    seed = spec.sampling.seed if spec.sampling.temperature > 0.0 else 0
    return origin_of(spec.prompt_ids[: spec.num_original_prompt_tokens], seed)


def tokens_at(
    origins: NDArray[np.uint64],
    positions: NDArray[np.int64] | NDArray[np.int32],
    ids: NDArray[np.int32],
    banned: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """Return tokens int32 [m] at absolute `positions` [m] of the generations with `origins` [m],
    chosen from `ids` [n] without the banned tokens.

    `banned` int32 [k, m]: column i has the banned ids of generation i, -1 where unused. A banned
    token is replaced by the next of `ids` that is not banned.
    """
    hashed = mix64(origins + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN)
    indices = hashed % np.uint64(len(ids))
    tokens: NDArray[np.int32] = ids[indices]
    if banned is None:
        return tokens
    for _ in range(MAX_STOP_IDS):
        is_banned = (banned == tokens).any(axis=0)
        if not is_banned.any():
            break
        indices[is_banned] = (indices[is_banned] + np.uint64(1)) % np.uint64(len(ids))
        tokens = ids[indices]
    return tokens


def stop_position(spec: RequestSpec, config: SimulatedConfig) -> int:
    """Return the first position at which the request gets `stop_ids[0]`; NEVER if it gets none."""
    if config.max_output_tokens is None or not spec.stop_ids:
        return NEVER
    origin = np.array([request_origin(spec)], dtype=np.uint64)
    span = config.max_output_tokens - config.min_output_tokens + 1
    num_outputs = config.min_output_tokens + int(mix64(origin)[0] % np.uint64(span))
    return spec.num_original_prompt_tokens + max(num_outputs - 1, spec.min_tokens)


def simulated_logprobs(tokens: NDArray[np.int32], num_top: int, vocab_size: int) -> TokenLogprobs:
    """Return the log probabilities of `tokens` [m], and for each the `num_top` most likely tokens,
    in a simulated distribution: 1/2 for the token, 1/4 for the next token id, and so on.
    """
    ranks = np.arange(min(num_top, vocab_size), dtype=np.int32)
    return TokenLogprobs(
        chosen=np.full(len(tokens), -np.log(2.0), dtype=np.float32),
        ranks=np.ones(len(tokens), dtype=np.int32),
        top_ids=((tokens[:, None] + ranks) % vocab_size).astype(np.int32),
        top_logprobs=np.broadcast_to(
            (-np.log(2.0) * (ranks + 1)).astype(np.float32), (len(tokens), len(ranks))
        ),
    )
