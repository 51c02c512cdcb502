/* Detects which of the compiled instruction sets the processor and the operating system support. */
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* for arch_prctl, from asm/prctl.h */

/* AMX with bfloat16 and 8 bits. The kernel saves tile registers only for a process that requests
 * it. */
static int has_tiles(void) {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
    return 0;
  const unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;
  return (d & wanted) == wanted && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#else
static int has_tiles(void) { return 0; }
#endif

/* Digest of the sources that this library was compiled from. */
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
  const int has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16") &&
                       __builtin_cpu_supports("avx512vnni");
  if (strcmp(set, "avx512_bf16") == 0)
    return has_bf16;
  if (strcmp(set, "amx") == 0)
    return has_bf16 && has_tiles();
#endif
  return 0;
}

/* Returns the mean duration of a barrier of all awake threads, microseconds, over `num_rounds`
 * rounds. */
__attribute__((visibility("default"))) double penstock_barrier_us(int num_rounds) {
  struct timespec start, end;
#pragma omp parallel
  {
#pragma omp barrier
#pragma omp master
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < num_rounds; i++) {
#pragma omp barrier
    }
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  const double seconds = (double)(end.tv_sec - start.tv_sec) + 1e-9 * (end.tv_nsec - start.tv_nsec);
  return seconds * 1e6 / num_rounds;
}
