/* Writes new keys and values to the pages, with optional norm and rotation. */
#include "kernels.h"
#include "int8_row.h"
#include "norm.h"

enum { MAX_DIM = 512, SPAN = 16 /* tokens per work item */ };
static const int64_t MIN_PARALLEL_ELEMENTS = 1 << 15;

/* A token of a step row. */
typedef struct {
  int64_t row, token;
} Place;

/* Returns the address of head 0's key. Keys of other heads, and the values, follow at a distance of
 * one block of a head. */
INLINE char *place_of(const Layer *layer, const Rows *rows, Place place) {
  const int32_t *blocks = rows->block_table + rows->slots[place.row] * rows->table_stride;
  const int64_t position = rows->starts[place.row] + place.token;
  const int64_t block = blocks[position / layer->block_size];
  const int64_t line = block * 2 * layer->num_kv_heads * layer->block_size;
  return (char *)layer->pages + (line + position % layer->block_size) * layer->row_bytes;
}

/* Returns token `index` of all rows, counted row by row. */
INLINE Place find_place(const Rows *rows, int64_t index) {
  int64_t row = 0;
  while (index >= rows->num_tokens[row])
    index -= rows->num_tokens[row++];
  return (Place){.row = row, .token = index};
}

INLINE void next_place(const Rows *rows, Place *place) {
  place->token++;
  while (place->row < rows->num_rows && place->token >= rows->num_tokens[place->row])
    *place = (Place){.row = place->row + 1};
}

static int64_t count_tokens(const Rows *rows) {
  int64_t count = 0;
  for (int64_t row = 0; row < rows->num_rows; row++)
    count += rows->num_tokens[row];
  return count;
}

/* Writes one head's key or value in the format of the pages. */
INLINE void write_head(const Layer *layer, const char *from, char *to, bool half) {
  const int64_t dim = layer->head_dim;
  if (!layer->is_int8) {
    memcpy(to, from, layer->row_bytes);
    return;
  }
  const float scale = quantise_row(from, dim, 0, (uint8_t *)to, half);
  memcpy(to + dim, &scale, sizeof scale);
}

/* Writes one token's keys and values, each [num_kv_heads, head_dim]. */
INLINE void write_token(const Layer *layer, const char *key, int64_t key_head, const char *value,
                        int64_t value_head, char *to, bool half) {
  const int64_t bytes = half ? 2 : 4, head_bytes = layer->block_size * layer->row_bytes;
  for (int64_t head = 0; head < layer->num_kv_heads; head++) {
    write_head(layer, key + head * key_head * bytes, to + head * head_bytes, half);
    write_head(layer, value + head * value_head * bytes,
               to + (layer->num_kv_heads + head) * head_bytes, half);
  }
}

/* Writes key and value [tokens, num_kv_heads, head_dim] to the pages. */
void EXPORT(write)(const Layer *layer, const Rows *rows, const char *key, int64_t key_token,
                   int64_t key_head, const char *value, int64_t value_token, int64_t value_head) {
  const int64_t bytes = layer->is_bf16 ? 2 : 4, total = count_tokens(rows);
  const int64_t num_elements = total * 2 * layer->num_kv_heads * layer->head_dim;
#pragma omp parallel for schedule(static) if (num_elements >= MIN_PARALLEL_ELEMENTS)
  for (int64_t first = 0; first < total; first += SPAN) {
    Place place = find_place(rows, first);
    for (int64_t i = first; i < first + SPAN && i < total; i++, next_place(rows, &place)) {
      const int64_t packed = rows->first_tokens[place.row] + place.token;
      BY_TYPE(layer->is_bf16, write_token, layer, key + packed * key_token * bytes, key_head,
              value + packed * value_token * bytes, value_head, place_of(layer, rows, place));
    }
  }
}

/* Normalises one head (if there is a weight) and rotates its first `size` elements (half-split
 * layout). */
INLINE void rotate_head(const void *head, const void *norm, float eps, int64_t dim,
                        const Rotary *rotary, int64_t position, void *to, bool half) {
  float x[MAX_DIM], turned[MAX_DIM];
  uint16_t normed[2 * MAX_DIM];
  if (norm) {
    norm_row(head, norm, eps, dim, normed, half);
    head = normed;
  }
  for (int64_t d = 0; d < dim; d++)
    x[d] = get_any(head, d, half);
  const int64_t middle = rotary->size / 2;
  const float *cosines = rotary->cosines + position * middle;
  const float *sines = rotary->sines + position * middle;
  for (int64_t d = 0; d < middle; d++) {
    turned[d] = x[d] * cosines[d] - x[d + middle] * sines[d];
    turned[d + middle] = x[d + middle] * cosines[d] + x[d] * sines[d];
  }
  memcpy(turned + rotary->size, x + rotary->size, (dim - rotary->size) * sizeof(float));
  int64_t d = 0;
  for (; d + LANES <= dim; d += LANES)
    store_any(to, d, load(turned + d), half);
  for (; d < dim; d++)
    set_any(to, d, turned[d], half);
}

INLINE void rotate_token(const Layer *layer, const Rotary *rotary, int64_t position, char *qkv,
                         const void *query_norm, const void *key_norm, float eps, char *to,
                         bool half) {
  const int64_t dim = layer->head_dim, bytes = dim * (half ? 2 : 4);
  const int64_t num_heads = layer->num_heads, num_kv_heads = layer->num_kv_heads;
  const int64_t head_bytes = layer->block_size * layer->row_bytes;
  char turned[4 * MAX_DIM];
  for (int64_t i = 0; i < num_heads; i++, qkv += bytes)
    rotate_head(qkv, query_norm, eps, dim, rotary, position, qkv, half);
  for (int64_t i = 0; i < num_kv_heads; i++, qkv += bytes) {
    rotate_head(qkv, key_norm, eps, dim, rotary, position, turned, half);
    write_head(layer, turned, to + i * head_bytes, half);
  }
  for (int64_t i = 0; i < num_kv_heads; i++, qkv += bytes)
    write_head(layer, qkv, to + (num_kv_heads + i) * head_bytes, half);
}

/* qkv [tokens, (heads + 2 * key heads) * head_dim]: normalises and rotates queries in place; writes
 * normalised and rotated keys, and values, to the pages. */
void TEAM(rotate_and_write)(const Layer *layer, const Rows *rows, const Rotary *rotary, char *qkv,
                            int64_t stride, const void *query_norm, const void *key_norm,
                            float eps) {
  const int64_t bytes = layer->is_bf16 ? 2 : 4, total = count_tokens(rows);
#pragma omp for schedule(static)
  for (int64_t first = 0; first < total; first += SPAN) {
    Place place = find_place(rows, first);
    for (int64_t i = first; i < first + SPAN && i < total; i++, next_place(rows, &place)) {
      char *row = qkv + (rows->first_tokens[place.row] + place.token) * stride * bytes;
      BY_TYPE(layer->is_bf16, rotate_token, layer, rotary, rows->starts[place.row] + place.token,
              row, query_norm, key_norm, eps, place_of(layer, rows, place));
    }
  }
}

void EXPORT(rotate_and_write)(const Layer *layer, const Rows *rows, const Rotary *rotary, char *qkv,
                              int64_t stride, const void *query_norm, const void *key_norm,
                              float eps) {
  const int64_t row_size = (layer->num_heads + 2 * layer->num_kv_heads) * layer->head_dim;
#pragma omp parallel if (count_tokens(rows) * row_size >= MIN_PARALLEL_ELEMENTS)
  TEAM(rotate_and_write)(layer, rows, rotary, qkv, stride, query_norm, key_norm, eps);
}
