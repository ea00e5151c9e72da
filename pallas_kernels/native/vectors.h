// Vectors of float32 and how weights become them, with the compilers' vector extensions.
//
// One source serves AVX-512, AVX2 and NEON; the number of lanes is the machine's. `fused` is one
// instruction on all three, so sums with a lane for each output, as of `matmul`, are equal to the
// bit; sums over lanes are those of reduce.h.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

#define STREE_INLINE inline __attribute__((always_inline))
#define STREE_EXPORT __attribute__((visibility("default")))

namespace stree {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));

namespace unaligned {
typedef float F32 __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint16_t U16 __attribute__((vector_size(kLanes * 2), aligned(2)));
}  // namespace unaligned

typedef uint32_t VecU32 __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecI32 __attribute__((vector_size(kLanes * 4)));

STREE_INLINE Vec load(const float* from) { return *(const unaligned::F32*)from; }

#if defined(__AVX512F__)
STREE_INLINE VecU32 widened(const uint16_t* from) {
  return (VecU32)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
}
#elif defined(__AVX2__)
STREE_INLINE VecU32 widened(const uint16_t* from) {
  return (VecU32)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
}
#else
STREE_INLINE VecU32 widened(const uint16_t* from) {
  return __builtin_convertvector(*(const unaligned::U16*)from, VecU32);
}
#endif

// bfloat16: the upper half of a float32.
STREE_INLINE Vec load(const uint16_t* from) { return (Vec)(widened(from) << 16); }
// float16, which all have: not as weights, which may be bfloat16 of the same size.
STREE_INLINE Vec load_half(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__x86_64__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#endif
}
STREE_INLINE void store(float* to, Vec values) { *(unaligned::F32*)to = values; }
STREE_INLINE Vec splat(float value) { return value - Vec{}; }

// a * b + c, rounded once. Compilers are told to fuse nothing by themselves: each would fuse other
// products, and one source would have other bits with other instructions.
STREE_INLINE Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__x86_64__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}

}  // namespace stree
