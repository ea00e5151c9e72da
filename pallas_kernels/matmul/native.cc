// Products of rows with a matrix in blocks of 32 columns, on a CPU.
//
// Every output is summed in one fixed order, whatever the number of rows and of threads: parts of
// 256 inputs, each in order from zero, and the parts in order. So a row's product is the same to
// the bit alone and among others. For weights in 8 or 4 bits rows are rounded to 8 bits:
// `rounded.h`.
//
// Tiles of few rows take several blocks at once, because one block would give too few independent
// sums to hide the latency of a multiply-add. Large products are cut into tasks of some blocks and
// some rows.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "../native/parallel.h"
#include "../native/shapes.h"
#include "../native/vectors.h"
#include "rounded.h"

namespace ffi = xla::ffi;
namespace stree {
namespace {

constexpr int64_t kPart = 256;  // inputs whose sums stay in registers

constexpr int kTileColumns = kVectors * kLanes;

constexpr int64_t kTaskBytes = 64 << 10;   // weights of a task
constexpr int64_t kAloneBytes = 64 << 10;  // weights that do not pay for a second thread
constexpr int64_t kTaskRows = 20 * kRows;

// Blocks of one matrix.
template <typename T>
struct Matrix {
  const T* weights;  // [blocks, inputs, 32]
  int64_t inputs;
};

// Adds a part of R rows times B blocks to the outputs; the first part sets them.
template <typename T, int R, int B>
STREE_INLINE void tile(const float* __restrict x, int64_t x_stride, const Matrix<T>& matrix,
                       const T* __restrict weights, float* __restrict y, int64_t y_stride,
                       int64_t count, bool first) {
  const int64_t stride = matrix.inputs * kColumns;
  Vec sums[B][R][kVectors] = {};
  for (int64_t k = 0; k < count; ++k) {
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      const T* at = weights + b * stride + k * kColumns;
      Vec w[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) w[v] = load(at + v * kLanes);
#pragma GCC unroll 2
      for (size_t byte = 0; byte < sizeof(T) * kTileColumns; byte += 64)
        __builtin_prefetch((const char*)at + kPrefetch + byte);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Vec input = splat(x[r * x_stride + k]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[b][r][v] = fused(input, w[v], sums[b][r][v]);
      }
    }
  }
#pragma GCC unroll 4
  for (int b = 0; b < B; ++b)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        float* out = y + r * y_stride + b * kColumns + v * kLanes;
        store(out, first ? sums[b][r][v] : load(out) + sums[b][r][v]);
      }
}

// R rows times B blocks, all inputs or a part of them.
template <typename T, int R, int B>
void tiles(const float* x, int64_t x_stride, const Matrix<T>& matrix, int64_t block, int64_t begin,
           int64_t count, float* y, int64_t y_stride) {
  const T* weights = matrix.weights + (block * matrix.inputs + begin) * kColumns;
  for (int column = 0; column < kColumns; column += kTileColumns)
    tile<T, R, B>(x + begin, x_stride, matrix, weights + column, y + column, y_stride, count,
                  begin == 0);
}

// All rows times B blocks.
template <typename T, int B>
void blocks(const float* x, int64_t rows, const Matrix<T>& matrix, int64_t block, float* y,
            int64_t y_stride) {
  for (int64_t begin = 0; begin < matrix.inputs; begin += kPart) {
    const int64_t count = std::min(matrix.inputs - begin, kPart);
    for_each_tile(rows, [&](int64_t row, auto height) {
      constexpr int R = decltype(height)::value;
      if constexpr (R * B <= kRows)
        tiles<T, R, B>(x + row * matrix.inputs, matrix.inputs, matrix, block, begin, count,
                       y + row * y_stride, y_stride);
    });
  }
}

// Rows times blocks [first, last); y is the output at the first of these blocks.
template <typename T>
void product(const float* x, int64_t rows, const Matrix<T>& matrix, int64_t first, int64_t last,
             float* y, int64_t y_stride) {
  const int64_t at_once = 4 * rows <= kRows ? 4 : 2 * rows <= kRows ? 2 : 1;
  for (int64_t block = first, count; block < last; block += count) {
    const int64_t left = std::min(at_once, last - block);
    count = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    const auto run = count == 4 ? blocks<T, 4> : count == 2 ? blocks<T, 2> : blocks<T, 1>;
    run(x, rows, matrix, block, y + (block - first) * kColumns, y_stride);
  }
}

// Rows that one matrix of several multiplies.
struct Segment {
  int64_t matrix, first, count;
};

// A task of a call: some rows of a segment times some blocks.
struct Task {
  int64_t matrix, row, rows, first, last;
};

// Weights of 8 bits, int8, or of 4 bits, two in a uint8.
template <typename T>
constexpr bool kIsNarrow = sizeof(T) == 1;

// The call's arrays after all checks.
template <typename T>
struct Call {
  const float* x;  // [rows, inputs]
  // [matrices, blocks, inputs, 32], or [matrices, blocks, groups, 16, 32, 2] of 8 bits, or
  // [matrices, blocks, groups, 4, 32, 4] of 4.
  const T* weights;
  const uint16_t* scales;  // of few bits: [matrices, blocks, groups, 32]
  float* y;                // [rows, columns]
  int64_t inputs, blocks, groups, first_block, columns;
  Rounded<T> rounded = {};  // of few bits: the rows

  int64_t block_size() const { return kIsNarrow<T> ? groups * Form<T>::kBytes : inputs * kColumns; }

  void run(const Task& task) const {
    const int64_t first = task.matrix * blocks + first_block;
    const T* matrix = weights + first * block_size();
    if constexpr (kIsNarrow<T>) {
      float block[kTaskRows * kColumns];
      for (int64_t b = task.first; b < task.last; ++b) {
        product<T>(rounded, task.row, task.rows, matrix + b * block_size(),
                   scales + (first + b) * groups * kColumns, block);
        copy(block, task, b);
      }
    } else {
      run(task, {matrix, inputs});
    }
  }

  void run(const Task& task, const Matrix<T>& matrix) const {
    const int64_t whole = columns / kColumns;  // blocks without missing columns
    const float* rows = x + task.row * inputs;
    float* out = y + task.row * columns;
    const int64_t end = std::min(task.last, whole);
    if (task.first < end)
      product(rows, task.rows, matrix, task.first, end, out + task.first * kColumns, columns);
    if (task.last <= whole) return;
    std::vector<float> block(task.rows * kColumns);
    product(rows, task.rows, matrix, whole, task.last, block.data(), kColumns);
    copy(block.data(), task, whole);
  }

  // Writes the columns of a block `[rows, 32]` that there are.
  void copy(const float* from, const Task& task, int64_t block) const {
    const int64_t column = block * kColumns, count = std::min<int64_t>(kColumns, columns - column);
    for (int64_t r = 0; r < task.rows; ++r)
      std::copy_n(from + r * kColumns, count, y + (task.row + r) * columns + column);
  }

  void run(ffi::ThreadPool& pool, const std::vector<Segment>& segments, int64_t rows) {
    if constexpr (kIsNarrow<T>) {
      rounded = {rows, groups};
      for_each_row(pool, rows, inputs, kRowTask,
                   [&](int64_t row) { rounded.round(x + row * inputs, row, inputs); });
    }
    const int64_t used = (columns + kColumns - 1) / kColumns;
    const int64_t block_bytes = block_size() * sizeof(T);
    // A multiple of 4 blocks, which tiles of one row take at once.
    const int64_t wanted = (std::max<int64_t>(1, kTaskBytes / block_bytes) + 3) / 4 * 4;
    const int64_t fair = std::max<int64_t>(1, used / pool.num_threads());
    const int64_t each = segments.size() == 1 ? std::min(wanted, fair) : wanted;
    std::vector<Task> tasks;
    for (const Segment& segment : segments)
      for (int64_t row = 0; row < segment.count; row += kTaskRows)
        for (int64_t block = 0; block < used; block += each)
          tasks.push_back({segment.matrix, segment.first + row,
                           std::min(kTaskRows, segment.count - row), block,
                           std::min(block + each, used)});
    const int64_t bytes = used * block_bytes * static_cast<int64_t>(segments.size());
    if (bytes <= kAloneBytes && tasks.size() <= segments.size() * used)
      for (const Task& task : tasks) run(task);
    else
      for_each_task(pool, tasks.size(), [&](int64_t task) { run(tasks[task]); });
  }
};

// Each row times the matrix that `which` names: rows of one matrix become neighbours.
template <typename T>
void grouped(ffi::ThreadPool& pool, Call<T>& call, const int32_t* which, int64_t rows,
             int64_t matrices) {
  std::vector<int64_t> starts(matrices + 1);
  for (int64_t r = 0; r < rows; ++r) ++starts[which[r] + 1];
  std::vector<Segment> segments;
  for (int64_t m = 0; m < matrices; ++m) {
    if (starts[m + 1]) segments.push_back({m, starts[m], starts[m + 1]});
    starts[m + 1] += starts[m];
  }
  std::vector<int64_t> place(rows);
  for (int64_t r = 0; r < rows; ++r) place[r] = starts[which[r]]++;
  std::vector<float> x(rows * call.inputs), y(rows * call.columns);
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(x.data() + place[r] * call.inputs, call.x + r * call.inputs,
                call.inputs * sizeof(float));
  float* out = call.y;
  call.x = x.data();
  call.y = y.data();
  call.run(pool, segments, rows);
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(out + r * call.columns, y.data() + place[r] * call.columns,
                call.columns * sizeof(float));
}

bool is_zero(const float* row, int64_t size) {
  return std::all_of(row, row + size, [](float value) { return value == 0; });
}

// Rows of zeros, as padding is, give zeros without a product.
template <typename T>
void without_zeros(ffi::ThreadPool& pool, Call<T>& call, int64_t rows) {
  std::vector<Segment> segments;
  for (int64_t r = 0; r < rows; ++r) {
    if (is_zero(call.x + r * call.inputs, call.inputs))
      std::memset(call.y + r * call.columns, 0, call.columns * sizeof(float));
    else if (!segments.empty() && segments.back().first + segments.back().count == r)
      ++segments.back().count;
    else
      segments.push_back({0, r, 1});
  }
  call.run(pool, segments, rows);
}

template <typename T>
void matmul(ffi::ThreadPool& pool, Call<T>& call, const int32_t* which, int64_t rows,
            int64_t matrices) {
  if (which)
    grouped(pool, call, which, rows, matrices);
  else if (rows > kRows)
    without_zeros(pool, call, rows);
  else
    call.run(pool, {{0, 0, rows}}, rows);
}

// Runs the function with the weights in their own type.
template <typename Run>
ffi::Error with_weights(ffi::AnyBuffer blocks, const Run& run) {
  switch (blocks.element_type()) {
    case ffi::F32:
      run(static_cast<const float*>(blocks.untyped_data()));
      break;
    case ffi::BF16:
      run(static_cast<const uint16_t*>(blocks.untyped_data()));
      break;
    case ffi::S8:
      run(static_cast<const int8_t*>(blocks.untyped_data()));
      break;
    case ffi::U8:
      run(static_cast<const uint8_t*>(blocks.untyped_data()));
      break;
    default:
      return refused("matmul", "matrices are float32, bfloat16, int8 or uint8");
  }
  return ffi::Error::Success();
}

float widened1(float weight) { return weight; }
float widened1(uint16_t weight) {
  const uint32_t bits = static_cast<uint32_t>(weight) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Input k of a column [groups, 16, 32, 2] in 8 bits, or [groups, 4, 32, 4] in 4.
float input(const int8_t* column, int64_t k) { return column[k / 2 * 2 * kColumns + k % 2]; }
float input(const uint8_t* column, int64_t k) {
  const int64_t byte = k / kGroup * kGroup / 2 + k % (kGroup / 2);
  const int both = column[byte / 4 * 4 * kColumns + byte % 4];
  return (k % kGroup < kGroup / 2 ? both & 15 : both >> 4) - 8;
}

// True for blocks [*several, inputs, 32], or with scales [*several, groups, 32] int8 [*several,
// groups, 16, 32, 2] or uint8 [*several, groups, 4, 32, 4].
bool fit(ffi::AnyBuffer blocks, ffi::AnyBuffer scales, size_t several, int64_t inputs) {
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
  const auto bs = blocks.dimensions(), ss = scales.dimensions();
  const auto ends_in = [&](auto shape, std::initializer_list<int64_t> end) {
    return shape.size() == several + end.size() &&
           std::equal(shape.begin(), shape.begin() + several, bs.begin()) &&
           std::equal(end.begin(), end.end(), shape.begin() + several);
  };
  if (blocks.element_type() == ffi::S8)
    return ends_in(bs, {groups, kGroup / 2, kColumns, 2}) && ends_in(ss, {groups, kColumns}) &&
           scales.element_type() == ffi::BF16;
  if (blocks.element_type() == ffi::U8)
    return ends_in(bs, {groups, 4, kColumns, 4}) && ends_in(ss, {groups, kColumns}) &&
           scales.element_type() == ffi::F16;
  return ends_in(bs, {inputs, kColumns}) && scales.element_count() == 0;
}

// Columns [first + index] of some blocks, of `columns` from `first` on.
ffi::Error Rows(ffi::AnyBuffer blocks, ffi::AnyBuffer scales, S32 index, Result rows, int64_t first,
                int64_t columns) {
  const auto bs = blocks.dimensions(), is_ = index.dimensions(), rs = rows->dimensions();
  if (is_.size() != 1 || rs.size() != 2 || rs[0] != is_[0] || !fit(blocks, scales, 1, rs[1]) ||
      first < 0 || columns < 1 || first > bs[0] * kColumns - columns)
    return refused("matmul", "shapes do not fit");
  const int64_t inputs = rs[1], groups = (inputs + kGroup - 1) / kGroup;
  return with_weights(blocks, [&](auto* weights) {
    for (int64_t r = 0; r < is_[0]; ++r) {
      const int64_t at = first + std::clamp<int64_t>(index.typed_data()[r], 0, columns - 1);
      const int64_t block = at / kColumns, column = at % kColumns;
      float* to = rows->typed_data() + r * inputs;
      using T = std::decay_t<decltype(*weights)>;
      if constexpr (kIsNarrow<T>) {
        const T* from = weights + block * groups * Form<T>::kBytes + column * Form<T>::kTogether;
        const uint16_t* scale = static_cast<const uint16_t*>(scales.untyped_data()) +
                                block * groups * kColumns + column / kLanes * kLanes;
        for (int64_t k = 0; k < inputs; ++k)
          to[k] = input(from, k) * Form<T>::scales(scale + k / kGroup * kColumns)[column % kLanes];
      } else {
        const auto* from = weights + block * inputs * kColumns + column;
        for (int64_t k = 0; k < inputs; ++k) to[k] = widened1(from[k * kColumns]);
      }
    }
  });
}

// x [rows, inputs] times the blocks of matrices from `first_block` on, with the matrix of each row
// [rows] or [0] if there is one.
ffi::Error Matmul(ffi::ThreadPool pool, F32 x, ffi::AnyBuffer blocks, ffi::AnyBuffer scales,
                  S32 which, Result y, int64_t first_block) {
  const auto xs = x.dimensions(), bs = blocks.dimensions(), ws = which.dimensions(),
             ys = y->dimensions();
  if (xs.size() != 2 || ys.size() != 2 || ys[0] != xs[0] || !fit(blocks, scales, 2, xs[1]))
    return refused("matmul", "shapes do not fit");
  const int64_t rows = xs[0], inputs = xs[1], groups = (inputs + kGroup - 1) / kGroup;
  const int64_t used = (ys[1] + kColumns - 1) / kColumns;
  if (first_block < 0 || first_block > bs[1] - used)
    return refused("matmul", "there are fewer columns");
  const bool is_chosen = bs[0] != 1;
  if (ws.size() != 1 || (ws[0] != 0 || is_chosen) * rows != ws[0])
    return refused("matmul", "every row needs the index of its matrix");
  const int32_t* chosen = ws[0] ? which.typed_data() : nullptr;
  for (int64_t r = 0; r < ws[0]; ++r)
    if (chosen[r] < 0 || chosen[r] >= bs[0])
      return refused("matmul", "there is no matrix " + std::to_string(chosen[r]) + " of " +
                                   std::to_string(bs[0]));
  if (y->element_count() == 0) return ffi::Error::Success();
  if (inputs == 0) {
    std::memset(y->untyped_data(), 0, y->size_bytes());
    return ffi::Error::Success();
  }
  return with_weights(blocks, [&](auto* weights) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(weights)>>;
    const uint16_t* factors = static_cast<const uint16_t*>(scales.untyped_data());
    Call<T> call{x.typed_data(), weights,     factors, y->typed_data(), inputs, bs[1],
                 groups,         first_block, ys[1]};
    matmul(pool, call, chosen, rows, bs[0]);
  });
}

}  // namespace
}  // namespace stree

extern "C" STREE_EXPORT XLA_FFI_Error* stree_jax_matmul(XLA_FFI_CallFrame* frame);
extern "C" STREE_EXPORT XLA_FFI_Error* stree_jax_rows(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(stree_jax_matmul, stree::Matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<stree::F32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<stree::S32>()
                                  .Ret<stree::F32>()
                                  .Attr<int64_t>("first_block"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(stree_jax_rows, stree::Rows,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<stree::S32>()
                                  .Ret<stree::F32>()
                                  .Attr<int64_t>("first")
                                  .Attr<int64_t>("columns"));
