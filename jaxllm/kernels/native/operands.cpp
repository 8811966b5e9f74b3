#include "operands.h"

namespace jaxllm {
namespace {

namespace ffi = xla::ffi;

Type type_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::PRED:
      return Type::kBool;
    case ffi::DataType::S8:
      return Type::kS8;
    case ffi::DataType::U8:
      return Type::kU8;
    case ffi::DataType::U16:
      return Type::kU16;
    case ffi::DataType::S32:
      return Type::kS32;
    case ffi::DataType::U32:
      return Type::kU32;
    case ffi::DataType::F16:
      return Type::kF16;
    case ffi::DataType::F32:
      return Type::kF32;
    default:
      return Type::kOther;
  }
}

}  // namespace

Array array_of(const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  Array out;
  if (dims.size() > kMostDimensions) return out;
  out.data = buffer.untyped_data();
  out.type = type_of(buffer.element_type());
  out.rank = static_cast<uint8_t>(dims.size());
  for (size_t i = 0; i < dims.size(); i++) out.dims[i] = static_cast<size_t>(dims[i]);
  out.count = buffer.element_count();
  return out;
}

bool Operands::read(const ffi::AnyBuffer& table, const ffi::AnyBuffer& row, ffi::RemainingArgs buffers,
                    Columns columns) {
  if (table.element_count() != 0) {
    if (table.element_type() != ffi::DataType::U32 || table.element_count() != 2) return false;
    if (row.element_type() != ffi::DataType::S32 || row.element_count() != 1) return false;
    const uint32_t* halves = table.reinterpret_data<uint32_t>();
    if (!row_.open(static_cast<uint64_t>(halves[1]) << 32 | halves[0], *row.reinterpret_data<int32_t>()))
      return false;
  }
  arrays_.reserve(columns.size());
  size_t next = 0;
  for (const int64_t column : columns) {
    if (column < 0) {
      auto buffer = buffers.get<ffi::AnyBuffer>(next++);
      if (!buffer) return false;
      arrays_.push_back(array_of(*buffer));
    } else {
      const Array* const found = row_.at(static_cast<size_t>(column));
      if (!found) return false;
      arrays_.push_back(*found);
    }
  }
  return next == buffers.size();
}

}  // namespace jaxllm
