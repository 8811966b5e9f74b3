// Chunks of a cache from the bytes that they are kept as, spread over the threads.
#include <string.h>

#include <algorithm>
#include <atomic>

#include "ops.h"
#include "pool.h"

namespace jaxllm {
namespace {

// Bytes of the keys, or of the values, of a chunk with levels.
size_t part_bytes(const ChunksShape& s, int bits, bool by_token) {
  const size_t shared = s.kv_heads * (by_token ? s.tokens : s.width);
  return s.kv_heads * s.tokens * s.width * static_cast<size_t>(bits) / 8 + 2 * 2 * shared;
}

// Where a head's rows of a chunk stand in a cache.
char* rows_at(const ChunksShape& s, void* cache, size_t head, size_t chunk) {
  return static_cast<char*>(cache) + (head * s.capacity + chunk * s.tokens) * s.width * (s.half ? 2 : 4);
}

// One head's keys or values of a chunk with levels, from its part of the blob.
Chunk chunk_of(const ChunksShape& s, const uint8_t* part, int bits, bool by_token, size_t head) {
  const size_t levels = s.tokens * s.width * static_cast<size_t>(bits) / 8;
  const size_t shared = by_token ? s.tokens : s.width;
  Chunk c{};
  c.data = part + head * levels;
  c.low = part + s.kv_heads * levels + 2 * head * shared;
  c.scale = c.low + 2 * s.kv_heads * shared;
  c.bits = bits, c.by_token = by_token;
  c.block = s.rotated ? s.width & (~s.width + 1) : 1;
  c.width = s.width, c.half = s.half;
  return c;
}

}  // namespace

Failure load_chunks(const uint8_t* const* blobs, const int32_t* bits, size_t count, const ChunksShape& s,
                    void* keys, void* values) {
  std::atomic<bool> failed{false};
  const auto load = [&](size_t task) {
    const size_t index = task / s.kv_heads, head = task % s.kv_heads, from = index * s.tokens;
    if (bits[index] < 0 || from >= s.capacity) return;
    const size_t tokens = std::min(s.tokens, s.capacity - from), row = s.width * (s.half ? 2 : 4);
    if (bits[index] == 0) {
      const uint8_t* of_keys = blobs[index] + head * s.tokens * row;
      memcpy(rows_at(s, keys, head, index), of_keys, tokens * row);
      memcpy(rows_at(s, values, head, index), of_keys + s.kv_heads * s.tokens * row, tokens * row);
      return;
    }
    void* scratch = thread_scratch(kTaskWork, chunk_scratch(s.width) * sizeof(float));
    if (!scratch) {
      failed = true;
      return;
    }
    const uint8_t* of_values = blobs[index] + part_bytes(s, bits[index], s.keys_by_token);
    Chunk k = chunk_of(s, blobs[index], bits[index], s.keys_by_token, head);
    Chunk v = chunk_of(s, of_values, bits[index], s.values_by_token, head);
    k.tokens = v.tokens = tokens;
    k.out = rows_at(s, keys, head, index), v.out = rows_at(s, values, head, index);
    backend().load_chunk(k, static_cast<float*>(scratch));
    backend().load_chunk(v, static_cast<float*>(scratch));
  };
  if (s.spread) {
    parallel(count * s.kv_heads, load);
  } else {
    for (size_t task = 0; task < count * s.kv_heads; task++) load(task);
  }
  return failed ? kNoMemory : nullptr;
}

}  // namespace jaxllm
