// The scan of a whole sequence, on a CPU: one step after the other, a head's state in the nearest
// cache.
//
// The state is held [S, P] meanwhile: a vector has channels, so an output is no sum over lanes.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "../native/math.h"
#include "../native/parallel.h"
#include "../native/shapes.h"

namespace ffi = xla::ffi;
namespace stree {
namespace {

constexpr int kVectors = 4;  // of channels at once

// Sizes as in the glossary: T steps, H heads of P channels, G groups of S states.
struct Sequence {
  int64_t steps, heads, channels, groups, states;
  const float *x, *dt, *A, *B, *C, *D, *state;
  float *y, *new_state;

  // Channels [first, first + V * kLanes) of head h of row b.
  template <int V>
  void run(int64_t b, int64_t h, int64_t first, float* held) const {
    constexpr int64_t kWidth = V * kLanes;
    const int64_t g = h / (heads / groups), at = ((b * heads + h) * channels + first) * states;
    for (int64_t s = 0; s < states; ++s)
      for (int64_t p = 0; p < kWidth; ++p) held[s * kWidth + p] = state[at + p * states + s];
    Vec skip[V];
    for (int v = 0; v < V; ++v) skip[v] = load(D + h * channels + first + v * kLanes);
    for (int64_t t = 0; t < steps; ++t) {
      const int64_t step = b * steps + t;
      const float width = dt[step * heads + h];
      const Vec decay = splat(exp1(width * A[h]));
      const float* in = x + (step * heads + h) * channels + first;
      const float* b_row = B + (step * groups + g) * states;
      const float* c_row = C + (step * groups + g) * states;
      Vec written[V], sums[V] = {};
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) written[v] = load(in + v * kLanes) * splat(width);
      for (int64_t s = 0; s < states; ++s) {
        const Vec into = splat(b_row[s]), out_of = splat(c_row[s]);
        float* row = held + s * kWidth;
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          const Vec value = load(row + v * kLanes) * decay + into * written[v];
          store(row + v * kLanes, value);
          sums[v] += out_of * value;
        }
      }
      float* out = y + (step * heads + h) * channels + first;
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v)
        store(out + v * kLanes, sums[v] + skip[v] * load(in + v * kLanes));
    }
    for (int64_t s = 0; s < states; ++s)
      for (int64_t p = 0; p < kWidth; ++p) new_state[at + p * states + s] = held[s * kWidth + p];
  }

  void head(int64_t b, int64_t h) const {
    std::vector<float> held(kVectors * kLanes * states);
    for (int64_t first = 0; first < channels;) {
      const bool is_wide = channels - first >= kVectors * kLanes;
      is_wide ? run<kVectors>(b, h, first, held.data()) : run<1>(b, h, first, held.data());
      first += (is_wide ? kVectors : 1) * kLanes;
    }
  }
};

ffi::Error SSD(ffi::ThreadPool pool, F32 x, F32 dt, F32 A, F32 B, F32 C, F32 D, F32 state, Result y,
               Result new_state) {
  const auto xs = x.dimensions(), bs = B.dimensions();
  if (xs.size() != 4 || bs.size() != 4)
    return ffi::Error::InvalidArgument("stree_jax ssd: shapes do not fit");
  const int64_t batch = xs[0], steps = xs[1], heads = xs[2], channels = xs[3];
  const int64_t groups = bs[2], states = bs[3];
  const bool fits = channels % kLanes == 0 && groups > 0 && heads % groups == 0 &&
                    is(dt.dimensions(), {batch, steps, heads}) && is(A.dimensions(), {heads}) &&
                    is(bs, {batch, steps, groups, states}) &&
                    is(C.dimensions(), {batch, steps, groups, states}) &&
                    is(D.dimensions(), {heads, channels}) &&
                    is(state.dimensions(), {batch, heads, channels, states}) &&
                    is(y->dimensions(), {batch, steps, heads, channels}) &&
                    is(new_state->dimensions(), {batch, heads, channels, states});
  if (!fits) return ffi::Error::InvalidArgument("stree_jax ssd: shapes do not fit");
  const Sequence sequence{steps,          heads,          channels,       groups,
                          states,         x.typed_data(), dt.typed_data(), A.typed_data(),
                          B.typed_data(), C.typed_data(), D.typed_data(), state.typed_data(),
                          y->typed_data(), new_state->typed_data()};
  for_each_task(pool, batch * heads,
                [&](int64_t task) { sequence.head(task / heads, task % heads); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

extern "C" STREE_EXPORT XLA_FFI_Error* stree_jax_ssd(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(stree_jax_ssd, stree::SSD,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Ret<stree::F32>()
                                  .Ret<stree::F32>());
