/* Attention of a step's rows over the pages: decode rows and chunk rows in one parallel loop.
 *
 * A work item is a tile of query rows and a range of keys. The query rows are those of one key head
 * (chunk tokens times group) or, for few rows, of several key heads. Keys are accessed in tiles
 * with one pointer per key, so any block size works. An item processes all its heads for each tile,
 * because the heads of a block are adjacent in memory. The softmax is computed online, in float32.
 * Few rows use dot products, more rows a matrix product with a transposed tile. Only keys that are
 * visible to some row of the item are read, so memory past the end of a sequence has no effect.
 *
 * A sequence with few rows is split at fixed positions, so a result depends neither on the number
 * of threads nor on the other rows of the step. */
#include "kernels.h"
#include "matrix_product.h"
#include "norm.h"

#include <math.h>
#include <stdlib.h>

enum {
  ROWS = 32,       /* query rows of an item, over all its heads */
  FEW_ROWS = 8,    /* up to this, values are widened again for each block of rows */
  PART_KEYS = 512, /* keys per part of a sequence with few rows */
  ITEMS_PER_THREAD = 6, /* minimum, if there are enough heads to separate */
  MAX_DIM = 512,
};
int omp_get_max_threads(void); /* declared here: not every compiler has omp.h */

static const float LOWEST = -1e30f; /* initial maximum; finite, so that differences are */
static const int64_t MIN_PARALLEL_WORK = 1 << 18; /* below this, waking threads costs more */

typedef struct {
  int64_t row;
  int64_t first_head, num_heads; /* key heads */
  int64_t first, last;           /* query rows per head: token * group + query head in group */
  int64_t low, high;             /* positions of keys */
  float *partial;      /* destination of a part's sums; NULL: not split */
  bool takes_sinks;
} Item;

typedef struct {
  const Layer *layer;
  const Rows *rows;
  const char *query;
  char *out;
  int64_t query_token, query_head, out_token, out_head;
  int64_t group;
  int64_t pad; /* head_dim rounded up to the inner loops' step */
  int64_t max_heads; /* maximum heads per item */
} Call;

/* Rows of one head of an item: their queries, and the sums so far. */
typedef struct {
  const char *query;
  float *out, *greatest, *sum;
} Head;

typedef struct {
  float query[ROWS * MAX_DIM] __attribute__((aligned(64)));
  float out[ROWS * MAX_DIM] __attribute__((aligned(64)));
  float scores[ROWS * KEYS] __attribute__((aligned(64)));
  float keys[KEYS * MAX_DIM] __attribute__((aligned(64)));   /* transposed */
  float values[KEYS * MAX_DIM] __attribute__((aligned(64))); /* in float32 */
  float padded[2 * KEYS * MAX_DIM] __attribute__((aligned(64)));
  float greatest[ROWS], sum[ROWS];
} Scratch;

/* Number of rows allocated per head: a multiple of the row block of the matrix product. */
INLINE int64_t height_of(int64_t count) {
  return count < BLOCK_ROWS ? count : (count + BLOCK_ROWS - 1) & -BLOCK_ROWS;
}

/* Position of the first key that is visible to the token at `position`. */
INLINE int64_t first_key(const Layer *layer, int64_t position) {
  return layer->window ? larger(position + 1 - layer->window, 0) : 0;
}

/* The tile of the item's keys from position `low` on. */
INLINE void find_keys(const Call *call, const Item *item, int64_t low, Tile *tile) {
  const Layer *layer = call->layer;
  const int32_t *blocks =
      call->rows->block_table + call->rows->slots[item->row] * call->rows->table_stride;
  const int64_t block_size = layer->block_size, row_bytes = layer->row_bytes;
  tile->to_value = layer->num_kv_heads * block_size * row_bytes;
  tile->count = (int)smaller(item->high - low, KEYS);
  int64_t column = low / block_size, offset = low % block_size;
  for (int i = 0; i < tile->count; column++, offset = 0) {
    const char *head = (const char *)layer->pages +
                       ((int64_t)blocks[column] * 2 * layer->num_kv_heads + item->first_head) *
                           block_size * row_bytes;
    for (; offset < block_size && i < tile->count; offset++)
      tile->keys[i++] = head + offset * row_bytes;
  }
  for (int i = tile->count; i < KEYS; i++)
    tile->keys[i] = tile->keys[tile->count - 1];
}

/* Whether dot products read 8-bit keys directly from the pages. */
INLINE bool reads_int8(const Call *call, const Item *item, bool is_int8) {
  return is_int8 && item->last - item->first < BLOCK_ROWS && call->pad == call->layer->head_dim;
}

/* Loads the queries of one head of the item, padded with zeros: in bfloat16 if the processor has
 * bfloat16 products, else float32. */
INLINE void load_queries(const Call *call, const Item *item, int64_t kv_head, char *to, bool half,
                         bool is_wide) {
  const int64_t dim = call->layer->head_dim, pad = call->pad, size = half ? 2 : 4;
  const int64_t count = item->last - item->first;
  const int64_t width = half && HAS_BF16_DOT && !is_wide ? 2 : 4;
  memset(to, 0, height_of(count) * pad * width);
  for (int64_t i = 0; i < count; i++, to += pad * width) {
    const int64_t flat = item->first + i, head = kv_head * call->group + flat % call->group;
    const int64_t token = call->rows->first_tokens[item->row] + flat / call->group;
    const char *from =
        call->query + (token * call->query_token + head * call->query_head) * size;
    if (width == size)
      memcpy(to, from, dim * size);
    else
      for (int64_t d = 0; d < dim; d++)
        ((float *)to)[d] = widen(((const bf16 *)from)[d]);
  }
}

/* Rescales sums that were computed with a smaller maximum score. */
INLINE void rescale(float *out, int64_t pad, float factor) {
  if (factor != 1.0f)
    for (int64_t d = 0; d < pad; d += LANES)
      store(out + d, load(out + d) * factor);
}

/* Converts products to softmax weights; `first .. last - 1` of the tile are visible. `scales`:
 * scales of keys and values, or NULL. Returns the factor for the earlier sums. */
INLINE float weigh(float *scores, int64_t first, int64_t last, int count, const Layer *layer,
                   const Scales *scales, float *greatest, float *sum) {
  const float scale = layer->scaling * LOG2_E, cap = layer->softcap;
  const int width = (count + LANES - 1) / LANES * LANES;
  if (scales)
    for (int t = 0; t < width; t += LANES)
      store(scores + t, load(scores + t) * load(scales->keys + t));
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
    store(scores + t, scales ? weights * load(scales->values + t) : weights);
    total += weights;
  }
  *greatest = risen;
  *sum = *sum * factor + sum_of(total);
  return factor;
}

/* The visible range of a row within a tile that begins at position `low`. */
INLINE void seen_range(const Call *call, const Item *item, int64_t row, int64_t low, int count,
                       int64_t *first, int64_t *last) {
  const int64_t position = call->rows->starts[item->row] + row / call->group;
  *first = smaller(larger(first_key(call->layer, position) - low, 0), count);
  *last = larger(smaller(position + 1 - low, count), *first);
}

/* Few rows: one by one. */
INLINE void attend_dots(const Call *call, const Item *item, Head head, View view, View ahead,
                        int64_t low, Scratch *scratch, const Scales *scales, Kind kind) {
  const int64_t pad = call->pad, query_bytes = pad * (kind == BFLOAT16 && HAS_BF16_DOT ? 2 : 4);
  const int count = view.tile->count;
  for (int64_t i = 0; i < item->last - item->first; i++) {
    int64_t first, last;
    dot_keys(head.query + i * query_bytes, view, ahead, pad, scratch->scores, kind);
    seen_range(call, item, item->first + i, low, count, &first, &last);
    rescale(head.out + i * pad, pad,
            weigh(scratch->scores, first, last, count, call->layer, scales, head.greatest + i,
                  head.sum + i));
    add_values(head.out + i * pad, pad, scratch->scores, view, ahead, 1, kind);
  }
}

/* More rows: both products as matrix products. */
INLINE void attend_matrix(const Call *call, const Item *item, Head head, View view, View ahead,
                          int64_t low, Scratch *scratch, const Scales *scales, bool half) {
  const int64_t pad = call->pad, num_rows = item->last - item->first;
  const int64_t words = half && HAS_BF16_DOT ? pad / 2 : pad;
  const int count = view.tile->count, width = (count + LANES - 1) / LANES * LANES;
  transpose_keys(view, ahead, pad, scratch->keys, half);
  memset(scratch->scores, 0, height_of(num_rows) * KEYS * sizeof(float));
  multiply(scratch->scores, KEYS, (const float *)head.query, words, scratch->keys, KEYS, num_rows,
           words, width, half && HAS_BF16_DOT);
  for (int64_t i = 0; i < num_rows; i++) {
    int64_t first, last;
    seen_range(call, item, item->first + i, low, count, &first, &last);
    rescale(head.out + i * pad, pad,
            weigh(scratch->scores + i * KEYS, first, last, count, call->layer, scales,
                  head.greatest + i, head.sum + i));
  }
  if (num_rows <= FEW_ROWS) {
    for (int64_t i = 0; i < num_rows; i += BLOCK_ROWS)
      add_values(head.out + i * pad, pad, scratch->scores + i * KEYS, view, ahead,
                 BLOCK_ROWS, half ? BFLOAT16 : FLOAT32);
    return;
  }
  for (int t = 0; t < count; t++)
    for (int64_t d = 0; d < pad; d += LANES)
      store(scratch->values + t * pad + d, load_any(value_at(view, t), d, half));
  multiply(head.out, pad, scratch->scores, KEYS, scratch->values, pad, num_rows, count, pad, false);
}

/* Writes one row of the result: the sums divided by the sum of weights, rounded. */
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

/* Returns head `index` of an item. */
INLINE Head start_head(const Call *call, const Item *item, int64_t index, Scratch *scratch,
                       bool half, bool is_int8) {
  const int64_t count = item->last - item->first, first_row = index * height_of(count);
  const float *sinks = item->takes_sinks ? call->layer->sinks : NULL;
  const Head head = {
      .query = (const char *)scratch->query + first_row * call->pad * sizeof(float),
      .out = scratch->out + first_row * call->pad,
      .greatest = scratch->greatest + first_row,
      .sum = scratch->sum + first_row,
  };
  load_queries(call, item, item->first_head + index, (char *)head.query, half,
               reads_int8(call, item, is_int8));
  memset(head.out, 0, height_of(count) * call->pad * sizeof(float));
  for (int64_t i = 0; i < count; i++) {
    const int64_t query_head =
        (item->first_head + index) * call->group + (item->first + i) % call->group;
    head.greatest[i] = sinks ? sinks[query_head] * LOG2_E : LOWEST;
    head.sum[i] = sinks ? 1.0f : 0.0f;
  }
  return head;
}

INLINE void finish_head(const Call *call, const Item *item, int64_t index, Head head, bool half) {
  const int64_t count = item->last - item->first, pad = call->pad;
  for (int64_t i = 0; i < count; i++) {
    if (item->partial) {
      float *to = item->partial + (index * count + i) * (pad + 2);
      to[0] = head.greatest[i];
      to[1] = head.sum[i];
      memcpy(to + 2, head.out + i * pad, pad * sizeof(float));
    } else {
      write_row(call, item->row, item->first_head + index, item->first + i, head.out + i * pad,
                head.sum[i], half);
    }
  }
}

INLINE void attend_item(const Call *call, const Item *item, bool half, bool is_int8) {
  Scratch scratch;
  Scales room;
  Tile tile, next, padded;
  Head heads[ROWS];
  const Layer *layer = call->layer;
  Scales *scales = is_int8 ? &room : NULL;
  const int64_t row_bytes = layer->row_bytes;
  const int64_t head_bytes = layer->block_size * row_bytes;
  find_keys(call, item, item->low, &next);
  for (int i = 0; i < next.count; i++) {
    prefetch_row(next.keys[i], row_bytes);
    prefetch_row(next.keys[i] + next.to_value, row_bytes);
  }
  for (int64_t i = 0; i < item->num_heads; i++)
    heads[i] = start_head(call, item, i, &scratch, half, is_int8);
  for (int64_t low = item->low; low < item->high; low += KEYS) {
    tile = next;
    if (low + KEYS < item->high)
      find_keys(call, item, low + KEYS, &next);
    for (int64_t i = 0; i < item->num_heads; i++) {
      View view = {.tile = &tile, .shift = i * head_bytes};
      View ahead = {.tile = &next};
      if (i + 1 < item->num_heads)
        ahead = (View){.tile = &tile, .shift = (i + 1) * head_bytes};
      if (reads_int8(call, item, is_int8)) {
        load_scales(view, layer->head_dim, scales);
        attend_dots(call, item, heads[i], view, ahead, low, &scratch, scales, INT8);
        continue;
      }
      if (is_int8)
        load_scales(view, layer->head_dim, scales);
      if (is_int8 || call->pad != layer->head_dim) {
        copy_tile(view, layer->head_dim, call->pad, (char *)scratch.padded, &padded, is_int8, half);
        view = (View){.tile = &padded};
      }
      if (item->last - item->first < BLOCK_ROWS)
        attend_dots(call, item, heads[i], view, ahead, low, &scratch, scales,
                    half ? BFLOAT16 : FLOAT32);
      else
        attend_matrix(call, item, heads[i], view, ahead, low, &scratch, scales, half);
    }
  }
  for (int64_t i = 0; i < item->num_heads; i++)
    finish_head(call, item, i, heads[i], half);
}

/* Combines the parts of a tile's heads; `items`: the parts, in order. */
INLINE void add_parts(const Call *call, const Item *items, int64_t num_parts, bool half) {
  const int64_t pad = call->pad, count = items->last - items->first;
  float sums[MAX_DIM];
  for (int64_t i = 0; i < items->num_heads * count; i++) {
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
    write_row(call, items->row, items->first_head + i / count, items->first + i % count, sums,
              total, half);
  }
}

static int64_t parts_of(const Call *call, int64_t row) {
  const Rows *rows = call->rows;
  if (rows->num_tokens[row] * call->group > ROWS)
    return 1;
  const int64_t low = first_key(call->layer, rows->starts[row]);
  return (rows->starts[row] + rows->num_tokens[row] - low + PART_KEYS - 1) / PART_KEYS;
}

/* Totals of a step, before heads are grouped into items. */
typedef struct {
  int64_t num_tiles;  /* of query rows, for each part */
  int64_t num_floats; /* of partial sums */
  int64_t work;       /* approximate number of products */
} Extent;

static Extent measure(const Call *call) {
  const Rows *rows = call->rows;
  Extent extent = {0};
  for (int64_t row = 0; row < rows->num_rows; row++) {
    const int64_t flat = rows->num_tokens[row] * call->group, num_parts = parts_of(call, row);
    const int64_t num_elements = call->layer->num_kv_heads * flat;
    extent.num_tiles += (flat + ROWS - 1) / ROWS * num_parts;
    extent.work += num_elements * call->layer->head_dim * (rows->starts[row] + 1);
    if (num_parts > 1)
      extent.num_floats += num_elements * num_parts * (call->pad + 2);
  }
  return extent;
}

/* Lists the items, last rows first, because chunks come last and take longest. Returns the number
 * of items. Each item has as many heads as fit its rows, without leaving threads idle. */
static int64_t list_items(const Call *call, Item *items, float *partial) {
  const Layer *layer = call->layer;
  const Rows *rows = call->rows;
  int64_t count = 0;
  for (int64_t row = rows->num_rows - 1; row >= 0; row--) {
    const int64_t start = rows->starts[row], flat = rows->num_tokens[row] * call->group;
    const int64_t num_parts = parts_of(call, row), num_tiles = (flat + ROWS - 1) / ROWS;
    if (flat == 0)
      continue;
    const int64_t room = ROWS / height_of(smaller(flat, ROWS));
    const int64_t step = smaller(room, call->max_heads);
    for (int64_t tile = num_tiles - 1; tile >= 0; tile--)
      for (int64_t head = 0; head < layer->num_kv_heads; head += step) {
        const int64_t first = tile * ROWS, last = smaller(first + ROWS, flat);
        const int64_t low = first_key(layer, start + first / call->group);
        const int64_t high = start + (last - 1) / call->group + 1;
        for (int64_t part = 0; part < num_parts; part++) {
          Item *item = items + count++;
          *item = (Item){.row = row, .first_head = head, .first = first, .last = last};
          item->num_heads = smaller(step, layer->num_kv_heads - head);
          item->low = low + part * PART_KEYS;
          item->high = num_parts > 1 ? smaller(item->low + PART_KEYS, high) : high;
          item->takes_sinks = part == 0 && layer->sinks;
          if (num_parts > 1) {
            item->partial = partial;
            partial += item->num_heads * flat * (call->pad + 2);
          }
        }
      }
  }
  return count;
}

static void attend_item_of(const Call *call, const Item *item) {
  if (call->layer->is_bf16 && call->layer->is_int8)
    attend_item(call, item, true, true);
  else if (call->layer->is_bf16)
    attend_item(call, item, true, false);
  else if (call->layer->is_int8)
    attend_item(call, item, false, true);
  else
    attend_item(call, item, false, false);
}

struct Attention {
  Call call;
  int64_t num_items;
  bool has_parts;
  Item items[]; /* followed by the partial sums */
};

static Call call_of(const Layer *layer, const Rows *rows) {
  Call call = {.layer = layer, .rows = rows};
  call.group = layer->num_heads / layer->num_kv_heads;
  call.pad = (layer->head_dim + 31) & -32;
  return call;
}

int64_t TEAM(attention_bytes)(const Layer *layer, const Rows *rows) {
  const Call call = call_of(layer, rows);
  const Extent extent = measure(&call);
  const int64_t most = extent.num_tiles * layer->num_kv_heads;
  return sizeof(Attention) + most * sizeof(Item) + extent.num_floats * sizeof(float);
}

void TEAM(start_attention)(Attention *to, const Layer *layer, const Rows *rows, const char *query,
                           int64_t query_token, int64_t query_head, char *out, int64_t out_token,
                           int64_t out_head, int64_t num_threads) {
  Call *call = &to->call;
  *call = call_of(layer, rows);
  call->query = query, call->query_token = query_token, call->query_head = query_head;
  call->out = out, call->out_token = out_token, call->out_head = out_head;
  const Extent extent = measure(call);
  const int64_t num_wanted = ITEMS_PER_THREAD * num_threads;
  call->max_heads = larger(layer->num_kv_heads * extent.num_tiles / num_wanted, 1);
  call->max_heads = smaller(call->max_heads, layer->num_kv_heads);
  to->has_parts = extent.num_floats > 0;
  to->num_items =
      list_items(call, to->items, (float *)(to->items + extent.num_tiles * layer->num_kv_heads));
}

void TEAM(attend)(const Attention *attention) {
  const Call *call = &attention->call;
  const Item *items = attention->items;
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = 0; i < attention->num_items; i++)
    attend_item_of(call, items + i);
  if (!attention->has_parts)
    return;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < attention->num_items; i++) {
    const int64_t row = items[i].row;
    if (!items[i].partial || items[i].low != first_key(call->layer, call->rows->starts[row]))
      continue;
    BY_TYPE(call->layer->is_bf16, add_parts, call, items + i, parts_of(call, row));
  }
}

/* query, out: [tokens, heads, head_dim]. Returns 0, or -1 if out of memory. */
int EXPORT(attend)(const Layer *layer, const Rows *rows, const void *query, int64_t query_token,
                   int64_t query_head, void *out, int64_t out_token, int64_t out_head) {
  Attention *attention = malloc(TEAM(attention_bytes)(layer, rows));
  if (!attention)
    return -1;
  TEAM(start_attention)(attention, layer, rows, query, query_token, query_head, out, out_token,
                        out_head, omp_get_max_threads());
  const Call call = attention->call;
#pragma omp parallel if (measure(&call).work >= MIN_PARALLEL_WORK && attention->num_items > 1)
  TEAM(attend)(attention);
  free(attention);
  return 0;
}
