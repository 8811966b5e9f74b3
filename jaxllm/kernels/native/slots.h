// Slots for things that kernels find by a handle, while others open and close them.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

namespace jaxllm {

// A reader announces itself before it looks whether the slot holds its thing; who closes it first makes the
// slot hold none, then waits for all readers. Both in one total order: one of the two sees the other.
template <class Thing, size_t kMost>
class Slots {
 public:
  // The handle, or 0 where all slots are taken.
  uint64_t open(Thing thing) {
    const std::lock_guard<std::mutex> lock(changing_);
    for (size_t i = 0; i < kMost; i++) {
      Slot& slot = slots_[i];
      if (slot.taken) continue;
      slot.taken = true;
      slot.thing = std::move(thing);
      slot.last = slot.last == UINT32_MAX ? 1 : slot.last + 1;
      slot.generation.store(slot.last);
      return static_cast<uint64_t>(slot.last) << 32 | static_cast<uint64_t>(i);
    }
    return 0;
  }

  // Returns when nobody reads it any more; false where there is none.
  bool close(uint64_t handle) {
    const std::lock_guard<std::mutex> lock(changing_);
    const size_t at = static_cast<uint32_t>(handle);
    if (!is_handle(handle) || slots_[at].generation.load() != handle >> 32) return false;
    Slot& slot = slots_[at];
    slot.generation.store(0);
    while (slot.readers.load() != 0) std::this_thread::yield();
    slot.thing = {};
    slot.taken = false;
    return true;
  }

  // What a handle stands for, or null. `slot` is the reader's until `leave`, also of null; SIZE_MAX is none.
  const Thing* enter(uint64_t handle, size_t& slot) {
    slot = SIZE_MAX;
    if (!is_handle(handle)) return nullptr;
    slot = static_cast<uint32_t>(handle);
    slots_[slot].readers.fetch_add(1);
    return slots_[slot].generation.load() == handle >> 32 ? &slots_[slot].thing : nullptr;
  }
  void leave(size_t slot) {
    if (slot != SIZE_MAX) slots_[slot].readers.fetch_sub(1);
  }

 private:
  struct Slot {
    std::atomic<uint32_t> generation{0};  // of the thing that may be read; 0: none
    std::atomic<uint32_t> readers{0};
    Thing thing{};
    uint32_t last = 0;  // generation
    bool taken = false;
  };
  static bool is_handle(uint64_t handle) { return static_cast<uint32_t>(handle) < kMost && handle >> 32; }

  Slot slots_[kMost];
  std::mutex changing_;
};

}  // namespace jaxllm
