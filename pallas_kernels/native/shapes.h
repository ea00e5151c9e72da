// Arguments of functions that XLA calls, and checks of their shapes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace stree {

using F32 = xla::ffi::Buffer<xla::ffi::F32>;
using S32 = xla::ffi::Buffer<xla::ffi::S32>;
using Flags = xla::ffi::Buffer<xla::ffi::PRED>;
using Result = xla::ffi::ResultBuffer<xla::ffi::F32>;

inline bool is(xla::ffi::Span<const int64_t> shape, std::initializer_list<int64_t> wanted) {
  return std::equal(shape.begin(), shape.end(), wanted.begin(), wanted.end());
}

// The error of an op that cannot take its arguments.
inline xla::ffi::Error refused(const std::string& op,
                               const std::string& why = "shapes do not fit") {
  return xla::ffi::Error::InvalidArgument("stree_jax " + op + ": " + why);
}

}  // namespace stree
