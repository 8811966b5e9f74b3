// Weights and adapters as handlers get them.
#include "ffi_checks.h"

namespace jaxllm {
namespace {

bool same_shape(const Array& a, const Array& b) {
  if (a.rank != b.rank) return false;
  for (size_t i = 0; i < a.rank; i++) {
    if (a.dim(i) != b.dim(i)) return false;
  }
  return true;
}

// The format of a weight's arrays; false where it is none. Shapes of data and scales are left to check.
bool read_stored(const WeightArrays& w, Stored& out) {
  if (w.bits != 2 && w.bits != 4 && w.bits != 8) return false;
  if (w.group != 32 && w.group != 64 && (w.group != 0 || w.bits != 8)) return false;
  if (w.data.type != (w.bits == 8 ? Type::kS8 : Type::kU8)) return false;
  const bool nested = w.scale.type == Type::kU8;
  if (nested ? w.bits != 4 || w.group != 64 : w.scale.type != (w.group ? Type::kF16 : Type::kF32))
    return false;
  // Minima lie behind the scales of a panel and group: [..., 2, 16] in place of [..., 16].
  const size_t rank = w.scale.rank;
  const bool minima = w.data.rank >= 3 && rank == w.data.rank + 1u && w.scale.dim(rank - 2) == 2;
  if (minima && (nested || w.bits != 4)) return false;
  const bool high_alone = w.low.type == Type::kNone || w.low.count == 0;
  if (!high_alone && (!nested || w.low.type != Type::kU8 || !same_shape(w.low, w.data))) return false;
  out = {w.data.data,
         high_alone ? nullptr : w.low.data,
         w.scale.data,
         static_cast<int>(w.bits),
         static_cast<int>(w.group),
         nested,
         minima};
  return true;
}

}  // namespace

bool read_units(const WeightArrays& w, size_t inputs, size_t outputs, Units& out) {
  const Array &data = w.data, &scale = w.scale;
  if (!read_stored(w, out.stored) || data.rank != 3 || inputs == 0 || outputs == 0) return false;
  const size_t panels = data.dim(0), blocks = data.dim(1);
  if (blocks != divide_up(inputs, kBlock) || data.dim(2) != static_cast<size_t>(w.bits) * 64) return false;
  if (divide_up(outputs, kPanel) > panels) return false;
  const size_t groups = w.group ? divide_up(inputs, w.group) : 1;
  const size_t halves = out.stored.minima ? 2 * kPanel : kPanel;  // of a panel and group
  const size_t per_panel = out.stored.nested ? kChannelsBytes + groups * kFactorsBytes : groups * halves;
  if (scale.count != panels * per_panel) return false;
  out.panels = panels, out.inputs = inputs, out.widen = false;
  return true;
}

bool read_reduction(const WeightArrays& w, size_t segments, size_t length, size_t outputs, Reduction& out) {
  const Array &data = w.data, &scale = w.scale;
  if (!read_stored(w, out.stored) || data.rank != 4) return false;
  if (segments == 0 || length == 0 || outputs == 0) return false;
  const size_t blocks = data.dim(1), panels = data.dim(2);
  if (data.dim(3) != static_cast<size_t>(w.bits) * 64 || segments > data.dim(0)) return false;
  if (divide_up(outputs, kPanel) > panels || divide_up(length, kBlock) > blocks) return false;
  // Segments follow each other by what they use: only the only one may be cut short.
  if (data.dim(0) > 1 && divide_up(length, kBlock) != blocks) return false;
  const bool nested = out.stored.nested;
  const size_t floats = nested ? kChannelsBytes : 0;  // of a panel, before those of groups
  const size_t per_group = panels * (nested ? kFactorsBytes : out.stored.minima ? 2 * kPanel : kPanel);
  const size_t per_segment = scale.count / data.dim(0);
  if (per_segment < panels * floats) return false;
  const size_t groups = w.group ? (per_segment - panels * floats) / per_group : 1;
  if (scale.count != data.dim(0) * (panels * floats + groups * per_group)) return false;
  const size_t needed = w.group ? divide_up(length, w.group) : 1;
  if (groups < needed || (w.group && data.dim(0) > 1 && groups != needed)) return false;
  out.segments = segments, out.blocks = blocks, out.panels = panels, out.groups = groups, out.widen = false;
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
