/* The product of two small matrices, for tiles of many query rows. */
#ifndef PENSTOCK_MATRIX_PRODUCT_H
#define PENSTOCK_MATRIX_PRODUCT_H

#include "key_tile.h"

INLINE vec multiply_add(vec sum, const float *a, vec b, bool is_pair) {
#if defined(__AVX512BF16__)
  if (is_pair)
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_castps_si512(_mm512_set1_ps(*a)),
                                 (__m512bh)_mm512_castps_si512((__m512)b));
#else
  (void)is_pair;
#endif
  return sum + *a * b;
}

/* c [rows, columns] += a [rows, depth] times b [depth, columns], for BLOCK_ROWS rows and
 * `num_vectors` vectors of columns. Words of a and b are float32, or pairs of bfloat16. */
INLINE void multiply_block(float *c, int64_t c_stride, const float *a, int64_t a_stride,
                           const float *b, int64_t b_stride, int64_t depth, const int num_vectors,
                           bool is_pair) {
  vec sums[BLOCK_ROWS][4];
  for (int i = 0; i < BLOCK_ROWS; i++)
    for (int j = 0; j < num_vectors; j++)
      sums[i][j] = load(c + i * c_stride + j * LANES);
  for (int64_t k = 0; k < depth; k++)
#pragma GCC unroll 4
    for (int j = 0; j < num_vectors; j++) {
      const vec column = load(b + k * b_stride + j * LANES);
#pragma GCC unroll 4
      for (int i = 0; i < BLOCK_ROWS; i++)
        sums[i][j] = multiply_add(sums[i][j], a + i * a_stride + k, column, is_pair);
    }
  for (int i = 0; i < BLOCK_ROWS; i++)
    for (int j = 0; j < num_vectors; j++)
      store(c + i * c_stride + j * LANES, sums[i][j]);
}

INLINE void multiply(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b,
                     int64_t b_stride, int64_t num_rows, int64_t depth, int64_t columns,
                     bool is_pair) {
  enum { WIDE = LANES == 16 ? 4 : 2 };
  for (int64_t i = 0; i < num_rows; i += BLOCK_ROWS) {
    const float *rows = a + i * a_stride;
    float *to = c + i * c_stride;
    int64_t j = 0;
    for (; j + WIDE * LANES <= columns; j += WIDE * LANES)
      multiply_block(to + j, c_stride, rows, a_stride, b + j, b_stride, depth, WIDE, is_pair);
    for (; j < columns; j += LANES)
      multiply_block(to + j, c_stride, rows, a_stride, b + j, b_stride, depth, 1, is_pair);
  }
}

#endif
