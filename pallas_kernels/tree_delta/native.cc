// The gated delta rule on a CPU: over a tree, with the replay of the previous tree's path, and over
// a sequence.
//
// As in tree_scan a state goes from token to token in one way, and is read once and written once.
// Where channels of a key have decays of their own, its products with the state are of decayed
// keys.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../native/math.h"
#include "../native/parallel.h"
#include "../native/shapes.h"
#include "../native/state.h"
#include "../native/walk.h"

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
// S states; a node has one decay a head, or S. Of a sequence all nodes are queries.
struct Delta {
  int64_t batch, before, nodes, queries, heads, channels, groups, states, decays;
  const float *prev_k, *prev_u, *prev_g;
  const bool* path;
  const float *q, *k, *v, *g, *beta, *state;
  const bool *mask, *valid;  // of a tree, or of a sequence; the other is null
  const float* prefix_u;     // of the first N - Q nodes
  float *y, *u, *new_state;  // u: of the queries, or null; new_state: null if nothing is replayed

  // Of each row: nodes of the path, and the order of the nodes.
  std::vector<std::vector<int>> paths;
  std::vector<Walk> walks;

  ffi::Error run(ffi::ThreadPool& pool);
  template <bool kApart>
  void group(int64_t b, int64_t group) const;
  bool exists(int64_t b, int64_t i) const {
    return mask ? mask[(b * nodes + i) * nodes + i] : valid[b * nodes + i];
  }
};

// What the heads of a group share.
struct Keys {
  std::vector<float> walked, keys, queries;  // normed: of the path, of all nodes, of the queries
  std::vector<float> alike;                  // products of each query with its own key
};

ffi::Error Delta::run(ffi::ThreadPool& pool) {
  paths.resize(batch);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t j = 0; j < before; ++j)
      if (path[b * before + j]) paths[b].push_back(j);
    if (mask) {
      walks.push_back(walk(mask + b * nodes * nodes, nodes, nodes - queries));
      continue;
    }
    walks.emplace_back();
    for (int64_t t = 0; t < nodes; ++t)  // each state takes the place of the one before
      if (exists(b, t)) walks[b].visits.push_back({t, 0, 0});
  }
  for_each_task(pool, batch * groups, [&](int64_t task) {
    decays > 1 ? group<true>(task / groups, task % groups)
               : group<false>(task / groups, task % groups);
  });
  return ffi::Error::Success();
}

// Writes the decays of a node.
void exp_of(const float* g, float* to, int64_t count) {
  if (count == 1) {
    *to = exp1(*g);
    return;
  }
  for (int64_t s = 0; s < count; s += kLanes) store(to + s, exp(load(g + s)));
}

template <bool kApart>
void head(const Delta& delta, const Keys& of, int64_t b, int64_t h) {
  const int64_t nodes = delta.nodes, queries = delta.queries, first = nodes - queries;
  const int64_t channels = delta.channels, states = delta.states;
  const int64_t width = kApart ? states : 1;
  const auto node = [&](int64_t count, int64_t j) { return (b * count + j) * delta.heads + h; };
  const std::vector<int>& walked = delta.paths[b];
  const auto& [visits, slots] = delta.walks[b];

  for (int64_t i = first; i < nodes; ++i) {
    if (delta.exists(b, i)) continue;
    std::fill_n(delta.y + node(queries, i - first) * channels, channels, 0.0f);
    if (delta.u) std::fill_n(delta.u + node(queries, i - first) * channels, channels, 0.0f);
  }
  std::vector<float> decays(nodes * width), old_decays(walked.size() * width);
  std::vector<float> decayed(kApart ? 2 * states : 0);  // a key and a query
  std::vector<Token> old(walked.size());
  for (const Visit& visit : visits)
    exp_of(delta.g + node(nodes, visit.node) * width, &decays[visit.node * width], width);
  for (size_t j = 0; j < walked.size(); ++j) {
    exp_of(delta.prev_g + node(delta.before, walked[j]) * width, &old_decays[j * width], width);
    old[j].decays = &old_decays[j * width];
    old[j].B = of.walked.data() + j * states;
  }

  // The state, kLanes channels at a time.
  std::vector<float> stack(slots * kLanes * states);
  const float* from = delta.state + (b * delta.heads + h) * channels * states;
  float* to =
      delta.new_state ? delta.new_state + (b * delta.heads + h) * channels * states : nullptr;
  for (int64_t p = 0; p < channels; p += kLanes) {
    const float* rows = from + p * states;
    if (to) {
      for (size_t j = 0; j < walked.size(); ++j)
        std::copy_n(delta.prev_u + node(delta.before, walked[j]) * channels + p, kLanes, old[j].in);
      replay<kApart>(rows, to + p * states, old, states);
      rows = to + p * states;
    }
    for (const auto& [i, above, own] : visits) {
      const float* parent = above ? stack.data() + (above - 1) * kLanes * states : rows;
      const float* key = of.keys.data() + i * states;
      Token token{&decays[i * width], key, {}};
      if (i < first) {
        std::copy_n(delta.prefix_u + node(first, i) * channels + p, kLanes, token.in);
      } else {
        const int64_t q = i - first, at = node(queries, q);
        const float* query = of.queries.data() + q * states;
        const float* with[2] = {key, query};
        if (kApart) {
          for (int64_t s = 0; s < states; s += kLanes) {
            store(&decayed[s], load(key + s) * load(token.decays + s));
            store(&decayed[states + s], load(query + s) * load(token.decays + s));
          }
          with[0] = decayed.data(), with[1] = decayed.data() + states;
        }
        Vec found[2];
        products<2>([&](int r) { return parent + r * states; }, with, states, found);
        const Vec kept = splat(kApart ? 1 : *token.decays), strength = splat(delta.beta[at]);
        const Vec u = strength * fused(-kept, found[0], load(delta.v + at * channels + p));
        store(token.in, u);
        if (delta.u) store(delta.u + at * channels + p, u);
        store(delta.y + at * channels + p, fused(splat(of.alike[q]), u, kept * found[1]));
      }
      if (own < 0) continue;
      float* mine = own ? stack.data() + (own - 1) * kLanes * states : to + p * states;
      step<false, kApart>(parent, nullptr, nullptr, token, mine, states);
    }
  }
}

template <bool kApart>
void Delta::group(int64_t b, int64_t group) const {
  const auto node = [&](int64_t count, int64_t j) {
    return ((b * count + j) * groups + group) * states;
  };
  Keys of;
  const std::vector<int>& walked = paths[b];
  of.walked.resize(walked.size() * states);
  for (size_t j = 0; j < walked.size(); ++j)
    norm(prev_k + node(before, walked[j]), of.walked.data() + j * states, states, 1);
  of.keys.resize(nodes * states);
  of.queries.resize(queries * states);
  of.alike.resize(queries);
  for (int64_t i = 0; i < nodes; ++i) {
    float* key = of.keys.data() + i * states;
    norm(k + node(nodes, i), key, states, 1);
    if (const int64_t own = i - (nodes - queries); own >= 0) {
      float* query = of.queries.data() + own * states;
      norm(q + node(queries, own), query, states, 1 / std::sqrt(static_cast<float>(states)));
      of.alike[own] = dot(query, key, states);
    }
  }
  const int64_t each = heads / groups;
  for (int64_t h = group * each; h < (group + 1) * each; ++h) head<kApart>(*this, of, b, h);
}

ffi::Error run(ffi::ThreadPool& pool, F32 prev_k, F32 prev_u, F32 prev_g, Flags path, F32 q, F32 k,
               F32 v, F32 g, F32 beta, F32 state, Flags mask, F32 prefix_u, Result y, Result u,
               float* new_state) {
  const auto qs = q.dimensions(), ks = k.dimensions(), vs = v.dimensions(),
             ps = prev_k.dimensions(), gs = g.dimensions();
  if (qs.size() != 4 || ks.size() != 4 || vs.size() != 4 || ps.size() != 4 || gs.size() != 4)
    return refused("tree_delta", "arrays of four axes");
  const int64_t b = ks[0], o = ps[1], n = ks[1], c = qs[1], h = vs[2], p = vs[3], e = ks[2],
                s = ks[3], d = gs[3];
  const bool fits = e > 0 && h % e == 0 && p % kLanes == 0 && s % kWidth == 0 && c <= n &&
                    (d == 1 || (d > 0 && d == s)) && is(ps, {b, o, e, s}) &&
                    is(prev_u.dimensions(), {b, o, h, p}) &&
                    is(prev_g.dimensions(), {b, o, h, d}) && is(path.dimensions(), {b, o}) &&
                    is(qs, {b, c, e, s}) && is(vs, {b, c, h, p}) && is(gs, {b, n, h, d}) &&
                    is(beta.dimensions(), {b, c, h}) && is(state.dimensions(), {b, h, p, s}) &&
                    is(mask.dimensions(), {b, n, n}) &&
                    is(prefix_u.dimensions(), {b, n - c, h, p}) &&
                    is(y->dimensions(), {b, c, h, p}) && is(u->dimensions(), {b, c, h, p});
  if (!fits) return refused("tree_delta");
  Delta delta{};
  delta.batch = b, delta.before = o, delta.nodes = n, delta.queries = c, delta.heads = h;
  delta.channels = p, delta.groups = e, delta.states = s, delta.decays = d;
  delta.prev_k = prev_k.typed_data(), delta.prev_u = prev_u.typed_data();
  delta.prev_g = prev_g.typed_data(), delta.path = path.typed_data();
  delta.q = q.typed_data(), delta.k = k.typed_data(), delta.v = v.typed_data();
  delta.g = g.typed_data(), delta.beta = beta.typed_data(), delta.state = state.typed_data();
  delta.mask = mask.typed_data(), delta.prefix_u = prefix_u.typed_data();
  delta.y = y->typed_data(), delta.u = u->typed_data(), delta.new_state = new_state;
  return delta.run(pool);
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
    return refused("tree_delta", "the new state has another shape");
  return run(pool, prev_k, prev_u, prev_g, path, q, k, v, g, beta, state, mask, prefix_u, y, u,
             new_state->typed_data());
}

ffi::Error DeltaChunks(ffi::ThreadPool pool, F32 q, F32 k, F32 v, F32 g, F32 beta, F32 state,
                       Flags valid, Result y, Result new_state) {
  const auto ks = k.dimensions(), vs = v.dimensions(), gs = g.dimensions();
  if (ks.size() != 4 || vs.size() != 4 || gs.size() != 4)
    return refused("delta_chunks", "arrays of four axes");
  const int64_t b = ks[0], t = ks[1], e = ks[2], s = ks[3], h = vs[2], p = vs[3];
  const int64_t d = gs[3];
  const bool fits = e > 0 && h % e == 0 && p % kLanes == 0 && s % kWidth == 0 &&
                    (d == 1 || (d > 0 && d == s)) && is(q.dimensions(), {b, t, e, s}) &&
                    is(vs, {b, t, h, p}) && is(gs, {b, t, h, d}) &&
                    is(beta.dimensions(), {b, t, h}) && is(state.dimensions(), {b, h, p, s}) &&
                    is(valid.dimensions(), {b, t}) && is(y->dimensions(), {b, t, h, p}) &&
                    is(new_state->dimensions(), {b, h, p, s});
  if (!fits) return refused("delta_chunks");
  Delta delta{};
  delta.batch = b, delta.nodes = delta.queries = t, delta.heads = h, delta.channels = p;
  delta.groups = e, delta.states = s, delta.decays = d;
  delta.q = q.typed_data(), delta.k = k.typed_data(), delta.v = v.typed_data();
  delta.g = g.typed_data(), delta.beta = beta.typed_data(), delta.state = state.typed_data();
  delta.valid = valid.typed_data();
  delta.y = y->typed_data(), delta.new_state = new_state->typed_data();
  return delta.run(pool);
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
      .Arg<Flags>()
      .Arg<F32>()
      .Ret<F32>()
      .Ret<F32>();
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
