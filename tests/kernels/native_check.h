// What native_check.cpp draws and what it compares with: buffers, random numbers, weights, plain references.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "ops.h"

namespace check {

// Bytes that end where their data ends: what lies behind cannot be touched.
class Guarded {
 public:
  Guarded() = default;
  // `align` of the first byte; the data then ends up to align - 1 bytes early. Filled with NaN.
  Guarded(size_t bytes, size_t align) : bytes_(bytes) {
#if defined(__SANITIZE_ADDRESS__)
    if (posix_memalign(&base_, std::max(align, sizeof(void*)), bytes + !bytes)) abort();
    data_ = base_;
#else
    // Emulators of x86 may load a whole register where the instruction reads one number.
    static const size_t slack =
        getenv("NATIVE_CHECK_SLACK") ? strtoull(getenv("NATIVE_CHECK_SLACK"), nullptr, 10) : 0;
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t padded = (bytes + align - 1) / align * align + slack;
    mapped_ = (padded + page - 1) / page * page + page;
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED || mprotect(static_cast<char*>(base_) + mapped_ - page, page, PROT_NONE)) abort();
    data_ = static_cast<char*>(base_) + mapped_ - page - padded;
#endif
    memset(data_, 0xff, bytes);
  }
  Guarded(Guarded&& other) noexcept { *this = std::move(other); }
  Guarded& operator=(Guarded&& other) noexcept {
    std::swap(base_, other.base_), std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_), std::swap(mapped_, other.mapped_);
    return *this;
  }
  ~Guarded() {
#if defined(__SANITIZE_ADDRESS__)
    free(base_);
#else
    if (base_) munmap(base_, mapped_);
#endif
  }
  char* data() const { return static_cast<char*>(data_); }
  size_t size() const { return bytes_; }

 private:
  void *base_ = nullptr, *data_ = nullptr;
  size_t bytes_ = 0, mapped_ = 0;
};

template <class T>
class Buffer {
 public:
  explicit Buffer(size_t count) : memory_(count * sizeof(T), sizeof(T)), count_(count) {}
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) {
    if (count_) memcpy(data(), values.data(), count_ * sizeof(T));
  }
  T* data() { return reinterpret_cast<T*>(memory_.data()); }
  const T* data() const { return reinterpret_cast<const T*>(memory_.data()); }
  size_t size() const { return count_; }

 private:
  Guarded memory_;
  size_t count_;
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 0x1234567ull) {}
  uint64_t below(uint64_t end) {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return (state_ >> 11) % end;
  }
  size_t in(size_t low, size_t high) { return low + below(high - low + 1); }
  double unit() { return static_cast<double>(below(1 << 24)) / (1 << 24) * 2 - 1; }
  // One row as often as many; now and then more than one task has.
  size_t rows() { return below(3) == 0 ? 1 : below(8) ? in(1, 40) : in(250, 300); }
  std::vector<float> floats(size_t count, bool spread = true) {
    std::vector<float> values(count);
    for (float& each : values) each = static_cast<float>(unit() * (spread ? exp2(unit() * 4) : 1.7));
    return values;
  }

 private:
  uint64_t state_;
};

inline double half_value(uint16_t h) {
  const int exponent = h >> 10 & 31;
  const double mantissa = h & 1023,
               size = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
  return exponent == 31 ? (h & 1023 ? NAN : INFINITY) : h & 0x8000 ? -size : size;
}

// A normal half of either sign, about 2^-10 to 2^1.
inline uint16_t draw_half(Random& random) {
  return static_cast<uint16_t>(random.below(2) << 15 | random.in(5, 15) << 10 | random.below(1024));
}

// How a weight is stored: bits of a plane, inputs per scale, whether its scales are nested, and whether it
// has a low plane.
struct Format {
  int bits = 8, group = 0;
  bool nested = false, both = false, minima = false;
  static Format draw(Random& random) {
    const size_t kind = random.below(7);
    if (kind == 6) return {4, static_cast<int>(random.in(1, 2)) * 32, false, false, true};
    if (kind > 3) return {4, 64, true, kind == 4};
    const int bits = kind == 3 ? 8 : 2 << kind;
    return {bits, static_cast<int>(bits == 8 ? random.below(3) : random.in(1, 2)) * 32};
  }
  std::string text() const {
    return " bits " + std::to_string(bits) + " group " + std::to_string(group) +
           (both     ? " nested"
            : nested ? " high"
            : minima ? " minima"
                     : "");
  }
};

// A random weight: in blocks, as levels, and as [segments * inputs][outputs] of the numbers it stands for.
struct Weight {
  size_t segments, inputs, outputs, panels, blocks;
  Format format;
  Buffer<uint8_t> data, low;
  Buffer<uint8_t> scale;  // bytes of floats or halves, or nested ones
  std::vector<int> levels;
  // Sizes: of what is summed for each. Wider: fewer bits made 8 of one scale per span; empty if that cannot
  // be.
  std::vector<double> dense, sizes, wider;

  // Units are outputs; the buffer holds some more of them than are used.
  static Weight of_outputs(Random& random, size_t outputs, size_t inputs, Format format = {}) {
    const size_t panels = (outputs + 15) / 16 + random.below(2), blocks = (inputs + 31) / 32;
    return Weight(random, 1, inputs, outputs, panels, blocks, format, false);
  }
  // Units are inputs; a lone segment's buffer may hold some more of them.
  static Weight of_inputs(Random& random, size_t segments, size_t inputs, size_t outputs,
                          Format format = {}) {
    const size_t more = segments == 1 ? random.below(3) : 0;
    return Weight(random, segments, inputs, outputs, (outputs + 15) / 16, (inputs + 31) / 32 + more, format,
                  true);
  }
  jaxllm::Stored stored() const {
    return {data.data(),  format.both ? low.data() : nullptr,
            scale.data(), format.bits,
            format.group, format.nested,
            format.minima};
  }
  jaxllm::Units units(bool widen) const { return {stored(), panels, inputs, widen}; }
  jaxllm::Reduction reduction(bool widen) const {
    const size_t groups = groups_of(inputs, blocks, format.group, true);
    return {stored(), segments, blocks, panels, groups, widen};
  }

 private:
  // Of groups along a lone segment that is longer than what is used, all are there.
  static size_t groups_of(size_t inputs, size_t blocks, int group, bool reduction) {
    return group ? ((reduction ? blocks * 32 : inputs) + group - 1) / group : 1;
  }

  static size_t scale_bytes(size_t panels, size_t groups, Format format) {
    if (format.nested) return panels * (64 + groups * 8);
    return panels * 16 * groups * (format.group ? 2 : 4) * (format.minima ? 2 : 1);
  }

  Weight(Random& random, size_t segments, size_t inputs, size_t outputs, size_t panels, size_t blocks,
         Format format, bool reduction)
      : segments(segments),
        inputs(inputs),
        outputs(outputs),
        panels(panels),
        blocks(blocks),
        format(format),
        data(segments * panels * blocks * static_cast<size_t>(format.bits) * 64),
        low(format.both ? data.size() : 0),
        scale(segments * scale_bytes(panels, groups_of(inputs, blocks, format.group, reduction), format)),
        levels(segments * inputs * outputs),
        dense(levels.size()),
        sizes(levels.size()) {
    const int bits = format.bits, group = format.group;
    const size_t groups = groups_of(inputs, blocks, group, reduction);
    const size_t scales = format.nested ? 0 : segments * panels * 16 * groups * (format.minima ? 2 : 1);
    for (size_t i = 0; i < data.size(); i++) data.data()[i] = static_cast<uint8_t>(random.below(256));
    for (size_t i = 0; i < low.size(); i++) low.data()[i] = static_cast<uint8_t>(random.below(256));
    if (format.nested) {
      for (size_t i = 0; i < scale.size(); i++) scale.data()[i] = static_cast<uint8_t>(random.below(256));
      // Of each panel of outputs its floats come first; of inputs those of all panels do.
      const size_t floats = reduction ? panels * 16 : 16, parts = reduction ? segments : panels;
      for (size_t i = 0; i < parts * floats; i++) {
        const float value = static_cast<float>(random.unit());
        memcpy(scale.data() + i / floats * (scale.size() / parts) + i % floats * 4, &value, 4);
      }
    }
    for (size_t i = 0; i < scales; i++) {
      const uint16_t half = draw_half(random);
      const float value = static_cast<float>(random.unit());
      memcpy(scale.data() + i * (group ? 2 : 4), group ? static_cast<const void*>(&half) : &value,
             group ? 2 : 4);
    }
    if (bits != 8 && group && !format.minima) wider.resize(dense.size());
    for (size_t s = 0; s < segments; s++) {
      for (size_t o = 0; o < outputs; o++) {
        for (size_t i = 0; i < inputs; i++) {
          const size_t p = o / 16, b = i / 32, quarter = i % 32 / 4;
          const size_t block = reduction ? (s * blocks + b) * panels + p : p * blocks + b;
          const size_t row = quarter * static_cast<size_t>(bits) / 8;
          const size_t place = block * static_cast<size_t>(bits) * 64 + row * 64 + o % 16 * 4 + i % 4;
          const auto nibble = [&](uint8_t byte) { return (quarter % 2 ? byte >> 4 : byte & 15) - 8; };
          const uint8_t byte = data.data()[place];
          int level = bits == 8   ? static_cast<int8_t>(byte)
                      : bits == 4 ? nibble(byte)
                                  : 2 * (byte >> (2 * (quarter % 4)) & 3) - 3;
          if (format.both) {
            // No level is below those of a byte: with -8 above, what is below is at least 0.
            if (nibble(byte) == -8) low.data()[place] |= quarter % 2 ? 0x80 : 0x08;
            level = 16 * level + nibble(low.data()[place]);
          }
          const size_t at = (s * inputs + i) * outputs + o;
          levels[at] = level;
          const size_t of = group ? i / group : 0;
          const double own = scale_at(s, p, of, o % 16, groups, group, reduction);
          const double least = format.minima ? scale_at(s, p, of, o % 16, groups, group, reduction, 1) : 0;
          const double steps = (format.minima ? level + 8 : level) * own;
          dense[at] = steps + least, sizes[at] = fabs(steps) + fabs(least);
          if (!wider.empty()) {
            const float top = format.both ? 127.0f : bits == 4 ? 8.0f : 3.0f;
            float most = 1e-30f;
            for (size_t other = i / 256 * 256; other < std::min(inputs, i / 256 * 256 + 256);
                 other += group) {
              const double size = fabs(scale_at(s, p, other / group, o % 16, groups, group, reduction));
              most = std::max(most, static_cast<float>(size));
            }
            const float own = static_cast<float>(scale_at(s, p, i / group, o % 16, groups, group, reduction));
            const float factor = own * ((127.0f / top) / most);
            const double step = static_cast<double>(most * (top / 127.0f));
            const long fixed = lrintf(factor * (format.both ? 32767.0f : 128.0f));
            double wide = floor((level * 256.0 * static_cast<double>(fixed) + 16384) / 32768);
            if (format.both) wide = floor(std::min(wide + 128, 32767.0) / 256);
            wider[at] = wide * step;
          }
        }
      }
    }
  }

  // The scale of a group of an output, or of a weight with minima its minimum (`which` 1).
  double scale_at(size_t s, size_t p, size_t g, size_t lane, size_t groups, int group, bool reduction,
                  size_t which = 0) const {
    if (!group) {
      float value;
      memcpy(&value, scale.data() + ((s * panels + p) * 16 + lane) * 4, 4);
      return value;
    }
    if (format.nested) {
      const size_t parts = reduction ? segments : panels, part = reduction ? s : p;
      const uint8_t* own = scale.data() + part * (scale.size() / parts);
      const size_t floats = reduction ? panels * 64 : 64, in_part = reduction ? p : 0;
      float channel;
      memcpy(&channel, own + in_part * 64 + lane * 4, 4);
      const uint8_t byte = own[floats + (g * (reduction ? panels : 1) + in_part) * 8 + lane % 8];
      const int code = lane / 8 ? byte >> 4 : byte & 15, factor = code < 8 ? code - 16 : code;
      return static_cast<double>(static_cast<float>(factor) * (format.both ? channel : channel * 16));
    }
    uint16_t half;
    const size_t at = reduction ? (s * groups + g) * panels + p : p * groups + g;
    const size_t panel = format.minima ? 2 * at + which : at;
    memcpy(&half, scale.data() + (panel * 16 + lane) * 2, 2);
    return half_value(half);
  }
};

// A random low-rank change to a weight, or none; its left side has some more units than are used.
struct Change {
  Change(Random& random, size_t units, size_t width)
      : rank(random.below(2) ? random.in(1, 9) : 0),
        stride(units + random.below(20)),
        width(width),
        left(random.floats(rank * stride)),
        right(random.floats(rank * width)) {}
  jaxllm::Adapter adapter() const { return {left.data(), right.data(), rank, stride}; }
  // What it adds to the weight, at a unit and a place on the other side.
  double at(size_t unit, size_t place) const {
    double sum = 0;
    for (size_t r = 0; r < rank; r++)
      sum += static_cast<double>(left.data()[r * stride + unit]) * right.data()[r * width + place];
    return sum;
  }
  // Of the sum at(): of magnitudes.
  double size_at(size_t unit, size_t place) const {
    double sum = 0;
    for (size_t r = 0; r < rank; r++)
      sum += fabs(static_cast<double>(left.data()[r * stride + unit]) * right.data()[r * width + place]);
    return sum;
  }

  size_t rank, stride, width;
  Buffer<float> left, right;
};

// What a product of `inputs` needs for its shadow: rows in halves of some inputs, whose outputs are some more
// than are used. Places beyond the rows are none, too.
struct Shadow {
  Shadow(Random& random, size_t inputs, size_t outputs)
      : rows(random.below(20)),
        stride(outputs + random.below(20)),
        place(inputs),
        halves(rows * stride),
        count(1) {
    for (size_t i = 0; i < inputs; i++) {
      place.data()[i] = static_cast<int32_t>(random.below(rows + 3)) - 1;
    }
    for (size_t i = 0; i < rows * stride; i++) halves.data()[i] = draw_half(random);
    *count.data() = 0;
  }
  jaxllm::Step step(float size) const { return {size, place.data(), const_cast<int32_t*>(count.data())}; }
  jaxllm::FloatRows floats() const { return {halves.data(), rows, stride}; }
  // What an input's excess is multiplied with, instead of the weight's own.
  double at(size_t input, size_t output, double own) const {
    const int32_t row = place.data()[input];
    return row < 0 || static_cast<size_t>(row) >= rows ? own
                                                       : half_value(halves.data()[row * stride + output]);
  }

  size_t rows, stride;
  Buffer<int32_t> place;
  Buffer<uint16_t> halves;
  Buffer<int32_t> count;
};

// Activations as the kernels see them: 8 bits, a scale for each 256 inputs of a segment, of which the two
// largest may have more.
inline std::vector<double> rounded(const std::vector<float>& x, size_t rows, size_t segments, size_t length) {
  std::vector<double> out(x.size());
  for (size_t row = 0; row < rows * segments; row++) {
    for (size_t from = 0; from < length; from += 256) {
      const size_t to = std::min(length, from + 256);
      std::vector<float> sizes(3);
      for (size_t i = from; i < to; i++) sizes.push_back(fabsf(x[row * length + i]));
      std::sort(sizes.rbegin(), sizes.rend());
      if (sizes[0] < 1e-30f) continue;
      const float top = std::max(sizes[2], sizes[0] / 128), factor = 127.0f / top, step = top / 127.0f;
      for (size_t i = from; i < to; i++) {
        const float steps = x[row * length + i] * factor;
        const float level = fabsf(steps) > 127 ? truncf(steps + copysignf(0.5f, steps)) : rintf(steps);
        out[row * length + i] = static_cast<double>(level) * step;
      }
    }
  }
  return out;
}

inline double activated(double x, int activation) {
  switch (activation) {
    case jaxllm::kSilu:
      return x / (1 + exp(-x));
    case jaxllm::kGelu:
      return x * 0.5 * erfc(-x / sqrt(2.0));
    case jaxllm::kGeluTanh:
      return x * 0.5 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    default:
      return std::max(x, 0.0);
  }
}

// Keys or values of a cache, [heads][capacity][width]; rows from `stale` on are NaN.
struct Rows {
  Rows(Random& random, size_t heads, size_t capacity, size_t width, size_t stale, bool half)
      : capacity(capacity), width(width), half(half), bytes(heads * capacity * width * (half ? 2 : 4)) {
    for (size_t i = 0; i < heads * capacity * width; i++) {
      if (i / width % capacity >= stale) continue;
      const uint16_t h = draw_half(random);
      const float value = static_cast<float>(random.unit() * 1.7);
      memcpy(bytes.data() + i * element(), half ? static_cast<const void*>(&h) : &value, element());
    }
  }
  Rows copy() const { return Rows(*this, 0); }
  size_t element() const { return half ? 2 : 4; }
  double at(size_t head, size_t position, size_t h) const {
    const uint8_t* from = bytes.data() + ((head * capacity + position) * width + h) * element();
    uint16_t bits;
    float value;
    memcpy(half ? static_cast<void*>(&bits) : &value, from, element());
    return half ? half_value(bits) : value;
  }

  size_t capacity, width;
  bool half;
  Buffer<uint8_t> bytes;

 private:
  Rows(const Rows& other, int)
      : capacity(other.capacity), width(other.width), half(other.half), bytes(other.bytes.size()) {
    if (bytes.size()) memcpy(bytes.data(), other.bytes.data(), bytes.size());
  }
};

// Dimension h of a row, turned in pairs (h, h + rotary).
inline double turned(const float* row, size_t h, const float* cos, const float* sin, size_t token,
                     size_t rotary) {
  if (!cos || h >= 2 * rotary) return row[h];
  const size_t i = h % rotary;
  const double c = cos[token * rotary + i], s = sin[token * rotary + i], a = row[i], b = row[i + rotary];
  return h < rotary ? a * c - b * s : b * c + a * s;
}

void fail(const char* what, size_t row, size_t column, double got, double expected, double room);

// Causal attention over a cache, [batch][tokens][kv_heads][group][width]; what the valid tokens attend to
// each position is added to `mass` [batch][capacity].
inline std::vector<double> attended(const jaxllm::AttentionShape& s, const float* q, const float* cos,
                                    const float* sin, const Rows& keys, const Rows& values,
                                    std::vector<double>& mass) {
  std::vector<double> out(s.batch * s.tokens * s.kv_heads * s.group * s.width), weights(s.capacity),
      row(s.width);
  for (size_t r = 0; r < s.batch * s.tokens * s.kv_heads * s.group; r++) {
    const size_t kv = r / s.group % s.kv_heads;
    if (kv >= s.used_heads) continue;
    const size_t t = r / s.group / s.kv_heads % s.tokens;
    const size_t batch = r / s.group / s.kv_heads / s.tokens, head = batch * s.kv_heads + kv;
    const size_t position = static_cast<size_t>(s.positions[t]);
    const size_t from = s.window && position + 1 > s.window ? position + 1 - s.window : 0;
    const size_t row_end = s.seen ? s.base + s.nodes : static_cast<size_t>(s.rows[t]) + 1;
    const size_t to = std::min(s.capacity, row_end);
    // Where the token of a row stands: those that are seen of a tree one behind the other.
    const auto stands = [&](size_t p) {
      size_t place = std::min(p, s.seen ? s.base : p);
      for (size_t node = s.base; s.seen && node < p; node++) place += s.seen[t * s.nodes + node - s.base];
      return place;
    };
    const auto hidden = [&](size_t p) {
      return stands(p) < from || (s.seen && p >= s.base && !s.seen[t * s.nodes + p - s.base]);
    };
    for (size_t h = 0; h < s.width; h++)
      row[h] = turned(q + r * s.width, h, s.rotary ? cos : nullptr, sin, t, s.rotary);
    double top = -INFINITY, total = 0;
    for (size_t p = 0; p < to; p++) {
      double score = 0;
      for (size_t h = 0; h < s.width; h++) score += row[h] * keys.at(head, p, h);
      score *= s.scale;
      if (s.softcap > 0) score = tanh(score / s.softcap) * s.softcap;
      if (s.bias && stands(p) <= position) {
        const size_t far = std::min(position - stands(p), s.distances - 1);
        score +=
            s.bias[(r / s.group % s.kv_heads * s.group + r % s.group) * s.distances + s.distances - 1 - far];
      }
      weights[p] = hidden(p) ? -INFINITY : score;
      top = std::max(top, weights[p]);
    }
    if (top == -INFINITY) continue;  // sees nothing
    const size_t query = r / s.group % s.kv_heads * s.group + r % s.group;
    if (s.sink_logits) top = std::max<double>(top, s.sink_logits[query]);
    if (s.sink_logits) total = exp(s.sink_logits[query] - top);
    for (size_t p = 0; p < to; p++) total += weights[p] = exp(weights[p] - top);
    for (size_t p = 0; p < to; p++) {
      if (t < s.valid) mass[batch * s.capacity + p] += weights[p] / total;
      for (size_t h = 0; h < s.width; h++) out[r * s.width + h] += weights[p] / total * values.at(head, p, h);
    }
  }
  return out;
}

// Exactly the valid new rows of used heads were written, each as it should be.
inline void judge_rows(const jaxllm::AttentionShape& s, const float* rows, const float* cos, const float* sin,
                       const Rows& before, const Rows& after) {
  for (size_t head = 0; head < s.batch * s.kv_heads; head++) {
    for (size_t p = 0; p < s.capacity; p++) {
      const int32_t *end = s.rows + s.valid, *found = std::find(s.rows, end, static_cast<int32_t>(p));
      const bool fresh = found != end && head % s.kv_heads < s.used_heads;
      const size_t t = static_cast<size_t>(found - s.rows);
      const float* row =
          rows + ((head / s.kv_heads * s.tokens + t) * s.kv_heads + head % s.kv_heads) * s.width;
      for (size_t h = 0; h < s.width; h++) {
        const double got = after.at(head, p, h);
        if (!fresh) {
          const size_t at = ((head * s.capacity + p) * s.width + h) * after.element();
          if (memcmp(before.bytes.data() + at, after.bytes.data() + at, after.element())) {
            fail("an old row has changed", p, h, got, before.at(head, p, h), 0);
          }
          continue;
        }
        const double expected = turned(row, h, s.rotary ? cos : nullptr, sin, t, s.rotary);
        const double room = s.half ? fabs(expected) / 2000 + 1e-7 : 4e-7 * (fabs(expected) + 1);
        if (!(fabs(got - expected) <= room)) fail("a new row is wrong", p, h, got, expected, room);
      }
    }
  }
}

}  // namespace check
