// The scan of a tree, the replay of the previous tree's path, and the scan of a sequence, on a CPU.
//
// A state goes from token to token in one way, whatever the tokens are part of: so the outputs of a
// token depend, to the bit, on nothing but the tokens before it. A head's state is read once and
// written once, some rows at a time: these advance along the path, then from parents to children
// while they are in the nearest cache.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "../native/math.h"
#include "../native/parallel.h"
#include "../native/shapes.h"
#include "../native/state.h"
#include "../native/walk.h"

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
  const bool* mask;  // null: a sequence
  const float *projected, *norm_weight;
  float *y, *mean_squares, *new_state;  // new_state: null if nothing is replayed

  // Of each row: nodes of the path, and the order of the nodes.
  std::vector<std::vector<int>> paths;
  std::vector<Walk> walks;
  std::vector<float> scores;  // C . B of each query [batch, queries, groups]

  void prepare();
  void head(int64_t row, int64_t h) const;
  void finish(int64_t row, int64_t h, const std::vector<float>& decays) const;
};

void Scan::prepare() {
  paths.resize(batch);
  scores.resize(batch * queries * groups);
  const int64_t first = nodes - queries;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t j = 0; j < before; ++j)
      if (path[b * before + j]) paths[b].push_back(j);
    walks.push_back(mask ? walk(mask + b * nodes * nodes, nodes, first) : Walk());
    for (int64_t t = 0; !mask && t < nodes; ++t)  // each state takes the place of the one before
      walks[b].visits.push_back({t, 0, 0});
    for (int64_t q = 0; q < queries; ++q)
      for (int64_t g = 0; g < groups; ++g)
        scores[(b * queries + q) * groups + g] =
            dot(C + ((b * queries + q) * groups + g) * states,
                B + ((b * nodes + first + q) * groups + g) * states, states);
  }
}

void Scan::head(int64_t b, int64_t h) const {
  const int64_t g = h / (heads / groups), first = nodes - queries;
  const float a = a_is_log ? -exp1(A[h]) : A[h];
  const auto node = [&](int64_t count, int64_t j) { return (b * count + j) * heads + h; };
  const std::vector<int>& walked = paths[b];
  const auto& [visits, slots] = walks[b];

  std::vector<float> decays(nodes), old_decays(walked.size());
  std::vector<Token> old(walked.size());
  for (const Visit& visit : visits) decays[visit.node] = exp1(dt[node(nodes, visit.node)] * a);
  for (size_t j = 0; j < walked.size(); ++j) {
    old_decays[j] = exp1(prev_dt[node(before, walked[j])] * a);
    old[j].decays = &old_decays[j];
    old[j].B = prev_B + ((b * before + walked[j]) * groups + g) * states;
  }

  // The state, kLanes channels at a time; y has its products with C meanwhile.
  std::vector<float> stack(slots * kLanes * states);
  const float* from = state + (b * heads + h) * channels * states;
  float* to = new_state ? new_state + (b * heads + h) * channels * states : nullptr;
  for (int64_t p = 0; p < channels; p += kLanes) {
    const float* rows = from + p * states;
    if (to) {
      for (size_t j = 0; j < walked.size(); ++j) {
        const int64_t at = node(before, walked[j]);
        for (int r = 0; r < kLanes; ++r) old[j].in[r] = prev_dt[at] * prev_x[at * channels + p + r];
      }
      replay(rows, to + p * states, old, states);
      rows = to + p * states;
    }
    for (const auto& [i, above, own] : visits) {
      const int64_t at = node(nodes, i), q = i - first;
      const float* parent = above ? stack.data() + (above - 1) * kLanes * states : rows;
      float* mine = own > 0 ? stack.data() + (own - 1) * kLanes * states : to + p * states;
      const bool writes = own > 0 || (own == 0 && dt[at] != 0);  // padding of a sequence: 0
      const float* c = C + ((b * queries + q) * groups + g) * states;
      float* read = y + ((b * queries + q) * heads + h) * channels + p;
      Token token{&decays[i], B + ((b * nodes + i) * groups + g) * states, {}};
      for (int r = 0; r < kLanes; ++r) token.in[r] = dt[at] * x[at * channels + p + r];
      if (q < 0) {
        step<false>(parent, nullptr, nullptr, token, mine, states);
      } else if (writes) {
        step<true>(parent, c, read, token, mine, states);
      } else {
        Vec found;
        products<1>([&](int r) { return parent + r * states; }, {c}, states, &found);
        store(read, found);
      }
    }
  }
  finish(b, h, decays);
}

// Outputs from the products with C.
void Scan::finish(int64_t b, int64_t h, const std::vector<float>& decays) const {
  const int64_t g = h / (heads / groups), first = nodes - queries;
  for (int64_t q = 0; q < queries; ++q) {
    const int64_t at = (b * nodes + first + q) * heads + h;
    float* out = y + ((b * queries + q) * heads + h) * channels;
    if (mask && !mask[(b * nodes + first + q) * nodes + first + q]) {  // no node
      std::fill_n(out, channels, 0.0f);
      if (gate == kDeferredNorm) mean_squares[(b * queries + q) * heads + h] = 0;
      continue;
    }
    const Vec kept = splat(decays[first + q]);
    const Vec inner = splat(dt[at] * scores[(b * queries + q) * groups + g]);
    Wide squares = {};
    sum_up(squares, channels, [&](int64_t p, Vec sums) {
      const Vec own = load(x + at * channels + p);
      const Vec skip = d_per_channel ? load(D + h * channels + p) : splat(D[h]);
      Vec value = fused(skip, own, fused(kept, load(out + p), inner * own));
      if (gate != kNone) {
        const float* z = projected + (b * queries + q) * columns + start + h * channels + p;
        value *= silu(load(z) * splat(multiplier));
        sums = fused(value, value, sums);
        if (gate == kDeferredNorm) value *= load(norm_weight + h * channels + p);
      }
      store(out + p, value);
      return sums;
    });
    if (gate == kDeferredNorm)
      mean_squares[(b * queries + q) * heads + h] = sum(squares) / (heads * channels);
    if (gate == kNormPerHead) {
      const Vec scale = splat(1 / std::sqrt(sum(squares) / channels + epsilon));
      for (int64_t p = 0; p < channels; p += kLanes)
        store(out + p, load(out + p) * scale * load(norm_weight + h * channels + p));
    }
  }
}

ffi::Error run(ffi::ThreadPool& pool, F32 prev_x, F32 prev_dt, F32 prev_B, Flags path, F32 x,
               F32 dt, F32 A, F32 B, F32 C, F32 D, F32 state, Flags mask, F32 projected,
               F32 norm_weight, Result y, Result mean_squares, float* new_state, int64_t a_is_log,
               int64_t gate, int64_t start, float multiplier, float epsilon) {
  const auto xs = x.dimensions(), cs = C.dimensions(), ps = prev_x.dimensions(),
             gs = projected.dimensions();
  if (xs.size() != 4 || cs.size() != 4 || ps.size() != 4)
    return refused("tree_scan", "arrays of four axes");
  Scan scan{};
  scan.batch = xs[0], scan.nodes = xs[1], scan.heads = xs[2], scan.channels = xs[3];
  scan.before = ps[1], scan.queries = cs[1], scan.groups = cs[2], scan.states = cs[3];
  const int64_t b = scan.batch, o = scan.before, n = scan.nodes, q = scan.queries, h = scan.heads,
                p = scan.channels, g = scan.groups, s = scan.states;
  const bool is_sequence = is(mask.dimensions(), {0});
  const bool fits =
      h % std::max<int64_t>(g, 1) == 0 && g > 0 && p % kWidth == 0 && s % kWidth == 0 && q <= n &&
      is(ps, {b, o, h, p}) && is(prev_dt.dimensions(), {b, o, h}) &&
      is(prev_B.dimensions(), {b, o, g, s}) && is(path.dimensions(), {b, o}) &&
      is(dt.dimensions(), {b, n, h}) && is(A.dimensions(), {h}) &&
      is(B.dimensions(), {b, n, g, s}) && is(cs, {b, q, g, s}) &&
      (is(D.dimensions(), {h}) || is(D.dimensions(), {h, p})) &&
      is(state.dimensions(), {b, h, p, s}) &&
      (is(mask.dimensions(), {b, n, n}) || (is_sequence && new_state && q == n)) &&
      is(y->dimensions(), {b, q, h, p}) && gate >= kNone && gate <= kNormPerHead &&
      (gate == kNone ||
       (gs.size() == 3 && gs[0] == b && gs[1] == q && start >= 0 && start + h * p <= gs[2])) &&
      (gate <= kGate || is(norm_weight.dimensions(), {h * p})) &&
      (gate != kDeferredNorm || is(mean_squares->dimensions(), {b, q, h}));
  if (!fits) return refused("tree_scan");
  scan.columns = gate == kNone ? 0 : gs[2], scan.start = start;
  scan.a_is_log = a_is_log, scan.d_per_channel = D.dimensions().size() == 2;
  scan.gate = static_cast<GateKind>(gate), scan.multiplier = multiplier, scan.epsilon = epsilon;
  scan.prev_x = prev_x.typed_data(), scan.prev_dt = prev_dt.typed_data();
  scan.prev_B = prev_B.typed_data(), scan.path = path.typed_data();
  scan.x = x.typed_data(), scan.dt = dt.typed_data(), scan.A = A.typed_data();
  scan.B = B.typed_data(), scan.C = C.typed_data(), scan.D = D.typed_data();
  scan.state = state.typed_data(), scan.mask = is_sequence ? nullptr : mask.typed_data();
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
    return refused("tree_scan", "the new state has another shape");
  return run(pool, prev_x, prev_dt, prev_B, path, x, dt, A, B, C, D, state, mask, projected,
             norm_weight, y, mean_squares, new_state->typed_data(), a_is_log, gate, start,
             multiplier, epsilon);
}

auto arguments() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<F32>()
      .Arg<F32>()
      .Arg<F32>()
      .Arg<Flags>()
      .Arg<F32>()
      .Arg<F32>()
      .Arg<F32>()
      .Arg<F32>()
      .Arg<F32>()
      .Arg<F32>()
      .Arg<F32>()
      .Arg<Flags>()
      .Arg<F32>()
      .Arg<F32>()
      .Ret<F32>()
      .Ret<F32>();
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
