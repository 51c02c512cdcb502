"""Random numbers as a function of (seed, position): stateless, so they do not depend on order or
batch.

The generator is SplitMix64. The seed is hashed first, so that neighbouring seeds do not give
shifted copies of one stream; the position is the generator's step counter.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.executor.splitmix import GOLDEN, mix64


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return numbers in [0, 1) with 53 random bits, one for each pair of `seeds` [m] and
    `positions` [m] (0 or more).
    """
    counters = (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN
    return (mix64(mix64(seeds) + counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53
