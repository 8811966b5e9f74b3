#include "weight_tables.h"

#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

namespace jaxllm {
namespace {

constexpr size_t kMostTables = 4096;

// A reader announces itself before it looks whether the slot holds its table; who closes the table first
// makes the slot hold none, then waits for all readers. Both in one total order: one of the two sees the
// other.
struct Slot {
  std::atomic<uint32_t> generation{0};  // of the table that may be read; 0: none
  std::atomic<uint32_t> readers{0};
  std::vector<Array> arrays;
  size_t rows = 0;
  uint32_t last = 0;  // generation
  bool taken = false;
};

Slot slots[kMostTables];
std::mutex changing;

uint64_t handle_of(size_t slot, uint32_t generation) {
  return static_cast<uint64_t>(generation) << 32 | static_cast<uint64_t>(slot);
}

Slot* slot_of(uint64_t handle, uint32_t& generation) {
  const size_t slot = static_cast<uint32_t>(handle);
  generation = static_cast<uint32_t>(handle >> 32);
  return slot < kMostTables && generation != 0 ? slots + slot : nullptr;
}

}  // namespace

size_t bytes_of(Type type) {
  switch (type) {
    case Type::kNone:
    case Type::kOther:
      return 0;
    case Type::kBool:
    case Type::kS8:
    case Type::kU8:
      return 1;
    case Type::kU16:
    case Type::kF16:
      return 2;
    case Type::kS32:
    case Type::kU32:
    case Type::kF32:
      return 4;
  }
  return 0;
}

uint64_t open_table(std::vector<Array> arrays, size_t rows) {
  if (rows == 0 || arrays.empty() || arrays.size() % rows) return 0;
  const std::lock_guard<std::mutex> lock(changing);
  for (size_t i = 0; i < kMostTables; i++) {
    Slot& slot = slots[i];
    if (slot.taken) continue;
    slot.taken = true;
    slot.arrays = std::move(arrays);
    slot.rows = rows;
    slot.last = slot.last == UINT32_MAX ? 1 : slot.last + 1;
    slot.generation.store(slot.last);
    return handle_of(i, slot.last);
  }
  return 0;
}

bool close_table(uint64_t handle) {
  const std::lock_guard<std::mutex> lock(changing);
  uint32_t generation;
  Slot* const slot = slot_of(handle, generation);
  if (!slot || slot->generation.load() != generation) return false;
  slot->generation.store(0);
  while (slot->readers.load() != 0) std::this_thread::yield();
  slot->arrays = {};
  slot->rows = 0;
  slot->taken = false;
  return true;
}

bool TableRow::open(uint64_t handle, int64_t row) {
  uint32_t generation;
  Slot* const slot = slot_of(handle, generation);
  if (!slot || slot_ != SIZE_MAX) return false;
  slot->readers.fetch_add(1);
  slot_ = static_cast<size_t>(slot - slots);
  if (slot->generation.load() != generation) return false;
  if (row < 0 || static_cast<size_t>(row) >= slot->rows) return false;
  columns_ = slot->arrays.size() / slot->rows;
  arrays_ = slot->arrays.data() + static_cast<size_t>(row) * columns_;
  return true;
}

TableRow::~TableRow() {
  if (slot_ != SIZE_MAX) slots[slot_].readers.fetch_sub(1);
}

}  // namespace jaxllm
