/* Samples rows of logits: temperature, top-k, top-p, min-p, then inverse transform sampling with
 * one uniform number over the cumulative weights in order of id. Thresholds are found without a
 * sort, by counting over the bits of the scores, ties included, so the kept set depends only on the
 * values. */
#include <math.h>
#include <stdlib.h>

#include "kernels.h"
#include "simd.h"

#define MIN_PARALLEL_ELEMENTS (1 << 14)
#define PART 256
#define MAX_BUCKETS (1 << 11)

static const int SHIFTS[] = {20, 10, 0};

/* The sampling options of a row; off: top_k 0, top_p 1, min_p 0. */
typedef struct {
  float temperature;
  float top_p;
  float min_p;
  int32_t top_k;
  double uniform;
} SamplingOptions;

typedef struct {
  int64_t size;
  float *scores;  /* (logits - maximum) / temperature: at most 0 */
  float *weights; /* exponentials of the scores */
} Row;

/* The rank of a score: negative floats ordered by magnitude, most likely first. */
INLINE uint32_t rank_of(float score) {
  uint32_t bits;
  memcpy(&bits, &score, sizeof bits);
  return bits & 0x7fffffffu;
}

INLINE bool find_greatest(const void *logits, int64_t size, float *greatest, bool half) {
  vec top = splat(-INFINITY);
  ivec is_nan = {0};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const vec x = load_any(logits, i, half);
    is_nan |= x != x;
    top = greater(x, top);
  }
  bool is_good = true;
  for (int lane = 0; lane < LANES; lane++)
    is_good &= !is_nan[lane];
  *greatest = greatest_of(top);
  for (; i < size; i++) {
    const float x = get_any(logits, i, half);
    is_good &= x == x;
    *greatest = x > *greatest ? x : *greatest;
  }
  return is_good && *greatest < INFINITY && *greatest > -INFINITY;
}

INLINE void weigh(const void *logits, float greatest, float temperature, Row row, bool half) {
  int64_t i = 0;
  for (; i + LANES <= row.size; i += LANES) {
    const vec score = (load_any(logits, i, half) - greatest) / temperature;
    store(row.scores + i, score);
    store(row.weights + i, exp2_of(score * LOG2_E));
  }
  for (; i < row.size; i++) {
    row.scores[i] = (get_any(logits, i, half) - greatest) / temperature;
    row.weights[i] = exp2_of(splat(row.scores[i] * LOG2_E))[0];
  }
}

static double sum_part(const float *weights, int64_t size) {
  double sums[8] = {0};
  int64_t i = 0;
  for (; i + 8 <= size; i += 8)
    for (int j = 0; j < 8; j++)
      sums[j] += weights[i + j];
  for (; i < size; i++)
    sums[0] += weights[i];
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

/* The sum of weights, added in the same order as in `draw`: part by part. */
static double sum_weights(const Row row) {
  double sum = 0;
  for (int64_t first = 0; first < row.size; first += PART)
    sum += sum_part(row.weights + first, row.size - first < PART ? row.size - first : PART);
  return sum;
}

/* Returns the lowest rank at which the most likely scores, up to rank `limit`, reach `count` or
 * `mass`, found digit by digit; `limit` if they never do. */
static uint32_t find_rank(const Row row, uint32_t limit, int64_t count, double mass) {
  uint32_t found = 0;
  for (int digit = 0; digit < 3; digit++) {
    const int shift = SHIFTS[digit], above = digit ? SHIFTS[digit - 1] : 31;
    const uint32_t num_buckets = 1u << (above - shift);
    int64_t counts[MAX_BUCKETS] = {0};
    double masses[MAX_BUCKETS] = {0};
    for (int64_t i = 0; i < row.size; i++) {
      const uint32_t rank = rank_of(row.scores[i]);
      if (rank > limit || rank >> above != found >> above)
        continue;
      const uint32_t bucket = (rank >> shift) & (num_buckets - 1);
      counts[bucket]++;
      masses[bucket] += row.weights[i];
    }
    uint32_t bucket = 0;
    while (bucket < num_buckets && counts[bucket] < count && masses[bucket] < mass) {
      count -= counts[bucket];
      mass -= masses[bucket++];
    }
    if (bucket == num_buckets)
      return limit;
    found |= bucket << shift;
  }
  return found;
}

/* Zeroes the weights of tokens that the truncations exclude. */
static void truncate_row(Row row, const SamplingOptions *options) {
  const uint32_t none = 0x7f800000u;
  uint32_t limit = none;
  if (options->top_k > 0 && options->top_k < row.size)
    limit = find_rank(row, none, options->top_k, INFINITY);
  if (options->top_p < 1.0f) {
    double total = 0;
    for (int64_t i = 0; i < row.size; i++)
      total += rank_of(row.scores[i]) <= limit ? row.weights[i] : 0.0f;
    limit = find_rank(row, limit, INT64_MAX, options->top_p * total);
  }
  const float least = options->min_p > 0.0f ? (float)log((double)options->min_p) : -INFINITY;
  for (int64_t i = 0; i < row.size; i++)
    if (rank_of(row.scores[i]) > limit || row.scores[i] < least)
      row.weights[i] = 0.0f;
}

/* Returns the first id whose cumulative weight exceeds `uniform` times the total. */
static int64_t draw(const Row row, double uniform) {
  const double total = sum_weights(row), below = nextafter(total, 0.0);
  const double target = uniform * total < below ? uniform * total : below;
  double cumulated = 0;
  int64_t first = 0, last_kept = 0;
  for (; first + PART < row.size; first += PART) {
    const double sum = sum_part(row.weights + first, PART);
    if (cumulated + sum > target)
      break;
    cumulated += sum;
  }
  for (int64_t i = first; i < row.size; i++) {
    if (row.weights[i] == 0.0f)
      continue;
    last_kept = i;
    cumulated += row.weights[i];
    if (cumulated > target)
      break;
  }
  return last_kept;
}

/* out [num_rows]: a token sampled from row `rows[i]` of `logits`; 0 and is_finite 0 if a logit is
 * NaN or plus infinity (minus infinity excludes a token). Returns 1 if out of memory. */
int EXPORT(sample_rows)(const char *logits, int64_t stride, int64_t size, const int64_t *rows,
                        const SamplingOptions *options, int64_t num_rows, int32_t *out,
                        uint8_t *is_finite, int is_bf16) {
  int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) if (num_rows > 1 && num_rows * size >= MIN_PARALLEL_ELEMENTS)
  for (int64_t i = 0; i < num_rows; i++) {
    const char *from = logits + rows[i] * stride * (is_bf16 ? 2 : 4);
    float greatest;
    out[i] = 0;
    is_finite[i] = is_bf16 ? find_greatest(from, size, &greatest, true)
                           : find_greatest(from, size, &greatest, false);
    if (!is_finite[i])
      continue;
    float *scratch = malloc(sizeof(float) * 2 * (size_t)size);
    if (!scratch) {
#pragma omp atomic write
      failed = 1;
      continue;
    }
    const Row row = {.size = size, .scores = scratch, .weights = scratch + size};
    if (is_bf16)
      weigh(from, greatest, options[i].temperature, row, true);
    else
      weigh(from, greatest, options[i].temperature, row, false);
    truncate_row(row, &options[i]);
    out[i] = (int32_t)draw(row, options[i].uniform);
    free(scratch);
  }
  return failed;
}
