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
  Vec sums[kLanes] = {}, ins[kLanes];
  const Vec kept = splat(token.decay);
  for (int r = 0; r < kLanes; ++r) ins[r] = splat(token.in[r]);
  for (int64_t s = 0; s < states; s += kLanes) {
    Vec out_of = {}, into = {};
    if (kReads) out_of = load(C + s);
    if (kWrites) into = load(token.B + s);
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) {
      const Vec row = load(from + r * states + s);
      if (kReads) sums[r] = fused(row, out_of, sums[r]);
      if (kWrites) store(to + r * states + s, fused(row, kept, ins[r] * into));
    }
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
