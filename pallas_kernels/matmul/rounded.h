// Rows rounded to 8 bits, and their products with weights in 8 or 4 bits.
//
// Sums of a group of 32 inputs are of integers, at most 32 * 127 * 128 of them together, so they
// are exact in int32 and in float32 whatever their order. What is rounded is written in
// `reference.py`: the row's scale, its values, and a multiply-add for each group.
//
// 4-bit weights are 0 to 15, so the products of 8 of a group's pairs are at most 8 * 2 * 15 * 127
// together: without dot products they are added in int16, exactly.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tiles.h"

namespace stree {

constexpr int64_t kGroup = 32;  // inputs with one scale, of a row and of a column
constexpr int kColumns = 32;    // of a block

// Lanes of two int16, or with dot products four int8: the weights of as many inputs, and products
// that are added to a sum. VNNI's weights have no sign: they get 128 more, and the sums less.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
typedef int8_t Value;
#else
typedef int16_t Value;
#endif
constexpr int32_t kMore = sizeof(Value) == 1 && kLanes > 4 ? 128 : 0;

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#if defined(__AVX512VNNI__)
// Two pairs of all columns come together within 128 bits, so columns are turned.
STREE_INLINE void weights_of(const int8_t* group, int64_t k, int, VecI32 (&w)[2]) {
  const __m512i first = _mm512_loadu_si512(group + k * kColumns),
                second = _mm512_loadu_si512(group + (k + 2) * kColumns);
  w[0] = (VecI32)_mm512_unpacklo_epi16(first, second) ^ 0x80808080u;
  w[1] = (VecI32)_mm512_unpackhi_epi16(first, second) ^ 0x80808080u;
}
#else
STREE_INLINE VecI32 weights_of(const int8_t* from) {  // of two pairs
  const uint16_t* pairs = (const uint16_t*)from;
  return (VecI32)((widened(pairs) | widened(pairs + kColumns) << 16) ^ 0x80808080u);
}
#endif
STREE_INLINE VecI32 added(VecI32 sum, VecI32 a, VecI32 b) {
#if defined(__AVX512VNNI__)
  return (VecI32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)b, (__m512i)a);
#else
  return (VecI32)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)b, (__m256i)a);
#endif
}
#elif defined(__AVX512F__)
STREE_INLINE VecI32 weights_of(const int8_t* from) {
  return (VecI32)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
}
STREE_INLINE VecI32 added(VecI32 sum, VecI32 a, VecI32 b) {
  return sum + (VecI32)_mm512_madd_epi16((__m512i)a, (__m512i)b);
}
#elif defined(__AVX2__)
STREE_INLINE VecI32 weights_of(const int8_t* from) {
  return (VecI32)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
}
STREE_INLINE VecI32 added(VecI32 sum, VecI32 a, VecI32 b) {
  return sum + (VecI32)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
#elif defined(__ARM_FEATURE_DOTPROD)
STREE_INLINE VecI32 weights_of(const int8_t* from) {  // of two pairs
  const int16_t *first = (const int16_t*)from, *second = first + kColumns;
  const int16x4x2_t both = vzip_s16(vld1_s16(first), vld1_s16(second));
  return (VecI32)vcombine_s16(both.val[0], both.val[1]);
}
STREE_INLINE VecI32 added(VecI32 sum, VecI32 a, VecI32 b) {
  return (VecI32)vdotq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b);
}
#else
STREE_INLINE VecI32 weights_of(const int8_t* from) { return (VecI32)vmovl_s8(vld1_s8(from)); }
STREE_INLINE VecI32 added(VecI32 sum, VecI32 a, VecI32 b) {
  const int16x8_t c = (int16x8_t)a, d = (int16x8_t)b;
  return sum +
         (VecI32)vpaddq_s32(vmull_s16(vget_low_s16(c), vget_low_s16(d)), vmull_high_s16(c, d));
}
#endif

// Weights of a lane's inputs from input k on, in vectors of a group's columns [16, 32, 2].
#if !defined(__AVX512VNNI__)
template <int V>
STREE_INLINE void weights_of(const int8_t* group, int64_t k, int column, VecI32 (&w)[V]) {
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) w[v] = weights_of(group + k * kColumns + (column + v * kLanes) * 2);
}
#endif
// The same of a group of 4 bits [4, 32, 4]: inputs 0 to 15 in the low bits of bytes.
template <int V>
STREE_INLINE void weights_of(const uint8_t* group, int64_t k, int column, VecI32 (&w)[V]) {
  const int shift = k < kGroup / 2 ? 0 : 4;
  const uint8_t* from = group + k % (kGroup / 2) * kColumns + column * 4;
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v)
    w[v] = (VecI32)((VecU32)load((const float*)(from + v * kLanes * 4)) >> shift & 0x0f0f0f0fu);
}

// Keeps a sum in its register and the order of loads. gcc 12 would load and multiply all inputs of
// a tile before it adds them, in memory, and take twice the time.
STREE_INLINE void keep(VecI32& sum) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(sum) : : "memory");
#else
  asm volatile("" : "+w"(sum) : : "memory");
#endif
}

// Weights of a type: values of rows for them, what they have more, bytes of 32 x 32 of them, bytes
// of a column that lie together, and whether sums begin in int16. Scales have 16 bits.
template <typename W>
struct Form {  // 8 bits
  typedef Value Input;
  static constexpr int32_t kMore = stree::kMore;
  static constexpr int64_t kBytes = kGroup * kColumns, kTogether = 2;
  static constexpr bool kInHalves = false;
  static Vec scales(const uint16_t* from) { return load(from); }  // bfloat16
  // Four columns each from 0, 8, 16 and 24 on, as in sums, and the others. A third turn undoes two.
  static void turn(Vec& a, Vec& b) {
#if defined(__AVX512VNNI__)
    const __m512 first = (__m512)a, second = (__m512)b;
    a = (Vec)_mm512_shuffle_f32x4(first, second, 0x88);
    b = (Vec)_mm512_shuffle_f32x4(first, second, 0xdd);
#endif
  }
};
template <>
struct Form<uint8_t> {  // 4 bits
  typedef int8_t Input;
  static constexpr int32_t kMore = 8;
  static constexpr int64_t kBytes = kGroup / 2 * kColumns, kTogether = 4;
  static constexpr bool kInHalves = sizeof(Value) == 2;
  static Vec scales(const uint16_t* from) { return load_half(from); }
  static void turn(Vec&, Vec&) {}
};

// Without dot products: sums of products of four 4-bit weights, 0 to 15, and inputs, in two int16 a
// lane; and their sums.
#if defined(__AVX512F__)
STREE_INLINE VecI32 added_in_halves(VecI32 sum, VecI32 a, VecI32 b) {
  return (VecI32)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)b, (__m512i)a));
}
STREE_INLINE VecI32 of_halves(VecI32 sum) {
  return (VecI32)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
}
#elif defined(__AVX2__)
STREE_INLINE VecI32 added_in_halves(VecI32 sum, VecI32 a, VecI32 b) {
  return (VecI32)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)b, (__m256i)a));
}
STREE_INLINE VecI32 of_halves(VecI32 sum) {
  return (VecI32)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
}
#else
STREE_INLINE VecI32 added_in_halves(VecI32 sum, VecI32 a, VecI32 b) {
  const int8x16_t c = (int8x16_t)a, d = (int8x16_t)b;
  return (VecI32)vaddq_s16(
      (int16x8_t)sum, vpaddq_s16(vmull_s8(vget_low_s8(c), vget_low_s8(d)), vmull_high_s8(c, d)));
}
STREE_INLINE VecI32 of_halves(VecI32 sum) { return (VecI32)vpaddlq_s16((int16x8_t)sum); }
#endif

// A group of a row.
template <typename Input>
struct Piece {
  Input values[kGroup];
  float scale;
  int32_t start;  // of its sums
};

// Rows `[groups, rows]` for weights of a type: those of a group are neighbours.
template <typename W>
struct Rounded {
  typedef typename Form<W>::Input Input;
  int64_t rows, groups;
  std::vector<Piece<Input>> pieces = std::vector<Piece<Input>>(rows * groups);

  // Rounds a row, with zeros after its last input.
  void round(const float* from, int64_t row, int64_t inputs) {
    const int64_t whole = inputs / kGroup;
    for (int64_t g = 0; g < whole; ++g) round_group(from + g * kGroup, row, g);
    if (whole == groups) return;
    float last[kGroup] = {};
    std::copy(from + whole * kGroup, from + inputs, last);
    round_group(last, row, whole);
  }

 private:
  void round_group(const float* from, int64_t row, int64_t group) {
    constexpr int64_t kVecs = kGroup / kLanes;
    constexpr int32_t kLeast = 27 << 23, kInfinite = 255 << 23;  // 2^-100
    VecI32 most = {};
    for (int64_t v = 0; v < kVecs; ++v) {
      const VecI32 bits = (VecI32)load(from + v * kLanes) & 0x7fffffff;
      most = bits > most ? bits : most;
    }
    int32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits = std::max(bits, most[i]);
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    Piece<Input>& piece = pieces[group * rows + row];
    if (bits < kLeast || bits >= kInfinite) {
      piece = {{}, bits < kLeast ? 0.0f : NAN, 0};
      return;
    }
    int32_t sum = 0;
    piece.scale = largest / 127.0f;
    const Vec magic = splat(12582912.0f);  // adding 1.5 * 2^23 rounds, halves to even
    for (int64_t v = 0; v < kVecs; ++v) {
      const Vec shifted = load(from + v * kLanes) / splat(piece.scale) + magic;
      const VecI32 whole = (VecI32)shifted - (VecI32)magic;
      for (int i = 0; i < kLanes; ++i) {
        piece.values[v * kLanes + i] = static_cast<Input>(whole[i]);
        sum += whole[i];
      }
    }
    piece.start = -Form<W>::kMore * sum;
  }
};

// Sums of R rows with V vectors of columns of a group.
template <int R, int V, typename W>
STREE_INLINE void sums_of(VecI32 (&sums)[R][V], const Piece<typename Form<W>::Input>* __restrict x,
                          const W* __restrict weights, int column) {
  constexpr bool kInHalves = Form<W>::kInHalves;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[r][v] = (kInHalves ? 0 : x[r].start) - VecI32{};
#pragma GCC unroll 16
  for (int64_t k = 0; k < kGroup; k += 4 / sizeof x->values[0]) {
    VecI32 w[V];
    weights_of(weights, k, column, w);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t values;
      std::memcpy(&values, x[r].values + k, sizeof values);
      const VecI32 input = values - VecI32{};
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        if constexpr (kInHalves)
          sums[r][v] = added_in_halves(sums[r][v], input, w[v]);
        else
          sums[r][v] = added(sums[r][v], input, w[v]);
        keep(sums[r][v]);
      }
    }
  }
  if constexpr (kInHalves)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = of_halves(sums[r][v]) + x[r].start;
}

// Adds the products of R rows with a group of a block to y [R, 32]. Inlined, gcc 12 keeps the sums
// in memory.
template <int R, int V, typename W>
__attribute__((noinline)) void group(const Piece<typename Form<W>::Input>* __restrict x,
                                     const W* __restrict weights, const uint16_t* __restrict scales,
                                     float* __restrict y) {
  for (int column = 0; column < kColumns; column += V * kLanes) {
    VecI32 sums[R][V];
    sums_of<R, V>(sums, x, weights, column);
    Vec factors[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) factors[v] = Form<W>::scales(scales + column + v * kLanes);
    Form<W>::turn(factors[0], factors[1]);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        float* out = y + r * kColumns + column + v * kLanes;
        const Vec scale = splat(x[r].scale) * factors[v];
        store(out, fused(__builtin_convertvector(sums[r][v], Vec), scale, load(out)));
      }
  }
}

// Some of the rows times a block of groups with scales [groups, 32], into y [rows, 32].
template <typename W>
inline void product(const Rounded<W>& x, int64_t first, int64_t rows, const W* weights,
                    const uint16_t* scales, float* y) {
  std::fill(y, y + rows * kColumns, 0.0f);
  for (int64_t g = 0; g < x.groups; ++g) {
    for (int64_t byte = 0; byte < Form<W>::kBytes; byte += 64)
      __builtin_prefetch(weights + kPrefetch + byte);
    for_each_tile(rows, [&](int64_t row, auto height) {
      constexpr int R = decltype(height)::value;
      // One or two rows take all columns at once.
      group<R, R <= 2 ? kColumns / kLanes : kVectors, W>(&x.pieces[g * x.rows + first + row],
                                                         weights, scales, y + row * kColumns);
    });
    weights += Form<W>::kBytes;
    scales += kColumns;
  }
  for (float* row = y; row < y + rows * kColumns; row += kColumns) {
    Vec a = load(row), b = load(row + kLanes);
    Form<W>::turn(a, b);
    Form<W>::turn(a, b);
    store(row, a);
    store(row + kLanes, b);
  }
}

}  // namespace stree
