// Root-mean-square norms with their neighbours in a layer, on a CPU: each row by itself.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "../native/math.h"
#include "../native/parallel.h"
#include "../native/shapes.h"

namespace ffi = xla::ffi;
namespace stree {
namespace {

// The factor of a row, or of a group of it.
Vec factor(const Wide& squares, int64_t size, float epsilon) {
  return splat(1 / std::sqrt(sum(squares) / size + epsilon));
}

ffi::Error RMSNorm(ffi::ThreadPool pool, F32 x, F32 weight, Result normed, float epsilon) {
  const auto xs = x.dimensions();
  if (xs.size() != 2) return refused("rms_norm");
  const int64_t rows = xs[0], size = xs[1];
  if (size % kWidth || !is(weight.dimensions(), {size}) || !is(normed->dimensions(), {rows, size}))
    return refused("rms_norm");
  for_each_row(pool, rows, size, kRowTask, [&](int64_t row) {
    const float* in = x.typed_data() + row * size;
    float* out = normed->typed_data() + row * size;
    Wide squares = {};
    sum_up(squares, size,
           [&](int64_t i, Vec sums) { return fused(load(in + i), load(in + i), sums); });
    const Vec by = factor(squares, size, epsilon);
    for (int64_t i = 0; i < size; i += kLanes)
      store(out + i, load(in + i) * by * load(weight.typed_data() + i));
  });
  return ffi::Error::Success();
}

// Mean squares [rows, parts] of a deferred norm, or [0]: the output is not scaled.
ffi::Error AddRMSNorm(ffi::ThreadPool pool, F32 residual, F32 output, F32 mean_squares, F32 weight,
                      Result total, Result normed, float multiplier, float epsilon,
                      float deferred_epsilon) {
  const auto rs = residual.dimensions(), ms = mean_squares.dimensions();
  if (rs.size() != 2) return refused("add_rms_norm");
  const int64_t rows = rs[0], size = rs[1];
  const bool is_deferred = ms.size() == 2;
  const int64_t parts = is_deferred ? ms[1] : 0;
  if (size % kWidth || !is(output.dimensions(), {rows, size}) ||
      !(is_deferred ? is(ms, {rows, parts}) : is(ms, {0})) || !is(weight.dimensions(), {size}) ||
      !is(total->dimensions(), {rows, size}) || !is(normed->dimensions(), {rows, size}))
    return refused("add_rms_norm");
  for_each_row(pool, rows, size, kRowTask, [&](int64_t row) {
    float scale = multiplier;
    if (is_deferred) {
      const float* squares = mean_squares.typed_data() + row * parts;
      float mean = 0;
      for (int64_t i = 0; i < parts; ++i) mean += squares[i];
      scale /= std::sqrt(mean + deferred_epsilon);
    }
    const float* before = residual.typed_data() + row * size;
    const float* added = output.typed_data() + row * size;
    float* after = total->typed_data() + row * size;
    float* out = normed->typed_data() + row * size;
    Wide squares = {};
    sum_up(squares, size, [&](int64_t i, Vec sums) {
      const Vec value = fused(load(added + i), splat(scale), load(before + i));
      store(after + i, value);
      return fused(value, value, sums);
    });
    const Vec by = factor(squares, size, epsilon);
    for (int64_t i = 0; i < size; i += kLanes)
      store(out + i, load(after + i) * by * load(weight.typed_data() + i));
  });
  return ffi::Error::Success();
}

// A norm of each group before the gate, after it, or none: then the weight is [0].
ffi::Error GatedRMSNorm(ffi::ThreadPool pool, F32 y, F32 gate, F32 weight, Result result,
                        float epsilon, int64_t groups, int64_t gate_start, int64_t gate_first,
                        int64_t is_sigmoid) {
  const auto ys = y.dimensions(), gs = gate.dimensions();
  if (ys.size() != 2 || gs.size() != 2) return refused("gated_rms_norm");
  const int64_t rows = ys[0], size = ys[1], columns = gs[1];
  const bool has_norm = weight.element_count() != 0;
  if (groups < 1 || size % (groups * kWidth) || gs[0] != rows || gate_start < 0 ||
      gate_start > columns - size || (has_norm && !is(weight.dimensions(), {size})) ||
      !is(result->dimensions(), {rows, size}))
    return refused("gated_rms_norm");
  const int64_t each = size / groups;
  const auto activated = [&](const float* z) {
    return is_sigmoid ? sigmoid(load(z)) : silu(load(z));
  };
  for_each_row(pool, rows, size, kRowTask, [&](int64_t row) {
    for (int64_t first = 0; first < size; first += each) {
      const float* in = y.typed_data() + row * size + first;
      const float* z = gate.typed_data() + row * columns + gate_start + first;
      float* out = result->typed_data() + row * size + first;
      Wide squares = {};
      sum_up(squares, each, [&](int64_t i, Vec sums) {
        Vec value = load(in + i);
        if (gate_first) value *= activated(z + i);
        store(out + i, value);
        return fused(value, value, sums);
      });
      if (has_norm) {
        const Vec by = factor(squares, each, epsilon);
        for (int64_t i = 0; i < each; i += kLanes)
          store(out + i, load(out + i) * by * load(weight.typed_data() + first + i));
      }
      if (!gate_first)
        for (int64_t i = 0; i < each; i += kLanes) store(out + i, load(out + i) * activated(z + i));
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

extern "C" STREE_EXPORT XLA_FFI_Error* stree_jax_rms_norm(XLA_FFI_CallFrame* frame);
extern "C" STREE_EXPORT XLA_FFI_Error* stree_jax_add_rms_norm(XLA_FFI_CallFrame* frame);
extern "C" STREE_EXPORT XLA_FFI_Error* stree_jax_gated_rms_norm(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(stree_jax_rms_norm, stree::RMSNorm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Ret<stree::F32>()
                                  .Attr<float>("epsilon"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(stree_jax_add_rms_norm, stree::AddRMSNorm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Ret<stree::F32>()
                                  .Ret<stree::F32>()
                                  .Attr<float>("multiplier")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("deferred_epsilon"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(stree_jax_gated_rms_norm, stree::GatedRMSNorm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Ret<stree::F32>()
                                  .Attr<float>("epsilon")
                                  .Attr<int64_t>("groups")
                                  .Attr<int64_t>("gate_start")
                                  .Attr<int64_t>("gate_first")
                                  .Attr<int64_t>("is_sigmoid"));
