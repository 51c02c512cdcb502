"""Groups rows of different context lengths for padded products. Does not know tensors."""

import numpy as np
from numpy.typing import NDArray

_MAX_CUTS = 12
"""Places where a group may end: enough for any mix, few enough to test them all."""


def split_by_length(
    num_blocks: NDArray[np.int64], overhead_blocks: float
) -> list[tuple[int, int, int]]:
    """Cut rows sorted by `num_blocks` (ascending, [n]) into groups (first, last + 1, width).

    Every row of a group is padded to its longest row's `width`. A group costs `overhead_blocks`
    plus rows times width; the partition with the least sum is found by dynamic programming over
    evenly spaced cuts.
    """
    num_rows = len(num_blocks)
    if num_rows == 0:
        return []
    num_cuts = min(num_rows, _MAX_CUTS)
    cuts = [num_rows * i // num_cuts for i in range(num_cuts + 1)]
    widths = [0] + [int(num_blocks[cut - 1]) for cut in cuts[1:]]
    best = [0.0] * (num_cuts + 1)
    previous = [0] * (num_cuts + 1)
    for end in range(1, num_cuts + 1):
        costs = [
            best[start] + overhead_blocks + (cuts[end] - cuts[start]) * widths[end]
            for start in range(end)
        ]
        previous[end] = min(range(end), key=costs.__getitem__)
        best[end] = costs[previous[end]]
    groups: list[tuple[int, int, int]] = []
    end = num_cuts
    while end > 0:
        start = previous[end]
        groups.append((cuts[start], cuts[end], widths[end]))
        end = start
    return groups[::-1]
