// The convolution over a tree, alone and with all that is between a Mamba-2 layer's input projection
// and its scan, on a CPU.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../native/math.h"
#include "../native/parallel.h"
#include "../native/shapes.h"

namespace ffi = xla::ffi;
namespace stree {
namespace {

constexpr int64_t kAlone = 16384;  // numbers that do not pay for a second thread
constexpr int64_t kMostTaps = 16;

// No numbers may have no address, which memcpy refuses.
float* copied(float* to, const float* from, int64_t count) {
  return std::copy_n(from, count, to);
}

// The convolution of one node.
struct Window {
  const float* rows[kMostTaps];
  int64_t taps, channels;
  const float *weight, *bias;

  // Finds the rows of a state and of inputs, as XLA's gather: rows outside are the nearest inside.
  void find(const int32_t* index, const float* state, const float* inputs, int64_t nodes) {
    for (int64_t k = 0; k < taps; ++k) {
      const int64_t row = std::clamp<int64_t>(index[k], 0, taps - 1 + nodes - 1);
      rows[k] = row < taps - 1 ? state + row * channels : inputs + (row - taps + 1) * channels;
    }
  }
  STREE_INLINE Vec at(int64_t channel) const {
    Vec value = bias ? load(bias + channel) : Vec{};
    for (int64_t k = 0; k < taps; ++k)
      value = fused(load(rows[k] + channel), load(weight + k * channels + channel), value);
    return value;
  }
};

// Calls run(task) for each task, on one thread if there are few numbers.
template <typename Run>
void for_nodes(ffi::ThreadPool& pool, int64_t tasks, int64_t channels, const Run& run) {
  if (tasks * channels > kAlone) return for_each_task(pool, tasks, run);
  for (int64_t task = 0; task < tasks; ++task) run(task);
}

// Columns [x | B | C | dt] from `first_column` on; channels [x | B | C].
struct Layer {
  int64_t prefix, queries, columns, channels, x_size, b_size, c_size, heads, taps;
  int64_t first_column;
  float multipliers[4], dt_low, dt_high;
  const float *projected, *weight, *bias, *dt_bias;
  const int32_t* index;
  const float *prefix_x, *prefix_dt, *prefix_B, *prefix_input;
  float *x, *dt, *B, *conv_input, *C, *conv_state;

  int64_t nodes() const { return prefix + queries; }

  void copy(int64_t b) const;
  void node(int64_t b, int64_t q) const;
};

// What stands before and after the convolution: the prefix, and the inputs of the new nodes.
void Layer::copy(int64_t b) const {
  copied(x + b * nodes() * x_size, prefix_x + b * prefix * x_size, prefix * x_size);
  copied(B + b * nodes() * b_size, prefix_B + b * prefix * b_size, prefix * b_size);
  copied(dt + b * nodes() * heads, prefix_dt + b * prefix * heads, prefix * heads);
  float* to = copied(conv_input + b * nodes() * channels, prefix_input + b * prefix * channels,
                     prefix * channels);
  const int64_t sizes[3] = {x_size, b_size, c_size};
  for (int64_t q = 0; q < queries; ++q) {
    const float* from = projected + (b * queries + q) * columns + first_column;
    for (int part = 0; part < 3; ++part)
      for (int64_t i = 0; i < sizes[part]; ++i) *to++ = *from++ * multipliers[part];
  }
}

void Layer::node(int64_t b, int64_t q) const {
  Window window{{}, taps, channels, weight, bias};
  window.find(index + (b * queries + q) * taps, conv_state + b * (taps - 1) * channels,
              conv_input + b * nodes() * channels, nodes());
  const int64_t i = b * nodes() + prefix + q;
  float* const parts[3] = {x + i * x_size, B + i * b_size, C + (b * queries + q) * c_size};
  const int64_t sizes[3] = {x_size, b_size, c_size};
  int64_t channel = 0;
  for (int part = 0; part < 3; ++part)
    for (int64_t c = 0; c < sizes[part]; c += kLanes, channel += kLanes)
      store(parts[part] + c, silu(window.at(channel)));
  const float* raw = projected + (b * queries + q) * columns + first_column + channels;
  for (int64_t h = 0; h < heads; h += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, heads - h);
    float values[kLanes] = {};
    for (int64_t j = 0; j < count; ++j)
      values[j] = std::fma(raw[h + j], multipliers[3], dt_bias[h + j]);
    store(values, softplus(load(values)));
    for (int64_t j = 0; j < count; ++j)
      dt[i * heads + h + j] = std::min(std::max(values[j], dt_low), dt_high);
  }
}

ffi::Error TreeConv1dLayer(ffi::ThreadPool pool, F32 projected, F32 weight, F32 bias, F32 dt_bias,
                           F32 old_state, S32 index, F32 prefix_x, F32 prefix_dt, F32 prefix_B,
                           F32 prefix_input, F32 old_input, S32 replay_index, Result x, Result dt,
                           Result B, Result conv_input, Result C, Result conv_state,
                           int64_t first_column, ffi::Span<const float> multipliers, float dt_low,
                           float dt_high) {
  const auto ps = projected.dimensions(), ws = weight.dimensions(), xs = x->dimensions(),
             bs = B->dimensions(), os = old_input.dimensions();
  if (ps.size() != 3 || ws.size() != 2 || xs.size() != 4 || bs.size() != 4 || os.size() != 3 ||
      multipliers.size() != 4)
    return ffi::Error::InvalidArgument("stree_jax tree_conv1d_layer: shapes do not fit");
  const int64_t batch = ps[0], queries = ps[1], nodes = xs[1], prefix = nodes - queries;
  const int64_t heads = xs[2], size = xs[3], groups = bs[2], states = bs[3];
  const int64_t taps = ws[0], channels = heads * size + 2 * groups * states, before = os[1];
  const bool has_replay = replay_index.element_count() != 0 || before != 0;
  const bool fits =
      prefix >= 0 && taps >= 1 && taps <= kMostTaps && first_column >= 0 &&
      first_column + channels + heads <= ps[2] && (heads * size) % kLanes == 0 &&
      (groups * states) % kLanes == 0 && is(ws, {taps, channels}) &&
      (bias.element_count() == 0 || is(bias.dimensions(), {channels})) &&
      is(dt_bias.dimensions(), {heads}) &&
      is(old_state.dimensions(), {batch, taps - 1, channels}) &&
      is(index.dimensions(), {batch, queries, taps}) &&
      is(prefix_x.dimensions(), {batch, prefix, heads, size}) &&
      is(prefix_dt.dimensions(), {batch, prefix, heads}) &&
      is(prefix_B.dimensions(), {batch, prefix, groups, states}) &&
      is(prefix_input.dimensions(), {batch, prefix, channels}) &&
      is(os, {batch, before, channels}) &&
      (!has_replay || is(replay_index.dimensions(), {batch, taps - 1})) &&
      is(xs, {batch, nodes, heads, size}) && is(dt->dimensions(), {batch, nodes, heads}) &&
      is(bs, {batch, nodes, groups, states}) &&
      is(conv_input->dimensions(), {batch, nodes, channels}) &&
      is(C->dimensions(), {batch, queries, groups, states}) &&
      is(conv_state->dimensions(), {batch, taps - 1, channels});
  if (!fits) return ffi::Error::InvalidArgument("stree_jax tree_conv1d_layer: shapes do not fit");

  // The conv state along the previous tree's path; the new one is in the old one's place.
  const int64_t state_rows = taps - 1;
  std::vector<float> context((state_rows + before) * channels);
  for (int64_t b = 0; b < batch; ++b) {
    float* end = copied(context.data(), old_state.typed_data() + b * state_rows * channels,
                        state_rows * channels);
    copied(end, old_input.typed_data() + b * before * channels, before * channels);
    for (int64_t j = 0; j < state_rows; ++j) {
      int64_t row = j;
      if (has_replay)
        row = std::clamp<int64_t>(replay_index.typed_data()[b * state_rows + j], 0,
                                  state_rows + before - 1);
      copied(conv_state->typed_data() + (b * state_rows + j) * channels,
             context.data() + row * channels, channels);
    }
  }

  Layer layer{};
  layer.prefix = prefix, layer.queries = queries, layer.columns = ps[2];
  layer.channels = channels, layer.x_size = heads * size;
  layer.b_size = layer.c_size = groups * states;
  layer.heads = heads, layer.taps = taps, layer.first_column = first_column;
  std::copy(multipliers.begin(), multipliers.end(), layer.multipliers);
  layer.dt_low = dt_low, layer.dt_high = dt_high;
  layer.projected = projected.typed_data(), layer.weight = weight.typed_data();
  layer.bias = bias.element_count() ? bias.typed_data() : nullptr;
  layer.dt_bias = dt_bias.typed_data(), layer.index = index.typed_data();
  layer.prefix_x = prefix_x.typed_data(), layer.prefix_dt = prefix_dt.typed_data();
  layer.prefix_B = prefix_B.typed_data(), layer.prefix_input = prefix_input.typed_data();
  layer.x = x->typed_data(), layer.dt = dt->typed_data(), layer.B = B->typed_data();
  layer.conv_input = conv_input->typed_data(), layer.C = C->typed_data();
  layer.conv_state = conv_state->typed_data();
  for (int64_t b = 0; b < batch; ++b) layer.copy(b);
  for_nodes(pool, batch * queries, channels,
            [&](int64_t task) { layer.node(task / queries, task % queries); });
  return ffi::Error::Success();
}

ffi::Error TreeConv1d(ffi::ThreadPool pool, F32 inputs, F32 state, F32 weight, F32 bias, S32 index,
                      Result outputs, int64_t has_silu) {
  const auto xs = inputs.dimensions(), ws = weight.dimensions(), ys = outputs->dimensions();
  if (xs.size() != 3 || ws.size() != 2 || ys.size() != 3)
    return ffi::Error::InvalidArgument("stree_jax tree_conv1d: shapes do not fit");
  const int64_t batch = xs[0], nodes = xs[1], queries = ys[1], taps = ws[0], channels = ws[1];
  const bool fits = taps >= 1 && taps <= kMostTaps && channels % kLanes == 0 && queries <= nodes &&
                    is(xs, {batch, nodes, channels}) && is(ys, {batch, queries, channels}) &&
                    is(state.dimensions(), {batch, taps - 1, channels}) &&
                    (bias.element_count() == 0 || is(bias.dimensions(), {channels})) &&
                    is(index.dimensions(), {batch, queries, taps});
  if (!fits) return ffi::Error::InvalidArgument("stree_jax tree_conv1d: shapes do not fit");
  for_nodes(pool, batch * queries, channels, [&](int64_t task) {
    Window window{{}, taps, channels, weight.typed_data(),
                  bias.element_count() ? bias.typed_data() : nullptr};
    const int64_t b = task / queries;
    window.find(index.typed_data() + task * taps, state.typed_data() + b * (taps - 1) * channels,
                inputs.typed_data() + b * nodes * channels, nodes);
    float* to = outputs->typed_data() + task * channels;
    for (int64_t c = 0; c < channels; c += kLanes)
      store(to + c, has_silu ? silu(window.at(c)) : window.at(c));
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

extern "C" STREE_EXPORT XLA_FFI_Error* stree_jax_tree_conv1d_layer(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    stree_jax_tree_conv1d_layer, stree::TreeConv1dLayer,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<stree::F32>().Arg<stree::F32>().Arg<stree::F32>().Arg<stree::F32>()
        .Arg<stree::F32>().Arg<stree::S32>()
        .Arg<stree::F32>().Arg<stree::F32>().Arg<stree::F32>().Arg<stree::F32>()
        .Arg<stree::F32>().Arg<stree::S32>()
        .Ret<stree::F32>().Ret<stree::F32>().Ret<stree::F32>().Ret<stree::F32>()
        .Ret<stree::F32>().Ret<stree::F32>()
        .Attr<int64_t>("first_column")
        .Attr<ffi::Span<const float>>("multipliers")
        .Attr<float>("dt_low")
        .Attr<float>("dt_high"));

extern "C" STREE_EXPORT XLA_FFI_Error* stree_jax_tree_conv1d(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    stree_jax_tree_conv1d, stree::TreeConv1d,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<stree::F32>().Arg<stree::F32>().Arg<stree::F32>().Arg<stree::F32>()
        .Arg<stree::S32>()
        .Ret<stree::F32>()
        .Attr<int64_t>("has_silu"));
