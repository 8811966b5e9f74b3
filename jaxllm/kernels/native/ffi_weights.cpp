// Weights and adapters as XLA brings them.
#include "ffi_checks.h"

namespace jaxllm {
namespace {

bool good_format(int64_t bits, int64_t group, const AnyBuffer& data, const AnyBuffer& scale) {
  if (bits != 2 && bits != 4 && bits != 8) return false;
  if (group != 0 && group != 32 && group != 64) return false;
  if (data.element_type() != (bits == 8 ? ffi::DataType::S8 : ffi::DataType::U8)) return false;
  return scale.element_type() == (group ? ffi::DataType::F16 : ffi::DataType::F32);
}

// Floats [ranks, width] from `at` on in a buffer.
bool read_side(const AnyBuffer& buffer, int64_t at, size_t ranks, size_t width, const float*& out) {
  if (buffer.element_type() != ffi::DataType::F32 || width == 0) return false;
  const size_t all = buffer.element_count();
  if (at < 0 || static_cast<size_t>(at) > all) return false;
  // Divided, because a product could overflow.
  if (ranks > (all - static_cast<size_t>(at)) / width) return false;
  out = buffer.reinterpret_data<float>() + at;
  return true;
}

}  // namespace

bool read_units(const AnyBuffer& data, const AnyBuffer& scale, int64_t bits, int64_t group, size_t inputs,
                size_t outputs, Units& out) {
  if (!good_format(bits, group, data, scale) || rank(data) != 3 || inputs == 0 || outputs == 0) return false;
  const size_t panels = dim(data, 0), blocks = dim(data, 1);
  if (blocks != divide_up(inputs, kBlock) || dim(data, 2) != static_cast<size_t>(bits) * 64) return false;
  if (divide_up(outputs, kPanel) > panels) return false;
  const size_t scales = panels * kPanel * (group ? divide_up(inputs, group) : 1);
  if (scale.element_count() != scales) return false;
  out = {data.untyped_data(),
         scale.untyped_data(),
         static_cast<int>(bits),
         static_cast<int>(group),
         panels,
         inputs,
         false};
  return true;
}

bool read_reduction(const AnyBuffer& data, const AnyBuffer& scale, int64_t bits, int64_t group,
                    size_t segments, size_t length, size_t outputs, Reduction& out) {
  if (!good_format(bits, group, data, scale) || rank(data) != 4) return false;
  if (segments == 0 || length == 0 || outputs == 0) return false;
  const size_t blocks = dim(data, 1), panels = dim(data, 2);
  if (dim(data, 3) != static_cast<size_t>(bits) * 64 || segments > dim(data, 0)) return false;
  if (divide_up(outputs, kPanel) > panels || divide_up(length, kBlock) > blocks) return false;
  // Segments follow each other by what they use: only the only one may be cut short.
  if (dim(data, 0) > 1 && divide_up(length, kBlock) != blocks) return false;
  const size_t groups = group ? scale.element_count() / (dim(data, 0) * panels * kPanel) : 1;
  if (scale.element_count() != dim(data, 0) * groups * panels * kPanel) return false;
  if (group &&
      (groups < divide_up(length, group) || (dim(data, 0) > 1 && groups != divide_up(length, group))))
    return false;
  out = {data.untyped_data(),
         scale.untyped_data(),
         static_cast<int>(bits),
         static_cast<int>(group),
         segments,
         blocks,
         panels,
         false};
  return true;
}

bool read_sides(const AnyBuffer& left, const AnyBuffer& right, int64_t left_at, int64_t right_at,
                int64_t ranks, size_t units, size_t width, Adapter& out) {
  out = {nullptr, nullptr, 0, units};
  if (ranks == 0) return true;
  if (ranks < 0) return false;
  out.rank = static_cast<size_t>(ranks);
  return read_side(left, left_at, out.rank, units, out.left) &&
         read_side(right, right_at, out.rank, width, out.right);
}

bool read_adapter(const AnyBuffer& left, const AnyBuffer& right, Places places, size_t i, size_t units,
                  size_t width, const AnyBuffer& counts, int64_t rank_at, Adapter& out) {
  if (!read_sides(left, right, places[i], places[i + 1], places[i + 2], units, width, out)) return false;
  if (out.rank == 0) return true;
  size_t used;
  if (!read_count(counts, rank_at, 0, SIZE_MAX, used)) return false;
  out.rank = used < out.rank ? used : out.rank;
  return true;
}

}  // namespace jaxllm
