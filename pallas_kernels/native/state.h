// How the state of a head [P, S] goes from token to token: the same in trees, replay and sequences.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "reduce.h"

namespace stree {

// What a token does to kLanes rows of a state: each decays, and `in` of the row times B is added.
struct Token {
  const float* decays;  // one, or [states] if the numbers of a row have their own
  const float* B;       // [states]
  float in[kLanes];
};

// The decays of the numbers of a row from s on.
template <bool kApart>
STREE_INLINE Vec decays(const Token& token, int64_t s) {
  return kApart ? load(token.decays + s) : splat(*token.decays);
}

// Writes kLanes rows of a state after a token, and what C reads of the rows before it.
template <bool kReads, bool kApart = false>
void step(const float* from, const float* C, float* read, const Token& token, float* to,
          int64_t states) {
  constexpr int kRows = kLanes == 16 ? 16 : 4;  // whose sums stay in registers
  Wide sums[kLanes];
#pragma GCC unroll 4
  for (int first = 0; first < kLanes; first += kRows) {
    Wide own[kRows] = {};
    Vec ins[kRows];
    for (int r = 0; r < kRows; ++r) ins[r] = splat(token.in[first + r]);
    for (int64_t i = 0; i < states; i += kWidth)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        const int64_t s = i + p * kLanes;
        const Vec out_of = kReads ? load(C + s) : Vec{}, into = load(token.B + s);
        const Vec kept = decays<kApart>(token, s);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const int64_t at = (first + r) * states + s;
          const Vec row = load(from + at);
          if (kReads) own[r].part[p] = fused(row, out_of, own[r].part[p]);
          store(to + at, fused(row, kept, ins[r] * into));
        }
      }
    std::copy_n(own, kRows, sums + first);
  }
  if (kReads) store(read, sums_of(sums));
}

// Writes kLanes rows of a state after some tokens.
template <bool kApart = false>
void replay(const float* from, float* to, const std::vector<Token>& tokens, int64_t states) {
  for (int64_t s = 0; s < states; s += kLanes) {
    Vec rows[kLanes];
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) rows[r] = load(from + r * states + s);
    for (const Token& token : tokens) {
      const Vec into = load(token.B + s), kept = decays<kApart>(token, s);
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) rows[r] = fused(rows[r], kept, splat(token.in[r]) * into);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) store(to + r * states + s, rows[r]);
  }
}

}  // namespace stree
