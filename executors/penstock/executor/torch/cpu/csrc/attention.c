/* Attention of a step's rows over the pages: decode rows and chunk rows in one parallel loop.
 *
 * An item is a tile of query rows of one key head (the queries of a key head are rows of one matrix,
 * chunk tokens times group) and a range of keys. Keys come in tiles of KEYS, by one pointer each, so
 * that no block size is special; the softmax is kept running, in float32. Few rows take dot
 * products, more of them a matrix product over a transposed tile. Only keys that some row of
 * the item sees are read: what lies behind a sequence's end reaches nobody.
 *
 * A sequence of few rows is split at fixed places, so a result depends neither on the number of
 * threads nor on what else the step holds. */
#include "kernels.h"
#include "simd.h"

#include <math.h>
#include <stdlib.h>

enum {
  KEYS = 64,       /* keys of a tile */
  ROWS = 32,       /* query rows of an item */
  BLOCK_ROWS = 4,  /* rows of the matrix product's inner loop */
  PART_KEYS = 512, /* keys of one part of a sequence of few rows */
  MAX_DIM = 512,
};
static const float LOWEST = -1e30f; /* a greatest score before any was seen; finite, for differences */
static const int64_t MIN_PARALLEL_WORK = 1 << 18; /* products; fewer are done before threads wake */

typedef struct {
  int64_t row, kv_head;
  int64_t first, last; /* flattened query rows: token * group + query head of the group */
  int64_t low, high;   /* positions of keys */
  float *partial;      /* where a part's sums go; NULL: the item is whole */
  bool takes_sinks;
} Item;

typedef struct {
  const Layer *layer;
  const Rows *rows;
  const char *query;
  char *out;
  int64_t query_token, query_head, out_token, out_head;
  int64_t group;
  int64_t pad; /* head_dim rounded up to what the inner loops step by */
} Call;

/* Keys of a tile; behind `count` the last one is repeated. A key's value lies `to_value` bytes on. */
typedef struct {
  const char *keys[KEYS];
  int64_t to_value;
  int count;
} Tile;

typedef struct {
  float query[ROWS * MAX_DIM] __attribute__((aligned(64)));
  float out[ROWS * MAX_DIM] __attribute__((aligned(64)));
  float scores[ROWS * KEYS] __attribute__((aligned(64)));
  float keys[KEYS * MAX_DIM] __attribute__((aligned(64)));   /* transposed */
  float values[KEYS * MAX_DIM] __attribute__((aligned(64))); /* in float32 */
  float padded[2 * KEYS * MAX_DIM] __attribute__((aligned(64)));
  float greatest[ROWS], sum[ROWS];
} Scratch;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Position of the first key that the token at `position` sees. */
INLINE int64_t first_key(const Layer *layer, int64_t position) {
  return layer->window ? larger(position + 1 - layer->window, 0) : 0;
}

/* The tile of the item's keys from position `low` on; of none where they have ended. */
INLINE void find_keys(const Call *call, const Item *item, int64_t low, Tile *tile, int64_t size) {
  const Layer *layer = call->layer;
  const int32_t *blocks =
      call->rows->block_table + call->rows->slots[item->row] * call->rows->table_stride;
  const int64_t block_size = layer->block_size, row_bytes = layer->head_dim * size;
  tile->to_value = layer->num_kv_heads * block_size * row_bytes;
  tile->count = (int)larger(smaller(item->high - low, KEYS), 0);
  int64_t column = low / block_size, offset = low % block_size;
  for (int i = 0; i < tile->count; column++, offset = 0) {
    const char *head = (const char *)layer->pages +
                       ((int64_t)blocks[column] * 2 * layer->num_kv_heads + item->kv_head) *
                           block_size * row_bytes;
    for (; offset < block_size && i < tile->count; offset++)
      tile->keys[i++] = head + offset * row_bytes;
  }
  for (int i = tile->count; i < KEYS && tile->count > 0; i++)
    tile->keys[i] = tile->keys[tile->count - 1];
}

/* Asks for keys and values of a tile ahead of their use: blocks lie anywhere in memory, where the
 * processor does not look ahead by itself. */
INLINE void prefetch_keys(const Tile *tile, int first, int last, int64_t row_bytes) {
  for (int i = first; i < last && i < tile->count; i++)
    for (int64_t at = 0; at < row_bytes; at += 64) {
      __builtin_prefetch(tile->keys[i] + at, 0, 2 /* to the second cache */);
      __builtin_prefetch(tile->keys[i] + tile->to_value + at, 0, 2 /* to the second cache */);
    }
}

/* Rows of a head size that the inner loops do not step over evenly: a copy with zeros behind. */
INLINE void pad_tile(Tile *tile, int64_t row_bytes, int64_t padded_bytes, char *room) {
  for (int i = 0; i < tile->count; i++) {
    char *key = room + i * padded_bytes, *value = key + KEYS * padded_bytes;
    memcpy(key, tile->keys[i], row_bytes);
    memset(key + row_bytes, 0, padded_bytes - row_bytes);
    memcpy(value, tile->keys[i] + tile->to_value, row_bytes);
    memset(value + row_bytes, 0, padded_bytes - row_bytes);
    tile->keys[i] = key;
  }
  for (int i = tile->count; i < KEYS; i++)
    tile->keys[i] = tile->keys[tile->count - 1];
  tile->to_value = KEYS * padded_bytes;
}

/* The item's queries, zeros behind; in bfloat16 where the processor multiplies it, else float32. */
INLINE void load_queries(const Call *call, const Item *item, Scratch *scratch, bool half) {
  const int64_t dim = call->layer->head_dim, pad = call->pad, size = half ? 2 : 4;
  const int64_t first_token = call->rows->first_tokens[item->row];
  for (int64_t i = item->first; i < item->last; i++) {
    const int64_t head = item->kv_head * call->group + i % call->group;
    const char *from = call->query + ((first_token + i / call->group) * call->query_token +
                                      head * call->query_head) * size;
    if (!half || HAS_BF16_DOT) {
      char *to = (char *)scratch->query + (i - item->first) * pad * size;
      memcpy(to, from, dim * size);
      memset(to + dim * size, 0, (pad - dim) * size);
    } else {
      float *to = scratch->query + (i - item->first) * pad;
      for (int64_t d = 0; d < pad; d++)
        to[d] = d < dim ? widen(((const bf16 *)from)[d]) : 0.0f;
    }
  }
  const int64_t count = item->last - item->first, width = half && HAS_BF16_DOT ? 2 : 4;
  memset((char *)scratch->query + count * pad * width, 0,
         (-count & (BLOCK_ROWS - 1)) * pad * width);
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
INLINE void dot_keys(const void *query, const Tile *tile, const Tile *next, int64_t pad,
                     float *scores, bool half) {
  const int64_t step = half && HAS_BF16_DOT ? 2 * LANES : LANES;
  for (int t = 0; t < tile->count; t += LANES) {
    vec sums[LANES] = {{0}};
    prefetch_keys(next, t, t + LANES, pad * (half ? 2 : 4));
    for (int64_t d = 0; d < pad; d += step)
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++)
        sums[i] = dot_step(sums[i], query, tile->keys[t + i], d, half);
    store(scores + t, sum_rows(sums));
  }
}

/* out = out * factor + weights times values, `count` vectors from element `d` on. */
INLINE void add_values(float *out, const float *weights, const Tile *tile, float factor, int64_t d,
                       const int count, bool half) {
  const int64_t size = half ? 2 : 4;
  vec sums[8];
  for (int j = 0; j < count; j++)
    sums[j] = load(out + d + j * LANES) * factor;
  for (int t = 0; t < tile->count; t++) {
    const char *value = tile->keys[t] + tile->to_value + d * size;
    const vec weight = splat(weights[t]);
#pragma GCC unroll 8
    for (int j = 0; j < count; j++)
      sums[j] += weight * load_any(value, j * LANES, half);
  }
  for (int j = 0; j < count; j++)
    store(out + d + j * LANES, sums[j]);
}

/* Products become weights; `first .. last - 1` of the tile are seen. Returns the factor of what was
 * summed before. */
INLINE float weigh(float *scores, int64_t first, int64_t last, int count, const Layer *layer,
                   float *greatest, float *sum) {
  const float scale = layer->scaling * LOG2_E, cap = layer->softcap;
  const int width = (count + LANES - 1) / LANES * LANES;
  if (cap != 0.0f) {
    for (int t = 0; t < width; t += LANES)
      store(scores + t, tanh_of(load(scores + t) * (layer->scaling / cap)) * (cap * LOG2_E));
  } else {
    for (int t = 0; t < width; t += LANES)
      store(scores + t, load(scores + t) * scale);
  }
  for (int64_t t = 0; t < first; t++)
    scores[t] = -INFINITY;
  for (int64_t t = last; t < width; t++)
    scores[t] = -INFINITY;
  vec top = splat(*greatest);
  for (int t = 0; t < width; t += LANES)
    top = greater(load(scores + t), top);
  const float risen = greatest_of(top);
  const float factor = exp2_of(splat(*greatest - risen))[0];
  vec total = {0};
  for (int t = 0; t < width; t += LANES) {
    vec weights = exp2_of(load(scores + t) - risen);
    store(scores + t, weights);
    total += weights;
  }
  *greatest = risen;
  *sum = *sum * factor + sum_of(total);
  return factor;
}

/* What a row sees of a tile that begins at position `low`, as a range within the tile. */
INLINE void seen_range(const Call *call, const Item *item, int64_t row, int64_t low, int count,
                       int64_t *first, int64_t *last) {
  const int64_t position = call->rows->starts[item->row] + row / call->group;
  *first = smaller(larger(first_key(call->layer, position) - low, 0), count);
  *last = larger(smaller(position + 1 - low, count), *first);
}

/* Few rows: each by itself. */
INLINE void attend_dots(const Call *call, const Item *item, const Tile *tile, const Tile *next,
                        int64_t low, Scratch *scratch, bool half) {
  const int64_t pad = call->pad, query_size = half && HAS_BF16_DOT ? 2 : 4;
  for (int64_t i = 0; i < item->last - item->first; i++) {
    int64_t first, last;
    dot_keys((const char *)scratch->query + i * pad * query_size, tile, next, pad, scratch->scores,
             half);
    seen_range(call, item, item->first + i, low, tile->count, &first, &last);
    const float factor = weigh(scratch->scores, first, last, tile->count, call->layer,
                               &scratch->greatest[i], &scratch->sum[i]);
    float *out = scratch->out + i * pad;
    int64_t d = 0;
    for (; d + 4 * LANES <= pad; d += 4 * LANES)
      add_values(out, scratch->scores, tile, factor, d, 4, half);
    for (; d < pad; d += 2 * LANES)
      add_values(out, scratch->scores, tile, factor, d, 2, half);
  }
}

/* Transposes the tile's keys: [pad / 2, KEYS] pairs of bfloat16 where the processor multiplies
 * those, else float32 [pad, KEYS]. */
INLINE void transpose_keys(const Tile *tile, const Tile *next, int64_t pad, float *to,
                           bool half) {
  const int64_t num_words = half ? pad / 2 : pad;
  for (int t = 0; t < tile->count; t += LANES) {
    prefetch_keys(next, t, t + LANES, pad * (half ? 2 : 4));
    for (int64_t d = 0; d < num_words; d += LANES) {
      vec rows[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++)
        rows[i] = load((const float *)tile->keys[t + i] + d);
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

/* c [rows, columns] += a [rows, depth] times b [depth, columns], `num_vectors` vectors of columns of
 * BLOCK_ROWS rows; words of a and b are float32, or pairs of bfloat16. */
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

/* More rows: both products as matrices. */
INLINE void attend_matrix(const Call *call, const Item *item, const Tile *tile, const Tile *next,
                          int64_t low, Scratch *scratch, bool half) {
  const int64_t pad = call->pad, count = item->last - item->first;
  const int64_t words = half && HAS_BF16_DOT ? pad / 2 : pad;
  const int64_t width = (tile->count + LANES - 1) / LANES * LANES;
  transpose_keys(tile, next, pad, scratch->keys, half);
  for (int t = 0; t < tile->count; t++)
    for (int64_t d = 0; d < pad; d += LANES)
      store(scratch->values + t * pad + d, load_any(tile->keys[t] + tile->to_value, d, half));
  memset(scratch->scores, 0, sizeof scratch->scores);
  multiply(scratch->scores, KEYS, scratch->query, words, scratch->keys, KEYS, count, words, width,
           half && HAS_BF16_DOT);
  for (int64_t i = 0; i < count; i++) {
    int64_t first, last;
    seen_range(call, item, item->first + i, low, tile->count, &first, &last);
    const float factor = weigh(scratch->scores + i * KEYS, first, last, tile->count, call->layer,
                               &scratch->greatest[i], &scratch->sum[i]);
    if (factor != 1.0f)
      for (int64_t d = 0; d < pad; d += LANES)
        store(scratch->out + i * pad + d, load(scratch->out + i * pad + d) * factor);
  }
  multiply(scratch->out, pad, scratch->scores, KEYS, scratch->values, pad, count, tile->count, pad,
           false);
}

/* Divided by the sum of weights and rounded: one row of the result. */
INLINE void write_row(const Call *call, int64_t row, int64_t kv_head, int64_t flat,
                      const float *values, float sum, bool half) {
  const int64_t head = kv_head * call->group + flat % call->group;
  const int64_t token = call->rows->first_tokens[row] + flat / call->group;
  const int64_t at = token * call->out_token + head * call->out_head;
  const float scale = 1.0f / sum;
  int64_t d = 0;
  for (; d + LANES <= call->layer->head_dim; d += LANES)
    store_any(call->out, at + d, load(values + d) * scale, half);
  for (; d < call->layer->head_dim; d++)
    set_any(call->out, at + d, values[d] * scale, half);
}

INLINE void attend_item(const Call *call, const Item *item, bool half) {
  Scratch scratch;
  const Layer *layer = call->layer;
  const int64_t pad = call->pad, count = item->last - item->first, size = half ? 2 : 4;
  Tile tile, next;
  find_keys(call, item, item->low, &next, size);
  prefetch_keys(&next, 0, KEYS, layer->head_dim * size);
  load_queries(call, item, &scratch, half);
  for (int64_t i = 0; i < count; i++) {
    const float *sinks = item->takes_sinks ? layer->sinks : NULL;
    const int64_t head = item->kv_head * call->group + (item->first + i) % call->group;
    scratch.greatest[i] = sinks ? sinks[head] * LOG2_E : LOWEST;
    scratch.sum[i] = sinks ? 1.0f : 0.0f;
  }
  memset(scratch.out, 0, ((count + BLOCK_ROWS - 1) & -BLOCK_ROWS) * pad * sizeof(float));
  for (int64_t low = item->low; low < item->high; low += KEYS) {
    tile = next;
    find_keys(call, item, low + KEYS, &next, size);
    if (pad != layer->head_dim)
      pad_tile(&tile, layer->head_dim * size, pad * size, (char *)scratch.padded);
    if (count < BLOCK_ROWS)
      attend_dots(call, item, &tile, &next, low, &scratch, half);
    else
      attend_matrix(call, item, &tile, &next, low, &scratch, half);
  }
  for (int64_t i = 0; i < count; i++) {
    const float *values = scratch.out + i * pad;
    if (item->partial) {
      float *to = item->partial + i * (pad + 2);
      to[0] = scratch.greatest[i];
      to[1] = scratch.sum[i];
      memcpy(to + 2, values, pad * sizeof(float));
    } else {
      write_row(call, item->row, item->kv_head, item->first + i, values, scratch.sum[i], half);
    }
  }
}

/* Adds the parts of one tile; `items` are its parts, one after another. */
INLINE void add_parts(const Call *call, const Item *items, int64_t num_parts, bool half) {
  const int64_t pad = call->pad;
  float sums[MAX_DIM];
  for (int64_t i = 0; i < items->last - items->first; i++) {
    float greatest = LOWEST, total = 0.0f;
    for (int64_t part = 0; part < num_parts; part++)
      greatest = fmaxf(greatest, items[part].partial[i * (pad + 2)]);
    memset(sums, 0, pad * sizeof(float));
    for (int64_t part = 0; part < num_parts; part++) {
      const float *from = items[part].partial + i * (pad + 2);
      const float weight = exp2f(from[0] - greatest);
      total += weight * from[1];
      for (int64_t d = 0; d < pad; d += LANES)
        store(sums + d, load(sums + d) + load(from + 2 + d) * weight);
    }
    write_row(call, items->row, items->kv_head, items->first + i, sums, total, half);
  }
}

static int64_t parts_of(const Call *call, int64_t row) {
  const Rows *rows = call->rows;
  if (rows->num_tokens[row] * call->group > ROWS)
    return 1;
  const int64_t low = first_key(call->layer, rows->starts[row]);
  return (rows->starts[row] + rows->num_tokens[row] - low + PART_KEYS - 1) / PART_KEYS;
}

/* The last rows first: chunks come last and take longest. Returns the number of items; with `items`
 * NULL it only counts, and `num_floats` is what partial sums need. */
static int64_t list_items(const Call *call, Item *items, float *partial, int64_t *num_floats,
                          int64_t *work) {
  const Layer *layer = call->layer;
  const Rows *rows = call->rows;
  int64_t count = 0;
  *num_floats = *work = 0;
  for (int64_t row = rows->num_rows - 1; row >= 0; row--) {
    const int64_t start = rows->starts[row], flat = rows->num_tokens[row] * call->group;
    const int64_t num_parts = parts_of(call, row), num_tiles = (flat + ROWS - 1) / ROWS;
    *work += flat * layer->num_kv_heads * layer->head_dim * (start + rows->num_tokens[row]);
    if (num_parts > 1)
      *num_floats += layer->num_kv_heads * num_parts * flat * (call->pad + 2);
    if (!items) {
      count += layer->num_kv_heads * num_tiles * num_parts;
      continue;
    }
    for (int64_t tile = num_tiles - 1; tile >= 0; tile--)
      for (int64_t head = 0; head < layer->num_kv_heads; head++) {
        const int64_t first = tile * ROWS, last = smaller(first + ROWS, flat);
        const int64_t low = first_key(layer, start + first / call->group);
        const int64_t high = start + (last - 1) / call->group + 1;
        for (int64_t part = 0; part < num_parts; part++) {
          Item *item = items + count++;
          *item = (Item){.row = row, .kv_head = head, .first = first, .last = last};
          item->low = low + part * PART_KEYS;
          item->high = num_parts > 1 ? smaller(item->low + PART_KEYS, high) : high;
          item->takes_sinks = part == 0 && layer->sinks;
          item->partial = num_parts > 1 ? partial : NULL;
          partial += num_parts > 1 ? flat * (call->pad + 2) : 0;
        }
      }
  }
  return count;
}

static void attend_item_bf16(const Call *call, const Item *item) { attend_item(call, item, true); }
static void attend_item_f32(const Call *call, const Item *item) { attend_item(call, item, false); }

/* query and out [tokens, heads, head_dim]. Returns 0; -1: out of memory. */
int EXPORT(attend)(const Layer *layer, const Rows *rows, const void *query, int64_t query_token,
                   int64_t query_head, void *out, int64_t out_token, int64_t out_head) {
  Call call = {.layer = layer, .rows = rows, .query = query, .out = out};
  call.query_token = query_token, call.query_head = query_head;
  call.out_token = out_token, call.out_head = out_head;
  call.group = layer->num_heads / layer->num_kv_heads;
  call.pad = (layer->head_dim + 31) & -32;
  int64_t num_floats, work;
  const int64_t count = list_items(&call, NULL, NULL, &num_floats, &work);
  Item *items = malloc(count * sizeof(Item) + num_floats * sizeof(float));
  if (!items)
    return -1;
  list_items(&call, items, (float *)(items + count), &num_floats, &work);
#pragma omp parallel if (work >= MIN_PARALLEL_WORK && count > 1)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++) {
      if (layer->is_bf16)
        attend_item_bf16(&call, items + i);
      else
        attend_item_f32(&call, items + i);
    }
    if (num_floats) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < count; i++) {
        if (!items[i].partial || items[i].low != first_key(layer, rows->starts[items[i].row]))
          continue;
        const int64_t num_parts = parts_of(&call, items[i].row);
        if (layer->is_bf16)
          add_parts(&call, items + i, num_parts, true);
        else
          add_parts(&call, items + i, num_parts, false);
      }
    }
  }
  free(items);
  return 0;
}
