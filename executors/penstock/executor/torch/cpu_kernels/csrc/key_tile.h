/* A tile of keys and values in the pages, and its products with query rows.
 *
 * `ahead` is the tile that comes next: it is asked for while this one is computed. */
#ifndef PENSTOCK_KEY_TILE_H
#define PENSTOCK_KEY_TILE_H

#include "simd.h"

enum {
  KEYS = 64,      /* keys of a tile */
  BLOCK_ROWS = 4, /* query rows that the inner loops take at once */
  LINE_BYTES = 64,
};

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Keys of a tile, of the item's first head; behind `count` the last one is repeated. A key's value
 * lies `to_value` bytes on. */
typedef struct {
  const char *keys[KEYS];
  int64_t to_value;
  int count;
} Tile;

/* The tile of another head, `shift` bytes on. */
typedef struct {
  const Tile *tile;
  int64_t shift;
} View;

INLINE const char *key_at(View view, int index) { return view.tile->keys[index] + view.shift; }
INLINE const char *value_at(View view, int index) {
  return key_at(view, index) + view.tile->to_value;
}

/* Asks for a key or a value ahead of its use: blocks lie anywhere in memory, where the processor
 * does not look ahead by itself. Evenly among the arithmetic: it has few requests under way. */
INLINE void prefetch_row(const char *row, int64_t row_bytes) {
  for (int64_t at = 0; at < row_bytes; at += LINE_BYTES)
    __builtin_prefetch(row + at, 0, 2 /* to the second cache */);
}

/* Rows of a head size that the inner loops do not step over evenly: a copy with zeros behind. */
INLINE void pad_tile(View view, int64_t row_bytes, int64_t padded_bytes, char *room, Tile *padded) {
  padded->count = view.tile->count;
  padded->to_value = KEYS * padded_bytes;
  for (int i = 0; i < KEYS; i++) {
    char *key = room + smaller(i, padded->count - 1) * padded_bytes;
    padded->keys[i] = key;
    if (i >= padded->count)
      continue;
    memcpy(key, key_at(view, i), row_bytes);
    memset(key + row_bytes, 0, padded_bytes - row_bytes);
    memcpy(key + padded->to_value, value_at(view, i), row_bytes);
    memset(key + padded->to_value + row_bytes, 0, padded_bytes - row_bytes);
  }
}

INLINE vec dot_step(vec sum, const void *a, const void *b, int64_t index, bool half) {
#if defined(__AVX512BF16__)
  if (half)
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512((const bf16 *)a + index),
                                 (__m512bh)_mm512_loadu_si512((const bf16 *)b + index));
#endif
  return sum + load((const float *)a + index) * load_any(b, index, half);
}

/* One row's products with the tile's keys. */
INLINE void dot_keys(const void *query, View view, View ahead, int64_t pad, float *scores,
                     bool half) {
  const int64_t step = half && HAS_BF16_DOT ? 2 * LANES : LANES;
  for (int t = 0; t < view.tile->count; t += LANES) {
    vec sums[LANES] = {{0}};
    for (int i = 0; i < LANES; i++)
      prefetch_row(key_at(ahead, t + i), pad * (half ? 2 : 4));
    for (int64_t d = 0; d < pad; d += step)
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++)
        sums[i] = dot_step(sums[i], query, key_at(view, t + i), d, half);
    store(scores + t, sum_rows(sums));
  }
}

/* out [num_rows, pad] += weights [num_rows, KEYS] times values; `num_vectors` vectors of it. */
INLINE void add_columns(float *out, int64_t pad, const float *weights, View view,
                        View ahead, const int num_rows, const int num_vectors, int64_t d,
                        bool half) {
  vec sums[BLOCK_ROWS][4];
  for (int i = 0; i < num_rows; i++)
    for (int j = 0; j < num_vectors; j++)
      sums[i][j] = load(out + i * pad + d + j * LANES);
  for (int t = 0; t < view.tile->count; t++) {
    const char *value = value_at(view, t);
    if (d == 0)
      prefetch_row(value_at(ahead, t), pad * (half ? 2 : 4));
#pragma GCC unroll 4
    for (int j = 0; j < num_vectors; j++) {
      const vec column = load_any(value, d + j * LANES, half);
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
                       const int num_rows, bool half) {
  int64_t d = 0;
  for (; d + 4 * LANES <= pad; d += 4 * LANES)
    add_columns(out, pad, weights, view, ahead, num_rows, 4, d, half);
  for (; d < pad; d += 2 * LANES)
    add_columns(out, pad, weights, view, ahead, num_rows, 2, d, half);
}

/* Transposes the tile's keys: [pad / 2, KEYS] pairs of bfloat16 where the processor multiplies
 * those, else float32 [pad, KEYS]. */
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
