/* The RMS norm of one row, used for layers and heads. */
#ifndef PENSTOCK_NORM_H
#define PENSTOCK_NORM_H

#include "simd.h"

#include <math.h>

/* Calls `function(..., true)` for bfloat16, else with false, so that both are compiled separately.
 */
#define BY_TYPE(is_bf16, function, ...)                                                            \
  do {                                                                                             \
    if (is_bf16)                                                                                   \
      function(__VA_ARGS__, true);                                                                 \
    else                                                                                           \
      function(__VA_ARGS__, false);                                                                \
  } while (0)

/* Rounds to the type, as between two tensor operations. */
INLINE vec rounded(vec x, bool half) { return half ? (vec)(round_bf16(x) << 16) : x; }
INLINE float rounded_scalar(float x, bool half) { return half ? widen(narrow(x)) : x; }

INLINE float square_sum(const void *row, int64_t size, bool half) {
  vec sums = {0};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const vec x = load_any(row, i, half);
    sums += x * x;
  }
  float sum = sum_of(sums);
  for (; i < size; i++)
    sum += get_any(row, i, half) * get_any(row, i, half);
  return sum;
}

/* Rounds before and after the multiplication with the weight, as transformers does. */
INLINE void norm_row(const void *row, const void *weight, float eps, int64_t size, void *out,
                     bool half) {
  const float scale = 1.0f / sqrtf(square_sum(row, size, half) / (float)size + eps);
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES)
    store_any(out, i, rounded(load_any(row, i, half) * scale, half) * load_any(weight, i, half),
              half);
  for (; i < size; i++)
    set_any(out, i, rounded_scalar(get_any(row, i, half) * scale, half) * get_any(weight, i, half),
            half);
}

#endif
