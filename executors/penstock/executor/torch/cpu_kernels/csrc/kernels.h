/* What Python passes (native.py mirrors it). Strides are in elements. */
#ifndef PENSTOCK_KERNELS_H
#define PENSTOCK_KERNELS_H

#include <stdint.h>

/* The rows of a step: row i computes `num_tokens[i]` tokens from position `starts[i]` on, packed
 * from place `first_tokens[i]` on, of the sequence whose blocks are `block_table[slots[i]]`. */
typedef struct {
  const int32_t *first_tokens;
  const int32_t *num_tokens;
  const int32_t *starts;
  const int32_t *slots;
  const int32_t *block_table;
  int64_t table_stride;
  int64_t num_rows;
} Rows;

/* One layer: `pages` [blocks, 2, num_kv_heads, block_size], each a row of `row_bytes`: head_dim
 * numbers of the type of queries, or 8-bit integers with a float32 scale behind them. `window` 0,
 * `softcap` 0 and `sinks` NULL mean off. */
typedef struct {
  void *pages;
  const float *sinks;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  int64_t window;
  float scaling;
  float softcap;
  int64_t is_bf16;
  int64_t is_int8; /* keys and values */
  int64_t row_bytes;
} Layer;

/* Compiled once per instruction set; the name carries it. */
#define JOIN_(name, set) penstock_##name##_##set
#define JOIN(name, set) JOIN_(name, set)
#define EXPORT(name) __attribute__((visibility("default"))) JOIN(name, INSTRUCTIONS)

#endif
