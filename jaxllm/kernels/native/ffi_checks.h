// What all handlers share: reading XLA's buffers, refusing what does not fit, and the time they take.
//
// Every check guards memory: a graph whose shapes disagree must end in an error, not in a read beyond a
// buffer.
#pragma once
#include <string.h>

#include <chrono>
#include <string>

#include "ffi.h"
#include "ops.h"
#include "xla/ffi/api/ffi.h"

namespace jaxllm {

namespace ffi = xla::ffi;
using ffi::AnyBuffer;
using ffi::Error;

void add_busy_ns(int64_t ns);

// Adds the time it lives to what operations have taken.
class Timer {
 public:
  ~Timer() { add_busy_ns((std::chrono::steady_clock::now() - began_).count()); }

 private:
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

inline Error wrong(const std::string& what) { return Error::InvalidArgument("jaxllm kernels: " + what); }
inline Error result(Failure failure) {
  return failure ? Error(ffi::ErrorCode::kResourceExhausted, failure) : Error::Success();
}

inline size_t dim(const AnyBuffer& buffer, size_t i) { return static_cast<size_t>(buffer.dimensions()[i]); }
inline size_t rank(const AnyBuffer& buffer) { return buffer.dimensions().size(); }

// What is changed in place: XLA gives a result the memory of the argument that it replaces; should it not,
// the argument is copied.
inline void* in_place(const AnyBuffer& argument, ffi::Result<AnyBuffer>& replaced) {
  if (replaced->untyped_data() != argument.untyped_data())
    memcpy(replaced->untyped_data(), argument.untyped_data(), argument.size_bytes());
  return replaced->untyped_data();
}

// An optional float vector or matrix: an empty buffer stands for none.
inline bool read_floats(const AnyBuffer& buffer, size_t count, const float*& out) {
  out = nullptr;
  if (buffer.element_type() != ffi::DataType::F32) return false;
  if (buffer.element_count() == 0) return true;
  out = buffer.reinterpret_data<float>();
  return buffer.element_count() == count;
}

// Rows of a matrix [..., width].
inline bool read_rows(const AnyBuffer& x, ffi::DataType type, size_t& rows, size_t& width) {
  if (x.element_type() != type || rank(x) == 0) return false;
  width = dim(x, rank(x) - 1);
  if (width == 0 || x.element_count() == 0) return false;
  rows = x.element_count() / width;
  return true;
}

inline size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

// How many of something count at run time: a number in [least, all] of an int32 buffer; all where that is
// empty.
inline bool read_count(const AnyBuffer& counts, int64_t at, size_t least, size_t all, size_t& out) {
  out = all;
  if (counts.element_type() != ffi::DataType::S32) return false;
  if (counts.element_count() == 0) return true;
  if (at < 0 || static_cast<size_t>(at) >= counts.element_count()) return false;
  const int32_t count = counts.reinterpret_data<int32_t>()[at];
  out = static_cast<size_t>(count);
  return count >= 0 && out >= least && out <= all;
}

// A weight [panels, blocks, bytes] whose units are outputs; false where its shapes disagree.
bool read_units(const AnyBuffer& data, const AnyBuffer& scale, int64_t bits, int64_t group, size_t inputs,
                size_t outputs, Units& out);

// A weight [segments, blocks, panels, bytes] whose units are inputs; `segments` of `length` are used.
bool read_reduction(const AnyBuffer& data, const AnyBuffer& scale, int64_t bits, int64_t group,
                    size_t segments, size_t length, size_t outputs, Reduction& out);

// Of each adapter, where its left and its right side begin in their buffers, and its rank (0: there is none).
using Places = ffi::Span<const int64_t>;

// The adapter whose three `places` begin at `i`: left [ranks, units] and right [ranks, width], of which
// counts[rank_at] are used, or all if there are fewer.
bool read_adapter(const AnyBuffer& left, const AnyBuffer& right, Places places, size_t i, size_t units,
                  size_t width, const AnyBuffer& counts, int64_t rank_at, Adapter& out);
// Its sides, `left_at` and `right_at` in their buffers.
bool read_sides(const AnyBuffer& left, const AnyBuffer& right, int64_t left_at, int64_t right_at,
                int64_t ranks, size_t units, size_t width, Adapter& out);

}  // namespace jaxllm
