/* The operators between a layer's matrix products (norm after residual addition, gated activation),
 * and the greedy choice. Each makes one pass over memory and computes in float32. */
#include "kernels.h"
#include "norm.h"

static const int64_t MIN_PARALLEL_ELEMENTS = 1 << 15;

INLINE void add_row(void *to, const void *added, int64_t size, bool half) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES)
    store_any(to, i, load_any(to, i, half) + load_any(added, i, half), half);
  for (; i < size; i++)
    set_any(to, i, get_any(to, i, half) + get_any(added, i, half), half);
}

/* residual [rows, size] += added (if not NULL); out = norm of residual. */
void TEAM(add_rms_norm)(char *residual, int64_t residual_stride, const char *added,
                        int64_t added_stride, const void *weight, float eps, char *out,
                        int64_t out_stride, int64_t num_rows, int64_t size, int is_bf16) {
  const int64_t bytes = is_bf16 ? 2 : 4;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < num_rows; i++) {
    char *row = residual + i * residual_stride * bytes;
    if (added)
      BY_TYPE(is_bf16, add_row, row, added + i * added_stride * bytes, size);
    BY_TYPE(is_bf16, norm_row, row, weight, eps, size, out + i * out_stride * bytes);
  }
}

void EXPORT(add_rms_norm)(char *residual, int64_t residual_stride, const char *added,
                          int64_t added_stride, const void *weight, float eps, char *out,
                          int64_t out_stride, int64_t num_rows, int64_t size, int is_bf16) {
#pragma omp parallel if (num_rows * size >= MIN_PARALLEL_ELEMENTS)
  TEAM(add_rms_norm)(residual, residual_stride, added, added_stride, weight, eps, out, out_stride,
                     num_rows, size, is_bf16);
}

INLINE vec silu(vec x) { return x / (1.0f + exp2_of(x * -LOG2_E)); }

INLINE void gate_row(const void *gate, const void *up, int64_t size, void *out, bool half) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES)
    store_any(out, i, silu(load_any(gate, i, half)) * load_any(up, i, half), half);
  for (; i < size; i++)
    set_any(out, i, silu(splat(get_any(gate, i, half)))[0] * get_any(up, i, half), half);
}

/* gate_up [rows, 2 * size]: out = silu(gate) * up. */
void TEAM(silu_mul)(const char *gate_up, int64_t stride, char *out, int64_t out_stride,
                    int64_t num_rows, int64_t size, int is_bf16) {
  const int64_t bytes = is_bf16 ? 2 : 4;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < num_rows; i++) {
    const char *gate = gate_up + i * stride * bytes;
    BY_TYPE(is_bf16, gate_row, gate, gate + size * bytes, size, out + i * out_stride * bytes);
  }
}

void EXPORT(silu_mul)(const char *gate_up, int64_t stride, char *out, int64_t out_stride,
                      int64_t num_rows, int64_t size, int is_bf16) {
#pragma omp parallel if (num_rows * size >= MIN_PARALLEL_ELEMENTS / 2)
  TEAM(silu_mul)(gate_up, stride, out, out_stride, num_rows, size, is_bf16);
}

INLINE int64_t greatest_index(const void *row, int64_t size, bool *is_finite, bool half) {
  vec top = splat(-INFINITY);
  ivec is_nan = {0};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const vec x = load_any(row, i, half);
    is_nan |= x != x;
    top = greater(x, top);
  }
  float greatest = greatest_of(top);
  *is_finite = true;
  for (int lane = 0; lane < LANES; lane++)
    *is_finite &= !is_nan[lane];
  for (; i < size; i++) {
    const float x = get_any(row, i, half);
    *is_finite &= x == x;
    greatest = x > greatest ? x : greatest;
  }
  *is_finite &= greatest < INFINITY && greatest > -INFINITY;
  if (!*is_finite)
    return 0;
  int64_t first = 0;
  for (; first + LANES <= size; first += LANES) {
    const ivec is_equal = load_any(row, first, half) == greatest;
    if (sum_of((vec)(is_equal & (ivec)splat(1.0f))) > 0.0f)
      break;
  }
  while (first < size - 1 && get_any(row, first, half) != greatest)
    first++;
  return first;
}

/* out: the lowest index of each row's maximum. A row with NaN or plus infinity, or with only minus
 * infinity, gets 0 and is_finite 0. */
void EXPORT(argmax_rows)(const char *logits, int64_t stride, int64_t num_rows, int64_t size,
                         int32_t *out, uint8_t *is_finite, int is_bf16) {
  const int64_t bytes = is_bf16 ? 2 : 4;
#pragma omp parallel for schedule(static) if (num_rows * size >= MIN_PARALLEL_ELEMENTS)
  for (int64_t i = 0; i < num_rows; i++) {
    const char *row = logits + i * stride * bytes;
    bool is_good = true;
    out[i] = (int32_t)(is_bf16 ? greatest_index(row, size, &is_good, true)
                               : greatest_index(row, size, &is_good, false));
    is_finite[i] = is_good;
  }
}
