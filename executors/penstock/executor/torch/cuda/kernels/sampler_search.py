"""Device functions shared by the sampling kernels: floats as ordered integers, random numbers,
draws by cumulative weight, and exact thresholds.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(3.4028234663852886e38)
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ordered(numbers):
    """Map float32 numbers to int32 in the same order."""
    bits = numbers.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ _MAGNITUDE_BITS)


@triton.jit
def number_of(ordered_bits):
    """Return the float32 numbers of these bits: the inverse of `ordered`."""
    bits = tl.where(ordered_bits >= 0, ordered_bits, ordered_bits ^ _MAGNITUDE_BITS)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _mixed(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def uniform(seed, position):
    """Return a random float64 in [0, 1) that depends only on `seed` (its bits as int64) and
    `position`. It is bit-identical to the result of `counter_random.uniforms`.
    """
    counter = (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    bits = _mixed(_mixed(seed.to(tl.uint64, bitcast=True)) + counter) >> 11
    # 2**-53, as a product of two powers that are exact in float32.
    return bits.to(tl.float64) * (1.0 / 134217728.0) * (1.0 / 67108864.0)


@triton.jit
def pick(weights, index, target):
    """Return the first index with nonzero weight whose cumulative weight exceeds the target (if
    none does, the last index with nonzero weight), and the remainder.

    The remainder is the target minus the weights before the index; it is the target of a search
    inside the index.
    """
    cumulated = tl.cumsum(weights, 0)
    last = tl.max(tl.where(weights > 0.0, index, 0), 0)
    found = tl.minimum(tl.sum((cumulated <= target).to(tl.int32), 0), last)
    before = tl.sum(tl.where(index < found, weights, 0.0), 0)
    return found, target - before


@triton.jit
def mass_at_least(values, count, threshold, top, scale, block: tl.constexpr):
    """Return the sum of exp2((value - top) * scale) over `values[:count]` at or above the
    threshold.
    """
    sums = tl.zeros([block], tl.float64)
    for first in tl.range(0, count, block, num_stages=3):
        at = first + tl.arange(0, block)
        value = tl.load(values + at, mask=at < count, other=float("-inf"))
        weight = tl.exp2((value - top) * scale)
        sums += tl.where(value >= threshold, weight, 0.0).to(tl.float64)
    return tl.sum(sums, 0)


@triton.jit
def least_kept(
    values,
    count,
    goal,
    top,
    scale,
    by_mass: tl.constexpr,
    num_pivots: tl.constexpr,
    block: tl.constexpr,
):
    """Return the greatest finite value t such that the values at or above t reach `goal`.

    The goal is a number of values or, with `by_mass`, a sum of exp2((value - top) * scale). If all
    values together do not reach the goal, t is the lowest finite value. Each pass over
    `values[:count]` tests several thresholds at once, alternately spaced evenly over the numbers
    and over their bits: the first converges fast for usual distributions, the second bounds the
    number of passes.
    """
    step = tl.arange(0, num_pivots) + 1
    low, high = 0.0 * top - LARGEST, top
    pivots = top + (step - num_pivots).to(tl.float32) * (12.0 / num_pivots) * LOG2_E / scale
    pivots = tl.maximum(pivots, -LARGEST)
    answer, turn = low, 0
    is_open = top == top
    while is_open:
        reached = tl.zeros([num_pivots, block], tl.float32)
        least = tl.full([block], float("inf"), tl.float32)
        most = tl.full([block], float("-inf"), tl.float32)
        for first in tl.range(0, count, block, num_stages=3):
            at = first + tl.arange(0, block)
            value = tl.load(values + at, mask=at < count, other=float("-inf"))
            if by_mass:
                amount = tl.exp2((value - top) * scale)
            else:
                amount = tl.full([block], 1.0, tl.float32)
            reached += tl.where(value[None, :] >= pivots[:, None], amount[None, :], 0.0)
            is_within = (value >= low) & (value <= high)
            least = tl.minimum(least, tl.where(is_within, value, float("inf")))
            most = tl.maximum(most, tl.where(is_within, value, float("-inf")))
        holds = tl.sum(reached.to(tl.float64), 1) >= goal
        low = tl.maximum(tl.min(least, 0), tl.max(tl.where(holds, pivots, -LARGEST), 0))
        # The answer is below the lowest failing pivot.
        barrier = tl.min(tl.where(holds, float("inf"), pivots), 0)
        below = number_of(ordered(barrier) - 1)
        high = tl.minimum(tl.max(most, 0), below)
        answer = tl.minimum(low, tl.max(most, 0))
        is_open = (tl.min(least, 0) < tl.max(most, 0)) & (low < high) & (turn < 64)
        turn += 1
        share = step.to(tl.float32) / num_pivots
        evenly = low * (1.0 - share) + high * share
        first_bits = ordered(low).to(tl.int64)
        bits = first_bits + (ordered(high).to(tl.int64) - first_bits) * step // num_pivots
        pivots = tl.where(turn % 2 == 0, number_of(bits.to(tl.int32)), evenly)
        pivots = tl.minimum(tl.maximum(pivots, low), high)
    return answer


@triton.jit
def candidate_bound(maxima, wanted, most, top):
    """Return a bound that at least `wanted` of the maxima reach, but at most `most` of them, or
    more if several maxima equal the bound. If there are fewer than `wanted` maxima, the bound is
    minus infinity.
    """
    keys = ordered(maxima).to(tl.int64)
    high = ordered(top).to(tl.int64)
    low = ordered(top - float("inf")).to(tl.int64)
    reaching = most + 1
    while (low < high) & (reaching > most):
        middle = low + (high - low + 1) // 2
        found = tl.sum((keys >= middle).to(tl.int32), 0)
        is_enough = found >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
        reaching = tl.where(is_enough, found, reaching)
    return number_of(low.to(tl.int32))


@triton.jit
def count_above(values, count, limit, block: tl.constexpr):
    """Return how many of `values[:count]` are greater than the limit."""
    sums = tl.zeros([block], tl.int32)
    for first in tl.range(0, count, block, num_stages=3):
        at = first + tl.arange(0, block)
        value = tl.load(values + at, mask=at < count, other=float("-inf"))
        sums += (value > limit).to(tl.int32)
    return tl.sum(sums, 0)
