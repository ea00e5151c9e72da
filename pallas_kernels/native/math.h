// exp, log and what is made of them, on vectors of float32.
#pragma once

#include <cmath>
#include <cstring>

#include "reduce.h"

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
  const Vec shifted = fused(clipped, splat(1.44269504f), magic);
  const Vec n = shifted - magic;
  Vec r = fused(n, splat(-0.693145752f), clipped);
  r = fused(n, splat(-1.42860677e-6f), r);
  Vec p = splat(1.98756915e-4f);
  p = fused(p, r, splat(1.39819995e-3f));
  p = fused(p, r, splat(8.33345187e-3f));
  p = fused(p, r, splat(4.16657959e-2f));
  p = fused(p, r, splat(1.66666655e-1f));
  p = fused(p, r, splat(5.00000000e-1f));
  p = fused(p * r, r, r) + splat(1.0f);
  // 2^n by its exponent, in two factors: n may be 128.
  const VecI32 whole = (VecI32)shifted - (VecI32)magic;
  const VecI32 half = whole >> 1;
  const Vec scale = (Vec)((half + 127) << 23), rest = (Vec)((whole - half + 127) << 23);
  const Vec value = p * scale * rest;
  return select(x < low, Vec{}, select(x > high, splat(INFINITY), select(x == x, value, x)));
}

STREE_INLINE Vec silu(Vec x) { return x / (splat(1.0f) + exp(-x)); }

STREE_INLINE Vec sigmoid(Vec x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

STREE_INLINE float exp1(float x) { return exp(splat(x))[0]; }

// log(x) of normal numbers above 0, to about one unit in the last place. C's own function has other
// bits on other machines.
STREE_INLINE Vec log(Vec x) {
  // x = 2^n (1 + r), with 1 + r from sqrt(1/2) to sqrt(2).
  const VecI32 bits = (VecI32)x - 0x3f3504f3;
  const Vec n = __builtin_convertvector(bits >> 23, Vec);
  const Vec r = (Vec)((bits & 0x7fffff) + 0x3f3504f3) - splat(1.0f), square = r * r;
  Vec p = splat(7.0376836292e-2f);
  p = fused(p, r, splat(-1.1514610310e-1f));
  p = fused(p, r, splat(1.1676998740e-1f));
  p = fused(p, r, splat(-1.2420140846e-1f));
  p = fused(p, r, splat(1.4249322787e-1f));
  p = fused(p, r, splat(-1.6668057665e-1f));
  p = fused(p, r, splat(2.0000714765e-1f));
  p = fused(p, r, splat(-2.4999993993e-1f));
  p = fused(p, r, splat(3.3333331174e-1f));
  Vec low = fused(n, splat(-2.12194440e-4f), r * square * p);
  low = fused(square, splat(-0.5f), low);
  const Vec value = fused(n, splat(0.693359375f), r + low);
  return select(x == x, value, x);
}

STREE_INLINE float log1(float x) { return log(splat(x))[0]; }

// log(1 + exp(x)). What is lost of a small y in 1 + y comes back by a factor (Goldberg 1991,
// theorem 4).
STREE_INLINE Vec softplus(Vec x) {
  const Vec one = splat(1.0f), y = exp(select(x > Vec{}, -x, x)), u = one + y;
  const Vec logarithm = select(u == one, y, log(u) * (y / (u - one)));
  return select(x < Vec{}, Vec{}, x) + logarithm;
}

}  // namespace stree
