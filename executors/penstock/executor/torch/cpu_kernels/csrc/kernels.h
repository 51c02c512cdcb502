/* Structures passed from Python (mirrored in native.py). Strides are in elements. */
#ifndef PENSTOCK_KERNELS_H
#define PENSTOCK_KERNELS_H

#include <stdint.h>

/* The rows of a step. Row i computes `num_tokens[i]` tokens from position `starts[i]` on, packed
 * from index `first_tokens[i]` on, of the sequence with the blocks `block_table[slots[i]]`. */
typedef struct {
  const int32_t *first_tokens;
  const int32_t *num_tokens;
  const int32_t *starts;
  const int32_t *slots;
  const int32_t *block_table;
  int64_t table_stride;
  int64_t num_rows;
} Rows;

/* One layer. `pages` [blocks, 2, num_kv_heads, block_size] has rows of `row_bytes` bytes: head_dim
 * numbers of the type of the queries, or 8-bit integers followed by a float32 scale. `window` 0,
 * `softcap` 0 and `sinks` NULL: off. */
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
  int64_t is_int8; /* whether keys and values are in 8 bits */
  int64_t row_bytes;
} Layer;

/* Cosines and sines, [positions, size / 2]; row p is position p. */
typedef struct {
  const float *cosines;
  const float *sines;
  int64_t size;
} Rotary;

/* Weights in the layout of packed_linear.c. `depth` (bytes) and `columns` are padded to whole
 * groups and panels. `offsets` and `scales`: for 8-bit weights, else NULL. `bias` may be NULL. */
typedef struct {
  const char *packed;
  const int32_t *offsets; /* minus the contribution of the rows' zero point to each sum */
  const float *scales;
  const float *bias;
  int64_t depth, columns;
  int64_t num_outputs; /* columns without padding */
} PackedMatrix;

/* Compiled once per instruction set, whose name is in the symbol's name. */
#define JOIN_(name, set) penstock_##name##_##set
#define JOIN(name, set) JOIN_(name, set)
#define EXPORT(name) __attribute__((visibility("default"))) JOIN(name, INSTRUCTIONS)

/* Called by every thread of a team, each for its share; returns when all threads are done. */
#define TEAM(name) JOIN(team_##name, INSTRUCTIONS)

typedef struct Attention Attention;

void TEAM(add_rms_norm)(char *residual, int64_t residual_stride, const char *added,
                        int64_t added_stride, const void *weight, float eps, char *out,
                        int64_t out_stride, int64_t num_rows, int64_t size, int is_bf16);
void TEAM(silu_mul)(const char *gate_up, int64_t stride, char *out, int64_t out_stride,
                    int64_t num_rows, int64_t size, int is_bf16);
void TEAM(rotate_and_write)(const Layer *layer, const Rows *rows, const Rotary *rotary, char *qkv,
                            int64_t stride, const void *query_norm, const void *key_norm,
                            float eps);
/* `room`: scratch memory of LINEAR_ROOM bytes per row if the matrix is in 8 bits. */
void TEAM(linear)(const PackedMatrix *matrix, const char *x, int64_t x_stride, int64_t size,
                  char *out, int64_t out_stride, int64_t num_rows, int is_bf16, char *room);
#define LINEAR_ROOM(matrix) ((int64_t)sizeof(float) + (matrix)->depth)

/* `attend` in three steps: size of the scratch memory, single-threaded preparation, the team's
 * part. */
int64_t TEAM(attention_bytes)(const Layer *layer, const Rows *rows);
void TEAM(start_attention)(Attention *to, const Layer *layer, const Rows *rows, const char *query,
                           int64_t query_token, int64_t query_head, char *out, int64_t out_token,
                           int64_t out_head, int64_t num_threads);
void TEAM(attend)(const Attention *attention);

#endif
