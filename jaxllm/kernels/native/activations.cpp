#include "activations.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>

#include "pool.h"

namespace jaxllm {
namespace {

constexpr size_t kRowsPerTask = 8;
constexpr float kLevels = 127.0f;
// Channels whose rows are in a task's scratch at a time.
constexpr size_t kChannels = kTaskScratchBytes / (kTaskPanels * kPanel * sizeof(float));
static_assert(kChannels >= 16);

// Calls one(task, first row, last row) for all rows: in one task where there is little to do.
template <class Function>
void over_rows(size_t rows, size_t width, Function&& one) {
  if (rows * width < 16384) return one(0, 0, rows);
  parallel((rows + kRowsPerTask - 1) / kRowsPerTask,
           [&](size_t task) { one(task, task * kRowsPerTask, std::min(rows, (task + 1) * kRowsPerTask)); });
}

// The channels that some task has marked, and of each row what lies beyond there.
bool gather_excess(const float* x, size_t x_stride, size_t rows, size_t width, Norm norm, const float* factor,
                   const Step& step, uint8_t* marks, size_t tasks, Excess& excess) {
  for (size_t task = 1; task < tasks; task++) {
    for (size_t i = 0; i < width; i++) marks[i] |= marks[task * width + i];
  }
  const size_t count = width - static_cast<size_t>(std::count(marks, marks + width, 0));
  *step.channels = static_cast<int32_t>(count);
  excess = {step.place, nullptr, count, nullptr};
  if (!count) return true;
  char* memory = static_cast<char*>(thread_scratch(kExcess, (rows + 1) * count * 4));
  if (!memory) return false;
  uint32_t* channels = reinterpret_cast<uint32_t*>(memory);
  float* compact = reinterpret_cast<float*>(channels + count);
  for (size_t i = 0, at = 0; i < width; i++) {
    if (marks[i]) channels[at++] = static_cast<uint32_t>(i);
  }
  const float top = kLevels * step.size;
  over_rows(rows, count, [&](size_t, size_t from, size_t to) {
    for (size_t row = from; row < to; row++) {
      for (size_t k = 0; k < count; k++) {
        // As the norm gave it, to the bit.
        float value = x[row * x_stride + channels[k]];
        if (norm.scale) value = value * factor[row] * norm.scale[channels[k]];
        // What is not finite shows in the product of whole numbers.
        compact[row * count + k] = isfinite(value) ? value - std::clamp(value, -top, top) : 0.0f;
      }
    }
  });
  excess.channels = channels;
  excess.compact = compact;
  return true;
}

// What input `input` is multiplied with in `panels` panels, of a weight of 8 bits with a scale per output.
void weight_row(const Matrix& m, size_t input, size_t panel, size_t panels, float* out) {
  const size_t segment = input / m.inputs.length, at = input % m.inputs.length;
  const size_t block = segment * m.inputs.blocks() + at / kBlock, place = at % kBlock;
  const float* scales = static_cast<const float*>(m.scale) + segment * m.scale_group_stride;
  for (size_t p = panel; p < panel + panels; p++, out += kPanel) {
    const uint8_t* four = m.data + p * m.panel_stride + block * m.block_stride + place / 4 * kPanel * 4;
    for (size_t o = 0; o < kPanel; o++) {
      out[o] = static_cast<int8_t>(four[o * 4 + place % 4]) * scales[p * m.scale_panel_stride + o];
    }
  }
}

}  // namespace

bool prepare_rows(const float* x, size_t x_stride, size_t rows, const Inputs& in, Norm norm, const Step& step,
                  const Low* lows, size_t low_count, Prepared& prepared) {
  const size_t width = in.segments * in.length, used = in.all_blocks() * kBlock;
  const size_t stride = (used + 63) / 64 * 64, padded = (rows + 15) / 16 * 16;
  const size_t spans = in.all_spans(), blocks = in.all_blocks();
  size_t low_stride = 0;
  for (size_t i = 0; i < low_count; i++) low_stride += lows[i].rank;
  // 64 more bytes: a tile reads two blocks at a time, also from a row's last.
  const size_t data_bytes = padded * stride + 64, row_words = 2 * spans + blocks + low_stride;
  const size_t outlier_bytes = step.size > 0 || step.plain ? 0 : rows * spans * sizeof(Outliers);
  char* memory = static_cast<char*>(
      thread_scratch(kActivations, data_bytes + rows * row_words * 4 + outlier_bytes + 64));
  if (!memory) return false;
  int8_t* q = reinterpret_cast<int8_t*>(memory);
  float* scale = reinterpret_cast<float*>(memory + (data_bytes + 63) / 64 * 64);
  int32_t* span_sum = reinterpret_cast<int32_t*>(scale + rows * spans);
  int32_t* block_sum = span_sum + rows * spans;
  float* low = reinterpret_cast<float*>(block_sum + rows * blocks);
  Outliers* outliers = outlier_bytes ? reinterpret_cast<Outliers*>(low + rows * low_stride) : nullptr;
  prepared = {{q, stride, scale, span_sum, block_sum, outliers}, low, low_stride, {}};
  // Each task marks the channels that lie beyond in its rows.
  const size_t tasks = (rows + kRowsPerTask - 1) / kRowsPerTask;
  float* factor = nullptr;
  uint8_t* marks = nullptr;
  if (step.channels) {
    char* found = static_cast<char*>(thread_scratch(kMarks, rows * sizeof(float) + tasks * width));
    if (!found) return false;
    factor = reinterpret_cast<float*>(found);
    marks = reinterpret_cast<uint8_t*>(factor + rows);
    memset(marks, 0, tasks * width);
  }
  const Backend& kernels = backend();
  std::atomic<bool> failed{false};
  auto one = [&](size_t task, size_t row) {
    const float* from = x + row * x_stride;
    if (norm.scale) {
      float* normed = static_cast<float*>(thread_scratch(kTaskOut, width * sizeof(float)));
      if (!normed) {
        failed = true;
        return;
      }
      const float shared = kernels.rms_norm(from, norm.scale, norm.eps, width, normed);
      if (factor) factor[row] = shared;
      from = normed;
    }
    int8_t* to = q + row * stride;
    kernels.quantize(from, in, step.size, to, scale + row * spans, span_sum + row * spans,
                     block_sum + row * blocks, outliers ? outliers + row * spans : nullptr,
                     marks ? marks + task * width : nullptr);
    memset(to + used, 0, stride - used);
    float* sums = low + row * low_stride;
    for (size_t i = 0; i < low_count; i++) {
      kernels.low_sums(from, lows[i].side, lows[i].stride, lows[i].rank, width, sums);
      sums += lows[i].rank;
    }
  };
  memset(q + rows * stride, 0, data_bytes - rows * stride);
  over_rows(rows, width, [&](size_t task, size_t from, size_t to) {
    for (size_t row = from; row < to; row++) one(task, row);
  });
  if (failed) return false;
  return !marks || gather_excess(x, x_stride, rows, width, norm, factor, step, marks, tasks, prepared.excess);
}

void Change::add(size_t row, size_t rows, size_t column, size_t width, float* y, size_t y_stride,
                 void* work) const {
  const Backend& kernels = backend();
  if (rank)
    kernels.add_low(low + row * low_stride, low_stride, rows, side + column, stride, rank, width, y,
                    y_stride);
  const size_t columns = padded_width(width);
  float* weights = static_cast<float*>(work);
  for (size_t from = 0; from < excess.count; from += kChannels) {
    const size_t count = std::min(kChannels, excess.count - from);
    for (size_t k = 0; k < count; k++) {
      const size_t channel = excess.channels[from + k];
      const int32_t place = excess.place[channel];
      float* to = weights + k * columns;
      if (place >= 0 && static_cast<size_t>(place) < floats.count) {
        kernels.floats_of(floats.data + static_cast<size_t>(place) * floats.stride + column, width, to);
      } else {
        weight_row(*weight, channel, column / kPanel, columns / kPanel, to);
      }
    }
    kernels.add_low(excess.compact + row * excess.count + from, excess.count, rows, weights, columns, count,
                    width, y, y_stride);
  }
}

void leave_out(float* x, size_t rows, size_t width, const int32_t* used, size_t stride) {
  for (size_t row = 0; row < rows; row++) {
    const size_t first = static_cast<size_t>(used[row * stride]);
    memset(x + row * width + first, 0, (width - first) * sizeof(float));
  }
}

}  // namespace jaxllm
