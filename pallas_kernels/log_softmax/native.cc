// Log-probabilities of rows of logits, on a CPU: each row in one order of sums.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "../native/math.h"
#include "../native/parallel.h"
#include "../native/shapes.h"

namespace ffi = xla::ffi;
namespace stree {
namespace {

constexpr int64_t kPart = 1024;  // numbers of a sum

ffi::Error LogSoftmax(ffi::ThreadPool pool, F32 logits, Result log_probs) {
  const auto shape = logits.dimensions();
  if (shape.size() != 2 || !is(log_probs->dimensions(), {shape[0], shape[1]}))
    return refused("log_softmax");
  const int64_t rows = shape[0], size = shape[1];
  for_each_row(pool, rows, size, kRowTask, [&](int64_t row) {
    const float* in = logits.typed_data() + row * size;
    float* out = log_probs->typed_data() + row * size;
    float largest = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < size; ++i) largest = std::max(largest, in[i]);
    float total = 0;
    for (int64_t part = 0; part < size; part += kPart) {
      const int64_t end = std::min(part + kPart, size);
      Wide sums = {};
      sum_up(sums, end - part, [&](int64_t i, Vec sums) {
        const float* from = in + part + i;
        float last[kLanes];
        if (from + kLanes > in + end) {
          std::fill_n(last, kLanes, -std::numeric_limits<float>::infinity());
          if (from < in + end) std::copy(from, in + end, last);
          from = last;
        }
        return sums + exp(load(from) - splat(largest));
      });
      total += sum(sums);
    }
    const float logarithm = log1(total);
    for (int64_t i = 0; i < size; ++i) out[i] = (in[i] - largest) - logarithm;
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

extern "C" STREE_EXPORT XLA_FFI_Error* stree_jax_log_softmax(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    stree_jax_log_softmax, stree::LogSoftmax,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<stree::F32>().Ret<stree::F32>());
