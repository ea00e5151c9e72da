// Sums over numbers of a row, with the same bits on every machine.
//
// Number i of a row is summed in lane i % 16, whatever the number of lanes in the machine's
// vectors. Then lanes that are 8 apart are added, then 4, 2 and 1. Sizes are multiples of 16.
#pragma once

#include "vectors.h"

namespace stree {

constexpr int kWidth = 16, kParts = kWidth / kLanes;

struct Wide {
  Vec part[kParts];
};

// The sums of lanes that belong together in the machine's vectors.
STREE_INLINE Vec folded(Wide values) {
#pragma GCC unroll 4
  for (int half = kParts / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) values.part[i] += values.part[i + half];
  return values.part[0];
}

STREE_INLINE float sum(const Wide& values) {
  float lanes[kLanes];
  store(lanes, folded(values));
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// Adds to `total` what add(i, sums) makes of the sums of lanes for the numbers from i on.
template <typename Add>
STREE_INLINE void sum_up(Wide& total, int64_t size, const Add& add) {
  for (int64_t i = 0; i < size; i += kWidth)
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) total.part[p] = add(i + p * kLanes, total.part[p]);
}

// The inner product of `size` numbers.
inline float dot(const float* a, const float* b, int64_t size) {
  Wide total = {};
  sum_up(total, size, [&](int64_t i, Vec sums) { return fused(load(a + i), load(b + i), sums); });
  return sum(total);
}

template <int... I>
struct Lanes {};
template <int N, int... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <int... I>
struct Count<0, I...> {
  using type = Lanes<I...>;
};

// Sums of lanes that are `Step` apart: this bit of a lane's number says whether it is of `b`.
template <int Step, int... I>
STREE_INLINE Vec paired(Vec a, Vec b, Lanes<I...>) {
  return __builtin_shufflevector(a, b, ((I & Step) ? kLanes + (I & ~Step) : I)...) +
         __builtin_shufflevector(a, b, ((I & Step) ? kLanes + I : (I | Step))...);
}

// One vector with what is left of kLanes vectors, each in the order of `sum`.
template <int Step = kLanes / 2>
STREE_INLINE Vec sums_of(Vec* values) {
  if constexpr (Step == 0) {
    return values[0];
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < Step; ++i)
      values[i] = paired<Step>(values[i], values[i + Step], typename Count<kLanes>::type());
    return sums_of<Step / 2>(values);
  }
}

STREE_INLINE Vec sums_of(const Wide* values) {
  Vec halves[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) halves[i] = folded(values[i]);
  return sums_of(halves);
}

// Parts whose sums for kLanes rows stay in registers: AVX2 takes one after the other.
constexpr int kTogether = kLanes == 8 ? 1 : kParts;

// Inner products of kLanes rows with each of some vectors; row(r) is where a row begins.
template <int kVectors, typename Row>
STREE_INLINE void products(const Row& row, const float* const (&with)[kVectors], int64_t size,
                           Vec* found) {
  constexpr int kRows = kLanes / kVectors;
  Wide sums[kVectors][kLanes];
  for (int part = 0; part < kParts; part += kTogether)
#pragma GCC unroll 2
    for (int first = 0; first < kLanes; first += kRows) {
      Vec own[kVectors][kRows][kTogether] = {};
      for (int64_t i = 0; i < size; i += kWidth)
#pragma GCC unroll 4
        for (int p = 0; p < kTogether; ++p) {
          const int64_t at = i + (part + p) * kLanes;
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            const Vec values = load(row(first + r) + at);
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v)
              own[v][r][p] = fused(values, load(with[v] + at), own[v][r][p]);
          }
        }
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
          for (int p = 0; p < kTogether; ++p) sums[v][first + r].part[part + p] = own[v][r][p];
    }
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) found[v] = sums_of(sums[v]);
}

}  // namespace stree
