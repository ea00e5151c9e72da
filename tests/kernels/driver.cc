// Calls the functions of the native library as XLA does, with random shapes.
//
//   driver CALLS SEED THREADS
//
// is linked with the library, and prints a digest of what each function wrote. Without arguments it
// runs the calls of tests/emulated.py, from its input. Each array is an allocation of its own,
// without room behind it, so that a sanitizer sees a number too far. Results begin as NaN, so that
// a number that is not written is seen too. Every fourth call has an array of a wrong shape. The
// tasks of a call run on threads of their own; one thread must give the same bits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace {

using Shape = std::vector<int64_t>;
constexpr auto kBool = XLA_FFI_DataType_PRED, kInt8 = XLA_FFI_DataType_S8,
               kByte = XLA_FFI_DataType_U8, kHalf = XLA_FFI_DataType_F16,
               kInt32 = XLA_FFI_DataType_S32, kInt64 = XLA_FFI_DataType_S64,
               kFloat = XLA_FFI_DataType_F32, kBfloat16 = XLA_FFI_DataType_BF16;

struct Array {
  XLA_FFI_DataType dtype;
  Shape shape;
  void* data;

  Array(XLA_FFI_DataType dtype, Shape shape)
      : dtype(dtype), shape(std::move(shape)), data(std::calloc(bytes(), 1)) {}
  Array(const Array& other) : Array(other.dtype, other.shape) {
    std::memcpy(data, other.data, bytes());
  }
  ~Array() { std::free(data); }

  int64_t count() const {
    int64_t count = 1;
    for (int64_t size : shape) count *= size;
    return count;
  }
  size_t bytes() const {
    const bool is_byte = dtype == kBool || dtype == kInt8 || dtype == kByte;
    return count() * (is_byte ? 1 : dtype == kBfloat16 || dtype == kHalf ? 2 : 4);
  }
  template <typename T>
  T* of() const {
    return static_cast<T*>(data);
  }
};

using Pointer = std::shared_ptr<Array>;
using Arrays = std::vector<Pointer>;

Pointer out(const Shape& shape) {
  auto array = std::make_shared<Array>(kFloat, shape);
  for (int64_t i = 0; i < array->count(); ++i) array->of<float>()[i] = NAN;
  return array;
}

Pointer none() { return out({0}); }

// Random sizes, and arrays of random numbers.
struct Draw {
  uint64_t state;

  uint64_t next() {  // splitmix64
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t end) { return next() % end; }
  int64_t of(const Shape& sizes) { return sizes[below(sizes.size())]; }

  template <typename T, typename Number>
  Pointer filled(XLA_FFI_DataType dtype, const Shape& shape, const Number& number) {
    auto array = std::make_shared<Array>(dtype, shape);
    for (int64_t i = 0; i < array->count(); ++i) array->of<T>()[i] = number();
    return array;
  }
  float number() { return (below(1 << 24) - (1 << 23)) / float(1 << 22); }
  Pointer f(const Shape& shape) {
    return filled<float>(kFloat, shape, [&] { return number(); });
  }
  Pointer positive(const Shape& shape, float sign = 1) {
    return filled<float>(kFloat, shape, [&] { return sign * std::fabs(number()); });
  }
  Pointer negative(const Shape& shape) { return positive(shape, -1); }
  Pointer flags(const Shape& shape) {
    return filled<bool>(kBool, shape, [&] { return below(5) < 3; });
  }
  Pointer whole(int64_t low, int64_t high, const Shape& shape) {
    return filled<int32_t>(kInt32, shape, [&] { return low + below(high - low); });
  }
  // Where the new state goes: to a place of its own, or to that of the old one.
  Pointer after(const Pointer& state) { return of({0, 1}) ? state : out(state->shape); }
  // Who sees whom, now and then nonsense.
  Pointer tree(int64_t b, int64_t n) {
    Pointer mask = flags({b, n, n});
    if (of({0, 1})) return mask;
    for (int64_t i = 0; i < b * n * n; ++i) {
      const int64_t node = i / n % n, other = i % n;
      mask->of<bool>()[i] = other == node || (other < node && mask->of<bool>()[i]);
    }
    return mask;
  }
  // Blocks of matrices, and their scales if they have some.
  std::pair<Pointer, Pointer> weights(const Shape& several, int64_t inputs) {
    const auto shape = [&](std::initializer_list<int64_t> end) {
      Shape whole = several;
      whole.insert(whole.end(), end);
      return whole;
    };
    const int64_t kind = of({0, 1, 2, 3}), groups = (inputs + 31) / 32;
    if (kind == 0) return {f(shape({inputs, 32})), none()};
    if (kind == 1)
      return {filled<uint16_t>(kBfloat16, shape({inputs, 32}), [&] { return 0x3f00 + below(256); }),
              none()};
    if (kind == 2)
      return {filled<uint8_t>(kByte, shape({groups, 4, 32, 4}), [&] { return below(256); }),
              filled<uint16_t>(kHalf, shape({groups, 32}), [&] { return 0x2000 + below(0x2000); })};
    const Shape pairs = shape({groups, 16, 32, 2});
    return {filled<int8_t>(kInt8, pairs, [&] { return below(256) - 128; }),
            filled<uint16_t>(kBfloat16, shape({groups, 32}), [&] { return 0x3c00 + below(256); })};
  }
};

using Setting = std::variant<int64_t, float, std::vector<float>>;
struct Call {
  Arrays given, results;
  std::map<std::string, Setting> settings = {};  // sorted, as XLA has them

  Call copy() const {  // some arrays are both
    std::map<Pointer, Pointer> copies;
    Call copied{given, results, settings};
    for (Arrays* arrays : {&copied.given, &copied.results})
      for (Pointer& array : *arrays) {
        Pointer& own = copies[array];
        if (!own) own = std::make_shared<Array>(*array);
        array = own;
      }
    return copied;
  }
};

// The shapes of each function's calls.

Call matmul(Draw& s) {
  const int64_t rows = s.of({0, 1, 2, 3, 6, 7, 14, 27, 300});
  const int64_t inputs = s.of({0, 1, 31, 32, 33, 257, 600});
  const int64_t columns = s.of({0, 1, 31, 32, 33, 100, 129, 300}), first = s.of({0, 1, 2});
  const int64_t matrices = s.of({1, 1, 2, 5}), blocks = first + (columns + 31) / 32 + s.of({0, 1});
  const auto [weights, scales] = s.weights({matrices, blocks}, inputs);
  const Pointer x = s.f({rows, inputs});
  if (s.of({0, 1}))  // rows of zeros
    for (int64_t row = 0; row < rows; ++row)
      if (s.of({0, 1})) std::memset(x->of<float>() + row * inputs, 0, inputs * sizeof(float));
  const Pointer which = s.whole(0, matrices, {matrices > 1 || s.of({0, 1}) ? rows : 0});
  return {{x, weights, scales, which}, {out({rows, columns})}, {{"first_block", first}}};
}

Call rows(Draw& s) {
  const int64_t inputs = s.of({0, 1, 31, 33, 70}), blocks = s.of({1, 2, 5});
  const int64_t count = s.of({0, 1, 2, 9}), first = s.of({0, 1, 31, blocks * 32 - 1});
  const int64_t columns = s.of({1, blocks * 32 - first});
  const auto [weights, scales] = s.weights({blocks}, inputs);
  return {{weights, scales, s.whole(-3, columns + 3, {count})},
          {out({count, inputs})},
          {{"first", first}, {"columns", columns}}};
}

Call rms_norm(Draw& s) {
  const int64_t rows = s.of({0, 1, 3, 700}), size = 16 * s.of({0, 1, 2, 3, 9});
  return {{s.f({rows, size}), s.f({size})}, {out({rows, size})}, {{"epsilon", 1e-5f}}};
}

Call add_rms_norm(Draw& s) {
  const int64_t rows = s.of({0, 1, 3, 700}), size = 16 * s.of({0, 1, 2, 3, 9});
  const Pointer squares = s.of({0, 1}) ? s.positive({rows, s.of({0, 1, 5})}) : none();
  return {{s.f({rows, size}), s.f({rows, size}), squares, s.f({size})},
          {out({rows, size}), out({rows, size})},
          {{"multiplier", 0.7f}, {"epsilon", 1e-5f}, {"deferred_epsilon", 1e-5f}}};
}

Call gated_rms_norm(Draw& s) {
  const int64_t rows = s.of({0, 1, 3, 300}), groups = s.of({1, 2, 5}), start = s.of({0, 1, 17});
  const int64_t size = groups * 16 * s.of({0, 1, 2, 5});
  return {{s.f({rows, size}), s.f({rows, start + size + s.of({0, 3})}),
           s.of({0, 1}) ? s.f({size}) : none()},
          {out({rows, size})},
          {{"epsilon", 1e-5f},
           {"groups", groups},
           {"gate_start", start},
           {"gate_first", s.of({0, 1})},
           {"is_sigmoid", s.of({0, 1})}}};
}

Call log_softmax(Draw& s) {
  const int64_t rows = s.of({0, 1, 5}), size = s.of({0, 1, 16, 33, 1100});
  return {{s.f({rows, size})}, {out({rows, size})}};
}

Call weighted_sum(Draw& s) {
  const int64_t t = s.of({0, 1, 5}), a = s.of({0, 1, 3}), size = s.of({0, 1, 16, 33});
  return {{s.f({t, a, size}), s.f({t, a})}, {out({t, size})}};
}

Call largest_threshold(Draw& s) {
  const int64_t rows = s.of({0, 1, 5, 40}), size = s.of({0, 1, 63, 64, 65, 500});
  const Pointer values = s.positive({rows, size});
  if (s.of({0, 1})) {
    const float odd[] = {INFINITY, NAN, -1, 0}, chosen = odd[s.below(4)];
    for (int64_t i = 0; i < rows * size; ++i)
      if (s.of({0, 1})) values->of<float>()[i] = chosen;
  }
  return {{values, s.positive({s.of({0, rows}), size}), s.f({rows})},
          {out({rows})},
          {{"is_share", s.of({0, 1})}}};
}

Call tree_scans(Draw& s, bool replays) {
  const int64_t b = s.of({0, 1, 2, 3}), g = s.of({1, 2}), n = s.of({0, 1, 2, 7, 20});
  const int64_t states = 16 * s.of({0, 1, 2, 8}), h = g * s.of({0, 1, 3});
  const int64_t p = 16 * s.of({0, 1, 2, 4}), before = replays ? s.of({0, 1, 6}) : 0;
  const int64_t q = s.of({0, n / 2, n}), start = s.of({0, 5}), channels = h * p;
  const int64_t gate = p ? s.of({0, 1, 2, 3}) : s.of({0, 1});  // a mean of no numbers is none
  const Pointer state = s.f({b, h, p, states});
  const bool is_sequence = replays && q == n && s.of({0, 1});
  Call call{
      {s.f({b, before, h, p}), s.positive({b, before, h}), s.f({b, before, g, states}),
       s.flags({b, before}), s.f({b, n, h, p}), s.positive({b, n, h}), s.negative({h}),
       s.f({b, n, g, states}), s.f({b, q, g, states}), s.f(s.of({0, 1}) ? Shape{h} : Shape{h, p}),
       state, is_sequence ? s.flags({0}) : s.tree(b, n),
       gate ? s.f({b, q, start + channels + s.of({0, 3})}) : none(),
       gate > 1 ? s.f({channels}) : none()},
      {out({b, q, h, p}), gate == 2 ? out({b, q, h}) : none()},
      {{"a_is_log", s.of({0, 1})},
       {"gate", gate},
       {"start", start},
       {"multiplier", 1.1f},
       {"epsilon", 1e-5f}}};
  if (replays) call.results.push_back(s.after(state));
  return call;
}
Call tree_scan(Draw& s) { return tree_scans(s, false); }
Call replay_tree_scan(Draw& s) { return tree_scans(s, true); }

Call tree_attention(Draw& s) {
  const int64_t b = s.of({0, 1, 3}), q = s.of({0, 1, 5, 40}), g = s.of({1, 2});
  const int64_t size = 16 * s.of({0, 1, 2, 4}), h = g * s.of({0, 1, 3});
  const int64_t n = s.of({0, 1, 7, 64, 65}), places = s.of({0, 1, 63, 64, 200});
  return {
      {s.f({b, q, h, size}), s.f({b, n, g, size}), s.f({b, n, g, size}), s.f({b, g, places, size}),
       s.f({b, g, places, size}), s.whole(-2, places + 3, {b}), s.flags({b, q, n})},
      {out({b, q, h, size})},
      {{"scale", s.of({0, 1}) ? 0.3f : 0.02f}, {"window", s.of({0, 1, 5, 64, 100})}}};
}

Call tree_conv1d_layer(Draw& s) {
  const int64_t b = s.of({0, 1, 3}), q = s.of({0, 1, 4, 9}), prefix = s.of({0, 2});
  const int64_t before = s.of({0, 3}), h = s.of({1, 2}), p = 16 * s.of({0, 1, 3});
  const int64_t g = s.of({1, 2}), n = 16 * s.of({0, 1}), taps = s.of({1, 2, 4, 16});
  const int64_t channels = h * p + 2 * g * n, first = s.of({0, 7}), nodes = prefix + q;
  const Pointer state = s.f({b, taps - 1, channels});
  const bool replays = before || s.of({0, 1});
  return {{s.f({b, q, first + channels + h + s.of({0, 2})}), s.f({taps, channels}),
           s.of({0, 1}) ? s.f({channels}) : none(), s.f({h}), state,
           s.whole(-3, taps + nodes + 2, {b, q, taps}), s.f({b, prefix, h, p}), s.f({b, prefix, h}),
           s.f({b, prefix, g, n}), s.f({b, prefix, channels}), s.f({b, before, channels}),
           s.whole(-2, taps + before + 1, replays ? Shape{b, taps - 1} : Shape{0})},
          {out({b, nodes, h, p}), out({b, nodes, h}), out({b, nodes, g, n}),
           out({b, nodes, channels}), out({b, q, g, n}), s.after(state)},
          {{"first_column", first},
           {"multipliers", std::vector<float>{1, 0.5, 2, 1.5}},
           {"dt_low", 0.0f},
           {"dt_high", 9.0f}}};
}

Call tree_conv1d(Draw& s) {
  const int64_t b = s.of({0, 1, 3}), n = s.of({0, 1, 4, 9}), q = s.of({0, n / 2, n});
  const int64_t channels = 16 * s.of({0, 1, 3}), taps = s.of({1, 2, 3, 16});
  return {{s.f({b, n, channels}), s.f({b, taps - 1, channels}), s.f({taps, channels}),
           s.of({0, 1}) ? s.f({channels}) : none(), s.whole(-3, taps + n + 2, {b, q, taps})},
          {out({b, q, channels})},
          {{"has_silu", s.of({0, 1})}}};
}

Call tree_deltas(Draw& s, bool replays) {
  const int64_t b = s.of({0, 1, 2, 3}), g = s.of({1, 2}), n = s.of({0, 1, 2, 7, 20});
  const int64_t states = 16 * s.of({0, 1, 2}), h = g * s.of({0, 1, 3});
  const int64_t p = 16 * s.of({0, 1, 2, 4}), before = replays ? s.of({0, 1, 6}) : 0;
  const int64_t q = replays ? n : s.of({0, n / 2, n}), decays = states ? s.of({1, states}) : 1;
  const Pointer state = s.f({b, h, p, states});
  Call call{{s.f({b, before, g, states}), s.f({b, before, h, p}),
             s.negative({b, before, h, decays}), s.flags({b, before}), s.f({b, q, g, states}),
             s.f({b, n, g, states}), s.f({b, q, h, p}), s.negative({b, n, h, decays}),
             s.positive({b, q, h}), state, s.tree(b, n), s.f({b, n - q, h, p})},
            {out({b, q, h, p}), out({b, q, h, p})}};
  if (replays) call.results.push_back(s.after(state));
  return call;
}
Call tree_delta(Draw& s) { return tree_deltas(s, false); }
Call replay_tree_delta(Draw& s) { return tree_deltas(s, true); }

Call delta_chunks(Draw& s) {
  const int64_t b = s.of({0, 1, 2}), t = s.of({0, 1, 2, 9}), g = s.of({1, 2});
  const int64_t n = 16 * s.of({0, 1, 2}), h = g * s.of({0, 1, 3}), p = 16 * s.of({0, 1, 4, 5});
  const int64_t decays = n ? s.of({1, n}) : 1;
  const Pointer state = s.f({b, h, p, n});
  return {{s.f({b, t, g, n}), s.f({b, t, g, n}), s.f({b, t, h, p}), s.negative({b, t, h, decays}),
           s.positive({b, t, h}), state, s.flags({b, t})},
          {out({b, t, h, p}), s.after(state)}};
}

#define STREE_FUNCTIONS(each)                                                                      \
  each(matmul) each(rows) each(rms_norm) each(add_rms_norm) each(gated_rms_norm)                   \
      each(weighted_sum) each(log_softmax) each(tree_scan) each(replay_tree_scan) each(tree_delta) \
          each(replay_tree_delta) each(delta_chunks) each(tree_attention) each(tree_conv1d)        \
              each(tree_conv1d_layer) each(largest_threshold)

}  // namespace

#define STREE_DECLARED(name) extern "C" XLA_FFI_Error* stree_jax_##name(XLA_FFI_CallFrame*);
STREE_FUNCTIONS(STREE_DECLARED)

namespace {

struct Function {
  std::string name;
  Call (*call)(Draw&);
  XLA_FFI_Handler* handler;
};
#define STREE_FUNCTION(name) {#name, name, stree_jax_##name},
const Function kFunctions[] = {STREE_FUNCTIONS(STREE_FUNCTION)};

// One array has another number of elements along an axis, or another rank.
void damage(Draw& s, Call& call) {
  const size_t at = s.below(call.given.size() + call.results.size());
  Pointer& array = at < call.given.size() ? call.given[at] : call.results[at - call.given.size()];
  Shape shape = array->shape;
  if (s.below(10) == 0) {
    if (s.of({0, 1}))
      shape.pop_back();
    else
      shape.push_back(1);
  } else {
    int64_t& size = shape[s.below(shape.size())];
    size = std::max<int64_t>(0, size + s.of({-16, -1, 1, 16, -size}));
  }
  array = std::make_shared<Array>(array->dtype, shape);
}

// What a function asks of XLA.

std::vector<std::thread> running;

XLA_FFI_Error* refuse(XLA_FFI_Error_Create_Args* args) {
  return reinterpret_cast<XLA_FFI_Error*>(new std::string(args->message));
}
XLA_FFI_Error* schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  running.emplace_back(args->task, args->data);
  return nullptr;
}
XLA_FFI_Error* num_threads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = *reinterpret_cast<int64_t*>(args->ctx);
  return nullptr;
}

// Buffers of arrays; XLA_FFI_Args and XLA_FFI_Rets differ in names only.
struct Buffers {
  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<void*> places;

  explicit Buffers(const Arrays& arrays) {
    for (const Pointer& array : arrays)
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, array->dtype, array->data,
                         int64_t(array->shape.size()), array->shape.data()});
    for (XLA_FFI_Buffer& buffer : buffers) places.push_back(&buffer);
  }
};

// Returns why the function refuses the call; empty: it ran.
std::string run(XLA_FFI_Handler* function, Call& call, int64_t threads) {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = refuse;
  api.XLA_FFI_ThreadPool_Schedule = schedule;
  api.XLA_FFI_ThreadPool_NumThreads = num_threads;

  Buffers given(call.given), results(call.results);
  std::vector<XLA_FFI_ArgType> of_given(call.given.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> of_results(call.results.size(), XLA_FFI_RetType_BUFFER);
  const size_t count = call.settings.size();
  std::vector<XLA_FFI_AttrType> kinds;
  std::vector<XLA_FFI_ByteSpan> names;
  std::vector<XLA_FFI_Scalar> scalars(count);
  std::vector<XLA_FFI_Array> several(count);
  std::vector<void*> values;
  for (auto& [name, setting] : call.settings) {
    const size_t at = names.size();
    names.push_back({name.data(), name.size()});
    if (auto* numbers = std::get_if<std::vector<float>>(&setting)) {
      several[at] = {kFloat, numbers->size(), numbers->data()};
      kinds.push_back(XLA_FFI_AttrType_ARRAY), values.push_back(&several[at]);
    } else {
      auto* number = std::get_if<float>(&setting);
      scalars[at] = number ? XLA_FFI_Scalar{kFloat, number}
                           : XLA_FFI_Scalar{kInt64, &std::get<int64_t>(setting)};
      kinds.push_back(XLA_FFI_AttrType_SCALAR), values.push_back(&scalars[at]);
    }
  }
  std::vector<XLA_FFI_ByteSpan*> places;
  for (XLA_FFI_ByteSpan& name : names) places.push_back(&name);

  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(&threads);
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, int64_t(of_given.size()), of_given.data(),
                given.places.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, int64_t(of_results.size()), of_results.data(),
                results.places.data()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
                 nullptr,
                 int64_t(count),
                 kinds.data(),
                 places.data(),
                 values.data()};
  std::unique_ptr<std::string> why(reinterpret_cast<std::string*>(function(&frame)));
  return why ? *why : "";
}

void require(bool holds, const std::string& name, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "%s: %s\n", name.c_str(), what.c_str());
  std::exit(1);
}

void join() {
  for (std::thread& thread : running) thread.join();
  running.clear();
}

template <typename T>
std::vector<T> read(int64_t count) {
  std::vector<T> values(count);
  if (std::fread(values.data(), sizeof(T), count, stdin) != size_t(count)) std::exit(0);
  return values;
}
std::string name() { return read<char>(32).data(); }

// One call: a function's name, three counts, arrays, results and settings.
void serve() {
  const std::string wanted = name();
  const Function* function = kFunctions;
  while (function->name != wanted) ++function;
  const Shape counts = read<int64_t>(3);
  Call call;
  for (int64_t i = 0; i < counts[0] + counts[1]; ++i) {
    const Shape head = read<int64_t>(3);  // its type, the array that it is, its rank
    const auto array = std::make_shared<Array>(XLA_FFI_DataType(head[0]), read<int64_t>(head[2]));
    const auto bytes = read<char>(i < counts[0] ? array->bytes() : 0);
    std::copy(bytes.begin(), bytes.end(), array->of<char>());
    (i < counts[0] ? call.given : call.results)
        .push_back(head[1] < 0 ? array : call.given[head[1]]);
  }
  for (int64_t i = 0; i < counts[2]; ++i) {
    Setting& setting = call.settings[name()];
    const Shape kind = read<int64_t>(2);
    const auto numbers = read<float>(kind[1]);
    if (kind[0] == 0)
      setting = int64_t(numbers[0]);
    else if (kind[0] == 1)
      setting = numbers[0];
    else
      setting = numbers;
  }
  const std::string why = run(function->handler, call, 2);
  join();
  const int64_t size = why.size();
  std::fwrite(&size, sizeof size, 1, stdout);
  std::fwrite(why.data(), 1, size, stdout);
  for (const Pointer& each : call.results)
    if (why.empty()) std::fwrite(each->data, 1, each->bytes(), stdout);
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** arguments) {
  while (count == 1) serve();
  const int64_t calls = std::atoll(arguments[1]), threads = std::atoll(arguments[3]);
  Draw s{uint64_t(std::atoll(arguments[2]))};
  int64_t damaged = 0, refused = 0;
  std::map<std::string, uint64_t> digests;
  for (int64_t at = 0; at < calls; ++at) {
    const auto& [name, draw, function] = kFunctions[at % std::size(kFunctions)];
    {
      Call call = draw(s);
      if (at / std::size(kFunctions) % 4 == 3) {
        damage(s, call);
        ++damaged;
        refused += !run(function, call, threads).empty();
      } else {
        Call again = call.copy();
        const std::string why = run(function, call, threads) + run(function, again, 1);
        require(why.empty(), name, why);
        for (size_t i = 0; i < call.results.size(); ++i) {
          const Array &one = *call.results[i], &other = *again.results[i];
          require(!std::memcmp(one.data, other.data, one.bytes()), name, "threads differ");
          for (int64_t j = 0; j < one.count(); ++j) {
            const bool is_number = !std::isnan(one.of<float>()[j]);
            require(is_number || name == "largest_threshold", name, "a number is not written");
            uint64_t& digest = digests[name];
            digest = 31 * digest + (is_number ? one.of<uint32_t>()[j] : 1);
          }
        }
      }
    }
    join();  // these may find nothing left to do, and that the call's arrays are gone
  }
  // Some are right all the same, as where an axis is 0.
  require(2 * refused >= damaged, "wrong shapes", "most are not refused");
  for (const auto& [name, digest] : digests) std::printf("%s %016lx\n", name.c_str(), digest);
}
