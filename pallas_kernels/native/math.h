// exp and what is made of it, on vectors of float32.
#pragma once

#include <cmath>
#include <cstring>

#include "vectors.h"

namespace stree {

STREE_INLINE Vec select(VecI32 is_first, Vec first, Vec second) {
  return (Vec)((is_first & (VecI32)first) | (~is_first & (VecI32)second));
}

// exp(x) to about one unit in the last place; 0 below -87, infinite above 88.7.
STREE_INLINE Vec exp(Vec x) {
  const Vec low = splat(-87.3f), high = splat(88.72f);
  const Vec clipped = select(x < low, low, select(x > high, high, x));
  // exp(x) = 2^n exp(r), with n the nearest integer to x / log 2. Adding 1.5 * 2^23 rounds.
  const Vec magic = splat(12582912.0f);
  const Vec shifted = clipped * splat(1.44269504f) + magic;
  const Vec n = shifted - magic;
  Vec r = clipped - n * splat(0.693145752f);
  r = r - n * splat(1.42860677e-6f);
  Vec p = splat(1.98756915e-4f);
  p = p * r + splat(1.39819995e-3f);
  p = p * r + splat(8.33345187e-3f);
  p = p * r + splat(4.16657959e-2f);
  p = p * r + splat(1.66666655e-1f);
  p = p * r + splat(5.00000000e-1f);
  p = p * r * r + r + splat(1.0f);
  // 2^n by its exponent, in two factors: n may be 128.
  const VecI32 whole = (VecI32)shifted - (VecI32)magic;
  const VecI32 half = whole >> 1;
  const Vec scale = (Vec)((half + 127) << 23), rest = (Vec)((whole - half + 127) << 23);
  const Vec value = p * scale * rest;
  return select(x < low, Vec{}, select(x > high, splat(INFINITY), select(x == x, value, x)));
}

STREE_INLINE Vec silu(Vec x) { return x / (splat(1.0f) + exp(-x)); }

STREE_INLINE float exp1(float x) { return exp(splat(x))[0]; }

// The sum of all lanes, halves first.
STREE_INLINE float sum(Vec values) {
  float lanes[kLanes];
  store(lanes, values);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// The inner product of `size` numbers, a multiple of kLanes.
inline float dot(const float* a, const float* b, int64_t size) {
  Vec total = {};
  for (int64_t i = 0; i < size; i += kLanes) total += load(a + i) * load(b + i);
  return sum(total);
}

}  // namespace stree
