// The weighted sum of a token's experts, on a CPU: in their order, whatever the number of tokens.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../native/parallel.h"
#include "../native/shapes.h"
#include "../native/vectors.h"

namespace ffi = xla::ffi;
namespace stree {
namespace {

// Outputs of the experts [tokens, A, M], weights [tokens, A].
ffi::Error WeightedSum(ffi::ThreadPool pool, F32 by_choice, F32 weights, Result sums) {
  const auto xs = by_choice.dimensions();
  if (xs.size() != 3 || !is(weights.dimensions(), {xs[0], xs[1]}) ||
      !is(sums->dimensions(), {xs[0], xs[2]}))
    return refused("weighted_sum");
  const int64_t choices = xs[1], size = xs[2];
  for_each_row(pool, xs[0], choices * size, kRowTask, [&](int64_t t) {
    float* __restrict out = sums->typed_data() + t * size;
    std::fill_n(out, size, 0.0f);
    for (int64_t a = 0; a < choices; ++a) {
      const float weight = weights.typed_data()[t * choices + a];
      const float* in = by_choice.typed_data() + (t * choices + a) * size;
      for (int64_t i = 0; i < size; ++i) out[i] = std::fma(weight, in[i], out[i]);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

extern "C" STREE_EXPORT XLA_FFI_Error* stree_jax_weighted_sum(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    stree_jax_weighted_sum, stree::WeightedSum,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<stree::F32>().Arg<stree::F32>().Ret<stree::F32>());
