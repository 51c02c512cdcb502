/* Quantises a row of numbers to 8-bit integers with one scale; the maximum magnitude becomes 127.
 */
#ifndef PENSTOCK_INT8_ROW_H
#define PENSTOCK_INT8_ROW_H

#include "simd.h"

#include <math.h>

typedef uint8_t bvec __attribute__((vector_size(LANES)));
typedef int8_t sbvec __attribute__((vector_size(LANES)));

/* Loads LANES 8-bit integers as float32. */
INLINE vec load_int8(const int8_t *from) {
#if defined(__AVX512F__)
  return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__)
  return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#endif
  sbvec x;
  memcpy(&x, from, sizeof x);
  return __builtin_convertvector(__builtin_convertvector(x, ivec), vec);
}

/* Returns the maximum magnitude; NaN if a number is not finite. */
INLINE float greatest_magnitude(const void *row, int64_t size, bool half) {
  vec top = {0};
  ivec is_bad = {0};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const vec x = (vec)((ivec)load_any(row, i, half) & 0x7fffffff);
    is_bad |= ~(x < splat(INFINITY));
    top = greater(x, top);
  }
  float greatest = greatest_of(top);
  if (sum_of((vec)(is_bad & (ivec)splat(1.0f))) > 0.0f)
    return NAN;
  for (; i < size; i++) {
    const float x = fabsf(get_any(row, i, half));
    if (!(x < INFINITY))
      return NAN;
    greatest = x > greatest ? x : greatest;
  }
  return greatest;
}

/* to[i] = round(row[i] / scale) + zero, to nearest even. Returns the scale; NaN if the row is not
 * finite. */
INLINE float quantise_row(const void *row, int64_t size, uint8_t zero, uint8_t *to, bool half) {
  const float to_integer = 12582912.0f; /* 1.5 * 2^23: the sum has no fraction bits */
  const float greatest = greatest_magnitude(row, size, half);
  if (!(greatest > 1e-30f)) {
    memset(to, zero, size);
    return greatest == greatest ? 0.0f : greatest;
  }
  const float factor = 127.0f / greatest;
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const uvec bits = (uvec)(load_any(row, i, half) * factor + to_integer) + zero;
    const bvec bytes = __builtin_convertvector(bits & 0xffu, bvec);
    memcpy(to + i, &bytes, sizeof bytes);
  }
  for (; i < size; i++) {
    const float shifted = get_any(row, i, half) * factor + to_integer;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    to[i] = (uint8_t)(bits + zero);
  }
  return greatest / 127.0f;
}

#endif
