/* The product of a step's rows with a matrix of 8-bit weights, rows in 8 bits too, each with a scale
 * of its own. Sums are whole numbers: a row's result depends on nothing but the row. */
#include "kernels.h"
#include "int8_row.h"

#include <stdlib.h>

enum {
  PANEL = 64, /* columns that lie together: [depth / 4, PANEL, 4] */
  GROUP = 4,  /* of depth, which one instruction multiplies and adds */
  ZERO = 128, /* what stands for 0 in a row: one factor of the instruction is unsigned */
  WIDE = LANES == 16 ? 4 : 2, /* vectors of columns that the inner loop takes at once */
  HEIGHT = LANES == 16 ? 6 : 3,
  ROWS = 96, /* rows of an item: with a panel they fit into the second cache */
};
static const int64_t MIN_PARALLEL_WORK = 1 << 21;

/* `columns` and `depth` of the packed matrix: multiples of PANEL and GROUP. */
typedef struct {
  const int8_t *packed;
  const int32_t *offsets; /* what ZERO adds to each column's sum, negated */
  const float *scales;
  const float *bias; /* or NULL */
  int64_t depth, columns;
  int64_t num_outputs; /* columns without those that only fill the last panel */
} Int8Matrix;

#if defined(__AVX512BW__)
#define MULTIPLY_PAIRS(a, b) (ivec) _mm512_madd_epi16((__m512i)(a), (__m512i)(b))
#elif defined(__AVX2__)
#define MULTIPLY_PAIRS(a, b) (ivec) _mm256_madd_epi16((__m256i)(a), (__m256i)(b))
#elif defined(__SSE2__)
#define MULTIPLY_PAIRS(a, b) (ivec) _mm_madd_epi16((__m128i)(a), (__m128i)(b))
#endif

/* sum + the products of a row's next GROUP numbers with those of LANES columns. */
INLINE ivec dot_groups(ivec sum, const uint8_t *x, const int8_t *weights) {
  int32_t group;
  ivec words;
  memcpy(&group, x, sizeof group);
  memcpy(&words, weights, sizeof words);
#if defined(__AVX512VNNI__)
  return (ivec)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(group), (__m512i)words);
#elif defined(MULTIPLY_PAIRS)
  typedef int16_t pairs __attribute__((vector_size(LANES * 4)));
  const ivec even = (ivec){0} + (group & 0x00ff00ff), odd = (ivec){0} + (group >> 8 & 0x00ff00ff);
  return sum + MULTIPLY_PAIRS((pairs)words << 8 >> 8, even) +
         MULTIPLY_PAIRS((pairs)words >> 8, odd);
#else
  for (int i = 0; i < GROUP; i++)
    sum += (words << (24 - 8 * i) >> 24) * (int32_t)x[i];
  return sum;
#endif
}

/* to [num_rows, PANEL]: sums of WIDE vectors of columns from `first` on. */
INLINE void sum_block(const uint8_t *x, int64_t depth, const int8_t *panel, const int32_t *offsets,
                      int first, int32_t *to, const int num_rows) {
  ivec sums[HEIGHT][WIDE];
  for (int j = 0; j < WIDE; j++) {
    ivec start;
    memcpy(&start, offsets + first + j * LANES, sizeof start);
    for (int i = 0; i < num_rows; i++)
      sums[i][j] = start;
  }
  for (int64_t k = 0; k < depth; k += GROUP) {
    const int8_t *weights = panel + k * PANEL + first * GROUP;
#pragma GCC unroll 4
    for (int j = 0; j < WIDE; j++)
#pragma GCC unroll 6
      for (int i = 0; i < num_rows; i++)
        sums[i][j] = dot_groups(sums[i][j], x + i * depth + k, weights + j * LANES * GROUP);
  }
  for (int i = 0; i < num_rows; i++)
    for (int j = 0; j < WIDE; j++)
      memcpy(to + i * PANEL + first + j * LANES, &sums[i][j], sizeof(ivec));
}

INLINE void sum_rows_of(const uint8_t *x, int64_t depth, const int8_t *panel,
                        const int32_t *offsets, int32_t *to, int64_t num_rows) {
  for (int first = 0; first < PANEL; first += WIDE * LANES)
    switch (num_rows) {
    case 1:
      sum_block(x, depth, panel, offsets, first, to, 1);
      break;
    case 2:
      sum_block(x, depth, panel, offsets, first, to, 2);
      break;
    case 3:
      sum_block(x, depth, panel, offsets, first, to, 3);
      break;
#if LANES == 16
    case 4:
      sum_block(x, depth, panel, offsets, first, to, 4);
      break;
    case 5:
      sum_block(x, depth, panel, offsets, first, to, 5);
      break;
    case 6:
      sum_block(x, depth, panel, offsets, first, to, 6);
      break;
#endif
    }
}

/* One row's sums of a panel, scaled. */
INLINE void finish_row(const Int8Matrix *matrix, int64_t panel, const int32_t *sums, float scale,
                       char *out, bool half) {
  const int64_t first = panel * PANEL;
  for (int64_t i = 0; i < PANEL; i += LANES) {
    ivec whole;
    memcpy(&whole, sums + i, sizeof whole);
    vec x = __builtin_convertvector(whole, vec) * (load(matrix->scales + first + i) * scale);
    if (matrix->bias)
      x += load(matrix->bias + first + i);
    const int64_t room = matrix->num_outputs - first - i;
    if (room >= LANES) {
      store_any(out, first + i, x, half);
    } else {
      for (int64_t j = 0; j < room; j++)
        set_any(out, first + i + j, x[j], half);
    }
  }
}

/* Rows first .. last - 1 of one panel. */
static void multiply_item(const Int8Matrix *matrix, const uint8_t *x, const float *scales,
                          int64_t panel, int64_t first, int64_t last, char *out, int64_t out_bytes,
                          int is_bf16) {
  int32_t sums[HEIGHT * PANEL] __attribute__((aligned(64)));
  for (int64_t row = first; row < last; row += HEIGHT) {
    const int64_t count = last - row < HEIGHT ? last - row : HEIGHT;
    sum_rows_of(x + row * matrix->depth, matrix->depth,
                matrix->packed + panel * matrix->depth * PANEL, matrix->offsets + panel * PANEL,
                sums, count);
    for (int64_t i = 0; i < count; i++)
      if (is_bf16)
        finish_row(matrix, panel, sums + i * PANEL, scales[row + i], out + (row + i) * out_bytes,
                   true);
      else
        finish_row(matrix, panel, sums + i * PANEL, scales[row + i], out + (row + i) * out_bytes,
                   false);
  }
}

/* x [rows, size] times the matrix; the strides are in elements. Returns 1 without memory. */
int EXPORT(int8_linear)(const Int8Matrix *matrix, const char *x, int64_t x_stride, int64_t size,
                        char *out, int64_t out_stride, int64_t num_rows, int is_bf16) {
  const int64_t bytes = is_bf16 ? 2 : 4, depth = matrix->depth;
  const int64_t num_panels = matrix->columns / PANEL, num_parts = (num_rows + ROWS - 1) / ROWS;
  float *scales = malloc((size_t)num_rows * (sizeof(float) + (size_t)depth));
  if (!scales)
    return 1;
  uint8_t *rows = (uint8_t *)(scales + num_rows);
#pragma omp parallel if (num_rows * depth * matrix->columns >= MIN_PARALLEL_WORK)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_rows; i++) {
      const char *from = x + i * x_stride * bytes;
      uint8_t *to = rows + i * depth;
      scales[i] = is_bf16 ? quantise_row(from, size, ZERO, to, true)
                          : quantise_row(from, size, ZERO, to, false);
      memset(to + size, ZERO, depth - size);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_parts * num_panels; i++) {
      const int64_t first = i / num_panels * ROWS;
      const int64_t last = first + ROWS < num_rows ? first + ROWS : num_rows;
      multiply_item(matrix, rows, scales, i % num_panels, first, last, out, out_stride * bytes,
                    is_bf16);
    }
  }
  free(scales);
  return 0;
}
