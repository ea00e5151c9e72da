// The gated delta rule on a CPU: over a tree, with the replay of the previous tree's path, and over
// a whole sequence.
//
// Over a tree a head's state is read once and written once, some rows at a time, as in tree_scan;
// then the corrections u follow from parent to child, each from those above it. Over a sequence one
// step follows the other, and the state is held [S, P], so that a product is no sum over lanes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../native/math.h"
#include "../native/parallel.h"
#include "../native/reduce.h"
#include "../native/shapes.h"

namespace ffi = xla::ffi;
namespace stree {
namespace {

constexpr float kEpsilon = 1e-6f;  // of the norm of q and k, in all published models

// Writes a vector of length `length` in the direction of `from`.
void norm(const float* from, float* to, int64_t size, float length) {
  const Vec scale = splat(length / std::sqrt(dot(from, from, size) + kEpsilon));
  for (int64_t i = 0; i < size; i += kLanes) store(to + i, load(from + i) * scale);
}

// Sizes as in the glossary: O nodes before, N nodes, Q queries, H heads of P channels, G groups of
// S states.
struct Tree {
  int64_t batch, before, nodes, queries, heads, channels, groups, states;
  const float *prev_k, *prev_u, *prev_g;
  const bool* path;
  const float *q, *k, *v, *g, *beta, *state;
  const bool* mask;
  const float* prefix_u;  // of the first N - Q nodes
  float *y, *u, *new_state;  // u: of the queries; new_state: null if nothing is replayed

  // Of each row: nodes of the path; and of each query its ancestors, itself last.
  std::vector<std::vector<int>> paths, ancestors;

  void prepare();
  void group(int64_t b, int64_t g) const;
};

// What the heads of a group share.
struct Keys {
  std::vector<float> walked, keys, queries;  // normed: of the path, of all nodes, of the queries
  // Of each query: products of its k and its q with the k of its ancestors.
  std::vector<std::vector<float>> alike, seen;
};

void Tree::prepare() {
  paths.resize(batch);
  ancestors.resize(batch * queries);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t j = 0; j < before; ++j)
      if (path[b * before + j]) paths[b].push_back(j);
    for (int64_t i = nodes - queries; i < nodes; ++i) {
      const bool* row = mask + (b * nodes + i) * nodes;
      if (!row[i]) continue;  // no node: the rest of its row says nothing
      for (int64_t j = 0; j <= i; ++j)
        if (row[j]) ancestors[b * queries + i - (nodes - queries)].push_back(j);
    }
  }
}

void head(const Tree& tree, const Keys& of, int64_t b, int64_t group, int64_t h) {
  const int64_t first = tree.nodes - tree.queries, channels = tree.channels, states = tree.states;
  const auto node = [&](int64_t count, int64_t j) { return (b * count + j) * tree.heads + h; };

  // Weights of the path's nodes in the new state; decays are sums over later nodes.
  const std::vector<int>& walked = tree.paths[b];
  std::vector<float> weights(walked.size());
  float later = 0;
  for (int64_t j = static_cast<int64_t>(walked.size()) - 1; j >= 0; --j) {
    weights[j] = exp1(later);
    later += tree.prev_g[node(tree.before, walked[j])];
  }
  const float total = exp1(later);

  // The state, kLanes channels at a time, and its products with k and q.
  std::vector<float> read(tree.queries * channels), carried(tree.queries * channels);
  const float* from = tree.state + (b * tree.heads + h) * channels * states;
  float* to = tree.new_state ? tree.new_state + (b * tree.heads + h) * channels * states : nullptr;
  for (int64_t p = 0; p < channels; p += kLanes) {
    const float* rows = from + p * states;
    if (to) {
      float* out = to + p * states;
      for (int r = 0; r < kLanes; ++r)
        for (int64_t s = 0; s < states; s += kLanes) {
          Vec value = load(rows + r * states + s) * splat(total);
          for (size_t j = 0; j < walked.size(); ++j) {
            const float in =
                weights[j] * tree.prev_u[node(tree.before, walked[j]) * channels + p + r];
            value += splat(in) * load(of.walked.data() + j * states + s);
          }
          store(out + r * states + s, value);
        }
      rows = out;
    }
    for (int64_t q = 0; q < tree.queries; ++q) {
      if (tree.ancestors[b * tree.queries + q].empty()) continue;
      const auto product = [&](const float* with, float* result) {
        Vec sums[kLanes] = {};
        for (int64_t s = 0; s < states; s += kLanes) {
          const Vec value = load(with + s);
#pragma GCC unroll 16
          for (int r = 0; r < kLanes; ++r) sums[r] += load(rows + r * states + s) * value;
        }
        store(result + q * channels + p, sums_of(sums));
      };
      product(of.keys.data() + (first + q) * states, read.data());
      product(of.queries.data() + q * states, carried.data());
    }
  }

  std::vector<float> inner(tree.nodes), outer(tree.nodes);
  for (int64_t q = 0; q < tree.queries; ++q) {
    const std::vector<int>& above = tree.ancestors[b * tree.queries + q];
    const int64_t own = node(tree.queries, q) * channels;
    if (above.empty()) {
      std::fill_n(tree.u + own, channels, 0.0f);
      std::fill_n(tree.y + own, channels, 0.0f);
      continue;
    }
    const float beta = tree.beta[node(tree.queries, q)];
    const std::vector<float>&alike = of.alike[q], &seen = of.seen[q];
    float between = 0;  // the log-decay from just after an ancestor on
    for (int64_t a = static_cast<int64_t>(above.size()) - 1; a >= 0; --a) {
      const float decay = exp1(between);
      inner[a] = beta * decay * alike[a];
      outer[a] = decay * seen[a];
      between += tree.g[node(tree.nodes, above[a])];
    }
    const Vec kept = splat(exp1(between)), strength = splat(beta);
    const auto correction = [&](int64_t j) -> const float* {
      if (j < first) return tree.prefix_u + node(first, j) * channels;
      return tree.u + node(tree.queries, j - first) * channels;
    };
    for (int64_t p = 0; p < channels; p += kLanes) {
      // What ancestors give is summed by itself: taken from u one by one, each would round u.
      Vec written = {}, y = kept * load(carried.data() + q * channels + p);
      for (size_t a = 0; a + 1 < above.size(); ++a) {
        const Vec other = load(correction(above[a]) + p);
        written += splat(inner[a]) * other;
        y += splat(outer[a]) * other;
      }
      const Vec missing = load(tree.v + own + p) - kept * load(read.data() + q * channels + p);
      const Vec u = strength * missing - written;
      store(tree.u + own + p, u);
      store(tree.y + own + p, y + splat(outer[above.size() - 1]) * u);
    }
  }
}

void Tree::group(int64_t b, int64_t group) const {
  const auto node = [&](int64_t count, int64_t j) { return ((b * count + j) * groups + group) * states; };
  Keys of;
  const std::vector<int>& walked = paths[b];
  of.walked.resize(walked.size() * states);
  for (size_t j = 0; j < walked.size(); ++j)
    norm(prev_k + node(before, walked[j]), of.walked.data() + j * states, states, 1);
  of.keys.resize(nodes * states);
  for (int64_t j = 0; j < nodes; ++j) norm(k + node(nodes, j), of.keys.data() + j * states, states, 1);
  of.queries.resize(queries * states);
  of.alike.resize(queries);
  of.seen.resize(queries);
  for (int64_t i = 0; i < queries; ++i) {
    float* query = of.queries.data() + i * states;
    norm(q + node(queries, i), query, states, 1 / std::sqrt(static_cast<float>(states)));
    const float* key = of.keys.data() + (nodes - queries + i) * states;
    for (int j : ancestors[b * queries + i]) {
      const float* other = of.keys.data() + j * states;
      of.alike[i].push_back(dot(key, other, states));
      of.seen[i].push_back(dot(query, other, states));
    }
  }
  const int64_t each = heads / groups;
  for (int64_t h = group * each; h < (group + 1) * each; ++h) head(*this, of, b, group, h);
}

ffi::Error run(ffi::ThreadPool& pool, F32 prev_k, F32 prev_u, F32 prev_g, Flags path, F32 q, F32 k,
               F32 v, F32 g, F32 beta, F32 state, Flags mask, F32 prefix_u, Result y, Result u,
               float* new_state) {
  const auto qs = q.dimensions(), ks = k.dimensions(), vs = v.dimensions(),
             ps = prev_k.dimensions();
  if (qs.size() != 4 || ks.size() != 4 || vs.size() != 4 || ps.size() != 4)
    return ffi::Error::InvalidArgument("stree_jax tree_delta: arrays of four axes");
  const int64_t b = ks[0], o = ps[1], n = ks[1], c = qs[1], h = vs[2], p = vs[3], e = ks[2],
                s = ks[3];
  const bool fits =
      e > 0 && h % e == 0 && p % kLanes == 0 && s % kLanes == 0 && c <= n &&
      is(ps, {b, o, e, s}) && is(prev_u.dimensions(), {b, o, h, p}) &&
      is(prev_g.dimensions(), {b, o, h}) && is(path.dimensions(), {b, o}) &&
      is(qs, {b, c, e, s}) && is(vs, {b, c, h, p}) && is(g.dimensions(), {b, n, h}) &&
      is(beta.dimensions(), {b, c, h}) && is(state.dimensions(), {b, h, p, s}) &&
      is(mask.dimensions(), {b, n, n}) && is(prefix_u.dimensions(), {b, n - c, h, p}) &&
      is(y->dimensions(), {b, c, h, p}) && is(u->dimensions(), {b, c, h, p});
  if (!fits) return ffi::Error::InvalidArgument("stree_jax tree_delta: shapes do not fit");
  Tree tree{b,
            o,
            n,
            c,
            h,
            p,
            e,
            s,
            prev_k.typed_data(),
            prev_u.typed_data(),
            prev_g.typed_data(),
            path.typed_data(),
            q.typed_data(),
            k.typed_data(),
            v.typed_data(),
            g.typed_data(),
            beta.typed_data(),
            state.typed_data(),
            mask.typed_data(),
            prefix_u.typed_data(),
            y->typed_data(),
            u->typed_data(),
            new_state,
            {},
            {}};
  tree.prepare();
  for_each_task(pool, b * e, [&](int64_t task) { tree.group(task / e, task % e); });
  return ffi::Error::Success();
}

ffi::Error TreeDelta(ffi::ThreadPool pool, F32 prev_k, F32 prev_u, F32 prev_g, Flags path, F32 q,
                     F32 k, F32 v, F32 g, F32 beta, F32 state, Flags mask, F32 prefix_u, Result y,
                     Result u) {
  return run(pool, prev_k, prev_u, prev_g, path, q, k, v, g, beta, state, mask, prefix_u, y, u,
             nullptr);
}

ffi::Error ReplayTreeDelta(ffi::ThreadPool pool, F32 prev_k, F32 prev_u, F32 prev_g, Flags path,
                           F32 q, F32 k, F32 v, F32 g, F32 beta, F32 state, Flags mask,
                           F32 prefix_u, Result y, Result u, Result new_state) {
  if (!std::equal(state.dimensions().begin(), state.dimensions().end(),
                  new_state->dimensions().begin(), new_state->dimensions().end()))
    return ffi::Error::InvalidArgument("stree_jax tree_delta: the new state has another shape");
  return run(pool, prev_k, prev_u, prev_g, path, q, k, v, g, beta, state, mask, prefix_u, y, u,
             new_state->typed_data());
}

constexpr int kVectors = 4;  // of channels at once
constexpr int64_t kPart = 32;  // states of a sum

struct Sequence {
  int64_t steps, heads, channels, groups, states;
  const float *q, *k, *v, *g, *beta, *state;
  const bool* valid;
  float *y, *new_state;

  // Channels [first, first + V * kLanes) of head h of row b; q and k are normed.
  template <int V>
  void run(int64_t b, int64_t h, int64_t first, const Keys& of, float* held) const {
    constexpr int64_t kWidth = V * kLanes;
    const int64_t at = ((b * heads + h) * channels + first) * states;
    for (int64_t s = 0; s < states; ++s)
      for (int64_t p = 0; p < kWidth; ++p) held[s * kWidth + p] = state[at + p * states + s];
    for (int64_t t = 0; t < steps; ++t) {
      const int64_t step = b * steps + t;
      float* out = y + (step * heads + h) * channels + first;
      if (!valid[step]) {
        std::fill_n(out, kWidth, 0.0f);
        continue;
      }
      const float *key = of.keys.data() + t * states, *query = of.queries.data() + t * states;
      Vec read[V] = {}, carried[V] = {};
      for (int64_t part = 0; part < states; part += kPart) {  // sums of sums round less
        Vec reads[V] = {}, carries[V] = {};
        const int64_t end = std::min(part + kPart, states);
        for (int64_t s = part; s < end; ++s) {
          const Vec in = splat(key[s]), out_of = splat(query[s]);
#pragma GCC unroll 4
          for (int i = 0; i < V; ++i) {
            const Vec value = load(held + s * kWidth + i * kLanes);
            reads[i] += in * value;
            carries[i] += out_of * value;
          }
        }
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) read[i] += reads[i], carried[i] += carries[i];
      }
      const Vec decay = splat(exp1(g[step * heads + h])), alike = splat(of.seen[0][t]);
      const Vec strength = splat(beta[step * heads + h]);
      Vec u[V];
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) {
        const Vec in = load(v + (step * heads + h) * channels + first + i * kLanes);
        u[i] = strength * (in - decay * read[i]);
        store(out + i * kLanes, decay * carried[i] + alike * u[i]);
      }
      for (int64_t s = 0; s < states; ++s) {
        const Vec in = splat(key[s]);
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) {
          float* row = held + s * kWidth + i * kLanes;
          store(row, load(row) * decay + in * u[i]);
        }
      }
    }
    for (int64_t s = 0; s < states; ++s)
      for (int64_t p = 0; p < kWidth; ++p) new_state[at + p * states + s] = held[s * kWidth + p];
  }

  void group(int64_t b, int64_t group) const {
    Keys of;
    of.keys.resize(steps * states);
    of.queries.resize(steps * states);
    of.seen.resize(1);
    for (int64_t t = 0; t < steps; ++t) {
      const int64_t from = ((b * steps + t) * groups + group) * states;
      float *key = of.keys.data() + t * states, *query = of.queries.data() + t * states;
      norm(k + from, key, states, 1);
      norm(q + from, query, states, 1 / std::sqrt(static_cast<float>(states)));
      of.seen[0].push_back(dot(query, key, states));
    }
    std::vector<float> held(kVectors * kLanes * states);
    const int64_t each = heads / groups;
    for (int64_t h = group * each; h < (group + 1) * each; ++h)
      for (int64_t first = 0; first < channels;) {
        const bool is_wide = channels - first >= kVectors * kLanes;
        is_wide ? run<kVectors>(b, h, first, of, held.data()) : run<1>(b, h, first, of, held.data());
        first += (is_wide ? kVectors : 1) * kLanes;
      }
  }
};

ffi::Error DeltaChunks(ffi::ThreadPool pool, F32 q, F32 k, F32 v, F32 g, F32 beta, F32 state,
                       Flags valid, Result y, Result new_state) {
  const auto ks = k.dimensions(), vs = v.dimensions();
  if (ks.size() != 4 || vs.size() != 4)
    return ffi::Error::InvalidArgument("stree_jax delta_chunks: arrays of four axes");
  const int64_t b = ks[0], t = ks[1], e = ks[2], s = ks[3], h = vs[2], p = vs[3];
  const bool fits = e > 0 && h % e == 0 && p % kLanes == 0 && s % kLanes == 0 &&
                    is(q.dimensions(), {b, t, e, s}) && is(vs, {b, t, h, p}) &&
                    is(g.dimensions(), {b, t, h}) && is(beta.dimensions(), {b, t, h}) &&
                    is(state.dimensions(), {b, h, p, s}) && is(valid.dimensions(), {b, t}) &&
                    is(y->dimensions(), {b, t, h, p}) &&
                    is(new_state->dimensions(), {b, h, p, s});
  if (!fits) return ffi::Error::InvalidArgument("stree_jax delta_chunks: shapes do not fit");
  const Sequence sequence{t,
                          h,
                          p,
                          e,
                          s,
                          q.typed_data(),
                          k.typed_data(),
                          v.typed_data(),
                          g.typed_data(),
                          beta.typed_data(),
                          state.typed_data(),
                          valid.typed_data(),
                          y->typed_data(),
                          new_state->typed_data()};
  for_each_task(pool, b * e, [&](int64_t task) { sequence.group(task / e, task % e); });
  return ffi::Error::Success();
}

auto arguments() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<F32>().Arg<F32>().Arg<F32>().Arg<Flags>()
      .Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>()
      .Arg<Flags>().Arg<F32>()
      .Ret<F32>().Ret<F32>();
}

}  // namespace
}  // namespace stree

extern "C" STREE_EXPORT XLA_FFI_Error* stree_jax_tree_delta(XLA_FFI_CallFrame* frame);
extern "C" STREE_EXPORT XLA_FFI_Error* stree_jax_replay_tree_delta(XLA_FFI_CallFrame* frame);
extern "C" STREE_EXPORT XLA_FFI_Error* stree_jax_delta_chunks(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(stree_jax_tree_delta, stree::TreeDelta, stree::arguments());
XLA_FFI_DEFINE_HANDLER_SYMBOL(stree_jax_replay_tree_delta, stree::ReplayTreeDelta,
                              stree::arguments().Ret<stree::F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(stree_jax_delta_chunks, stree::DeltaChunks,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::F32>()
                                  .Arg<stree::Flags>()
                                  .Ret<stree::F32>()
                                  .Ret<stree::F32>());
