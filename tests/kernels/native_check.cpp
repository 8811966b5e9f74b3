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
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#define thread_scratch pooled_scratch
#include "pool.cpp"
#undef thread_scratch
#include "chunk_tables.h"
#include "native_check.h"
#include "ops.h"
#include "weight_tables.h"

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

void must(Failure failure) {
  if (failure) fail(failure, 0, 0, 0, 0, 0);
}

#include "native_check_attention.inl"
#include "native_check_chunks.inl"
#include "native_check_coded.inl"
#include "native_check_documents.inl"
#include "native_check_products.inl"
#include "native_check_sampling.inl"
#include "native_check_shadow.inl"
#include "native_check_tables.inl"

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

// Rows of an embedding.
void check_tokens(Random& random) {
  const size_t rows = random.in(1, 60), outputs = random.in(1, 150), inputs = random.in(1, 300);
  const Format format = Format::draw(random);
  shape = "tokens " + std::to_string(rows) + " outputs " + std::to_string(outputs) + " inputs " +
          std::to_string(inputs) + format.text();
  const Weight w = Weight::of_outputs(random, outputs, inputs, format);
  const Units units = w.units(false);
  Buffer<int32_t> index(rows);
  // Some beyond either end, which count as the nearest.
  for (size_t i = 0; i < rows; i++) index.data()[i] = static_cast<int32_t>(random.below(outputs + 2)) - 1;
  Buffer<float> y(rows * inputs);
  everywhere(
      y, [&] { unit_rows(index.data(), rows, units, outputs, y.data()); },
      [&] {
        for (size_t i = 0; i < y.size(); i++) {
          const int32_t row = std::clamp<int32_t>(index.data()[i / inputs], 0, outputs - 1);
          const double expected = w.dense[i % inputs * outputs + row], room = 1e-6 * fabs(expected);
          if (!(fabs(y.data()[i] - expected) <= room))
            fail("a row is wrong", i / inputs, i % inputs, y.data()[i], expected, room);
        }
      });
}

// Ranges are all panels, once, in order, and none is longer than one before it.
void check_ranges(Random& random) {
  const size_t panels = random.in(1, 3000), bytes = random.in(1, 70000), used = random.in(1, 300);
  shape = "ranges of " + std::to_string(panels) + " panels of " + std::to_string(bytes) + " for " +
          std::to_string(used);
  const Ranges ranges(panels, bytes, used);
  size_t next = 0, before = ranges.longest();
  for (size_t i = 0; i < ranges.count(); i++) {
    const auto [from, to] = ranges.at(i);
    if (from != next || to <= from || to - from > before) fail("a range is wrong", i, 0, from, next, 0);
    next = to, before = to - from;
  }
  if (next != panels) fail("ranges are not all", ranges.count(), 0, next, panels, 0);
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
      const Weight w = Weight::of_outputs(random, 90, 300);
      const size_t rows = i % 2 ? 1 : 20, outputs = 90;
      const std::vector<float> values = random.floats(rows * 300);
      std::vector<float> first(rows * outputs), y(rows * outputs);
      const Outputs result{w.units(false), {}, outputs, outputs, y.data(), {}};
      for (int round = 0; round < 200; round++) {
        must(to_units(values.data(), rows, {nullptr, 0}, {}, &result, 1));
        if (round == 0) first = y;
        if (memcmp(first.data(), y.data(), y.size() * 4))
          fail("another caller is in the way", i, round, 0, 0, 0);
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
  if (argc > 3) {
    check::check_concurrency(seed);
    check::check_tables_at_once(seed);
  }
  check::check_many_tables();
  for (int i = 0; i < cases; i++) {
    check::Random random(seed * 1000003 + static_cast<uint64_t>(i));
    check::check_to_units(random);
    check::check_from_units(random);
    check::check_feed_forward(random);
    check::check_shadow(random);
    check::check_shadow_of_inputs(random);
    check::check_activations(random);
    check::check_integers(random);
    check::check_attention(random);
    check::check_tree(random);
    check::check_chunks(random);
    check::check_coded(random);
    check::check_chunk_tables(random);
    check::check_documents(random);
    check::check_tokens(random);
    check::check_sampling(random);
    check::check_ranges(random);
    check::check_reading(random);
    check::check_tables(random);
    check::check_zero(random);
  }
  const char* names[8];
  const int count = jaxllm::backends(names);
  printf("%d cases with", cases);
  for (int i = 0; i < count; i++) printf(" %s", names[i]);
  printf("\n");
  return 0;
}
