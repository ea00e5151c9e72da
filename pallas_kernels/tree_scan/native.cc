// The scan of a tree, and the replay of the previous tree's path, on a CPU.
//
// A head's state is read once and written once, some rows at a time: each row advances along the
// path, and the products with C of all query nodes follow while it is in the nearest cache.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "../native/math.h"
#include "../native/parallel.h"
#include "../native/reduce.h"
#include "../native/shapes.h"

namespace ffi = xla::ffi;
namespace stree {
namespace {

constexpr int64_t kTaskBytes = 32 << 10;  // of state

enum GateKind : int64_t { kNone, kGate, kDeferredNorm, kNormPerHead };

// Sizes as in the glossary: O nodes before, N nodes, Q queries, H heads of P channels, G groups of
// S states.
struct Scan {
  int64_t batch, before, nodes, queries, heads, channels, groups, states, columns, start;
  bool a_is_log, d_per_channel;
  GateKind gate;
  float multiplier, epsilon;
  const float *prev_x, *prev_dt, *prev_B;
  const bool* path;
  const float *x, *dt, *A, *B, *C, *D, *state;
  const bool* mask;
  const float *projected, *norm_weight;
  float *y, *mean_squares, *new_state;  // new_state: null if nothing is replayed

  // Of each row: nodes of the path; of each query its ancestors and their C . B by group.
  std::vector<std::vector<int>> paths, ancestors;
  std::vector<std::vector<float>> scores;

  void prepare();
  void head(int64_t row, int64_t h) const;
};

void Scan::prepare() {
  paths.resize(batch);
  ancestors.resize(batch * nodes);
  scores.resize(batch * groups * queries);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t j = 0; j < before; ++j)
      if (path[b * before + j]) paths[b].push_back(j);
    for (int64_t i = 0; i < nodes; ++i)
      for (int64_t j = 0; j <= i; ++j)
        if (mask[(b * nodes + i) * nodes + j]) ancestors[b * nodes + i].push_back(j);
    for (int64_t q = 0; q < queries; ++q)
      for (int j : ancestors[b * nodes + nodes - queries + q])
        for (int64_t g = 0; g < groups; ++g)
          scores[(b * groups + g) * queries + q].push_back(
              dot(C + ((b * queries + q) * groups + g) * states,
                  B + ((b * nodes + j) * groups + g) * states, states));
  }
}

void Scan::head(int64_t b, int64_t h) const {
  const int64_t g = h / (heads / groups), first = nodes - queries;
  const float a = a_is_log ? -exp1(A[h]) : A[h];
  const auto node = [&](int64_t count, int64_t j) { return (b * count + j) * heads + h; };

  // Weights of the path's nodes in the new state; decays are sums over later nodes.
  const std::vector<int>& walked = paths[b];
  std::vector<float> weights(walked.size());
  float later = 0;
  for (int64_t j = static_cast<int64_t>(walked.size()) - 1; j >= 0; --j) {
    const float step = prev_dt[node(before, walked[j])];
    weights[j] = exp1(later) * step;
    later += step * a;
  }
  const float total = exp1(later);

  std::vector<float> decay(nodes);
  for (int64_t i = 0; i < nodes; ++i)
    for (int j : ancestors[b * nodes + i]) decay[i] += dt[node(nodes, j)] * a;

  // The state, kLanes channels at a time, and its products with C.
  std::vector<float> carried(queries * channels);
  const float* from = state + (b * heads + h) * channels * states;
  float* to = new_state ? new_state + (b * heads + h) * channels * states : nullptr;
  for (int64_t p = 0; p < channels; p += kLanes) {
    const float* rows = from + p * states;
    if (to) {
      float* out = to + p * states;
      for (int r = 0; r < kLanes; ++r)
        for (int64_t s = 0; s < states; s += kLanes) {
          Vec value = load(rows + r * states + s) * splat(total);
          for (size_t j = 0; j < walked.size(); ++j) {
            const float in = weights[j] * prev_x[node(before, walked[j]) * channels + p + r];
            value += splat(in) * load(prev_B + ((b * before + walked[j]) * groups + g) * states + s);
          }
          store(out + r * states + s, value);
        }
      rows = out;
    }
    for (int64_t q = 0; q < queries; ++q) {
      const float* c = C + ((b * queries + q) * groups + g) * states;
      Vec sums[kLanes] = {};
      for (int64_t s = 0; s < states; s += kLanes) {
        const Vec value = load(c + s);
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r) sums[r] += load(rows + r * states + s) * value;
      }
      store(carried.data() + q * channels + p, sums_of(sums));
    }
  }

  std::vector<float> inner(nodes);
  for (int64_t q = 0; q < queries; ++q) {
    const int64_t i = first + q;
    const std::vector<int>& above = ancestors[b * nodes + i];
    const std::vector<float>& score = scores[(b * groups + g) * queries + q];
    for (size_t k = 0; k < above.size(); ++k)
      inner[k] = exp1(decay[i] - decay[above[k]]) * dt[node(nodes, above[k])] * score[k];
    const Vec outer = splat(exp1(decay[i]));
    const float* own = x + node(nodes, i) * channels;
    float* out = y + ((b * queries + q) * heads + h) * channels;
    Vec squares = {};
    for (int64_t p = 0; p < channels; p += kLanes) {
      Vec value = {};
      for (size_t k = 0; k < above.size(); ++k)
        value += splat(inner[k]) * load(x + node(nodes, above[k]) * channels + p);
      value += load(carried.data() + q * channels + p) * outer;
      value += (d_per_channel ? load(D + h * channels + p) : splat(D[h])) * load(own + p);
      if (gate != kNone) {
        const float* z = projected + (b * queries + q) * columns + start + h * channels + p;
        value *= silu(load(z) * splat(multiplier));
        squares += value * value;
        if (gate == kDeferredNorm) value *= load(norm_weight + h * channels + p);
      }
      store(out + p, value);
    }
    if (gate == kDeferredNorm)
      mean_squares[(b * queries + q) * heads + h] = sum(squares) / (heads * channels);
    if (gate == kNormPerHead) {
      const Vec scale = splat(1 / std::sqrt(sum(squares) / channels + epsilon));
      for (int64_t p = 0; p < channels; p += kLanes)
        store(out + p, load(out + p) * scale * load(norm_weight + h * channels + p));
    }
  }
}

ffi::Error run(ffi::ThreadPool& pool, F32 prev_x, F32 prev_dt, F32 prev_B, Flags path, F32 x, F32 dt,
               F32 A, F32 B, F32 C, F32 D, F32 state, Flags mask, F32 projected, F32 norm_weight,
               Result y, Result mean_squares, float* new_state, int64_t a_is_log, int64_t gate,
               int64_t start, float multiplier, float epsilon) {
  const auto xs = x.dimensions(), cs = C.dimensions(), ps = prev_x.dimensions(),
             gs = projected.dimensions();
  if (xs.size() != 4 || cs.size() != 4 || ps.size() != 4)
    return ffi::Error::InvalidArgument("stree_jax tree_scan: arrays of four axes");
  Scan scan{};
  scan.batch = xs[0], scan.nodes = xs[1], scan.heads = xs[2], scan.channels = xs[3];
  scan.before = ps[1], scan.queries = cs[1], scan.groups = cs[2], scan.states = cs[3];
  const int64_t b = scan.batch, o = scan.before, n = scan.nodes, q = scan.queries,
                h = scan.heads, p = scan.channels, g = scan.groups, s = scan.states;
  const bool fits =
      h % std::max<int64_t>(g, 1) == 0 && g > 0 && p % kLanes == 0 && s % kLanes == 0 && q <= n &&
      is(ps, {b, o, h, p}) && is(prev_dt.dimensions(), {b, o, h}) &&
      is(prev_B.dimensions(), {b, o, g, s}) && is(path.dimensions(), {b, o}) &&
      is(dt.dimensions(), {b, n, h}) && is(A.dimensions(), {h}) &&
      is(B.dimensions(), {b, n, g, s}) && is(cs, {b, q, g, s}) &&
      (is(D.dimensions(), {h}) || is(D.dimensions(), {h, p})) &&
      is(state.dimensions(), {b, h, p, s}) && is(mask.dimensions(), {b, n, n}) &&
      is(y->dimensions(), {b, q, h, p}) && gate >= kNone && gate <= kNormPerHead &&
      (gate == kNone || (gs.size() == 3 && gs[0] == b && gs[1] == q && start >= 0 &&
                         start + h * p <= gs[2])) &&
      (gate <= kGate || is(norm_weight.dimensions(), {h * p})) &&
      (gate != kDeferredNorm || is(mean_squares->dimensions(), {b, q, h}));
  if (!fits) return ffi::Error::InvalidArgument("stree_jax tree_scan: shapes do not fit");
  scan.columns = gate == kNone ? 0 : gs[2], scan.start = start;
  scan.a_is_log = a_is_log, scan.d_per_channel = D.dimensions().size() == 2;
  scan.gate = static_cast<GateKind>(gate), scan.multiplier = multiplier, scan.epsilon = epsilon;
  scan.prev_x = prev_x.typed_data(), scan.prev_dt = prev_dt.typed_data();
  scan.prev_B = prev_B.typed_data(), scan.path = path.typed_data();
  scan.x = x.typed_data(), scan.dt = dt.typed_data(), scan.A = A.typed_data();
  scan.B = B.typed_data(), scan.C = C.typed_data(), scan.D = D.typed_data();
  scan.state = state.typed_data(), scan.mask = mask.typed_data();
  scan.projected = projected.typed_data(), scan.norm_weight = norm_weight.typed_data();
  scan.y = y->typed_data(), scan.mean_squares = mean_squares->typed_data();
  scan.new_state = new_state;
  scan.prepare();
  const int64_t bytes = scan.channels * scan.states * sizeof(float);
  const int64_t each = std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, bytes));
  const int64_t tasks = (scan.heads + each - 1) / each;
  for_each_task(pool, scan.batch * tasks, [&](int64_t task) {
    const int64_t first = task % tasks * each;
    for (int64_t head = first; head < std::min(first + each, scan.heads); ++head)
      scan.head(task / tasks, head);
  });
  return ffi::Error::Success();
}

ffi::Error TreeScan(ffi::ThreadPool pool, F32 prev_x, F32 prev_dt, F32 prev_B, Flags path, F32 x,
                    F32 dt, F32 A, F32 B, F32 C, F32 D, F32 state, Flags mask, F32 projected,
                    F32 norm_weight, Result y, Result mean_squares, int64_t a_is_log, int64_t gate,
                    int64_t start, float multiplier, float epsilon) {
  return run(pool, prev_x, prev_dt, prev_B, path, x, dt, A, B, C, D, state, mask, projected,
             norm_weight, y, mean_squares, nullptr, a_is_log, gate, start, multiplier, epsilon);
}

ffi::Error ReplayTreeScan(ffi::ThreadPool pool, F32 prev_x, F32 prev_dt, F32 prev_B, Flags path,
                          F32 x, F32 dt, F32 A, F32 B, F32 C, F32 D, F32 state, Flags mask,
                          F32 projected, F32 norm_weight, Result y, Result mean_squares,
                          Result new_state, int64_t a_is_log, int64_t gate, int64_t start,
                          float multiplier, float epsilon) {
  if (!std::equal(state.dimensions().begin(), state.dimensions().end(),
                  new_state->dimensions().begin(), new_state->dimensions().end()))
    return ffi::Error::InvalidArgument("stree_jax tree_scan: the new state has another shape");
  return run(pool, prev_x, prev_dt, prev_B, path, x, dt, A, B, C, D, state, mask, projected,
             norm_weight, y, mean_squares, new_state->typed_data(), a_is_log, gate, start,
             multiplier, epsilon);
}

auto arguments() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<F32>().Arg<F32>().Arg<F32>().Arg<Flags>()
      .Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>()
      .Arg<Flags>().Arg<F32>().Arg<F32>()
      .Ret<F32>().Ret<F32>();
}

template <typename Binding>
auto attributes(Binding binding) {
  return std::move(binding)
      .template Attr<int64_t>("a_is_log")
      .template Attr<int64_t>("gate")
      .template Attr<int64_t>("start")
      .template Attr<float>("multiplier")
      .template Attr<float>("epsilon");
}

}  // namespace
}  // namespace stree

extern "C" STREE_EXPORT XLA_FFI_Error* stree_jax_tree_scan(XLA_FFI_CallFrame* frame);
extern "C" STREE_EXPORT XLA_FFI_Error* stree_jax_replay_tree_scan(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(stree_jax_tree_scan, stree::TreeScan,
                              stree::attributes(stree::arguments()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(stree_jax_replay_tree_scan, stree::ReplayTreeScan,
                              stree::attributes(stree::arguments().Ret<stree::F32>()));
