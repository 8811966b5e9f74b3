// Weights by address: tables of arrays, which kernels look up by a handle and a row, such as a layer.
//
// A compiled step that took the weights of all layers as operands would be one piece of code and some buffers
// for each of them. With a table it takes a handle, and its body can be a loop over layers. Addresses never
// leave this process's tables: a handle that is wrong, or of a closed table, finds nothing.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace jaxllm {

enum class Type : uint8_t { kNone, kBool, kS8, kU8, kS32, kU32, kU16, kF16, kF32, kOther };
size_t bytes_of(Type type);

constexpr size_t kMostDimensions = 5;

// An array in memory, in C order. Without a type there is none.
struct Array {
  const void* data = nullptr;
  Type type = Type::kNone;
  uint8_t rank = 0;
  size_t dims[kMostDimensions] = {};
  size_t count = 0;  // of elements

  size_t dim(size_t i) const { return dims[i]; }
  template <typename T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
};

// Opens a table of `rows` rows, row by row; the memory of its arrays stays the caller's. 0 where there are
// too many tables.
uint64_t open_table(std::vector<Array> arrays, size_t rows);
// Closes a table: later kernels do not find it. Returns when no kernel reads it any more; false where there
// is none.
bool close_table(uint64_t handle);

// A row of a table, which is not closed while this lives.
class TableRow {
 public:
  TableRow() = default;
  TableRow(const TableRow&) = delete;
  TableRow& operator=(const TableRow&) = delete;
  ~TableRow();
  // False where there is no such table or row.
  bool open(uint64_t handle, int64_t row);
  // Null where there is no such column.
  const Array* at(size_t column) const { return column < columns_ ? arrays_ + column : nullptr; }

 private:
  size_t slot_ = SIZE_MAX, columns_ = 0;
  const Array* arrays_ = nullptr;
};

}  // namespace jaxllm
