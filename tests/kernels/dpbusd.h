// AVX-VNNI's product as its manual writes it, for processors without it.
#include <immintrin.h>

static inline __m256i dpbusd(__m256i sum, __m256i a, __m256i b) {
  __v8si y = (__v8si)sum;
  for (int i = 0; i < 32; ++i) y[i / 4] += ((__v32qu)a)[i] * (signed char)((__v32qi)b)[i];
  return (__m256i)y;
}
#define _mm256_dpbusd_avx_epi32 dpbusd
