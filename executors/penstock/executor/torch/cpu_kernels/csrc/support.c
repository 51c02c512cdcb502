/* Which of the compiled instruction sets this processor and its operating system run. */
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

/* Of the sources that this was compiled from. */
__attribute__((visibility("default"))) const char penstock_source_digest[] = SOURCE_DIGEST;

__attribute__((visibility("default"))) int penstock_supports(const char *set) {
  if (strcmp(set, "baseline") == 0)
    return 1;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (strcmp(set, "avx2") == 0)
    return has_avx2;
  const int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                         __builtin_cpu_supports("avx512vl");
  if (strcmp(set, "avx512") == 0)
    return has_avx512;
  if (strcmp(set, "avx512_bf16") == 0)
    return has_avx512 && __builtin_cpu_supports("avx512bf16") &&
           __builtin_cpu_supports("avx512vnni");
#endif
  return 0;
}

/* Whether the processor multiplies tiles of bfloat16 (AMX). */
__attribute__((visibility("default"))) int penstock_has_tiles(void) {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d))
    return d >> 22 & 1;
#endif
  return 0;
}
