// The native kernels without Python and XLA: random shapes, buffers that end where their data ends, a plain
// reference in double. `test_native_check.py` builds this with sanitizers, and for Arm.
//
//   native_check CASES SEED [concurrent]
//
// Every buffer is as long as its contents to the byte: with AddressSanitizer on the heap, else before a page
// that cannot be read, which also stops instructions that the sanitizer does not see. Scratch is handed out
// the same way, filled with NaN, so that nothing that a kernel did not write itself is read unseen.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#define thread_scratch pooled_scratch
#include "pool.cpp"
#undef thread_scratch
#include "native_check.h"
#include "ops.h"

namespace jaxllm {

void* thread_scratch(Slot slot, size_t bytes) {
  thread_local check::Guarded memory[kSlots];
  memory[slot] = check::Guarded(bytes, 64);
  return memory[slot].data();
}

}  // namespace jaxllm

namespace check {

using namespace jaxllm;

static std::string shape;  // of the case underway, for messages

void fail(const char* what, size_t row, size_t column, double got, double expected, double room) {
  fprintf(stderr, "%s: %s at (%zu, %zu): %.9g, expected %.9g +- %.3g; kernels %s, %d threads\n",
          shape.c_str(), what, row, column, got, expected, room, backend().name, threads());
  exit(1);
}

namespace {

// Runs with every set of kernels on some numbers of threads; all threads must give the same bits.
void everywhere(Buffer<float>& y, const std::function<void()>& run, const std::function<void()>& judge) {
  const char* names[8];
  const int count = backends(names);
  std::vector<float> first(y.size());
  for (int i = 0; i < count; i++) {
    use_backend(names[i]);
    for (int used : {1, 2, 3}) {
      set_threads(used);
      std::fill_n(y.data(), y.size(), NAN);
      run();
      if (used == 1) {
        memcpy(first.data(), y.data(), y.size() * sizeof(float));
        judge();
      } else if (memcmp(first.data(), y.data(), y.size() * sizeof(float))) {
        fail("another number of threads gives other bits", 0, 0, 0, 0, 0);
      }
    }
  }
}

// ------------------------------------------------------------------------------------------ products

void must(Failure failure) {
  if (failure) fail(failure, 0, 0, 0, 0, 0);
}

// What a product must be: sums and how far off they may be, [rows][outputs], with weights as they are stored
// and with wider ones. Each row is the one or the other.
class Expected {
 public:
  Expected(const Weight& w, const std::vector<float>& x, size_t rows, const float* residual)
      : rows_(rows), outputs_(w.outputs) {
    const std::vector<double> seen = rounded(x, rows, w.segments, w.inputs);
    add(w.dense, seen, residual);
    if (!w.wider.empty()) add(w.wider, seen, residual);
  }

  void judge(const float* y) const {
    for (size_t row = 0; row < rows_; row++) {
      if (std::any_of(sums_.begin(), sums_.end(),
                      [&](const Sums& each) { return wrong(each, row, y) == outputs_; }))
        continue;
      const size_t o = wrong(sums_[0], row, y), at = row * outputs_ + o;
      fail("a product is wrong", row, o, y[at], sums_[0].value[at], sums_[0].room[at]);
    }
  }

 private:
  struct Sums {
    std::vector<double> value, room;
  };

  void add(const std::vector<double>& dense, const std::vector<double>& seen, const float* residual) {
    Sums sums{std::vector<double>(rows_ * outputs_), std::vector<double>(rows_ * outputs_)};
    const size_t inputs = dense.size() / outputs_;
    for (size_t row = 0; row < rows_; row++) {
      double *value = &sums.value[row * outputs_], *room = &sums.room[row * outputs_];
      for (size_t i = 0; i < inputs; i++) {
        const double x = seen[row * inputs + i], *w = &dense[i * outputs_];
        for (size_t o = 0; o < outputs_; o++) value[o] += x * w[o], room[o] += fabs(x * w[o]);
      }
      for (size_t o = 0; o < outputs_; o++) {
        const double more = residual ? residual[row * outputs_ + o] : 0;
        value[o] += more;
        room[o] = 1.5e-6 * (room[o] + fabs(more)) + 1e-30;
      }
    }
    sums_.push_back(std::move(sums));
  }

  // The first output of a row that is off; their number if none is.
  size_t wrong(const Sums& sums, size_t row, const float* y) const {
    size_t o = 0;
    while (o < outputs_) {
      const size_t at = row * outputs_ + o;
      if (!(fabs(y[at] - sums.value[at]) <= sums.room[at])) break;
      o++;
    }
    return o;
  }

  size_t rows_, outputs_;
  std::vector<Sums> sums_;
};

void check_to_units(Random& random) {
  const size_t rows = random.rows(), count = random.below(3) + 1, inputs = random.in(1, 600);
  const int bits = random.below(2) ? 8 : 4, group = static_cast<int>(random.below(3)) * 32;
  shape = "to_units rows " + std::to_string(rows) + " inputs " + std::to_string(inputs) + " bits " +
          std::to_string(bits) + " group " + std::to_string(group);
  std::vector<Weight> weights;
  std::vector<Units> units;
  std::vector<size_t> outputs, starts{0};
  for (size_t i = 0; i < count; i++) {
    outputs.push_back(random.in(1, 150));
    shape += " outputs " + std::to_string(outputs[i]);
    weights.push_back(Weight::of_outputs(random, outputs[i], inputs, bits, group));
    starts.push_back(starts[i] + rows * outputs[i]);
  }
  for (const Weight& w : weights)
    units.push_back({w.data.data(), w.scale.data(), bits, group, w.panels, inputs});
  const std::vector<float> values = random.floats(rows * inputs);
  const Buffer<float> x(values);
  // One buffer for each result; compared as one.
  std::vector<Expected> expected;
  for (const Weight& w : weights) expected.emplace_back(w, values, rows, nullptr);
  std::vector<Buffer<float>> results;
  std::vector<float*> pointers;
  for (size_t i = 0; i < count; i++) results.emplace_back(rows * outputs[i]);
  for (Buffer<float>& each : results) pointers.push_back(each.data());
  Buffer<float> y(starts[count]);
  everywhere(
      y,
      [&] {
        must(to_units(x.data(), rows, {nullptr, 0}, units.data(), outputs.data(), pointers.data(), count));
        for (size_t i = 0; i < count; i++) memcpy(y.data() + starts[i], pointers[i], rows * outputs[i] * 4);
      },
      [&] {
        for (size_t i = 0; i < count; i++) expected[i].judge(pointers[i]);
      });
}

void check_from_units(Random& random) {
  const size_t rows = random.rows(), segments = random.below(2) ? 1 : random.in(1, 4),
               outputs = random.in(1, 150);
  const size_t length = random.in(1, segments == 1 ? 600 : 90);
  const int bits = random.below(2) ? 8 : 4, group = static_cast<int>(random.below(3)) * 32;
  shape = "from_units rows " + std::to_string(rows) + " segments " + std::to_string(segments) + " length " +
          std::to_string(length) + " outputs " + std::to_string(outputs) + " bits " + std::to_string(bits) +
          " group " + std::to_string(group);
  const Weight w = Weight::of_inputs(random, segments, length, outputs, bits, group);
  const std::vector<float> values = random.floats(rows * segments * length),
                           more = random.floats(rows * outputs);
  const Buffer<float> h(values), residual(more);
  const float* add = random.below(2) ? residual.data() : nullptr;
  const Reduction reduction{w.data.data(), w.scale.data(), bits, group, segments, w.blocks, w.panels};
  const Expected expected(w, values, rows, add);
  Buffer<float> y(rows * outputs);
  everywhere(
      y, [&] { must(from_units(h.data(), rows, reduction, segments, length, outputs, add, y.data())); },
      [&] { expected.judge(y.data()); });
}

// A block is its parts, to the bit: products, activation, product.
void check_feed_forward(Random& random) {
  const size_t rows = random.rows(), width = random.in(1, 300), units = random.in(1, 300);
  const int bits = random.below(2) ? 8 : 4, group = static_cast<int>(random.below(3)) * 32;
  const int activation = static_cast<int>(random.below(4));
  const bool gated = random.below(2), add = random.below(2);
  shape = "feed_forward rows " + std::to_string(rows) + " width " + std::to_string(width) + " units " +
          std::to_string(units) + " bits " + std::to_string(bits) + " group " + std::to_string(group);
  const Weight gate = Weight::of_outputs(random, units, width, bits, group);
  const Weight up = Weight::of_outputs(random, units, width, bits, group);
  const Weight down = Weight::of_inputs(random, 1, units, width, bits, group);
  const Units both[2] = {{gate.data.data(), gate.scale.data(), bits, group, gate.panels, width},
                         {up.data.data(), up.scale.data(), bits, group, up.panels, width}};
  const Reduction reduction{down.data.data(), down.scale.data(), bits, group, 1, down.blocks, down.panels};
  const Buffer<float> x(random.floats(rows * width)), scale(random.floats(width));
  const Norm norm{random.below(2) ? scale.data() : nullptr, 1e-5f};
  Buffer<float> y(rows * width), expected(rows * width), hidden(rows * units), other(rows * units);
  everywhere(
      y,
      [&] {
        must(feed_forward(x.data(), rows, width, norm, gated ? &both[0] : nullptr, both[1], reduction, units,
                          activation, add, y.data()));
      },
      [&] {
        const size_t outputs[2] = {units, units};
        float* const results[2] = {hidden.data(), other.data()};
        must(to_units(x.data(), rows, norm, gated ? both : both + 1, outputs, results, gated ? 2 : 1));
        for (size_t row = 0; row < rows; row++) {
          float* to = hidden.data() + row * units;
          backend().activate(to, gated ? other.data() + row * units : nullptr, units, activation);
        }
        must(from_units(hidden.data(), rows, reduction, 1, units, width, add ? x.data() : nullptr,
                        expected.data()));
        for (size_t i = 0; i < rows * width; i++) {
          if (memcmp(&y.data()[i], &expected.data()[i], 4)) {
            fail("a block is not its parts", i / width, i % width, y.data()[i], expected.data()[i], 0);
          }
        }
      });
}

void check_activations(Random& random) {
  const size_t count = random.in(1, 100);
  shape = "activations of " + std::to_string(count);
  std::vector<float> values = random.floats(count);
  for (float& each : values) each *= 4;
  const Buffer<float> x(values), up(random.floats(count));
  Buffer<float> y(count);
  for (int activation = 0; activation < 4; activation++) {
    everywhere(
        y,
        [&] {
          memcpy(y.data(), x.data(), count * 4);
          backend().activate(y.data(), up.data(), count, activation);
        },
        [&] {
          for (size_t i = 0; i < count; i++) {
            const double v = values[i], expected = activated(v, activation) * up.data()[i];
            const double room = 1e-6 * fabs(v * up.data()[i]) + 1e-30;
            if (!(fabs(y.data()[i] - expected) <= room))
              fail("an activation is wrong", 0, i, y.data()[i], expected, room);
          }
        });
  }
}

void check_integers(Random& random) {
  const size_t rows = random.rows(), inputs = random.in(1, 600), outputs = random.in(1, 150);
  shape = "integers rows " + std::to_string(rows) + " inputs " + std::to_string(inputs);
  const Weight w = Weight::of_outputs(random, outputs, inputs, 8, 0);
  Buffer<int8_t> x(rows * inputs);
  for (size_t i = 0; i < x.size(); i++) x.data()[i] = static_cast<int8_t>(random.below(255)) - 127;
  const Units units{w.data.data(), nullptr, 8, 0, w.panels, inputs};
  Buffer<float> y(rows * outputs);  // of the same size as int32
  static_assert(sizeof(float) == sizeof(int32_t));
  int32_t* sums = reinterpret_cast<int32_t*>(y.data());
  everywhere(
      y, [&] { must(integer_product(x.data(), rows, units, outputs, sums)); },
      [&] {
        for (size_t i = 0; i < rows * outputs; i++) {
          int32_t expected = 0, got;
          for (size_t k = 0; k < inputs; k++) {
            expected += x.data()[i / outputs * inputs + k] * w.levels[k * outputs + i % outputs];
          }
          memcpy(&got, sums + i, 4);
          if (got != expected) fail("a sum is wrong", i / outputs, i % outputs, got, expected, 0);
        }
      });
}

// ----------------------------------------------------------------------------------------- attention

void check_attention(Random& random) {
  AttentionShape s{};
  s.batch = random.in(1, 2), s.kv_heads = random.in(1, 3), s.group = random.in(1, 8);
  s.tokens = random.below(2) ? 1 : random.in(1, 70);
  s.width = random.below(2) ? 16 * random.in(1, 8) : random.in(1, 40);
  s.capacity = random.below(4) ? random.in(1, 300) : random.in(1000, 3000);
  if (s.capacity > 300) s.batch = 1, s.tokens = std::min<size_t>(s.tokens, 2);
  s.start = random.below(s.capacity + 1);
  s.valid = random.below(3) ? s.tokens : random.below(s.tokens + 1);
  s.rotary = random.below(2) ? random.below(s.width / 2 + 1) : 0;
  s.window = random.below(2) ? 0 : random.in(1, 100);
  s.scale = 1.0f / sqrtf(static_cast<float>(s.width));
  s.softcap = random.below(2) ? 0.0f : 5.0f;
  s.half = random.below(2);
  shape = "attention B " + std::to_string(s.batch) + " T " + std::to_string(s.tokens) + " K " +
          std::to_string(s.kv_heads) + " G " + std::to_string(s.group) + " H " + std::to_string(s.width) +
          " S " + std::to_string(s.capacity) + " start " + std::to_string(s.start) + " valid " +
          std::to_string(s.valid) + " rotary " + std::to_string(s.rotary) + " window " +
          std::to_string(s.window) + (s.half ? " half" : "");
  const size_t new_rows = s.batch * s.tokens * s.kv_heads;
  const Buffer<float> q(random.floats(new_rows * s.group * s.width, false)),
      k(random.floats(new_rows * s.width, false));
  const Buffer<float> v(random.floats(new_rows * s.width, false));
  Buffer<float> cos(s.tokens * s.rotary), sin(s.tokens * s.rotary);
  for (size_t i = 0; i < cos.size(); i++) {
    const double angle = random.unit() * 6;
    cos.data()[i] = static_cast<float>(::cos(angle)), sin.data()[i] = static_cast<float>(::sin(angle));
  }
  // Rows that no query may see are NaN.
  const Rows old_keys(random, s.batch * s.kv_heads, s.capacity, s.width, s.start + s.tokens, s.half);
  const Rows old_values(random, s.batch * s.kv_heads, s.capacity, s.width, s.start + s.tokens, s.half);
  Rows keys = old_keys.copy(), values = old_values.copy();
  Buffer<float> y(new_rows * s.group * s.width);
  everywhere(
      y,
      [&] {
        keys = old_keys.copy(), values = old_values.copy();
        must(attention(q.data(), k.data(), v.data(), cos.data(), sin.data(), keys.bytes.data(),
                       values.bytes.data(), s, y.data()));
      },
      [&] {
        judge_rows(s, k.data(), cos.data(), sin.data(), old_keys, keys);
        judge_rows(s, v.data(), nullptr, nullptr, old_values, values);
        const std::vector<double> expected = attended(s, q.data(), cos.data(), sin.data(), keys, values);
        for (size_t i = 0; i < y.size(); i++) {
          if (!(fabs(y.data()[i] - expected[i]) <= 5e-5)) {
            fail("attention is wrong", i / s.width, i % s.width, y.data()[i], expected[i], 5e-5);
          }
        }
      });
}

void check_reading(Random& random) {
  const size_t bytes = random.below(3) ? random.below(5000) : (1 << 20) + random.below(3000);
  shape = "reading " + std::to_string(bytes);
  const Guarded data(bytes, 1);
  Buffer<float> y(1);
  everywhere(y, [&] { y.data()[0] = static_cast<float>(read_all(data.data(), bytes) & 0xffff); }, [] {});
}

// Callers of several threads at once, while their number changes: for the thread sanitizer.
void check_concurrency(uint64_t seed) {
  std::vector<std::thread> callers;
  for (uint64_t i = 0; i < 4; i++) {
    callers.emplace_back([i, seed] {
      Random random(seed + i);
      const Weight w = Weight::of_outputs(random, 90, 300, 8, 0);
      const Units units{w.data.data(), w.scale.data(), 8, 0, w.panels, 300};
      const size_t rows = i % 2 ? 1 : 20, outputs = 90;
      const std::vector<float> values = random.floats(rows * 300);
      std::vector<float> first(rows * outputs), y(rows * outputs);
      float* const to = y.data();
      for (int round = 0; round < 200; round++) {
        must(to_units(values.data(), rows, {nullptr, 0}, &units, &outputs, &to, 1));
        if (round == 0) first = y;
        if (memcmp(first.data(), to, y.size() * 4)) fail("another caller is in the way", i, round, 0, 0, 0);
      }
    });
  }
  for (int round = 0; round < 100; round++) set_threads(round % 4 + 1);
  for (std::thread& each : callers) each.join();
  set_threads(1);
}

}  // namespace
}  // namespace check

int main(int argc, char** argv) {
  const int cases = argc > 1 ? atoi(argv[1]) : 10;
  const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 0;
  if (argc > 3) check::check_concurrency(seed);
  for (int i = 0; i < cases; i++) {
    check::Random random(seed * 1000003 + static_cast<uint64_t>(i));
    check::check_to_units(random);
    check::check_from_units(random);
    check::check_feed_forward(random);
    check::check_activations(random);
    check::check_integers(random);
    check::check_attention(random);
    check::check_reading(random);
  }
  const char* names[8];
  const int count = jaxllm::backends(names);
  printf("%d cases with", cases);
  for (int i = 0; i < count; i++) printf(" %s", names[i]);
  printf("\n");
  return 0;
}
