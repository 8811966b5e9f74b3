#include "ops.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>

#include "activations.h"
#include "pool.h"

namespace jaxllm {
namespace {

constexpr size_t kTaskWidth = kTaskPanels * kPanel;
constexpr size_t kRowsPerTask = 16;  // of what is done row by row

size_t block_bytes(int bits) { return static_cast<size_t>(bits) * kPanel * kBlock / 8; }
size_t panels_of(size_t outputs) { return (outputs + kPanel - 1) / kPanel; }

Matrix matrix_of(const Stored& w, bool widen, size_t outputs) {
  Matrix m{};
  m.data = static_cast<const uint8_t*>(w.data);
  m.low = static_cast<const uint8_t*>(w.low);
  m.scale = w.scale;
  m.bits = w.bits;
  m.group = w.group;
  m.nested = w.nested;
  m.minima = w.minima;
  m.widen = widen;
  m.panels = panels_of(outputs);
  return m;
}

Matrix matrix_of(const Units& w, size_t outputs) {
  Matrix m = matrix_of(w.stored, w.widen, outputs);
  m.inputs = {1, w.inputs};
  m.block_stride = block_bytes(m.bits);
  m.panel_stride = m.inputs.blocks() * m.block_stride;
  const size_t halves = m.minima ? 2 * kPanel : kPanel;  // of a panel and group
  m.scale_group_stride = m.group ? halves : 0;
  m.scale_panel_stride = m.group ? m.groups() * halves : kPanel;
  if (m.nested) {
    m.scale_group_stride = kFactorsBytes;
    m.scale_panel_stride = m.channel_stride = kChannelsBytes + m.groups() * kFactorsBytes;
    m.factors_at = kChannelsBytes;
  }
  return m;
}

Matrix matrix_of(const Reduction& w, size_t segments, size_t length, size_t outputs) {
  Matrix m = matrix_of(w.stored, w.widen, outputs);
  m.inputs = {segments, length};
  m.panel_stride = block_bytes(m.bits);
  m.block_stride = w.panels * m.panel_stride;
  m.scale_panel_stride = m.minima ? 2 * kPanel : kPanel;
  m.scale_group_stride = w.panels * m.scale_panel_stride;
  if (m.nested) {
    m.scale_panel_stride = kFactorsBytes;
    m.scale_group_stride = w.panels * kFactorsBytes;
    m.channel_stride = kChannelsBytes;
    m.factors_at = w.panels * kChannelsBytes;
    m.scale_segment_stride = m.factors_at + w.groups * m.scale_group_stride;
  }
  return m;
}

// An adapter of a weight whose units are outputs: rows meet its right side first. The other way for inputs.
Low before_units(const Adapter& adapter, size_t width) { return {adapter.right, adapter.rank, width}; }
Change after_units(const Prepared& p, size_t at, const Adapter& adapter, const FloatRows& floats,
                   const Matrix& weight) {
  return {p.low + at, p.low_stride, adapter.left, adapter.rank, adapter.stride, p.excess, floats, &weight};
}
Low before_reduction(const Adapter& adapter) { return {adapter.left, adapter.rank, adapter.stride}; }
Change after_reduction(const Prepared& p, const Adapter& adapter, size_t width, const FloatRows& floats,
                       const Matrix& weight) {
  return {p.low, p.low_stride, adapter.right, adapter.rank, width, p.excess, floats, &weight};
}

// One task's tile of outputs in the thread's own scratch: [kTaskRows][kTaskWidth] floats, twice.
struct TaskMemory {
  float *out, *other;
  void* work;
  TaskMemory() {
    constexpr size_t tile = kTaskRows * kTaskWidth * sizeof(float);
    out = static_cast<float*>(thread_scratch(kTaskOut, 2 * tile));
    other = out ? out + kTaskRows * kTaskWidth : nullptr;
    work = thread_scratch(kTaskWork, kTaskScratchBytes);
  }
  bool good() const { return out && work; }
};

struct RowTile {
  size_t from, to, panel, panels;
};

// Rows are the faster index: the tasks underway share weights.
struct Tiling {
  size_t rows, panels;
  size_t row_tiles() const { return (rows + kTaskRows - 1) / kTaskRows; }
  size_t count() const { return row_tiles() * ((panels + kTaskPanels - 1) / kTaskPanels); }
  RowTile at(size_t task) const {
    const size_t from = task % row_tiles() * kTaskRows, panel = task / row_tiles() * kTaskPanels;
    return {from, std::min(rows, from + kTaskRows), panel, std::min<size_t>(panels - panel, kTaskPanels)};
  }
};

size_t plane_bytes(const Matrix& m) { return m.inputs.all_blocks() * block_bytes(m.bits); }  // of a panel
size_t panel_bytes(const Matrix& m) { return m.planes() * plane_bytes(m); }

// What the threads read first of a weight whose units are outputs, or inputs.
Upcoming first_ranges(const Matrix& m, const Ranges& ranges) {
  const size_t bytes = std::min(m.panels, ranges.longest()) * plane_bytes(m);
  return {m.data, m.low, static_cast<size_t>(threads()), bytes, bytes};
}
Upcoming first_spans(const Matrix& m) {
  const size_t bytes = m.inputs.span_blocks(0) * m.block_stride;
  return {m.data, m.low, std::min(m.inputs.all_spans(), static_cast<size_t>(threads())), bytes, bytes};
}

void row_to(const Matrix& m, const Activations& a, size_t from, size_t to, size_t outputs, float* y) {
  const Backend& kernels = backend();
  const size_t whole = std::min(to, outputs / kPanel);
  if (from < whole) kernels.row_panels(m, a, from, whole, y + from * kPanel);
  if (whole < to && from <= whole) {
    float last[kPanel];
    kernels.row_panels(m, a, whole, whole + 1, last);
    memcpy(y + whole * kPanel, last, (outputs - whole * kPanel) * sizeof(float));
  }
}

// Products of one row with weights whose units are inputs: spans in any order, summed in a fixed one. The
// last spans are cut into ranges of panels, so that all threads end together.
bool reduce_row(const Matrix& m, const Activations& a, size_t outputs, const float* residual, float* y,
                const Change& change, const Upcoming& next) {
  const size_t spans = m.inputs.all_spans(), padded = m.panels * kPanel;
  const size_t team = static_cast<size_t>(threads()), last = std::min(spans, team), whole = spans - last;
  const size_t cuts = std::max<size_t>(1, std::min((4 * team + last - 1) / last, m.panels / 8));
  const size_t per_cut = (m.panels + cuts - 1) / cuts;
  float* parts = static_cast<float*>(thread_scratch(kTaskOut, (2 * spans + 1) * padded * sizeof(float)));
  if (!parts) return false;
  float *high = parts + spans * padded, *sums = high + spans * padded;
  const Backend& kernels = backend();
  parallel(
      whole + last * cuts,
      [&](size_t task) {
        if (task < whole)
          return kernels.row_span(m, a, task, 0, m.panels, parts + task * padded, high + task * padded);
        const size_t span = whole + (task - whole) / cuts, from = (task - whole) % cuts * per_cut;
        const size_t to = std::min(m.panels, from + per_cut);
        const size_t at = span * padded + from * kPanel;
        if (from < to) kernels.row_span(m, a, span, from, to, parts + at, high + at);
      },
      next);
  kernels.join_spans(m, a, parts, high, sums);
  for (size_t i = 0; i < outputs; i++) y[i] = residual ? sums[i] + residual[i] : sums[i];
  change.add(0, 1, 0, outputs, y, outputs, nullptr);
  return true;
}

// Products of many rows, to rows of y that begin `stride` apart; whichever side the units are on.
bool multiply_rows(const Matrix& m, const Activations& a, size_t rows, size_t outputs, size_t stride,
                   const float* residual, float* y, const Change& change) {
  const Tiling tiling{rows, m.panels};
  const Backend& kernels = backend();
  std::atomic<bool> failed{false};
  parallel(tiling.count(), [&](size_t task) {
    const RowTile t = tiling.at(task);
    const TaskMemory memory;
    if (!memory.good()) {
      failed = true;
      return;
    }
    kernels.tile(m, a, t.from, t.to, t.panel, t.panels, memory.out, memory.work);
    const size_t column = t.panel * kPanel, width = std::min(outputs - column, t.panels * kPanel);
    for (size_t row = t.from; row < t.to; row++) {
      const float* from = memory.out + (row - t.from) * kTaskWidth;
      float* to = y + row * stride + column;
      if (residual) {
        const float* add = residual + row * stride + column;
        for (size_t i = 0; i < width; i++) to[i] = from[i] + add[i];
      } else {
        memcpy(to, from, width * sizeof(float));
      }
    }
    change.add(t.from, t.to - t.from, column, width, y + t.from * stride + column, stride, memory.work);
  });
  return !failed;
}

// Whether a product is one row's, which is bound by how fast weights are read.
bool one_row(const Matrix& m, size_t rows, const Excess& excess) {
  return rows == 1 && !excess.count && !m.widened();
}

bool reduce(const Matrix& m, const Activations& a, size_t rows, size_t outputs, const float* residual,
            float* y, const Change& change, const Upcoming& next) {
  if (one_row(m, rows, change.excess)) return reduce_row(m, a, outputs, residual, y, change, next);
  return multiply_rows(m, a, rows, outputs, outputs, residual, y, change);
}

}  // namespace

void add_normed(const float* x, size_t rows, size_t width, Norm norm, const float* residual, float* y) {
  parallel((rows + kRowsPerTask - 1) / kRowsPerTask, [&](size_t task) {
    for (size_t row = task * kRowsPerTask; row < std::min(rows, (task + 1) * kRowsPerTask); row++) {
      const float* more = residual + row * width;
      float* to = y + row * width;
      backend().rms_norm(x + row * width, norm.scale, norm.eps, width, to);
      for (size_t i = 0; i < width; i++) to[i] += more[i];
    }
  });
}

Failure to_units(const float* x, size_t rows, Norm norm, const Step& step, const Outputs* results,
                 size_t count) {
  constexpr size_t kMost = 8;
  if (count == 0 || count > kMost) return "a product takes 1 to 8 weights";
  Matrix m[kMost];
  Low lows[kMost];
  for (size_t i = 0; i < count; i++) {
    m[i] = matrix_of(results[i].weight, results[i].outputs);
    lows[i] = before_units(results[i].adapter, results[i].weight.inputs);
  }
  const Inputs& in = m[0].inputs;
  Prepared p;
  if (!prepare_rows(x, in.length, rows, in, norm, step, lows, count, p)) return kNoMemory;
  Change changes[kMost];
  for (size_t i = 0, at = 0; i < count; at += results[i++].adapter.rank) {
    changes[i] = after_units(p, at, results[i].adapter, results[i].floats, m[i]);
  }
  if (!one_row(m[0], rows, p.excess)) {
    for (size_t i = 0; i < count; i++) {
      const Outputs& to = results[i];
      if (!multiply_rows(m[i], p.a, rows, to.outputs, to.stride, nullptr, to.y, changes[i])) return kNoMemory;
    }
    return nullptr;
  }
  // The panels of all weights are one sequence.
  size_t panels = 0;
  for (size_t i = 0; i < count; i++) panels += m[i].panels;
  const Ranges ranges(panels, panel_bytes(m[0]), static_cast<size_t>(threads()));
  parallel(
      ranges.count(),
      [&](size_t task) {
        auto [from, to] = ranges.at(task);
        for (size_t i = 0; from < to; i++) {
          if (from < m[i].panels) {
            const size_t end = std::min(to, m[i].panels), outputs = results[i].outputs;
            row_to(m[i], p.a, from, end, outputs, results[i].y);
            const size_t column = from * kPanel, width = std::min(outputs, end * kPanel) - column;
            changes[i].add(0, 1, column, width, results[i].y + column, outputs, nullptr);
          }
          from -= std::min(from, m[i].panels);
          to -= std::min(to, m[i].panels);
        }
      },
      begin_reading(first_ranges(m[0], ranges)));
  return nullptr;
}

Failure from_units(const float* h, size_t rows, size_t stride, const Step& step, const Reduction& weight,
                   const Adapter& adapter, const FloatRows& floats, size_t segments, size_t length,
                   size_t outputs, const float* residual, float* y) {
  const Matrix m = matrix_of(weight, segments, length, outputs);
  const Low low = before_reduction(adapter);
  Prepared p;
  if (!prepare_rows(h, stride, rows, m.inputs, {nullptr, 0}, step, &low, 1, p)) return kNoMemory;
  const Upcoming next = one_row(m, rows, p.excess) ? begin_reading(first_spans(m)) : Upcoming{};
  const Change change = after_reduction(p, adapter, outputs, floats, m);
  return reduce(m, p.a, rows, outputs, residual, y, change, next) ? nullptr : kNoMemory;
}

Failure feed_forward(const float* x, size_t rows, size_t width, Norm norm, const Steps& steps,
                     const Block& block, size_t units, int activation, bool residual, float* y) {
  const bool gated = block.gate.stored.data != nullptr;
  Matrix up_matrix = matrix_of(block.up, units);
  const Matrix down_matrix = matrix_of(block.down, 1, units, width);
  // Without a gate, the other is what is activated.
  Matrix gate_matrix = gated ? matrix_of(block.gate, units) : up_matrix;
  const bool beginning = block.early && !block.finishing;
  if (block.early) {
    gate_matrix.early = block.early;
    up_matrix.early = block.early + up_matrix.panels * up_matrix.groups() * kPanel;
    gate_matrix.finishing = up_matrix.finishing = block.finishing;
  }
  const Adapter& first = gated ? block.gate_adapter : block.up_adapter;
  const Low lows[2] = {before_units(first, width), before_units(block.up_adapter, width)};
  Prepared p;
  if (!prepare_rows(x, width, rows, up_matrix.inputs, norm, steps.in, lows, gated ? 2 : 1, p))
    return kNoMemory;
  const Change gate_change =
                   after_units(p, 0, first, gated ? block.gate_floats : block.up_floats, gate_matrix),
               up_change = after_units(p, first.rank, block.up_adapter, block.up_floats, up_matrix);
  const size_t padded = up_matrix.panels * kPanel;
  float* hidden = static_cast<float*>(thread_scratch(kHidden, (rows * units + padded) * sizeof(float)));
  if (!hidden) return kNoMemory;
  const Backend& kernels = backend();
  std::atomic<bool> failed{false};
  Upcoming next;
  if (one_row(up_matrix, rows, p.excess)) {
    const Ranges ranges(up_matrix.panels, panel_bytes(up_matrix), static_cast<size_t>(threads()));
    if (!block.early) next = begin_reading(first_ranges(gate_matrix, ranges));
    parallel(
        ranges.count(),
        [&](size_t task) {
          const auto [from, to] = ranges.at(task);
          float* up_out = static_cast<float*>(thread_scratch(kTaskOut, (to - from) * kPanel * sizeof(float)));
          if (!up_out) {
            failed = true;
            return;
          }
          const size_t column = from * kPanel, count = std::min(units, to * kPanel) - column;
          // Past the last unit there is room for the rest of its panel.
          float* out = hidden + column;
          kernels.row_panels(gate_matrix, p.a, from, to, out);
          gate_change.add(0, 1, column, count, out, units, nullptr);
          if (gated) {
            kernels.row_panels(up_matrix, p.a, from, to, up_out);
            up_change.add(0, 1, column, count, up_out, units, nullptr);
          }
          if (!beginning) kernels.activate(out, gated ? up_out : nullptr, (to - from) * kPanel, activation);
        },
        beginning ? Upcoming{} : first_spans(down_matrix));
  } else {
    const Tiling tiling{rows, up_matrix.panels};
    parallel(tiling.count(), [&](size_t task) {
      const RowTile t = tiling.at(task);
      const TaskMemory memory;
      if (!memory.good()) {
        failed = true;
        return;
      }
      const size_t column = t.panel * kPanel, count = std::min(units - column, t.panels * kPanel);
      const size_t tile_rows = t.to - t.from;
      kernels.tile(gate_matrix, p.a, t.from, t.to, t.panel, t.panels, memory.out, memory.work);
      gate_change.add(t.from, tile_rows, column, count, memory.out, kTaskWidth, memory.work);
      if (gated) {
        kernels.tile(up_matrix, p.a, t.from, t.to, t.panel, t.panels, memory.other, memory.work);
        up_change.add(t.from, tile_rows, column, count, memory.other, kTaskWidth, memory.work);
      }
      for (size_t row = t.from; row < t.to; row++) {
        float* out = memory.out + (row - t.from) * kTaskWidth;
        const float* other = gated ? memory.other + (row - t.from) * kTaskWidth : nullptr;
        kernels.activate(out, other, count, activation);
        memcpy(hidden + row * units + column, out, count * sizeof(float));
      }
    });
  }
  if (failed) return kNoMemory;
  if (beginning) return nullptr;
  if (block.row_units) leave_out(hidden, rows, units, block.row_units, block.unit_stride);
  const Low low = before_reduction(block.down_adapter);
  if (!prepare_rows(hidden, units, rows, down_matrix.inputs, {nullptr, 0}, steps.hidden, &low, 1, p))
    return kNoMemory;
  const Change change = after_reduction(p, block.down_adapter, width, block.down_floats, down_matrix);
  return reduce(down_matrix, p.a, rows, width, residual ? x : nullptr, y, change, next) ? nullptr : kNoMemory;
}

Failure integer_product(const int8_t* x, size_t rows, const Units& weight, size_t outputs, int32_t* y) {
  const Matrix m = matrix_of(weight, outputs);
  const Inputs& in = m.inputs;
  const size_t used = in.all_blocks() * kBlock, stride = (used + 63) / 64 * 64, spans = in.all_spans();
  const size_t padded = (rows + 15) / 16 * 16, data_bytes = padded * stride + 64;
  char* memory = static_cast<char*>(thread_scratch(kActivations, data_bytes + rows * spans * 4));
  if (!memory) return kNoMemory;
  int8_t* q = reinterpret_cast<int8_t*>(memory);
  int32_t* span_sum = reinterpret_cast<int32_t*>(memory + data_bytes);
  memset(q, 0, data_bytes);
  for (size_t row = 0; row < rows; row++) {
    const int8_t* from = x + row * in.length;
    // -128 has no opposite in a byte, which some instruction sets need.
    for (size_t i = 0; i < in.length; i++) q[row * stride + i] = std::max<int8_t>(from[i], -127);
    for (size_t span = 0; span < spans; span++) {
      int32_t sum = 0;
      for (size_t i = span * kSpan; i < std::min<size_t>(in.length, (span + 1) * kSpan); i++) {
        sum += q[row * stride + i];
      }
      span_sum[row * spans + span] = sum;
    }
  }
  const Activations a{q, stride, nullptr, span_sum, nullptr, nullptr};
  const Tiling tiling{rows, m.panels};
  const Backend& kernels = backend();
  std::atomic<bool> failed{false};
  parallel(tiling.count(), [&](size_t task) {
    const RowTile t = tiling.at(task);
    const TaskMemory space;
    if (!space.good()) {
      failed = true;
      return;
    }
    int32_t* out = reinterpret_cast<int32_t*>(space.out);
    kernels.tile_int32(m, a, t.from, t.to, t.panel, t.panels, out, space.work);
    const size_t column = t.panel * kPanel, width = std::min(outputs - column, t.panels * kPanel);
    for (size_t row = t.from; row < t.to; row++) {
      memcpy(y + row * outputs + column, out + (row - t.from) * kTaskWidth, width * sizeof(int32_t));
    }
  });
  return failed ? kNoMemory : nullptr;
}

void unit_rows(const int32_t* index, size_t count, const Units& weight, size_t outputs, float* y) {
  const Matrix m = matrix_of(weight, outputs);
  const Backend& kernels = backend();
  const int32_t last = static_cast<int32_t>(outputs) - 1;
  parallel((count + kRowsPerTask - 1) / kRowsPerTask, [&](size_t task) {
    for (size_t i = task * kRowsPerTask; i < std::min(count, (task + 1) * kRowsPerTask); i++) {
      const size_t row = static_cast<size_t>(std::clamp(index[i], 0, last));
      kernels.unit_row(m, row, y + i * weight.inputs);
    }
  });
}

int64_t read_all(const void* data, size_t bytes) {
  constexpr size_t kPiece = 1 << 20;
  std::atomic<int64_t> sum{0};
  const Backend& kernels = backend();
  parallel((bytes + kPiece - 1) / kPiece, [&](size_t i) {
    const size_t from = i * kPiece;
    sum += kernels.read(static_cast<const char*>(data) + from, std::min(kPiece, bytes - from));
  });
  return sum;
}

}  // namespace jaxllm
