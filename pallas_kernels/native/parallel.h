// Tasks of one call on XLA's own threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace stree {

// Calls run(task) for each task in [0, count), on this thread and on those of the pool.
//
// All take the next task from one counter, so a thread that comes late takes fewer. This thread
// takes tasks until none is left, then waits for those that others took. It waits for nobody who
// has not begun, so it cannot deadlock, however busy the pool is. On shared cores a call is slow
// because its share of them is small: beside 13 busy processes on two cores, a step of 25 products
// waited here for less than 1 % of its time, and took as long on one thread.
template <typename Run>
void for_each_task(xla::ffi::ThreadPool& pool, int64_t count, const Run& run) {
  const int64_t threads = std::min<int64_t>(pool.num_threads(), count);
  if (threads <= 1) {
    for (int64_t task = 0; task < count; ++task) run(task);
    return;
  }
  // A thread of the pool may look at the counter after this call has returned.
  struct Counters {
    std::atomic<int64_t> taken{0}, done{0};
  };
  auto counters = std::make_shared<Counters>();
  auto work = [counters, count, &run] {
    int64_t own = 0;
    for (;;) {
      const int64_t task = counters->taken.fetch_add(1, std::memory_order_relaxed);
      if (task >= count) break;
      run(task);  // alive: this call waits for every task that was taken
      ++own;
    }
    if (own) counters->done.fetch_add(own, std::memory_order_release);
  };
  for (int64_t i = 1; i < threads; ++i) pool.Schedule([work] { work(); });
  work();
  for (int spins = 0; counters->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins < 4096) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else {
      std::this_thread::yield();  // fewer cores than threads
    }
  }
}

constexpr int64_t kRowTask = 16384;  // numbers of a task, where each costs little

// Calls run(row) for each row in [0, rows); a task has rows of `numbers` numbers together, because
// fewer do not pay for a second thread.
template <typename Run>
void for_each_row(xla::ffi::ThreadPool& pool, int64_t rows, int64_t size, int64_t numbers,
                  const Run& run) {
  const int64_t each = std::max<int64_t>(1, numbers / std::max<int64_t>(1, size));
  for_each_task(pool, (rows + each - 1) / each, [&](int64_t task) {
    for (int64_t row = task * each; row < std::min(rows, (task + 1) * each); ++row) run(row);
  });
}

}  // namespace stree
