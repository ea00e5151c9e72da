// Sizes of tiles of rows, whose sums stay in registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../native/vectors.h"

namespace stree {

// Vectors of columns and most rows: AVX-512 has 32 registers of 16 lanes, AVX2 16 of 8, NEON 32
// of 4.
#if defined(__AVX512F__)
constexpr int kVectors = 2, kRows = 13;
#elif defined(__AVX2__)
constexpr int kVectors = 2, kRows = 6;
#else
constexpr int kVectors = 4, kRows = 6;
#endif

constexpr int64_t kPrefetch = 4096;  // bytes ahead

// Calls run(row, height) for tiles of nearly equal height, a type's value: 13 rows are 5, 4 and 4.
template <typename Run>
STREE_INLINE void for_each_tile(int64_t rows, const Run& run) {
  int64_t height = 0, tiles_left = (rows + kRows - 1) / kRows;
  for (int64_t row = 0; row < rows; row += height) {
    height = (rows - row + tiles_left - 1) / tiles_left;
    --tiles_left;
    switch (height) {
#define STREE_CASE(R)                                                     \
  case R:                                                                 \
    if constexpr (R <= kRows) run(row, std::integral_constant<int, R>()); \
    break;
      // clang-format off
      STREE_CASE(1) STREE_CASE(2) STREE_CASE(3) STREE_CASE(4) STREE_CASE(5) STREE_CASE(6)
      STREE_CASE(7) STREE_CASE(8) STREE_CASE(9) STREE_CASE(10) STREE_CASE(11) STREE_CASE(12)
      STREE_CASE(13)
      // clang-format on
#undef STREE_CASE
    }
  }
}

}  // namespace stree
