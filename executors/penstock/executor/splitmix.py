"""SplitMix64: a bijective hash of 64-bit values, and the step of its counter.

Source: Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; finaliser
"variant 13" of Stafford.
"""

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the hash of each value, uint64, in an array of the same shape."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
