// Weights and adapters as handlers get them.
#include "ffi_checks.h"

namespace jaxllm {
namespace {

bool good_format(int64_t bits, int64_t group, const Array& data, const Array& scale) {
  if (bits != 2 && bits != 4 && bits != 8) return false;
  if (group != 0 && group != 32 && group != 64) return false;
  if (data.type != (bits == 8 ? Type::kS8 : Type::kU8)) return false;
  return scale.type == (group ? Type::kF16 : Type::kF32);
}

}  // namespace

bool read_units(const Array& data, const Array& scale, int64_t bits, int64_t group, size_t inputs,
                size_t outputs, Units& out) {
  if (!good_format(bits, group, data, scale) || data.rank != 3 || inputs == 0 || outputs == 0) return false;
  const size_t panels = data.dim(0), blocks = data.dim(1);
  if (blocks != divide_up(inputs, kBlock) || data.dim(2) != static_cast<size_t>(bits) * 64) return false;
  if (divide_up(outputs, kPanel) > panels) return false;
  const size_t scales = panels * kPanel * (group ? divide_up(inputs, group) : 1);
  if (scale.count != scales) return false;
  out = {data.data, scale.data, static_cast<int>(bits), static_cast<int>(group), panels, inputs, false};
  return true;
}

bool read_reduction(const Array& data, const Array& scale, int64_t bits, int64_t group, size_t segments,
                    size_t length, size_t outputs, Reduction& out) {
  if (!good_format(bits, group, data, scale) || data.rank != 4) return false;
  if (segments == 0 || length == 0 || outputs == 0) return false;
  const size_t blocks = data.dim(1), panels = data.dim(2);
  if (data.dim(3) != static_cast<size_t>(bits) * 64 || segments > data.dim(0)) return false;
  if (divide_up(outputs, kPanel) > panels || divide_up(length, kBlock) > blocks) return false;
  // Segments follow each other by what they use: only the only one may be cut short.
  if (data.dim(0) > 1 && divide_up(length, kBlock) != blocks) return false;
  const size_t groups = group ? scale.count / (data.dim(0) * panels * kPanel) : 1;
  if (scale.count != data.dim(0) * groups * panels * kPanel) return false;
  if (group && (groups < divide_up(length, group) || (data.dim(0) > 1 && groups != divide_up(length, group))))
    return false;
  out = {data.data, scale.data, static_cast<int>(bits), static_cast<int>(group), segments, blocks,
         panels,    false};
  return true;
}

bool read_adapter(const Array& left, const Array& right, size_t units, size_t width, const Array& counts,
                  Adapter& out) {
  out = {nullptr, nullptr, 0, units};
  if (left.type != Type::kF32 || right.type != Type::kF32) return false;
  if (left.count == 0 && right.count == 0) return true;
  if (left.rank < 2 || right.rank < 2 || left.dim(0) != right.dim(0)) return false;
  out.rank = left.dim(0);
  out.left = left.as<float>(), out.right = right.as<float>();
  if (left.count != out.rank * units || right.count != out.rank * width) return false;
  size_t used;
  if (!read_count(counts, kRanks, 0, SIZE_MAX, used)) return false;
  out.rank = used < out.rank ? used : out.rank;
  return true;
}

}  // namespace jaxllm
