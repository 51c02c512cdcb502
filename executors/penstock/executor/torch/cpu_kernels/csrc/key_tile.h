/* A tile of keys and values in the pages, and its products with query rows.
 *
 * `ahead` is the next tile, which is prefetched while this one is computed. */
#ifndef PENSTOCK_KEY_TILE_H
#define PENSTOCK_KEY_TILE_H

#include "int8_row.h"

enum {
  KEYS = 64,      /* keys per tile */
  BLOCK_ROWS = 4, /* query rows that the inner loops process together */
  LINE_BYTES = 64,
};

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Keys of a tile, for the item's first head; entries after `count` repeat the last key. The value
 * of a key is `to_value` bytes after it. */
typedef struct {
  const char *keys[KEYS];
  int64_t to_value;
  int count;
} Tile;

/* The tile of another head, `shift` bytes further. */
typedef struct {
  const Tile *tile;
  int64_t shift;
} View;

INLINE const char *key_at(View view, int index) { return view.tile->keys[index] + view.shift; }
INLINE const char *value_at(View view, int index) {
  return key_at(view, index) + view.tile->to_value;
}

/* Prefetches a key or a value: blocks are scattered in memory, so the hardware prefetcher does not
 * help. Spread evenly over the arithmetic, because few memory requests can be in flight. */
INLINE void prefetch_row(const char *row, int64_t row_bytes) {
  for (int64_t at = 0; at < row_bytes; at += LINE_BYTES)
    __builtin_prefetch(row + at, 0, 2 /* to the L2 cache */);
}

/* Scales of a tile's 8-bit keys and values; padded by repeating the last one. */
typedef struct {
  float keys[KEYS] __attribute__((aligned(64)));
  float values[KEYS] __attribute__((aligned(64)));
} Scales;

INLINE void load_scales(View view, int64_t dim, Scales *scales) {
  for (int i = 0; i < KEYS; i++) {
    memcpy(scales->keys + i, key_at(view, i) + dim, sizeof(float));
    memcpy(scales->values + i, value_at(view, i) + dim, sizeof(float));
  }
}

/* 8-bit integers, which are exact in both types. */
INLINE void store_whole(char *to, int64_t index, vec x, bool half) {
  if (half) {
    const hvec narrow = __builtin_convertvector((uvec)x >> 16, hvec);
    memcpy((bf16 *)to + index, &narrow, sizeof narrow);
  } else {
    store((float *)to + index, x);
  }
}

/* Copies one key or value of `dim` elements to the format of the inner loops, padded with zeros. */
INLINE void copy_row(const char *from, int64_t dim, int64_t pad, char *to, bool is_int8,
                     bool half) {
  const int64_t size = half ? 2 : 4;
  if (is_int8)
    for (int64_t d = 0; d < dim; d += LANES)
      store_whole(to, d, load_int8((const int8_t *)from + d), half);
  else
    memcpy(to, from, dim * size);
  memset(to + dim * size, 0, (pad - dim) * size);
}

/* Copies rows that the inner loops cannot read in place: 8-bit rows, and rows whose head size is
 * not a multiple of the inner loops' step. */
INLINE void copy_tile(View view, int64_t dim, int64_t pad, char *room, Tile *copy, bool is_int8,
                      bool half) {
  const int64_t row_bytes = pad * (half ? 2 : 4);
  copy->count = view.tile->count;
  copy->to_value = KEYS * row_bytes;
  for (int i = 0; i < KEYS; i++) {
    copy->keys[i] = room + smaller(i, copy->count - 1) * row_bytes;
    if (i >= copy->count)
      continue;
    copy_row(key_at(view, i), dim, pad, room + i * row_bytes, is_int8, half);
    copy_row(value_at(view, i), dim, pad, room + i * row_bytes + copy->to_value, is_int8, half);
  }
}

/* Number format of keys and values. */
typedef enum { FLOAT32, BFLOAT16, INT8 } Kind;

INLINE int size_of(Kind kind) { return kind == INT8 ? 1 : kind == BFLOAT16 ? 2 : 4; }

INLINE vec load_kind(const void *from, int64_t index, Kind kind) {
  return kind == INT8 ? load_int8((const int8_t *)from + index)
                      : load_any(from, index, kind == BFLOAT16);
}

INLINE vec dot_step(vec sum, const void *a, const void *b, int64_t index, Kind kind) {
#if defined(__AVX512BF16__)
  if (kind == BFLOAT16)
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512((const bf16 *)a + index),
                                 (__m512bh)_mm512_loadu_si512((const bf16 *)b + index));
#endif
  return sum + load((const float *)a + index) * load_kind(b, index, kind);
}

/* Computes one row's dot products with the tile's keys. */
INLINE void dot_keys(const void *query, View view, View ahead, int64_t pad, float *scores,
                     Kind kind) {
  const int64_t step = kind == BFLOAT16 && HAS_BF16_DOT ? 2 * LANES : LANES;
  for (int t = 0; t < view.tile->count; t += LANES) {
    vec sums[LANES] = {{0}};
    for (int i = 0; i < LANES; i++)
      prefetch_row(key_at(ahead, t + i), pad * size_of(kind));
    for (int64_t d = 0; d < pad; d += step)
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++)
        sums[i] = dot_step(sums[i], query, key_at(view, t + i), d, kind);
    store(scores + t, sum_rows(sums));
  }
}

/* out [num_rows, pad] += weights [num_rows, KEYS] times values, for `num_vectors` vectors of
 * columns. */
INLINE void add_columns(float *out, int64_t pad, const float *weights, View view,
                        View ahead, const int num_rows, const int num_vectors, int64_t d,
                        Kind kind) {
  vec sums[BLOCK_ROWS][4];
  for (int i = 0; i < num_rows; i++)
    for (int j = 0; j < num_vectors; j++)
      sums[i][j] = load(out + i * pad + d + j * LANES);
  for (int t = 0; t < view.tile->count; t++) {
    const char *value = value_at(view, t);
    if (d == 0)
      prefetch_row(value_at(ahead, t), pad * size_of(kind));
#pragma GCC unroll 4
    for (int j = 0; j < num_vectors; j++) {
      const vec column = load_kind(value, d + j * LANES, kind);
#pragma GCC unroll 4
      for (int i = 0; i < num_rows; i++)
        sums[i][j] += weights[i * KEYS + t] * column;
    }
  }
  for (int i = 0; i < num_rows; i++)
    for (int j = 0; j < num_vectors; j++)
      store(out + i * pad + d + j * LANES, sums[i][j]);
}

INLINE void add_values(float *out, int64_t pad, const float *weights, View view, View ahead,
                       const int num_rows, Kind kind) {
  int64_t d = 0;
  for (; d + 4 * LANES <= pad; d += 4 * LANES)
    add_columns(out, pad, weights, view, ahead, num_rows, 4, d, kind);
  for (; d < pad; d += 2 * LANES)
    add_columns(out, pad, weights, view, ahead, num_rows, 2, d, kind);
}

/* Transposes the tile's keys: to [pad / 2, KEYS] pairs of bfloat16 if the processor has bfloat16
 * products, else to float32 [pad, KEYS]. */
INLINE void transpose_keys(View view, View ahead, int64_t pad, float *to, bool half) {
  const int64_t num_words = half ? pad / 2 : pad;
  for (int t = 0; t < view.tile->count; t += LANES) {
    for (int64_t d = 0; d < num_words; d += LANES) {
      vec rows[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) {
        rows[i] = load((const float *)key_at(view, t + i) + d);
        prefetch_row(key_at(ahead, t + i) + d * 4, LANES * 4);
      }
      transpose(rows);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) {
        if (half && !HAS_BF16_DOT) {
          store(to + 2 * (d + i) * KEYS + t, (vec)((uvec)rows[i] << 16));
          store(to + (2 * (d + i) + 1) * KEYS + t, (vec)((uvec)rows[i] & 0xffff0000u));
        } else {
          store(to + (d + i) * KEYS + t, rows[i]);
        }
      }
    }
  }
}

#endif
