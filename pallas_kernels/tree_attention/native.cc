// Attention of tree nodes to a cache and to their ancestors, on a CPU.
//
// Softmax is online, over blocks of keys: first the cache up to its length, then the nodes that a
// query sees, which continue the cache's last block. So the position of a key decides its block, and
// a query's output depends, to the bit, on nothing but the tokens that it sees.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../native/math.h"
#include "../native/parallel.h"
#include "../native/shapes.h"

namespace ffi = xla::ffi;
namespace stree {
namespace {

constexpr int kKeys = 64;         // of a block
constexpr int64_t kRows = 32;     // query rows of a task
constexpr int64_t kAlone = 8192;  // multiply-adds that do not pay for a second thread

// Some keys and their values, each `size` numbers.
struct Block {
  const float *keys[kKeys], *values[kKeys];
  int count = 0;

  void add(const float* key, const float* value) {
    keys[count] = key;
    values[count++] = value;
  }
};

// The softmax of one query over the keys so far, not yet normalised.
struct Row {
  const float* query;
  float* output;  // the weighted sum of values
  float maximum = -std::numeric_limits<float>::infinity(), total = 0;

  void add(const Block& block, int64_t size, float scale);
  void finish(int64_t size) const;
};

void Row::add(const Block& block, int64_t size, float scale) {
  if (!block.count) return;
  float weights[kKeys];
  float largest = maximum;
  for (int first = 0; first < block.count; first += kLanes) {
    Vec scores;
    products<1>([&](int i) { return block.keys[std::min(first + i, block.count - 1)]; }, {query},
                size, &scores);
    store(weights + first, scores * splat(scale));
  }
  std::fill(weights + block.count, weights + kKeys, -std::numeric_limits<float>::infinity());
  for (float weight : weights) largest = std::max(largest, weight);
  const float kept = maximum == largest ? 1.0f : exp1(maximum - largest);
  Wide sums = {};
  sum_up(sums, block.count, [&](int64_t first, Vec sums) {
    const Vec weight = exp(load(weights + first) - splat(largest));
    store(weights + first, weight);
    return sums + weight;
  });
  total = std::fma(total, kept, sum(sums));
  maximum = largest;
  for (int64_t e = 0; e < size; e += kLanes) {
    // A block is summed by itself: one sum over thousands of keys would be five times less exact.
    Vec value = {};
    for (int i = 0; i < block.count; ++i)
      value = fused(splat(weights[i]), load(block.values[i] + e), value);
    store(output + e, fused(load(output + e), splat(kept), value));
  }
}

void Row::finish(int64_t size) const {
  // A query that sees nothing has no output; it is finite.
  const Vec factor = splat(total > 0 ? 1 / total : total == 0 ? 0 : total);
  for (int64_t e = 0; e < size; e += kLanes) store(output + e, load(output + e) * factor);
}

ffi::Error TreeAttention(ffi::ThreadPool pool, F32 query, F32 node_keys, F32 node_values, F32 keys,
                         F32 values, ffi::Buffer<ffi::S32> length, ffi::Buffer<ffi::PRED> mask,
                         ffi::ResultBuffer<ffi::F32> output, float scale, int64_t window) {
  const auto qs = query.dimensions(), ns = node_keys.dimensions(), ks = keys.dimensions();
  if (qs.size() != 4 || ns.size() != 4 || ks.size() != 4)
    return ffi::Error::InvalidArgument("stree_jax tree_attention: arrays of four axes");
  const int64_t batch = qs[0], queries = qs[1], heads = qs[2], size = qs[3];
  const int64_t nodes = ns[1], groups = ns[2], capacity = ks[2];
  const bool fits = window >= 0 && groups > 0 && heads % groups == 0 && size % kWidth == 0 &&
                    is(ns, {batch, nodes, groups, size}) && is(node_values.dimensions(), {batch, nodes, groups, size}) &&
                    is(ks, {batch, groups, capacity, size}) && is(values.dimensions(), {batch, groups, capacity, size}) &&
                    is(length.dimensions(), {batch}) &&
                    is(mask.dimensions(), {batch, queries, nodes}) && is(output->dimensions(), {batch, queries, heads, size});
  if (!fits) return ffi::Error::InvalidArgument("stree_jax tree_attention: shapes do not fit");
  const int64_t per_group = heads / groups, rows = queries * per_group;
  const int64_t tasks = (rows + kRows - 1) / kRows;
  std::vector<int64_t> depths(window ? batch * queries : 0);  // nodes above each query
  for (size_t i = 0; i < depths.size(); ++i)
    depths[i] = std::count(mask.typed_data() + i * nodes, mask.typed_data() + (i + 1) * nodes, true) - 1;

  const auto run = [&](int64_t task) {
    const int64_t b = task / tasks / groups, u = task / tasks % groups;
    const int64_t begin = task % tasks * kRows, end = std::min(begin + kRows, rows);
    std::vector<Row> own(end - begin);
    for (int64_t r = begin; r < end; ++r) {
      // Rows are heads of a query, then the next query.
      const int64_t place = ((b * queries + r / per_group) * heads + u * per_group + r % per_group) * size;
      Row& row = own[r - begin];
      row.query = query.typed_data() + place;
      row.output = output->typed_data() + place;
      std::fill_n(row.output, size, 0.0f);
    }
    // Of a ring the token at position l is at l % capacity.
    const int64_t tokens = std::max<int64_t>(0, length.typed_data()[b]);
    const int64_t used = window ? tokens : std::min(tokens, capacity);
    const int64_t oldest = window ? std::max<int64_t>(0, used - capacity) : 0;
    const int64_t cache = (b * groups + u) * capacity * size;
    const auto add = [&](Block& block, int64_t from, int64_t to) {
      for (int64_t l = from; l < to; ++l) {
        const int64_t place = cache + (window ? l % capacity : l) * size;
        block.add(keys.typed_data() + place, values.typed_data() + place);
      }
    };
    const int64_t whole = used / kKeys * kKeys;
    for (int64_t first = oldest / kKeys * kKeys; first < whole; first += kKeys) {
      Block block;
      add(block, std::max(first, oldest), first + kKeys);
      for (int64_t r = begin; r < end; ++r) {
        const int64_t lowest = used + (window ? depths[b * queries + r / per_group] - window + 1 : 0);
        if (!window || lowest <= first) {
          own[r - begin].add(block, size, scale);
        } else if (lowest < first + kKeys) {
          Block part;
          add(part, std::max(lowest, oldest), first + kKeys);
          own[r - begin].add(part, size, scale);
        }
      }
    }
    for (int64_t r = begin; r < end; ++r) {
      const bool* seen = mask.typed_data() + (b * queries + r / per_group) * nodes;
      Row& row = own[r - begin];
      const int64_t lowest =
          window ? std::max(oldest, used + depths[b * queries + r / per_group] - window + 1) : 0;
      Block block;
      add(block, std::max(whole, lowest), used);
      int64_t position = used;
      for (int64_t j = 0; j < nodes; ++j) {
        if (!seen[j]) continue;
        if (position >= lowest) {
          const int64_t place = ((b * nodes + j) * groups + u) * size;
          block.add(node_keys.typed_data() + place, node_values.typed_data() + place);
        }
        if (++position % kKeys) continue;
        row.add(block, size, scale);
        block.count = 0;
      }
      row.add(block, size, scale);
      row.finish(size);
    }
  };
  int64_t keys_seen = nodes;
  for (int64_t b = 0; b < batch; ++b) keys_seen = std::max<int64_t>(keys_seen, length.typed_data()[b]);
  if (batch * queries * heads * size * keys_seen <= kAlone)
    for (int64_t task = 0; task < batch * groups * tasks; ++task) run(task);
  else
    for_each_task(pool, batch * groups * tasks, run);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stree

extern "C" STREE_EXPORT XLA_FFI_Error* stree_jax_tree_attention(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(stree_jax_tree_attention, stree::TreeAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<stree::F32>().Arg<stree::F32>().Arg<stree::F32>()
                                  .Arg<stree::F32>().Arg<stree::F32>()
                                  .Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<stree::F32>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window"));
