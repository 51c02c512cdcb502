"""Random numbers as a function of (seed, position): stateless, so they do not depend on order or
batch.

Source: SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA
2014), finaliser "variant 13" of Stafford. The seed is hashed first, so that neighbouring seeds do
not give shifted copies of one stream; the position is the generator's step counter.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return numbers in [0, 1) with 53 random bits, one for each pair of `seeds` [m] and
    `positions` [m] (0 or more).
    """
    counters = (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(_mix(seeds) + counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53
