/* Products of a step's rows with a packed weight matrix, in bfloat16 or in 8 bits. In 8 bits each
 * row is also quantised, with its own scale (sums are integers). A row's result depends only on
 * that row. For few rows memory bandwidth is the limit, so a panel of columns is read from end to
 * end. */
#include "int8_row.h"
#include "kernels.h"

#include <stdlib.h>

int omp_get_num_threads(void);

enum {
  PANEL = 64, /* columns stored together: [depth / GROUP, PANEL, GROUP] */
  GROUP = 4,  /* bytes of depth per multiply-add instruction */
  ZERO = 128, /* zero point of 8-bit rows: one operand is unsigned */
#if defined(__AMX_TILE__)
  HEIGHT = 32, /* rows in two tiles */
  TILE_ROWS = 16,
  TILE_BYTES = 64, /* bytes of a tile's row */
  BLOCK_BYTES = 512, /* bytes of a row: 32 rows and as many columns fit into L1 */
  ITEM_BYTES = 768 << 10, /* of an item's rows: CPUs with AMX have 2 MiB of L2 */
#else
  WIDE = LANES == 16 ? 4 : 2, /* vectors of columns per iteration of the inner loop */
  WIDE_OF_ONE = LANES == 16 ? 4 : 8, /* for one row: a panel is read from end to end */
  HEIGHT = LANES == 16 ? 6 : 4, /* as many rows as have their sums in registers */
  PHASES = HAS_BF16_DOT ? 1 : 2,
#endif
  AHEAD = 4096, /* prefetch distance, bytes */
  FEW_ROWS = 16,
  PANELS_OF_FEW_ROWS = 4, /* per item: each takes 1 to 2 microseconds */
  ROWS = 96, /* minimum rows per item; with a panel they fit into L2 */
};
static const int64_t MIN_PARALLEL_WORK = 1 << 20; /* bytes of weights times rows, per product */

/* Rows with a stride of `stride` bytes. */
typedef struct {
  const char *at;
  int64_t stride;
} Inputs;

#if defined(__AMX_TILE__)
/* Tiles 0 to 3 are sums, 4 inputs, 5 weights; the panel layout is that of the instructions. Up to
 * 16 rows: sums of 16 columns each; 6 and 7 are inputs and weights of the remainder of `depth`. */
#define INPUTS 4
#define WEIGHTS 5
#define LAST_INPUTS 6
#define LAST_WEIGHTS 7
/* Up to 32 rows: sums 2 and 3, and inputs 6, belong to rows 16 to 31; 7 are weights of the next
 * columns. */
#define MORE_INPUTS 6
#define MORE_WEIGHTS 7

typedef struct {
  uint8_t palette, first_row, none[14];
  uint16_t bytes[16];
  uint8_t rows[16];
} TileConfig;

static void configure_tiles(int64_t num_rows, int64_t depth) {
  TileConfig config = {.palette = 1};
  const int64_t left = depth % TILE_BYTES ? depth % TILE_BYTES : TILE_BYTES;
  for (int i = 0; i < 8; i++) {
    const bool is_weights = i == WEIGHTS || i == LAST_WEIGHTS;
    config.bytes[i] = i == LAST_INPUTS ? left : TILE_BYTES;
    config.rows[i] = !is_weights ? num_rows : i == WEIGHTS ? TILE_BYTES / GROUP : left / GROUP;
  }
  _tile_loadconfig(&config);
}

static void configure_pairs(int64_t num_rows) {
  TileConfig config = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    const bool is_more = i == 2 || i == 3 || i == MORE_INPUTS;
    config.bytes[i] = TILE_BYTES;
    config.rows[i] = is_more ? num_rows - TILE_ROWS : TILE_ROWS;
  }
  _tile_loadconfig(&config);
}

#define ADD(sum, x, weights)                                                                       \
  if (is_int8)                                                                                     \
    _tile_dpbusd(sum, x, weights);                                                                 \
  else                                                                                             \
    _tile_dpbf16ps(sum, x, weights);

#define START_TILE(sum, column)                                                                    \
  if (is_int8)                                                                                     \
    _tile_loadd(sum, matrix->offsets + panel * PANEL + column, 0);                                 \
  else                                                                                             \
    _tile_zero(sum);

/* to [configured rows, PANEL]: sums of a panel's columns; `depth` is a multiple of TILE_BYTES. Each
 * tile of weights is used for two tiles of inputs, and a block of inputs stays in L1 for all
 * columns. */
INLINE void sum_pairs(const PackedMatrix *matrix, int64_t panel, Inputs x, int32_t *to,
                      bool is_int8) {
  const char *packed = matrix->packed + panel * matrix->depth * PANEL;
  for (int64_t start = 0; start < matrix->depth; start += BLOCK_BYTES) {
    const int64_t end = start + BLOCK_BYTES < matrix->depth ? start + BLOCK_BYTES : matrix->depth;
    for (int first = 0; first < PANEL; first += 2 * LANES) {
      int32_t *more = to + TILE_ROWS * PANEL + first;
      if (start) {
        _tile_loadd(0, to + first, PANEL * 4);
        _tile_loadd(1, to + first + LANES, PANEL * 4);
        _tile_loadd(2, more, PANEL * 4);
        _tile_loadd(3, more + LANES, PANEL * 4);
      } else {
        START_TILE(0, first) START_TILE(1, first + LANES)
        START_TILE(2, first) START_TILE(3, first + LANES)
      }
      for (int64_t k = start; k < end; k += TILE_BYTES) {
        const char *weights = packed + k * PANEL + first * GROUP;
        _tile_loadd(INPUTS, x.at + k, x.stride);
        _tile_loadd(WEIGHTS, weights, PANEL * GROUP);
        _tile_loadd(MORE_INPUTS, x.at + TILE_ROWS * x.stride + k, x.stride);
        _tile_loadd(MORE_WEIGHTS, weights + TILE_BYTES, PANEL * GROUP);
        ADD(0, INPUTS, WEIGHTS)
        ADD(2, MORE_INPUTS, WEIGHTS)
        ADD(1, INPUTS, MORE_WEIGHTS)
        ADD(3, MORE_INPUTS, MORE_WEIGHTS)
      }
      _tile_stored(0, to + first, PANEL * 4);
      _tile_stored(1, to + first + LANES, PANEL * 4);
      _tile_stored(2, more, PANEL * 4);
      _tile_stored(3, more + LANES, PANEL * 4);
    }
  }
}

#define ADD_TILE(sum, x, weights, at)                                                              \
  _tile_loadd(weights, at + sum * TILE_BYTES, PANEL * GROUP);                                       \
  if (is_int8)                                                                                     \
    _tile_dpbusd(sum, x, weights);                                                                 \
  else                                                                                             \
    _tile_dpbf16ps(sum, x, weights);

#define ADD_TILES(x, weights, at)                                                                  \
  ADD_TILE(0, x, weights, at)                                                                      \
  ADD_TILE(1, x, weights, at)                                                                      \
  ADD_TILE(2, x, weights, at)                                                                      \
  ADD_TILE(3, x, weights, at)

/* The same for any depth and up to 16 rows. */
INLINE void sum_tiles(const PackedMatrix *matrix, int64_t panel, Inputs x, int32_t *to,
                      bool is_int8) {
  START_TILE(0, 0) START_TILE(1, LANES) START_TILE(2, 2 * LANES) START_TILE(3, 3 * LANES)
  const char *weights = matrix->packed + panel * matrix->depth * PANEL;
  int64_t k = 0;
  for (; k + TILE_BYTES <= matrix->depth; k += TILE_BYTES, weights += TILE_BYTES * PANEL) {
    _tile_loadd(INPUTS, x.at + k, x.stride);
    ADD_TILES(INPUTS, WEIGHTS, weights)
  }
  if (k < matrix->depth) {
    _tile_loadd(LAST_INPUTS, x.at + k, x.stride);
    ADD_TILES(LAST_INPUTS, LAST_WEIGHTS, weights)
  }
  _tile_stored(0, to, PANEL * 4);
  _tile_stored(1, to + LANES, PANEL * 4);
  _tile_stored(2, to + 2 * LANES, PANEL * 4);
  _tile_stored(3, to + 3 * LANES, PANEL * 4);
}
#else
#if defined(__AVX512BW__)
#define MULTIPLY_PAIRS(a, b) (ivec) _mm512_madd_epi16((__m512i)(a), (__m512i)(b))
#elif defined(__AVX2__)
#define MULTIPLY_PAIRS(a, b) (ivec) _mm256_madd_epi16((__m256i)(a), (__m256i)(b))
#elif defined(__SSE2__)
#define MULTIPLY_PAIRS(a, b) (ivec) _mm_madd_epi16((__m128i)(a), (__m128i)(b))
#else
#define MULTIPLY_PAIRS(a, b) ((a) << 16 >> 16) * ((b) << 16 >> 16) + ((a) >> 16) * ((b) >> 16)
#endif

/* The bytes that a phase of the inner loop multiplies: with one phase all bytes of a GROUP; with
 * two phases every second number, widened, which needs fewer registers. */
INLINE ivec part_of(ivec words, const int phase, bool is_signed, bool is_int8) {
  typedef int16_t pairs __attribute__((vector_size(LANES * 4)));
  if (PHASES == 1)
    return words;
  if (!is_int8)
    return phase ? words & (int32_t)0xffff0000 : words << 16;
  if (!is_signed)
    return phase ? words >> 8 & 0x00ff00ff : words & 0x00ff00ff;
  return phase ? (ivec)((pairs)words >> 8) : (ivec)((pairs)words << 8 >> 8);
}

/* Returns sum + the products of a part of a row with LANES columns; sums of bfloat16 are float32.
 */
INLINE ivec add_products(ivec sum, ivec x, ivec weights, bool is_int8) {
#if defined(__AVX512BF16__)
  return is_int8 ? (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)weights)
                 : (ivec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weights);
#else
  return is_int8 ? sum + MULTIPLY_PAIRS(x, weights) : (ivec)((vec)sum + (vec)x * (vec)weights);
#endif
}

/* to [num_rows, PANEL]: sums of `wide` vectors of columns, starting at `first`. */
INLINE void sum_block(const PackedMatrix *matrix, int64_t panel, int first, Inputs x, int32_t *to,
                      const int num_rows, const int wide, bool is_int8) {
  ivec sums[HEIGHT][WIDE_OF_ONE];
#pragma GCC unroll 8
  for (int j = 0; j < wide; j++) {
    ivec start = {0};
    if (is_int8)
      memcpy(&start, matrix->offsets + panel * PANEL + first + j * LANES, sizeof start);
#pragma GCC unroll 6
    for (int i = 0; i < num_rows; i++)
      sums[i][j] = start;
  }
  const char *weights = matrix->packed + panel * matrix->depth * PANEL + first * GROUP;
  const char *inputs = x.at;
  for (int64_t k = 0; k < matrix->depth; k += GROUP, weights += PANEL * GROUP, inputs += GROUP) {
    __builtin_prefetch(weights + AHEAD, 0, 3);
#pragma GCC unroll 2
    for (int phase = 0; phase < PHASES; phase++) {
      ivec columns[WIDE_OF_ONE];
#pragma GCC unroll 8
      for (int j = 0; j < wide; j++) {
        memcpy(columns + j, weights + j * LANES * GROUP, sizeof(ivec));
        columns[j] = part_of(columns[j], phase, true, is_int8);
      }
#pragma GCC unroll 6
      for (int i = 0; i < num_rows; i++) {
        int32_t group;
        memcpy(&group, inputs + i * x.stride, sizeof group);
        ivec row = (ivec){0} + group;
        OPAQUE_VECTOR(row); /* forces a vector load before the shift */
        row = part_of(row, phase, false, is_int8);
#pragma GCC unroll 8
        for (int j = 0; j < wide; j++)
          sums[i][j] = add_products(sums[i][j], row, columns[j], is_int8);
      }
      OPAQUE_ADDRESS(weights); /* forces a reload instead of using registers */
      OPAQUE_ADDRESS(inputs);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 8
    for (int j = 0; j < wide; j++)
      memcpy(to + i * PANEL + first + j * LANES, &sums[i][j], sizeof(ivec));
}

INLINE void sum_panel(const PackedMatrix *matrix, int64_t panel, Inputs x, int32_t *to,
                      int64_t num_rows, bool is_int8) {
  if (num_rows == 1) {
    for (int first = 0; first < PANEL; first += WIDE_OF_ONE * LANES)
      sum_block(matrix, panel, first, x, to, 1, WIDE_OF_ONE, is_int8);
    return;
  }
  for (int first = 0; first < PANEL; first += WIDE * LANES)
    switch (num_rows) {
    case 2:
      sum_block(matrix, panel, first, x, to, 2, WIDE, is_int8);
      break;
    case 3:
      sum_block(matrix, panel, first, x, to, 3, WIDE, is_int8);
      break;
    case 4:
      sum_block(matrix, panel, first, x, to, 4, WIDE, is_int8);
      break;
#if LANES == 16
    case 5:
      sum_block(matrix, panel, first, x, to, 5, WIDE, is_int8);
      break;
    case 6:
      sum_block(matrix, panel, first, x, to, 6, WIDE, is_int8);
      break;
#endif
    }
}
#endif

/* Converts one row's sums of a panel to outputs. `scale`: for an 8-bit row. */
INLINE void finish_row(const PackedMatrix *matrix, int64_t panel, const int32_t *sums, float scale,
                       char *out, bool is_int8, bool half) {
  const int64_t first = panel * PANEL;
  for (int64_t i = 0; i < PANEL; i += LANES) {
    ivec sum;
    memcpy(&sum, sums + i, sizeof sum);
    vec x = (vec)sum;
    if (is_int8)
      x = __builtin_convertvector(sum, vec) * (load(matrix->scales + first + i) * scale);
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

/* The input and output rows of a product. */
typedef struct {
  const PackedMatrix *matrix;
  Inputs x;
  const float *scales; /* for 8-bit rows */
  char *out;
  int64_t out_bytes;
} Product;

/* Computes rows first .. last - 1 for one panel. */
INLINE void multiply_item(const Product *product, int64_t panel, int64_t first, int64_t last,
                          bool is_int8, bool half) {
  int32_t sums[HEIGHT * PANEL] __attribute__((aligned(64)));
#if defined(__AMX_TILE__)
  const int64_t height = product->matrix->depth % TILE_BYTES ? TILE_ROWS : HEIGHT;
#else
  const int64_t height = HEIGHT;
#endif
  for (int64_t row = first; row < last; row += height) {
    const int64_t count = last - row < height ? last - row : height;
    const Inputs x = {product->x.at + row * product->x.stride, product->x.stride};
#if defined(__AMX_TILE__)
    if (count > TILE_ROWS) {
      if (row == first || count < HEIGHT)
        configure_pairs(count);
      sum_pairs(product->matrix, panel, x, sums, is_int8);
    } else {
      configure_tiles(count, product->matrix->depth);
      sum_tiles(product->matrix, panel, x, sums, is_int8);
    }
#else
    sum_panel(product->matrix, panel, x, sums, count, is_int8);
#endif
    for (int64_t i = 0; i < count; i++)
      finish_row(product->matrix, panel, sums + i * PANEL, is_int8 ? product->scales[row + i] : 0,
                 product->out + (row + i) * product->out_bytes, is_int8, half);
  }
#if defined(__AMX_TILE__)
  _tile_release();
#endif
}

static void multiply_int8_bf16(const Product *product, int64_t panel, int64_t first, int64_t last) {
  multiply_item(product, panel, first, last, true, true);
}
static void multiply_int8_f32(const Product *product, int64_t panel, int64_t first, int64_t last) {
  multiply_item(product, panel, first, last, true, false);
}
static void multiply_bf16(const Product *product, int64_t panel, int64_t first, int64_t last) {
  multiply_item(product, panel, first, last, false, true);
}
typedef void Multiply(const Product *, int64_t panel, int64_t first, int64_t last);

/* Number of rows per pass over the matrix; fewer if there would be less than one item per thread.
 */
INLINE int64_t rows_of_item(const PackedMatrix *matrix, int64_t num_rows) {
#if defined(__AMX_TILE__)
  const int64_t most = ITEM_BYTES / matrix->depth;
  const int64_t shared = num_rows * (matrix->columns / PANEL) / (4 * omp_get_num_threads());
  const int64_t height = (shared < most ? shared : most) / HEIGHT * HEIGHT;
  return height > ROWS ? height : ROWS;
#else
  (void)matrix, (void)num_rows;
  return ROWS;
#endif
}

/* Computes all items; called by every thread of a team. */
INLINE void multiply_items(const Product *product, int64_t num_rows, Multiply *multiply) {
  const int64_t num_panels = product->matrix->columns / PANEL;
  const int64_t height = rows_of_item(product->matrix, num_rows);
  const int64_t num_parts = (num_rows + height - 1) / height;
  /* Dynamic instead of equal shares, because other processes may use a core meanwhile. */
  const int64_t share = num_parts * num_panels / (2 * omp_get_num_threads());
  const int64_t most = num_rows < FEW_ROWS ? PANELS_OF_FEW_ROWS : 1;
  const int64_t chunk = share < 1 ? 1 : share < most ? share : most;
#pragma omp for schedule(dynamic, chunk)
  for (int64_t i = 0; i < num_parts * num_panels; i++) {
    const int64_t first = i / num_panels * height;
    const int64_t last = first + height < num_rows ? first + height : num_rows;
    multiply(product, i % num_panels, first, last);
  }
}

/* Multiplies x [rows, size] by the matrix; strides are in elements. */
void TEAM(linear)(const PackedMatrix *matrix, const char *x, int64_t x_stride, int64_t size,
                  char *out, int64_t out_stride, int64_t num_rows, int is_bf16, char *room) {
  const int64_t bytes = is_bf16 ? 2 : 4, depth = matrix->depth;
  Product product = {matrix, {x, x_stride * bytes}, NULL, out, out_stride * bytes};
  if (!matrix->scales) {
    multiply_items(&product, num_rows, multiply_bf16);
    return;
  }
  float *scales = (float *)room;
  char *rows = room + num_rows * (int64_t)sizeof(float);
#pragma omp for schedule(static)
  for (int64_t i = 0; i < num_rows; i++) {
    const char *from = x + i * x_stride * bytes;
    uint8_t *to = (uint8_t *)rows + i * depth;
    scales[i] = is_bf16 ? quantise_row(from, size, ZERO, to, true)
                        : quantise_row(from, size, ZERO, to, false);
    memset(to + size, ZERO, depth - size);
  }
  product.x = (Inputs){rows, depth};
  product.scales = scales;
  multiply_items(&product, num_rows, is_bf16 ? multiply_int8_bf16 : multiply_int8_f32);
}

/* For an 8-bit matrix. Returns 1 if out of memory. */
int EXPORT(int8_linear)(const PackedMatrix *matrix, const char *x, int64_t x_stride, int64_t size,
                        char *out, int64_t out_stride, int64_t num_rows, int is_bf16) {
  char *room = malloc((size_t)(num_rows * LINEAR_ROOM(matrix)));
  if (!room)
    return 1;
#pragma omp parallel if (num_rows * matrix->depth * matrix->columns >= MIN_PARALLEL_WORK)
  TEAM(linear)(matrix, x, x_stride, size, out, out_stride, num_rows, is_bf16, room);
  free(room);
  return 0;
}

/* For a bfloat16 matrix; x must have as many columns as the matrix has inputs. */
void EXPORT(bf16_linear)(const PackedMatrix *matrix, const char *x, int64_t x_stride, char *out,
                         int64_t out_stride, int64_t num_rows) {
#pragma omp parallel if (num_rows * matrix->depth * matrix->columns >= MIN_PARALLEL_WORK)
  TEAM(linear)(matrix, x, x_stride, 0, out, out_stride, num_rows, 1, NULL);
}
