// The order in which the states of a tree's nodes follow from each other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace stree {

// A node, the slot of its parent's state and that of its own; -1: no node needs its own. Slot 0 has
// the state before the root.
struct Visit {
  int64_t node;
  int from, to;
};

struct Walk {
  std::vector<Visit> visits;
  int slots = 0;  // beyond slot 0
};

// Goes through a tree from parents to children, depth first, so that few states exist at a time: a
// state takes its parent's slot where no other child needs that. `mask` [nodes, nodes] has the
// ancestors of each node and itself; nodes that do not exist, and those before `first` that have no
// descendant from there on, are left out.
inline Walk walk(const bool* mask, int64_t nodes, int64_t first) {
  std::vector<int64_t> child(nodes + 1, -1), sibling(nodes, -1);  // children of no node: the last
  for (int64_t i = nodes - 1; i >= 0; --i) {
    const bool* row = mask + i * nodes;
    if (!row[i] || (i < first && child[i] < 0)) continue;
    int64_t above = i - 1;
    while (above >= 0 && !row[above]) --above;
    if (above < 0 || !mask[above * nodes + above]) above = nodes;
    sibling[i] = child[above];
    child[above] = i;
  }
  struct Open {
    int64_t node;
    int from;
    bool is_last;
  };
  std::vector<Open> open;
  const auto add = [&](int64_t above, int from) {
    for (int64_t i = child[above]; i >= 0; i = sibling[i])
      open.push_back({i, from, i == child[above]});
  };
  Walk found;
  add(nodes, 0);
  while (!open.empty()) {
    const Open at = open.back();
    open.pop_back();
    const int to = child[at.node] < 0 ? -1 : at.from + !(at.is_last && at.from > 0);
    found.slots = std::max(found.slots, to);
    found.visits.push_back({at.node, at.from, to});
    add(at.node, to);
  }
  return found;
}

}  // namespace stree
