/* Vectors of the instruction set that this file is compiled for. They use GNU vector extensions, so
 * the same code works for AVX-512, AVX2 and the baseline of the machine (SSE2, NEON).
 *
 * Comparisons and rounding preserve NaN: never compile with -ffast-math. */
#ifndef PENSTOCK_SIMD_H
#define PENSTOCK_SIMD_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512BF16__)
#define HAS_BF16_DOT true
#else
#define HAS_BF16_DOT false
#endif

/* Hides a value from the optimiser. */
#define OPAQUE_ADDRESS(x) __asm__("" : "+r"(x))
#if defined(__x86_64__)
#define OPAQUE_VECTOR(x) __asm__("" : "+x"(x))
#else
#define OPAQUE_VECTOR(x) (void)(x)
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2)));
typedef uint16_t bf16;

INLINE vec splat(float x) { return (vec){0} + x; }

INLINE vec load(const float *from) {
  vec x;
  memcpy(&x, from, sizeof x);
  return x;
}

INLINE void store(float *to, vec x) { memcpy(to, &x, sizeof x); }

INLINE vec load_bf16(const bf16 *from) {
  hvec x;
  memcpy(&x, from, sizeof x);
  return (vec)(__builtin_convertvector(x, uvec) << 16);
}

INLINE vec choose(ivec mask, vec yes, vec no) {
  return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

/* Rounds to nearest even; NaN stays NaN. */
INLINE uvec round_bf16(vec x) {
  uvec bits = (uvec)x;
  uvec rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  uvec quiet = bits | 0x00400000u;
  return (uvec)choose((ivec)(x == x), (vec)rounded, (vec)quiet) >> 16;
}

INLINE void store_bf16(bf16 *to, vec x) {
  hvec narrow = __builtin_convertvector(round_bf16(x), hvec);
  memcpy(to, &narrow, sizeof narrow);
}

INLINE float widen(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

INLINE bf16 narrow(float x) { return (bf16)round_bf16(splat(x))[0]; }

/* Access to elements of a tensor of either type; `half` is a compile-time constant after inlining.
 */
INLINE vec load_any(const void *from, int64_t index, bool half) {
  return half ? load_bf16((const bf16 *)from + index) : load((const float *)from + index);
}

INLINE void store_any(void *to, int64_t index, vec x, bool half) {
  if (half)
    store_bf16((bf16 *)to + index, x);
  else
    store((float *)to + index, x);
}

INLINE float get_any(const void *from, int64_t index, bool half) {
  return half ? widen(((const bf16 *)from)[index]) : ((const float *)from)[index];
}

INLINE void set_any(void *to, int64_t index, float x, bool half) {
  if (half)
    ((bf16 *)to)[index] = narrow(x);
  else
    ((float *)to)[index] = x;
}

/* LOW_n(a, b): for every block of n lanes, the first half of `a`, then the first half of `b`;
 * HIGH_n: the second halves. A butterfly of these transposes a square of LANES rows. */
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

#if LANES == 16
#define LOW_16(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define HIGH_16(a, b) SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#define LOW_8(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
#define HIGH_8(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define LOW_4(a, b) SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH_4(a, b) SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define LOW_2(a, b) SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#define HIGH_2(a, b) SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
#elif LANES == 8
#define LOW_8(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define HIGH_8(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
#define LOW_4(a, b) SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH_4(a, b) SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define LOW_2(a, b) SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14)
#define HIGH_2(a, b) SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15)
#else
#define LOW_4(a, b) SHUFFLE(a, b, 0, 1, 4, 5)
#define HIGH_4(a, b) SHUFFLE(a, b, 2, 3, 6, 7)
#define LOW_2(a, b) SHUFFLE(a, b, 0, 4, 2, 6)
#define HIGH_2(a, b) SHUFFLE(a, b, 1, 5, 3, 7)
#endif

/* Returns a vector whose lane i is the sum of rows[i]. */
INLINE vec sum_rows(vec rows[LANES]) {
#define ADD(n)                                                                                     \
  for (int i = 0; i < n / 2; i++)                                                                  \
    rows[i] = LOW_##n(rows[i], rows[i + n / 2]) + HIGH_##n(rows[i], rows[i + n / 2]);
#if LANES == 16
  ADD(16)
#endif
#if LANES >= 8
  ADD(8)
#endif
  ADD(4)
  ADD(2)
#undef ADD
  return rows[0];
}

INLINE void transpose(vec rows[LANES]) {
#define SWAP(n)                                                                                    \
  for (int i = 0; i < LANES; i++)                                                                  \
    if (!(i & (n / 2))) {                                                                          \
      vec low = LOW_##n(rows[i], rows[i + n / 2]);                                                 \
      rows[i + n / 2] = HIGH_##n(rows[i], rows[i + n / 2]);                                        \
      rows[i] = low;                                                                               \
    }
#if LANES == 16
  SWAP(16)
#endif
#if LANES >= 8
  SWAP(8)
#endif
  SWAP(4)
  SWAP(2)
#undef SWAP
}

#if LANES == 16
#define FOLD(x, op) x = op(LOW_16(x, x), HIGH_16(x, x)), FOLD_8(x, op)
#elif LANES == 8
#define FOLD(x, op) FOLD_8(x, op)
#else
#define FOLD(x, op) FOLD_4(x, op)
#endif
#define FOLD_8(x, op) x = op(LOW_8(x, x), HIGH_8(x, x)), FOLD_4(x, op)
#define FOLD_4(x, op) x = op(LOW_4(x, x), HIGH_4(x, x)), x = op(LOW_2(x, x), HIGH_2(x, x))

INLINE vec greater(vec a, vec b) { return choose(a > b, a, b); }
INLINE vec plus(vec a, vec b) { return a + b; }
INLINE float greatest_of(vec x) { return FOLD(x, greater), x[0]; }
INLINE float sum_of(vec x) { return FOLD(x, plus), x[0]; }

/* Returns 2^x with relative error 2e-7; 0 for x <= -127. */
INLINE vec exp2_of(vec x) {
  const float to_integer = 12582912.0f; /* 1.5 * 2^23: the sum has no fraction bits */
  x = choose(x < splat(-127.0f), splat(-127.0f), x);
  x = choose(x > splat(127.0f), splat(127.0f), x);
  vec shifted = x + to_integer;
  vec fraction = x - (shifted - to_integer);
  vec power = (vec)(((uvec)shifted << 23) + 0x3f800000u);
  vec sum = splat(1.535336188319500e-4f);
  sum = sum * fraction + 1.339887440266574e-3f;
  sum = sum * fraction + 9.618437357674640e-3f;
  sum = sum * fraction + 5.550332471162809e-2f;
  sum = sum * fraction + 2.402264791363012e-1f;
  sum = sum * fraction + 6.931472028550421e-1f;
  sum = sum * fraction + 1.0f;
  return sum * power;
}

#define LOG2_E 1.4426950408889634f

INLINE vec tanh_of(vec x) { return 1.0f - 2.0f / (exp2_of(x * (2.0f * LOG2_E)) + 1.0f); }

#endif
