#include "reading.h"

#include <stdint.h>

#include <mutex>

namespace jaxllm {
namespace {

// More than the operations of any model's step; where two share a place, one of them is not foreseen.
constexpr size_t kPlaces = 4096;

struct Memory {
  struct Place {
    const void* before = nullptr;
    Upcoming after;
  };
  std::mutex mutex;
  const void* last = nullptr;
  Place places[kPlaces];

  Place& of(const void* data) {
    const uint64_t mixed = reinterpret_cast<uintptr_t>(data) * 0x9e3779b97f4a7c15u;
    return places[mixed >> 52];
  }
  Upcoming after(const void* data) {
    const Place& place = of(data);
    return place.before == data ? place.after : Upcoming{};
  }
};
static_assert(kPlaces == 1 << (64 - 52), "places are found by the upper bits");

Memory& memory() {
  static Memory memory;
  return memory;
}

}  // namespace

Upcoming begin_reading(const Upcoming& now) {
  Memory& m = memory();
  const std::lock_guard<std::mutex> lock(m.mutex);
  if (m.last) m.of(m.last) = {m.last, now};
  m.last = now.data;
  return m.after(now.data);
}

}  // namespace jaxllm
