"""The second launch of sampling for rows that ask for more than a temperature.

Owns truncation, the draw from what it leaves, log probabilities and alternatives. The tables and
the first launch are those of `sampler_scores`.

The truncations are those of the path without these kernels: thresholds on the score, ties
included, top-k first, then top-p on what that left, then min-p; the draw walks in order of id.
"""

import triton
import triton.language as tl

from penstock.executor.torch.cuda.kernels.sampler_scores import (
    CHUNK,
    CUT,
    FLAGS,
    LARGEST,
    LOGPROBS,
    MAX_TOP,
    MIN_P_LOG,
    NUM_CANDIDATES,
    NUM_TOP,
    PART,
    PENALISED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    drawn,
    is_worked_row,
    number_word,
    seed_of,
    word,
)
from penstock.executor.torch.cuda.kernels.sampler_search import (
    LOG2_E,
    candidate_bound,
    collect,
    count_above,
    least_kept,
    mass_at_least,
    number_of,
    ordered,
    pick,
    uniform,
)

_MOST_PARTS = tl.constexpr(640)
"""Parts whose maxima may lie above the bound of the candidates."""
_NUM_PIVOTS = tl.constexpr(8)
_BLOCK = tl.constexpr(4096)
_NO_INDEX = tl.constexpr(0x7FFFFFFF)
_LEAST_KEY = tl.constexpr(-(1 << 62))


@triton.jit
def _candidates(table, slot, maxima, top, scores, vocab_size, found_scores, found_tokens):
    """The bound of a row's candidates and their number; more than fit when that is no use."""
    top_k = word(table, slot, TOP_K)
    is_cut = (word(table, slot, FLAGS) & CUT) != 0
    wanted = tl.maximum(word(table, slot, NUM_TOP), 64)
    by_k = tl.where(top_k > 0, top_k, 256)
    wanted = tl.minimum(tl.where(is_cut, tl.maximum(wanted, by_k), wanted), 512)
    bound = candidate_bound(maxima, wanted, _MOST_PARTS, top)
    return bound, collect(
        scores, vocab_size, bound, found_scores, found_tokens, NUM_CANDIDATES, _BLOCK
    )


@triton.jit
def _threshold(table, slot, scores, vocab_size, found, num_found, top, scale, whole):
    """The least score kept. `whole`: mass of the row."""
    top_k, top_p = word(table, slot, TOP_K), number_word(table, slot, TOP_P)
    has_k = (top_k > 0) & (top_k < vocab_size)
    threshold = top + number_word(table, slot, MIN_P_LOG) * number_word(table, slot, TEMPERATURE)
    is_found = (num_found <= NUM_CANDIDATES) & ((has_k == 0) | (top_k <= num_found))
    kept = whole
    if has_k:
        values = tl.where(is_found, found, scores)
        count = tl.where(is_found, num_found, vocab_size)
        goal = top_k.to(tl.float64)
        by_k = least_kept(values, count, goal, top, scale, False, _NUM_PIVOTS, _BLOCK)
        threshold = tl.maximum(threshold, by_k)
        if top_p < 1.0:
            kept = mass_at_least(values, count, by_k, top, scale, _BLOCK)
    if top_p < 1.0:
        goal = top_p.to(tl.float64) * kept
        if (has_k == 0) & is_found:
            reached = mass_at_least(found, num_found, float("-inf"), top, scale, _BLOCK)
            is_found = reached >= goal
        values = tl.where(is_found, found, scores)
        count = tl.where(is_found, num_found, vocab_size)
        by_p = least_kept(values, count, goal, top, scale, True, _NUM_PIVOTS, _BLOCK)
        threshold = tl.maximum(threshold, by_p)
    return threshold


@triton.jit
def _draw_among(found, found_tokens, num_found, number, threshold, top, scale):
    """The token at `number` of the weights of the candidates."""
    at = tl.arange(0, NUM_CANDIDATES)
    score = tl.load(found + at, mask=at < num_found, other=float("-inf"))
    weight = tl.where(score >= threshold, tl.exp2((score - top) * scale), 0.0).to(tl.float64)
    chosen, _ = pick(weight, at, number * tl.sum(weight, 0))
    return tl.load(found_tokens + chosen)


@triton.jit
def _weigh_chunks(scores, masses, threshold, top, scale, vocab_size, num_chunks: tl.constexpr):
    """Write the mass at or above the threshold of each chunk."""
    rows: tl.constexpr = _BLOCK // CHUNK
    for first in range(0, num_chunks, rows):
        chunk = first + tl.arange(0, rows)
        at = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        score = tl.load(scores + at, mask=at < vocab_size, other=float("-inf"))
        weight = tl.where(score >= threshold, tl.exp2((score - top) * scale), 0.0)
        tl.store(masses + chunk, tl.sum(weight.to(tl.float64), 1), mask=chunk < num_chunks)
    tl.debug_barrier()


@triton.jit
def _write_top(scores, found, found_tokens, is_found, num_found, num_top, vocab_size, shift, out):
    """The most likely tokens and their log probabilities; the least id first among equals."""
    values = tl.where(is_found, found, scores)
    count = tl.where(is_found, num_found, vocab_size)
    below = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    for rank in range(0, tl.minimum(num_top, vocab_size)):
        best = tl.full([], _LEAST_KEY, tl.int64)
        for first in range(0, count, _BLOCK):
            at = first + tl.arange(0, _BLOCK)
            value = tl.load(values + at, mask=at < count, other=float("-inf"))
            token = tl.load(found_tokens + at, mask=at < tl.where(is_found, count, 0), other=0)
            token = tl.where(is_found, token, at)
            key = (ordered(value).to(tl.int64) << 32) | (token ^ _NO_INDEX).to(tl.int64)
            key = tl.where((at < count) & (key < below), key, _LEAST_KEY)
            best = tl.maximum(best, tl.max(key, 0))
        below = best
        value = number_of((best >> 32).to(tl.int32)) - shift
        tl.store(out + rank, (best & 0x7FFFFFFF).to(tl.int32) ^ _NO_INDEX)
        tl.store(out + MAX_TOP + rank, value.to(tl.int32, bitcast=True))


@triton.jit
def _draw(
    logits, scores, is_worked, table, slot, number, mass, masses, own, bound, num_found, found,
    found_tokens, top, vocab_size, num_chunks: tl.constexpr,
):  # fmt: skip
    """The token at `number`; `mass` float64: the chunks' masses, all on the scale of `top`."""
    scale = 1.0 / number_word(table, slot, TEMPERATURE) * LOG2_E
    threshold = top - float("inf")
    is_among_found = num_found < 0
    if (word(table, slot, FLAGS) & CUT) != 0:
        whole = tl.sum(mass, 0)
        threshold = _threshold(
            table, slot, scores, vocab_size, found, num_found, top, scale, whole
        )  # fmt: skip
        is_among_found = (num_found <= NUM_CANDIDATES) & (threshold >= bound)
        if is_among_found == 0:
            _weigh_chunks(scores, masses, threshold, top, scale, vocab_size, num_chunks)
            mass = tl.load(masses + own, mask=own < num_chunks, other=0.0)
    if is_among_found:
        token = _draw_among(found, found_tokens, num_found, number, threshold, top, scale)
    else:
        token = drawn(
            logits, scores, is_worked, mass, number, top, scale, threshold, vocab_size
        )  # fmt: skip
    return token


@triton.jit
def _write_logprobs(
    scores, token, top, whole, bound, num_found, found, found_tokens, num_top, vocab_size,
    out_row, out_top,
):  # fmt: skip
    """Log probability and rank of the token, and the alternatives. `whole`: mass at no
    temperature, on the scale of `top`."""
    shift = top + tl.log(whole.to(tl.float32))
    score = tl.load(scores + token)
    tl.store(out_row + 2, (score - shift).to(tl.int32, bitcast=True))
    is_found = num_found <= NUM_CANDIDATES
    is_here = is_found & (score >= bound)
    values = tl.where(is_here, found, scores)
    rank = count_above(values, tl.where(is_here, num_found, vocab_size), score, _BLOCK)
    tl.store(out_row + 3, rank + 1)
    _write_top(
        scores, found, found_tokens, is_found, num_found, num_top, vocab_size, shift, out_top
    )  # fmt: skip


@triton.jit
def choose_full(
    logits, stride, slots, positions, table, seeds, counted, mask_rows, work, best_scores,
    best_tokens, masses, whole_masses, part_maxima, candidate_scores, candidate_tokens,
    last_tokens, out_rows, out_tops, vocab_size,
    num_chunks: tl.constexpr, num_padded: tl.constexpr, num_parts: tl.constexpr,
    has_masks: tl.constexpr,
):  # fmt: skip
    """A token for one row, whatever it asks for."""
    row = tl.program_id(0)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    chunks = tl.arange(0, num_padded)
    own = row * num_chunks + chunks
    best = tl.load(best_scores + own, mask=chunks < num_chunks, other=float("-inf"))
    at = tl.load(best_tokens + own, mask=chunks < num_chunks, other=_NO_INDEX)
    top = tl.max(best, 0)
    token = tl.minimum(tl.min(tl.where(best == top, at, _NO_INDEX), 0), vocab_size - 1)
    is_finite = (top >= -LARGEST) & (top <= LARGEST)
    flags = word(table, slot, FLAGS)
    scores = work + row.to(tl.int64) * vocab_size
    found = candidate_scores + row * NUM_CANDIDATES
    found_tokens = candidate_tokens + row * NUM_CANDIDATES
    bound, num_found = top, NUM_CANDIDATES + 1 + 0 * row
    if ((flags & (CUT | LOGPROBS)) != 0) & is_finite:
        parts = tl.arange(0, num_padded * (CHUNK // PART))
        own_maxima = part_maxima + row * num_parts + parts
        maxima = tl.load(own_maxima, mask=parts < num_parts, other=float("-inf"))
        bound, num_found = _candidates(
            table, slot, maxima, top, scores, vocab_size, found, found_tokens
        )  # fmt: skip
    temperature = number_word(table, slot, TEMPERATURE)
    if (temperature > 0.0) & is_finite:
        is_worked = is_worked_row(table, slot, position)
        if has_masks:
            is_worked = is_worked | (tl.load(mask_rows + row) >= 0)
        mass = tl.load(masses + own, mask=chunks < num_chunks, other=0.0)
        mass *= tl.exp2((best - top) * (1.0 / temperature * LOG2_E)).to(tl.float64)
        number = uniform(seed_of(seeds, slot), position)
        token = _draw(
            logits + row.to(tl.int64) * stride, scores, is_worked, table, slot, number, mass,
            masses + row * num_chunks, chunks, bound, num_found, found, found_tokens, top,
            vocab_size, num_chunks,
        )  # fmt: skip
    tl.store(last_tokens + 2 * slot + position % 2, token)
    tl.store(out_rows + row * 4, token)
    tl.store(out_rows + row * 4 + 1, is_finite.to(tl.int32))
    if (flags & PENALISED) != 0:
        tl.store(counted + slot, position.to(tl.int32))
    if ((flags & LOGPROBS) != 0) & is_finite:
        whole = tl.load(whole_masses + own, mask=chunks < num_chunks, other=0.0)
        whole *= tl.exp2((best - top) * LOG2_E).to(tl.float64)
        _write_logprobs(
            scores, token, top, tl.sum(whole, 0), bound, num_found, found, found_tokens,
            word(table, slot, NUM_TOP), vocab_size, out_rows + row * 4,
            out_tops + row * 2 * MAX_TOP,
        )  # fmt: skip
