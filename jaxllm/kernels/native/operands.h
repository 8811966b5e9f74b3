// What a handler's call brings: buffers of XLA's, and entries of a weight table in the place of some.
#pragma once
#include "weight_tables.h"
#include "xla/ffi/api/ffi.h"

namespace jaxllm {

// Of each operand its column in the table, or below 0 where it is a buffer.
using Columns = xla::ffi::Span<const int64_t>;

// The array that a buffer holds; without a type where no kernel takes one.
Array array_of(const xla::ffi::AnyBuffer& buffer);

// The operands of a call, in order. One that a table does not have has no type, which each handler refuses
// where it needs it.
class Operands {
 public:
  // table uint32 [2], a handle with its lower half first, and row int32 []; both are empty without a table.
  // False where an operand is missing, or the table, its row, or a column of it.
  bool read(const xla::ffi::AnyBuffer& table, const xla::ffi::AnyBuffer& row, xla::ffi::RemainingArgs buffers,
            Columns columns);
  size_t size() const { return arrays_.size(); }
  const Array& operator[](size_t i) const { return arrays_[i]; }

 private:
  TableRow row_;
  std::vector<Array> arrays_;
};

}  // namespace jaxllm
