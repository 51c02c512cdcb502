"""Kernels that sample the tokens of a step in which rows may have any sampling option. They find
candidates for the rows with truncation or log probabilities, and choose a token for every row.

`sampler_scores` contains the tables and the first launch.

The truncations are thresholds on the score and therefore keep ties: top-k first, then top-p on the
tokens that top-k kept, then min-p, as in `inverse_cdf`. A token is drawn by cumulative weight in
order of token id.

Five launches follow the launch of `score_chunks`. `bound_candidates` computes from the
maxima of small parts a bound that enough scores of the row reach. `list_candidates` stores the
candidates, chunk by chunk. `choose_listed` chooses among them. Rows for which the candidates do not
suffice (a flat distribution with top-p, a top-k of hundreds, very many ties) are handled by
`choose_searched`: it searches the whole row. `note_logprobs` adds log probabilities.
"""

import triton
import triton.language as tl

from penstock.executor.torch.cuda.kernels.sampler_scores import (
    CHUNK,
    CUT,
    FLAGS,
    LARGEST,
    LISTED,
    LOGPROBS,
    MAX_TOP,
    MIN_P_LOG,
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
    count_above,
    least_kept,
    mass_at_least,
    number_of,
    ordered,
    pick,
    uniform,
)

_MOST_PARTS = tl.constexpr(640)
"""Intended maximum number of parts that contain candidates; equal maxima may make it more."""
_MOST_WANTED = tl.constexpr(512)
_LIST_PIVOTS = tl.constexpr(4)
_LIST_BLOCK = tl.constexpr(2048)
_ROW_PIVOTS = tl.constexpr(8)
_ROW_BLOCK = tl.constexpr(4096)
_NO_INDEX = tl.constexpr(0x7FFFFFFF)
_LEAST_KEY = tl.constexpr(-(1 << 62))


@triton.jit
def bound_candidates(
    slots, table, part_maxima, bounds, num_parts: tl.constexpr, num_padded: tl.constexpr
):  # fmt: skip
    """Store a lower bound for the scores of one row's candidates, if the row has truncation or log
    probabilities.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    flags = word(table, slot, FLAGS)
    if (flags & (CUT | LOGPROBS)) != 0:
        parts = tl.arange(0, num_padded * (CHUNK // PART))
        maxima = tl.load(
            part_maxima + row * num_parts + parts, mask=parts < num_parts, other=float("-inf")
        )
        top = tl.max(maxima, 0)
        top_k = word(table, slot, TOP_K)
        wanted = tl.maximum(word(table, slot, NUM_TOP), 64)
        by_cut = tl.where(top_k > 0, top_k, 256)
        wanted = tl.where((flags & CUT) != 0, tl.maximum(wanted, by_cut), wanted)
        wanted = tl.minimum(wanted, _MOST_WANTED)
        bound = top
        if (top >= -LARGEST) & (top <= LARGEST):
            bound = candidate_bound(maxima, wanted, _MOST_PARTS, top)
        tl.store(bounds + row, bound)


@triton.jit
def list_candidates(
    slots, table, work, part_maxima, bounds, listed_scores, listed_tokens, listed_counts,
    vocab_size, num_chunks: tl.constexpr,
):  # fmt: skip
    """Store one chunk's candidates, at most LISTED, in order of token id. Also store the number of
    candidates, including candidates that do not fit.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if (word(table, slot, FLAGS) & (CUT | LOGPROBS)) != 0:
        parts: tl.constexpr = CHUNK // PART
        bound = tl.load(bounds + row)
        out = row * num_chunks + chunk
        part = tl.arange(0, parts)
        is_read = tl.load(part_maxima + out * parts + part) >= bound
        offset = part[:, None] * PART + tl.arange(0, PART)[None, :]
        at = chunk * CHUNK + offset
        own = work + row.to(tl.int64) * vocab_size
        limit = tl.where(is_read, vocab_size, 0)
        score = tl.load(own + at, mask=at < limit[:, None], other=float("-inf"))
        is_kept = (score >= bound) & (at < limit[:, None])
        kept = tl.reshape(is_kept.to(tl.int32), [CHUNK])
        place = tl.reshape(tl.cumsum(kept, 0) - 1, [parts, PART])
        count = tl.sum(kept, 0)
        is_written = is_kept & (place < LISTED)
        tl.store(listed_scores + out * LISTED + place, score, mask=is_written)
        tl.store(listed_tokens + out * LISTED + place, at, mask=is_written)
        lane = tl.arange(0, LISTED)
        nothing = tl.full([LISTED], float("-inf"), tl.float32)
        tl.store(listed_scores + out * LISTED + lane, nothing, mask=lane >= count)
        tl.store(listed_counts + out, count)


@triton.jit
def _listed_threshold(
    table, slot, listed, num_listed, num_found, vocab_size, bound, top, scale, whole
):  # fmt: skip
    """Return the threshold at or above which scores are kept, and whether the candidates suffice
    to determine it. `whole`: probability mass of the row (not normalised).
    """
    top_k, top_p = word(table, slot, TOP_K), number_word(table, slot, TOP_P)
    has_k = (top_k > 0) & (top_k < vocab_size)
    threshold = top + number_word(table, slot, MIN_P_LOG) * number_word(table, slot, TEMPERATURE)
    is_decided = (has_k == 0) | (top_k <= num_found)
    kept = whole
    if has_k & is_decided:
        goal = top_k.to(tl.float64)
        by_k = least_kept(listed, num_listed, goal, top, scale, False, _LIST_PIVOTS, _LIST_BLOCK)
        threshold = tl.maximum(threshold, by_k)
        kept = mass_at_least(listed, num_listed, by_k, top, scale, _LIST_BLOCK)
    if (top_p < 1.0) & is_decided:
        goal = top_p.to(tl.float64) * kept
        reached = mass_at_least(listed, num_listed, float("-inf"), top, scale, _LIST_BLOCK)
        is_decided = reached >= goal
        if is_decided:
            by_p = least_kept(listed, num_listed, goal, top, scale, True, _LIST_PIVOTS, _LIST_BLOCK)
            threshold = tl.maximum(threshold, by_p)
    return threshold, is_decided & (threshold >= bound)


@triton.jit
def _searched_threshold(table, slot, scores, vocab_size, top, scale, whole):
    """Return the threshold at or above which scores are kept, computed from the whole row."""
    top_k, top_p = word(table, slot, TOP_K), number_word(table, slot, TOP_P)
    threshold = top + number_word(table, slot, MIN_P_LOG) * number_word(table, slot, TEMPERATURE)
    kept = whole
    if (top_k > 0) & (top_k < vocab_size):
        goal = top_k.to(tl.float64)
        by_k = least_kept(scores, vocab_size, goal, top, scale, False, _ROW_PIVOTS, _ROW_BLOCK)
        threshold = tl.maximum(threshold, by_k)
        kept = mass_at_least(scores, vocab_size, by_k, top, scale, _ROW_BLOCK)
    if top_p < 1.0:
        goal = top_p.to(tl.float64) * kept
        by_p = least_kept(scores, vocab_size, goal, top, scale, True, _ROW_PIVOTS, _ROW_BLOCK)
        threshold = tl.maximum(threshold, by_p)
    return threshold


@triton.jit
def _weigh_chunks(scores, masses, threshold, top, scale, vocab_size, num_chunks: tl.constexpr):
    """Store, for each chunk, the probability mass of the scores at or above the threshold."""
    rows: tl.constexpr = _ROW_BLOCK // CHUNK
    for first in tl.range(0, num_chunks, rows, num_stages=3):
        chunk = first + tl.arange(0, rows)
        at = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        score = tl.load(scores + at, mask=at < vocab_size, other=float("-inf"))
        weight = tl.where(score >= threshold, tl.exp2((score - top) * scale), 0.0)
        tl.store(masses + chunk, tl.sum(weight.to(tl.float64), 1), mask=chunk < num_chunks)
    tl.debug_barrier()


@triton.jit
def _write_top(values, tokens, count, num_top, shift, out, has_tokens: tl.constexpr,
               block: tl.constexpr):  # fmt: skip
    """Store the `num_top` most likely tokens and their log probabilities in descending order; among
    ties, the lowest id comes first.
    """
    below = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    for rank in range(0, num_top):
        best = tl.full([], _LEAST_KEY, tl.int64)
        for first in range(0, count, block):
            at = first + tl.arange(0, block)
            value = tl.load(values + at, mask=at < count, other=float("-inf"))
            token = at
            if has_tokens:
                token = tl.load(tokens + at, mask=at < count, other=0)
            key = (ordered(value).to(tl.int64) << 32) | (token ^ _NO_INDEX).to(tl.int64)
            key = tl.where((at < count) & (key < below), key, _LEAST_KEY)
            best = tl.maximum(best, tl.max(key, 0))
        below = best
        value = number_of((best >> 32).to(tl.int32)) - shift
        tl.store(out + rank, (best & 0x7FFFFFFF).to(tl.int32) ^ _NO_INDEX)
        tl.store(out + MAX_TOP + rank, value.to(tl.int32, bitcast=True))


@triton.jit
def _write_token(token, is_finite, slot, position, table, counted, last_tokens, out_row):
    tl.store(last_tokens + 2 * slot + position % 2, token)
    tl.store(out_row, token)
    tl.store(out_row + 1, is_finite.to(tl.int32))
    if (word(table, slot, FLAGS) & PENALISED) != 0:
        tl.store(counted + slot, position.to(tl.int32))


@triton.jit
def _draw_listed(listed, tokens, num_listed, number, threshold, top, scale, width: tl.constexpr):
    """Return the kept candidate at the fraction `number` (0 to 1) of the total cumulative
    weight.
    """
    at = tl.arange(0, width)
    score = tl.load(listed + at, mask=at < num_listed, other=float("-inf"))
    weight = tl.where(score >= threshold, tl.exp2((score - top) * scale), 0.0).to(tl.float64)
    chosen, _ = pick(weight, at, number * tl.sum(weight, 0))
    return tl.load(tokens + chosen)


@triton.jit
def choose_listed(
    logits, stride, slots, positions, table, seeds, counted, mask_rows, work, best_scores,
    best_tokens, masses, bounds, listed_scores, listed_tokens, listed_counts, pending,
    last_tokens, out_rows, vocab_size,
    num_chunks: tl.constexpr, num_padded: tl.constexpr, has_masks: tl.constexpr,
):  # fmt: skip
    """Choose a token for one row, or mark the row as `pending` if its candidates do not suffice."""
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
    listed = listed_scores + row * num_chunks * LISTED
    tokens = listed_tokens + row * num_chunks * LISTED
    bound, num_found, is_decided = top, 0 * row, row >= 0
    if ((flags & CUT) != 0) & is_finite:
        bound = tl.load(bounds + row)
        counts = tl.load(listed_counts + own, mask=chunks < num_chunks, other=0)
        num_found = tl.sum(counts, 0)
        is_decided = tl.max(counts, 0) <= LISTED
    temperature = number_word(table, slot, TEMPERATURE)
    if (temperature > 0.0) & is_finite & is_decided:
        scale = 1.0 / temperature * LOG2_E
        mass = tl.load(masses + own, mask=chunks < num_chunks, other=0.0)
        mass *= tl.exp2((best - top) * scale).to(tl.float64)
        number = uniform(seed_of(seeds, slot), position)
        if (flags & CUT) != 0:
            threshold, is_decided = _listed_threshold(
                table, slot, listed, num_chunks * LISTED, num_found, vocab_size, bound, top, scale,
                tl.sum(mass, 0),
            )  # fmt: skip
            if is_decided:
                token = _draw_listed(
                    listed, tokens, num_chunks * LISTED, number, threshold, top, scale,
                    num_padded * LISTED,
                )  # fmt: skip
        else:
            is_worked = is_worked_row(table, slot, position)
            if has_masks:
                is_worked = is_worked | (tl.load(mask_rows + row) >= 0)
            token = drawn(
                logits + row.to(tl.int64) * stride, scores, is_worked, mass, number, top, scale,
                float("-inf"), vocab_size,
            )  # fmt: skip
    tl.store(pending + row, (is_decided == 0).to(tl.int32))
    if is_decided:
        out = out_rows + row * 4
        _write_token(token, is_finite, slot, position, table, counted, last_tokens, out)


@triton.jit
def choose_searched(
    slots, positions, table, seeds, counted, work, best_scores, masses, pending, last_tokens,
    out_rows, vocab_size,
    num_chunks: tl.constexpr, num_padded: tl.constexpr,
):  # fmt: skip
    """Choose a token for one `pending` row with a search over the whole row.

    Reads the row's edited scores from `work`; their maximum is finite.
    """
    row = tl.program_id(0)
    if tl.load(pending + row) != 0:
        slot, position = tl.load(slots + row), tl.load(positions + row)
        chunks = tl.arange(0, num_padded)
        own = row * num_chunks + chunks
        best = tl.load(best_scores + own, mask=chunks < num_chunks, other=float("-inf"))
        top = tl.max(best, 0)
        scores = work + row.to(tl.int64) * vocab_size
        scale = 1.0 / number_word(table, slot, TEMPERATURE) * LOG2_E
        mass = tl.load(masses + own, mask=chunks < num_chunks, other=0.0)
        mass *= tl.exp2((best - top) * scale).to(tl.float64)
        threshold = _searched_threshold(
            table, slot, scores, vocab_size, top, scale, tl.sum(mass, 0)
        )  # fmt: skip
        own_masses = masses + row * num_chunks
        _weigh_chunks(scores, own_masses, threshold, top, scale, vocab_size, num_chunks)
        mass = tl.load(masses + own, mask=chunks < num_chunks, other=0.0)
        number = uniform(seed_of(seeds, slot), position)
        token = drawn(scores, scores, row >= 0, mass, number, top, scale, threshold, vocab_size)
        out = out_rows + row * 4
        _write_token(token, row >= 0, slot, position, table, counted, last_tokens, out)


@triton.jit
def note_logprobs(
    slots, table, work, best_scores, whole_masses, bounds, listed_scores, listed_tokens,
    listed_counts, out_rows, out_tops, vocab_size,
    num_chunks: tl.constexpr, num_padded: tl.constexpr,
):  # fmt: skip
    """Store log probability and rank of one row's token, and the row's most likely tokens, if the
    row requests these and its logits are finite.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    out = out_rows + row * 4
    if ((word(table, slot, FLAGS) & LOGPROBS) != 0) & (tl.load(out + 1) != 0):
        chunks = tl.arange(0, num_padded)
        own = row * num_chunks + chunks
        best = tl.load(best_scores + own, mask=chunks < num_chunks, other=float("-inf"))
        top = tl.max(best, 0)
        whole = tl.load(whole_masses + own, mask=chunks < num_chunks, other=0.0)
        whole *= tl.exp2((best - top) * LOG2_E).to(tl.float64)
        shift = top + tl.log(tl.sum(whole, 0).to(tl.float32))
        scores = work + row.to(tl.int64) * vocab_size
        score = tl.load(scores + tl.load(out))
        tl.store(out + 2, (score - shift).to(tl.int32, bitcast=True))
        counts = tl.load(listed_counts + own, mask=chunks < num_chunks, other=0)
        is_listed = tl.max(counts, 0) <= LISTED
        listed = listed_scores + row * num_chunks * LISTED
        is_among = is_listed & (score >= tl.load(bounds + row))
        ranked = tl.where(is_among, listed, scores)
        num_ranked = tl.where(is_among, num_chunks * LISTED, vocab_size)
        tl.store(out + 3, count_above(ranked, num_ranked, score, _LIST_BLOCK) + 1)
        tops = out_tops + row * 2 * MAX_TOP
        num_top = tl.minimum(word(table, slot, NUM_TOP), vocab_size)
        tokens = listed_tokens + row * num_chunks * LISTED
        if is_listed:
            size = num_chunks * LISTED
            _write_top(listed, tokens, size, num_top, shift, tops, True, _LIST_BLOCK)
        else:
            _write_top(scores, tokens, vocab_size, num_top, shift, tops, False, _LIST_BLOCK)
