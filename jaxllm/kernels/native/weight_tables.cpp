#include "weight_tables.h"

#include <utility>

#include "slots.h"

namespace jaxllm {
namespace {

struct Table {
  std::vector<Array> arrays;
  size_t rows = 0;
};

Slots<Table, 4096> tables;

}  // namespace

size_t bytes_of(Type type) {
  switch (type) {
    case Type::kNone:
    case Type::kOther:
      return 0;
    case Type::kBool:
    case Type::kS8:
    case Type::kU8:
      return 1;
    case Type::kU16:
    case Type::kF16:
      return 2;
    case Type::kS32:
    case Type::kU32:
    case Type::kF32:
      return 4;
  }
  return 0;
}

uint64_t open_table(std::vector<Array> arrays, size_t rows) {
  if (rows == 0 || arrays.empty() || arrays.size() % rows) return 0;
  return tables.open({std::move(arrays), rows});
}

bool close_table(uint64_t handle) { return tables.close(handle); }

bool TableRow::open(uint64_t handle, int64_t row) {
  if (slot_ != SIZE_MAX) return false;
  const Table* const table = tables.enter(handle, slot_);
  if (!table || row < 0 || static_cast<size_t>(row) >= table->rows) return false;
  columns_ = table->arrays.size() / table->rows;
  arrays_ = table->arrays.data() + static_cast<size_t>(row) * columns_;
  return true;
}

TableRow::~TableRow() { tables.leave(slot_); }

}  // namespace jaxllm
