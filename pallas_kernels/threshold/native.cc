// The search for a threshold, on a CPU: bit by bit, a pass over a row in the nearest cache for each.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../native/math.h"
#include "../native/parallel.h"
#include "../native/shapes.h"

namespace ffi = xla::ffi;
namespace stree {
namespace {

constexpr int kSums = 2;         // that are added at once
constexpr int64_t kTask = 4096;  // values of a task

float with_bits(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The sum of the summands whose values are at least the threshold, or how many these values are;
// `size` is whole.
template <bool kCounts>
float sum_from(float threshold, const float* values, const float* summands, int64_t size) {
  const Vec low = splat(threshold);
  Wide sums[kSums] = {};
  for (int64_t i = 0; i < size; i += kSums * kWidth)
#pragma GCC unroll 2
    for (int j = 0; j < kSums; ++j)
      sum_up(sums[j], kWidth, [&](int64_t lane, Vec sums) {
        const int64_t at = i + j * kWidth + lane;
        const Vec summand = kCounts ? splat(1.0f) : load(summands + at);
        return sums + (Vec)((load(values + at) >= low) & (VecI32)summand);
      });
  return sum(sums[0]) + sum(sums[1]);
}

// Summands [rows, V], or [0, V]: ones.
ffi::Error LargestThreshold(ffi::ThreadPool pool, F32 values, F32 summands, F32 least,
                            Result thresholds, int64_t is_share) {
  const auto vs = values.dimensions(), ss = summands.dimensions();
  if (vs.size() != 2 || ss.size() != 2 || ss[1] != vs[1] || (ss[0] != vs[0] && ss[0] != 0) ||
      !is(least.dimensions(), {vs[0]}) || !is(thresholds->dimensions(), {vs[0]}))
    return ffi::Error::InvalidArgument("stree_jax largest_threshold: shapes do not fit");
  const int64_t rows = vs[0], size = vs[1], step = kSums * kWidth;
  const int64_t whole = (size + step - 1) / step * step;
  const bool counts = ss[0] == 0;
  for_each_row(pool, rows, size, kTask, [&](int64_t row) {
    // Copies of whole vectors: what is filled up is below every threshold.
    std::vector<float> own(whole, -1.0f), added(counts ? 0 : whole);
    std::copy_n(values.typed_data() + row * size, size, own.data());
    if (!counts) std::copy_n(summands.typed_data() + row * size, size, added.data());
    const auto sum = counts ? sum_from<true> : sum_from<false>;
    const auto from = [&](int32_t tried) {
      return sum(with_bits(tried), own.data(), added.data(), whole);
    };
    const float needed = least.typed_data()[row] * (is_share ? from(0) : 1);
    const auto passes = [&](int32_t tried) { return from(tried) >= needed; };
    int32_t bits = 0;
    const bool is_there = passes(1);  // else no threshold will do, and there is nothing to search
    for (int shift = 30; is_there && shift >= 0; --shift)
      if (passes(bits + (1 << shift))) bits += 1 << shift;
    thresholds->typed_data()[row] = with_bits(bits);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

extern "C" STREE_EXPORT XLA_FFI_Error* stree_jax_largest_threshold(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(stree_jax_largest_threshold, stree::LargestThreshold,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Ret<stree::F32>()
                                  .Attr<int64_t>("is_share"));
