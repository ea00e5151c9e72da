// Sums along the lanes of vectors.
#pragma once

#include "vectors.h"

namespace stree {

template <int... I>
struct Lanes {};
template <int N, int... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <int... I>
struct Count<0, I...> {
  using type = Lanes<I...>;
};

// Sums of pairs of lanes: bit `Step` of a lane's number says whether it is of `a` or of `b`.
template <int Step, int... I>
STREE_INLINE Vec paired(Vec a, Vec b, Lanes<I...>) {
  return __builtin_shufflevector(a, b, ((I & Step) ? kLanes + (I & ~Step) : I)...) +
         __builtin_shufflevector(a, b, ((I & Step) ? kLanes + I : (I | Step))...);
}

// One vector with the sums of kLanes vectors.
template <int Step = 1>
STREE_INLINE Vec sums_of(Vec* values) {
  if constexpr (Step == kLanes) {
    return values[0];
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / Step / 2; ++i)
      values[i] = paired<Step>(values[2 * i], values[2 * i + 1], typename Count<kLanes>::type());
    return sums_of<2 * Step>(values);
  }
}

}  // namespace stree
