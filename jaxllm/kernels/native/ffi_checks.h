// What all handlers share: reading XLA's buffers, refusing what does not fit, and the time they take.
//
// Every check guards memory: a graph whose shapes disagree must end in an error, not in a read beyond a
// buffer.
#pragma once
#include <string.h>

#include <chrono>
#include <string>

#include "ffi.h"
#include "operands.h"
#include "ops.h"
#include "xla/ffi/api/ffi.h"

namespace jaxllm {

namespace ffi = xla::ffi;
using ffi::AnyBuffer;
using ffi::Error;

// A binding that begins with so many buffers.
template <size_t count>
auto takes() {
  if constexpr (count == 0) {
    return ffi::Ffi::Bind();
  } else {
    return takes<count - 1>().template Arg<AnyBuffer>();
  }
}

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

// An optional float vector or matrix: an empty array stands for none.
inline bool read_floats(const Array& array, size_t count, const float*& out) {
  out = nullptr;
  if (array.type != Type::kF32) return false;
  if (array.count == 0) return true;
  out = array.as<float>();
  return array.count == count;
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

// Of `rows` the first that are computed: all where `live` is empty.
inline bool read_live(const AnyBuffer& live, size_t& rows) {
  if (live.element_type() != ffi::DataType::S32) return false;
  if (live.element_count() == 0) return true;
  const int32_t count = *live.reinterpret_data<int32_t>();
  if (live.element_count() != 1 || count < 1 || static_cast<size_t>(count) > rows) return false;
  rows = static_cast<size_t>(count);
  return true;
}

// How many of something count at run time: a number in [least, all] of an int32 array; all where that is
// empty.
inline bool read_count(const Array& counts, int64_t at, size_t least, size_t all, size_t& out) {
  out = all;
  if (counts.type != Type::kS32) return false;
  if (counts.count == 0) return true;
  if (at < 0 || static_cast<size_t>(at) >= counts.count) return false;
  const int32_t count = counts.as<int32_t>()[at];
  out = static_cast<size_t>(count);
  return count >= 0 && out >= least && out <= all;
}

// Of counts [1 + rows][n], whose first row is of all rows together, those of each row: the first of them and
// how far they lie apart. Null where counts are [n] or empty.
inline bool read_row_counts(const Array& counts, int64_t at, size_t rows, size_t most, const int32_t*& first,
                            size_t& stride) {
  first = nullptr, stride = 0;
  if (counts.count == 0 || counts.rank == 1) return true;
  if (counts.rank != 2 || counts.dim(0) != 1 + rows || static_cast<size_t>(at) >= counts.dim(1)) return false;
  stride = counts.dim(1);
  first = counts.as<int32_t>() + stride + at;
  for (size_t row = 0; row < rows; row++) {
    const int32_t count = first[row * stride];
    if (count < 0 || static_cast<size_t>(count) > most) return false;
  }
  return true;
}

// A weight's arrays as operands list them: data, scale and the low plane, which is empty, or not in a table,
// where there is none or only the high one is read.
struct WeightArrays {
  const Array &data, &scale, &low;
  int64_t bits, group;
};
constexpr size_t kWeightArrays = 3;
inline WeightArrays weight_at(const Operands& in, size_t at, int64_t bits, int64_t group) {
  return {in[at], in[at + 1], in[at + 2], bits, group};
}

// A weight [panels, blocks, bytes] whose units are outputs; false where its shapes disagree.
bool read_units(const WeightArrays& arrays, size_t inputs, size_t outputs, Units& out);

// A weight [segments, blocks, panels, bytes] whose units are inputs; `segments` of `length` are used.
bool read_reduction(const WeightArrays& arrays, size_t segments, size_t length, size_t outputs,
                    Reduction& out);

// An adapter's sides: left [ranks, units] and right [ranks, width], of which counts[kRanks] are used where
// that is given, or all if there are fewer. Empty arrays are none.
constexpr int64_t kRanks = 2;
bool read_adapter(const Array& left, const Array& right, size_t units, size_t width, const Array& counts,
                  Adapter& out);

constexpr const char* kOperands = "an operand is missing, or its weight table is closed";

}  // namespace jaxllm
