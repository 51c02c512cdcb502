"""The reference output of the simulated executor: a request's whole output at once."""

import numpy as np
from numpy.typing import NDArray

from penstock.executor.config import SimulatedConfig
from penstock.executor.simulated.tokens import origin_of, request_origin, stop_position, tokens_at
from penstock.scheduler.request import RequestSpec


def simulated_token(
    prompt_ids: NDArray[np.int32],
    position: int,
    vocabulary: int | NDArray[np.int32],
    *,
    seed: int = 0,
) -> int:
    """Return the token at the absolute `position`, which is at least the length of `prompt_ids`,
    the original prompt.

    `seed`: the seed of the request's sampling parameters; 0 for greedy decoding. Only for requests
    without stop ids; `simulated_output` also supports stop ids. `vocabulary`: the number of token
    ids, or the ids from which the executor chooses.
    """
    origins = np.array([origin_of(prompt_ids, seed)], dtype=np.uint64)
    return int(tokens_at(origins, np.array([position], dtype=np.int64), _ids(vocabulary))[0])


def simulated_output(
    spec: RequestSpec,
    vocabulary: int | NDArray[np.int32],
    config: SimulatedConfig | None = None,
) -> NDArray[np.int32]:
    """Return the whole output of a request, int32 [n], n at most `max_tokens`.

    Includes the stop id that ends it, and tokens replayed from an earlier engine. `vocabulary`: as
    for `simulated_token`.
    """
    first = spec.num_original_prompt_tokens
    positions = np.arange(first, spec.max_total_tokens, dtype=np.int64)
    origins = np.full(len(positions), request_origin(spec), dtype=np.uint64)
    banned = np.repeat(np.array(spec.stop_ids, dtype=np.int32)[:, None], len(positions), axis=1)
    tokens = tokens_at(origins, positions, _ids(vocabulary), banned)
    num_before_stop = stop_position(spec, config or SimulatedConfig()) - first
    if num_before_stop < len(tokens):
        tokens = tokens[: num_before_stop + 1]
        tokens[-1] = spec.stop_ids[0]
    return tokens


def _ids(vocabulary: int | NDArray[np.int32]) -> NDArray[np.int32]:
    if isinstance(vocabulary, int):
        return np.arange(vocabulary, dtype=np.int32)
    return vocabulary
