// How the state of a head [P, S] goes from token to token: the same in trees, replay and sequences.
#pragma once

#include <cstdint>
#include <vector>

#include "reduce.h"

namespace stree {

// What a token does to kLanes rows of a state: each decays, and `in` of the row times B is added.
struct Token {
  float decay;
  const float* B;  // [states]
  float in[kLanes];
};

// Multiplies kLanes rows of a state with C, and writes the rows after the token.
template <bool kReads, bool kWrites>
void step(const float* from, const float* C, float* read, const Token& token, float* to,
          int64_t states) {
  constexpr int kRows = together(1);
  Vec sums[kLanes], ins[kLanes];
  const Vec kept = splat(token.decay);
  for (int r = 0; r < kLanes; ++r) ins[r] = splat(token.in[r]);
#pragma GCC unroll 4
  for (int first = 0; first < kLanes; first += kRows) {
    Wide own[kRows] = {};
    for (int64_t i = 0; i < states; i += kWidth)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        const int64_t s = i + p * kLanes;
        Vec out_of = {}, into = {};
        if (kReads) out_of = load(C + s);
        if (kWrites) into = load(token.B + s);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const int64_t at = (first + r) * states + s;
          const Vec row = load(from + at);
          if (kReads) own[r].part[p] = fused(row, out_of, own[r].part[p]);
          if (kWrites) store(to + at, fused(row, kept, ins[first + r] * into));
        }
      }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) sums[first + r] = folded(own[r]);
  }
  if (kReads) store(read, sums_of(sums));
}

// Writes kLanes rows of a state after some tokens.
inline void replay(const float* from, float* to, const std::vector<Token>& tokens, int64_t states) {
  for (int64_t s = 0; s < states; s += kLanes) {
    Vec rows[kLanes];
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) rows[r] = load(from + r * states + s);
    for (const Token& token : tokens) {
      const Vec into = load(token.B + s), kept = splat(token.decay);
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) rows[r] = fused(rows[r], kept, splat(token.in[r]) * into);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) store(to + r * states + s, rows[r]);
  }
}

}  // namespace stree
