/* Runs all layers of a decoder in one parallel region: threads are woken once per step, and
 * synchronise at a barrier between two operators. */
#include "kernels.h"

#include <stdbool.h>
#include <stdlib.h>

int omp_get_num_threads(void);

/* One layer. The norms of query and key may be NULL. */
typedef struct {
  const Layer *attention;
  const PackedMatrix *qkv, *out, *gate_up, *down;
  const void *input_norm, *output_norm, *query_norm, *key_norm;
} DecoderLayer;

typedef struct {
  const DecoderLayer *layers;
  int64_t num_layers;
  const Rotary *rotary;
  float eps; /* of all norms */
  int64_t hidden, feed_forward; /* elements */
  int64_t is_bf16;
} Decoder;

/* A step's tensors, with contiguous rows. Afterwards `qkv` has the last layer's keys and values,
 * and `added` the output that is not added to `residual` yet. */
typedef struct {
  char *residual, *added, *normed, *qkv, *attended, *gate_up, *activated;
} Activations;

static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t linear_room(const DecoderLayer *layer) {
  int64_t room = LINEAR_ROOM(layer->qkv);
  room = larger_of(room, LINEAR_ROOM(layer->out));
  room = larger_of(room, LINEAR_ROOM(layer->gate_up));
  return larger_of(room, LINEAR_ROOM(layer->down));
}

/* Computes `num_rows` packed tokens; called by every thread of a team. */
static void run_layer(const Decoder *decoder, const DecoderLayer *layer, const Rows *rows,
                      const Activations *at, const char *added, int64_t num_rows,
                      Attention *attention, char *room) {
  const Layer *heads = layer->attention;
  const int64_t hidden = decoder->hidden, wide = decoder->feed_forward, dim = heads->head_dim;
  const int64_t query_size = heads->num_heads * dim, qkv_size = layer->qkv->num_outputs;
  const int is_bf16 = (int)decoder->is_bf16;
  TEAM(add_rms_norm)(at->residual, hidden, added, hidden, layer->input_norm, decoder->eps,
                     at->normed, hidden, num_rows, hidden, is_bf16);
  TEAM(linear)(layer->qkv, at->normed, hidden, hidden, at->qkv, qkv_size, num_rows, is_bf16, room);
#pragma omp single nowait
  TEAM(start_attention)(attention, heads, rows, at->qkv, qkv_size, dim, at->attended, query_size,
                        dim, omp_get_num_threads());
  TEAM(rotate_and_write)(heads, rows, decoder->rotary, at->qkv, qkv_size, layer->query_norm,
                         layer->key_norm, decoder->eps);
  TEAM(attend)(attention);
  TEAM(linear)(layer->out, at->attended, query_size, query_size, at->added, hidden, num_rows,
               is_bf16, room);
  TEAM(add_rms_norm)(at->residual, hidden, at->added, hidden, layer->output_norm, decoder->eps,
                     at->normed, hidden, num_rows, hidden, is_bf16);
  TEAM(linear)(layer->gate_up, at->normed, hidden, hidden, at->gate_up, 2 * wide, num_rows, is_bf16,
               room);
  TEAM(silu_mul)(at->gate_up, 2 * wide, at->activated, wide, num_rows, wide, is_bf16);
  TEAM(linear)(layer->down, at->activated, wide, wide, at->added, hidden, num_rows, is_bf16, room);
}

/* Returns 0, or 1 if out of memory. */
int EXPORT(run_layers)(const Decoder *decoder, const Rows *rows, const Activations *at,
                       int64_t num_rows) {
  int64_t room_bytes = 0, attention_bytes = 0;
  for (int64_t i = 0; i < decoder->num_layers; i++) {
    const DecoderLayer *layer = decoder->layers + i;
    room_bytes = larger_of(room_bytes, linear_room(layer));
    attention_bytes =
        larger_of(attention_bytes, TEAM(attention_bytes)(layer->attention, rows));
  }
  char *room = malloc((size_t)(room_bytes * num_rows));
  Attention *attention = malloc((size_t)attention_bytes);
  const bool has_memory = room && attention;
  if (has_memory) {
#pragma omp parallel
    for (int64_t i = 0; i < decoder->num_layers; i++)
      run_layer(decoder, decoder->layers + i, rows, at, i ? at->added : NULL, num_rows, attention,
                room);
  }
  free(room);
  free(attention);
  return !has_memory;
}
