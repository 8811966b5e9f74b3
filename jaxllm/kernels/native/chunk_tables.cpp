#include "chunk_tables.h"

#include <utility>

#include "slots.h"

namespace jaxllm {
namespace {

// Of a chunk and of a head: nobody's has more, and none that has is multiplied out.
constexpr size_t kMostTokens = 1 << 20, kMostWidth = 1 << 16, kMostHeads = 1 << 16;

Slots<ChunkTable, 1024> tables;

}  // namespace

const char* wrong_chunks(const ChunkTable& t) {
  const ChunkForm& form = t.form;
  if (form.tokens < 1 || form.tokens > kMostTokens || form.width < 4 || form.width % 4 ||
      form.width > kMostWidth) {
    return "chunks need a token at least, and heads whose width is a multiple of 4";
  }
  const size_t layers = t.heads.size(), count = t.bits.size();
  if (layers == 0 || t.blobs.size() != layers * count || t.bytes.size() != t.blobs.size())
    return "each chunk needs a blob in each layer";
  for (size_t i = 0; i < count; i++) {
    const int bits = t.bits[i];
    if (bits != 0 && bits != 2 && bits != 4 && bits != 8)
      return "chunks have levels of 8, 4 or 2 bits, or none";
    if (bits == 0 && form.rotated) return "rows as they are stand beside no transformed ones";
  }
  for (size_t l = 0; l < layers; l++) {
    if (t.heads[l] > kMostHeads) return "a layer of chunks has too many heads";
    if (t.heads[l] == 0) continue;
    for (size_t i = 0; i < count; i++) {
      const uint8_t* const blob = t.blobs[l * count + i];
      if (!blob) return "a chunk has no address";
      if (t.bytes[l * count + i] != form.blob_bytes(t.heads[l], t.bits[i]))
        return "a chunk has not the bytes of its width";
      if (t.bits[i] == 0 && reinterpret_cast<uintptr_t>(blob) % (form.half ? 2 : 4))
        return "a chunk of rows is not aligned";
    }
  }
  return nullptr;
}

uint64_t open_chunks(ChunkTable table) { return wrong_chunks(table) ? 0 : tables.open(std::move(table)); }
bool close_chunks(uint64_t handle) { return tables.close(handle); }

const ChunkTable* OpenChunks::open(uint64_t handle) {
  return slot_ == SIZE_MAX ? tables.enter(handle, slot_) : nullptr;
}
OpenChunks::~OpenChunks() { tables.leave(slot_); }

}  // namespace jaxllm
