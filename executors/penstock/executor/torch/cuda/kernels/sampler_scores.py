"""The two kernels of plain sampling: scores per chunk of the vocabulary, then one token per row.

`score_chunks` reads the logits once, edits them if a row requires it (penalties, then bias, then
banned stop ids, then a mask), and stores the best score and the probability mass of each chunk.
`choose_plain` then chooses the row's token: the best one, or the one at the row's random number in
the cumulative weights. In steps with other options than a temperature, the launches of
`sampler_choice` replace the launch of `choose_plain`.

The constants below give the layout of a row of `table`, in words. Float32 values are stored as
their bits.
"""

import triton
import triton.language as tl

from penstock.executor.torch.cuda.kernels.sampler_search import LARGEST, LOG2_E, pick, uniform

TEMPERATURE = tl.constexpr(0)
TOP_P = tl.constexpr(1)
MIN_P_LOG = tl.constexpr(2)
REPETITION = tl.constexpr(3)
PRESENCE = tl.constexpr(4)
FREQUENCY = tl.constexpr(5)
TOP_K = tl.constexpr(6)
NUM_TOP = tl.constexpr(7)
MIN_TOTAL = tl.constexpr(8)
NUM_STOPS = tl.constexpr(9)
NUM_BIASES = tl.constexpr(10)
FLAGS = tl.constexpr(11)
SEED = tl.constexpr(12)
STOPS = tl.constexpr(16)
NUM_WORDS = tl.constexpr(64)
MAX_STOPS = tl.constexpr(32)

PENALISED = tl.constexpr(1)
CUT = tl.constexpr(2)
LOGPROBS = tl.constexpr(4)

IN_PROMPT = tl.constexpr(0x4000)
MAX_COUNT = tl.constexpr(0x3FFF)

CHUNK = tl.constexpr(2048)
PART = tl.constexpr(128)
MAX_BIASES = tl.constexpr(4096)
MAX_TOP = tl.constexpr(128)
LISTED = tl.constexpr(32)
"""Maximum number of candidates that are stored for a chunk."""
_NO_INDEX = tl.constexpr(0x7FFFFFFF)


@triton.jit
def number_word(table, slot, index: tl.constexpr):
    """Return word `index` of the slot's row, with its bits interpreted as float32."""
    return tl.load(table + slot * NUM_WORDS + index).to(tl.float32, bitcast=True)


@triton.jit
def word(table, slot, index: tl.constexpr):
    """Return word `index` of the slot's row."""
    return tl.load(table + slot * NUM_WORDS + index)


@triton.jit
def seed_of(seeds, slot):
    """Return the slot's seed; `seeds` is the table viewed as int64."""
    return tl.load(seeds + slot * (NUM_WORDS // 2) + SEED // 2)


@triton.jit
def _penalised(score, table, slot, count):
    """Apply penalties to scores. `count`: for each token, how often it occurs in the output, and
    the bit IN_PROMPT if it occurs in the prompt.
    """
    is_seen = count != 0
    penalty = number_word(table, slot, REPETITION)
    changed = tl.where(score > 0, score / penalty, score * penalty)
    changed = tl.where(changed > LARGEST, LARGEST, changed)
    changed = tl.where(changed < -LARGEST, -LARGEST, changed)
    score = tl.where(is_seen, changed, score)
    times = (count & MAX_COUNT).to(tl.float32)
    score -= tl.where(times > 0, number_word(table, slot, PRESENCE), 0.0)
    return score - times * number_word(table, slot, FREQUENCY)


@triton.jit
def _counted(counts, counted, last_tokens, slot, position, at, vocab_size):
    """Count the newest token of the slot; return the counts (see `_penalised`) of the tokens `at`.

    The newest token is not in `counts` yet: the program whose chunk contains it stores its new
    count. `counted` is the number of tokens already counted. The kernel that later chooses the
    step's token advances it, so that a step repeated after that does not count the token twice.
    """
    place = counts + slot * vocab_size + at
    count = tl.load(place, mask=at < vocab_size, other=0).to(tl.int32)
    newest = tl.load(last_tokens + 2 * slot + (position - 1) % 2)
    newest = tl.where(tl.load(counted + slot) == position - 1, newest, -1)
    is_newest = (at == newest) & ((count & MAX_COUNT) < MAX_COUNT)
    count += is_newest.to(tl.int32)
    tl.store(place, count.to(tl.int16), mask=is_newest)
    return count


@triton.jit
def _edit_single(work, table, slot, bias_ids, bias_values, chunk, vocab_size, is_banned):
    """Apply bias, then banned stop ids, to the stored scores of one chunk."""
    first = chunk * CHUNK
    last = tl.minimum(first + CHUNK, vocab_size)
    tl.debug_barrier()
    num_biases = word(table, slot, NUM_BIASES)
    for start in range(0, num_biases, 128):
        at = start + tl.arange(0, 128)
        token = tl.load(bias_ids + slot * MAX_BIASES + at, mask=at < num_biases, other=-1)
        is_here = (token >= first) & (token < last)
        bias = tl.load(bias_values + slot * MAX_BIASES + at, mask=is_here, other=0.0)
        score = tl.load(work + token, mask=is_here, other=0.0)
        tl.store(work + token, score + bias, mask=is_here)
    tl.debug_barrier()
    if is_banned:
        at = tl.arange(0, MAX_STOPS)
        token = tl.load(table + slot * NUM_WORDS + STOPS + at)
        is_here = (token >= first) & (token < last)
        tl.store(work + token, tl.full([MAX_STOPS], float("-inf"), tl.float32), mask=is_here)
    tl.debug_barrier()


@triton.jit
def _masked(score, mask, at, limit):
    """Return scores, with minus infinity for the tokens below `limit` that the mask forbids; the
    mask has one bit per token, 1 for allowed.
    """
    bits = tl.load(mask + at // 32, mask=at < limit, other=-1)
    return tl.where(((bits >> (at % 32)) & 1) != 0, score, float("-inf"))


@triton.jit
def is_worked_row(table, slot, position):
    """Return whether a row's options require that its scores are stored in `work`, in float32:
    penalties, truncation, log probabilities, biases or banned stop ids. The scores of a row with a
    mask are stored too; the callers check for a mask separately.
    """
    is_banned = position < word(table, slot, MIN_TOTAL)
    return (word(table, slot, FLAGS) != 0) | (word(table, slot, NUM_BIASES) > 0) | is_banned


@triton.jit
def _edited(
    score, own, table, slot, position, counts, counted, last_tokens, bias_ids, bias_values, mask,
    has_mask, chunk, vocab_size, has_masks: tl.constexpr,
):  # fmt: skip
    """Return a chunk's scores with all edits of its row; also store them for the later kernels."""
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    is_inside = at < vocab_size
    if (word(table, slot, FLAGS) & PENALISED) != 0:
        count = _counted(counts, counted, last_tokens, slot, position, at, vocab_size)
        score = tl.where(is_inside, _penalised(score, table, slot, count), score)
    tl.store(own + at, score, mask=is_inside)
    is_banned = position < word(table, slot, MIN_TOTAL)
    if (word(table, slot, NUM_BIASES) > 0) | is_banned:
        _edit_single(own, table, slot, bias_ids, bias_values, chunk, vocab_size, is_banned)
        score = tl.load(own + at, mask=is_inside, other=float("-inf"))
    if has_masks:
        score = _masked(score, mask, at, tl.where(has_mask, vocab_size, 0))
        tl.store(own + at, score, mask=is_inside)
    return score


@triton.jit
def score_chunks(
    logits, stride, slots, positions, table, counts, counted, last_tokens, bias_ids, bias_values,
    masks, mask_rows, mask_words, work, best_scores, best_tokens, masses, whole_masses,
    part_maxima, vocab_size,
    num_chunks: tl.constexpr, is_full: tl.constexpr, has_masks: tl.constexpr,
):  # fmt: skip
    """Edit one chunk of one row; store the chunk's best score and best token and, where the row's
    options need them, its probability masses and the maxima of its parts.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    own_logits = logits + row.to(tl.int64) * stride
    score = tl.load(own_logits + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    if is_full:
        mask_row = tl.full([], -1, tl.int64)
        if has_masks:
            mask_row = tl.load(mask_rows + row).to(tl.int64)
        position = tl.load(positions + row)
        if is_worked_row(table, slot, position) | (mask_row >= 0):
            score = _edited(
                score, work + row.to(tl.int64) * vocab_size, table, slot, position, counts,
                counted, last_tokens, bias_ids, bias_values, masks + mask_row * mask_words,
                mask_row >= 0, chunk, vocab_size, has_masks,
            )  # fmt: skip
    # Convert NaN to infinity: both mark the row as invalid.
    score = tl.where(score != score, float("inf"), score)
    best = tl.max(score, 0)
    out = row * num_chunks + chunk
    tl.store(best_scores + out, best)
    tl.store(best_tokens + out, tl.min(tl.where(score == best, at, _NO_INDEX), 0))
    finite = tl.where((best >= -LARGEST) & (best <= LARGEST), best, 0.0)
    temperature = number_word(table, slot, TEMPERATURE)
    if temperature > 0.0:
        weight = tl.exp2((score - finite) * (1.0 / temperature * LOG2_E))
        tl.store(masses + out, tl.sum(weight.to(tl.float64), 0))
    if is_full:
        flags = word(table, slot, FLAGS)
        if (flags & (CUT | LOGPROBS)) != 0:
            parts: tl.constexpr = CHUNK // PART
            maxima = tl.max(tl.reshape(score, [parts, PART]), 1)
            tl.store(part_maxima + out * parts + tl.arange(0, parts), maxima)
        if (flags & LOGPROBS) != 0:
            weight = tl.exp2((score - finite) * LOG2_E)
            tl.store(whole_masses + out, tl.sum(weight.to(tl.float64), 0))


@triton.jit
def _scores(logits, work, at, vocab_size, is_worked):
    """Return a row's scores at `at`: the edited ones if `is_worked`, else its logits; minus
    infinity past the end.
    """
    edited = tl.load(work + at, mask=at < tl.where(is_worked, vocab_size, 0), other=float("-inf"))
    limit = tl.where(is_worked, 0, vocab_size)
    plain = tl.load(logits + at, mask=at < limit, other=float("-inf"))
    return tl.where(is_worked, edited, plain.to(tl.float32))


@triton.jit
def drawn(logits, work, is_worked, masses, number, top, scale, threshold, vocab_size):
    """Return a token, drawn with probabilities in proportion to the weights of the kept tokens.

    A token is kept if its score is at least `threshold`. In the order of ids, the result is the
    first token whose cumulative weight exceeds the fraction `number` (0 to 1) of the total weight.
    `masses`: the weight of each chunk's kept tokens, float64.
    """
    chunks = tl.arange(0, masses.shape[0])
    chunk, rest = pick(masses, chunks, number * tl.sum(masses, 0))
    offset = tl.arange(0, CHUNK)
    at = chunk * CHUNK + offset
    score = _scores(logits, work, at, vocab_size, is_worked)
    weight = tl.where(score >= threshold, tl.exp2((score - top) * scale), 0.0)
    found, _ = pick(weight.to(tl.float64), offset, rest)
    return chunk * CHUNK + found


@triton.jit
def choose_plain(
    logits, stride, slots, positions, table, seeds, best_scores, best_tokens, masses, last_tokens,
    out_rows, vocab_size, num_chunks: tl.constexpr, num_padded: tl.constexpr,
):  # fmt: skip
    """Choose a token for one row: the best, or one sampled at its temperature."""
    row = tl.program_id(0)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    chunks = tl.arange(0, num_padded)
    is_chunk = chunks < num_chunks
    own = row * num_chunks + chunks
    best = tl.load(best_scores + own, mask=is_chunk, other=float("-inf"))
    at = tl.load(best_tokens + own, mask=is_chunk, other=_NO_INDEX)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, at, _NO_INDEX), 0)
    is_finite = (top >= -LARGEST) & (top <= LARGEST)
    temperature = number_word(table, slot, TEMPERATURE)
    if (temperature > 0.0) & is_finite:
        scale = 1.0 / temperature * LOG2_E
        mass = tl.load(masses + own, mask=is_chunk, other=0.0)
        mass *= tl.exp2((best - top) * scale).to(tl.float64)
        number = uniform(seed_of(seeds, slot), position)
        own_logits = logits + row.to(tl.int64) * stride
        nowhere = row < 0
        token = drawn(
            own_logits, table, nowhere, mass, number, top, scale, float("-inf"), vocab_size
        )
    token = tl.minimum(token, vocab_size - 1)
    tl.store(last_tokens + 2 * slot + position % 2, token)
    tl.store(out_rows + row * 4, token)
    tl.store(out_rows + row * 4 + 1, is_finite.to(tl.int32))
