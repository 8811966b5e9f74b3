// Chunks of a cache from the bytes that they are kept as, spread over the threads.
#include <string.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "ops.h"
#include "pool.h"

namespace jaxllm {
namespace {

// Chunks that a thread takes at a time.
constexpr size_t kRun = 8;

// Of one layer's keys or values.
size_t part_bytes(const ChunksShape& s, size_t heads, int bits, bool by_token) {
  const size_t values = heads * s.tokens * s.width;
  if (!bits) return values * (s.half ? 2 : 4);
  return values * static_cast<size_t>(bits) / 8 + 2 * 2 * heads * (by_token ? s.tokens : s.width);
}

// Where a chunk's levels and scales stand in its blob, and where its rows go, one layer's keys or values.
struct Part {
  const uint8_t* data;
  size_t bytes, heads, from;
  bool by_token;
  void* cache;

  Part(const ChunksShape& s, const ChunksLayer& layer, size_t chunk, int bits, bool values)
      : data(layer.blobs[chunk]), heads(layer.kv_heads), from(chunk * s.tokens) {
    const size_t of_keys = part_bytes(s, heads, bits, s.keys_by_token);
    if (values) data += of_keys;
    bytes = values ? part_bytes(s, heads, bits, s.values_by_token) : of_keys;
    by_token = values ? s.values_by_token : s.keys_by_token;
    cache = values ? layer.values : layer.keys;
  }

  Chunk head(const ChunksShape& s, int bits, size_t at) const {
    const size_t element = s.half ? 2 : 4, shared = by_token ? s.tokens : s.width;
    const size_t row = bits ? s.width * static_cast<size_t>(bits) / 8 : s.width * element;
    Chunk c{};
    c.data = data + at * s.tokens * row;
    c.low = data + heads * s.tokens * row + 2 * at * shared;
    c.scale = c.low + 2 * heads * shared;
    c.bits = bits, c.by_token = by_token;
    c.block = s.rotated ? s.width & (~s.width + 1) : 1;
    c.tokens = std::min(s.tokens, s.capacity - from);
    c.width = s.width, c.half = s.half;
    c.out = static_cast<char*>(cache) + (at * s.capacity + from) * s.width * element;
    return c;
  }
};

// Asks memory for a head's share of what is decoded next: blobs lie anywhere, and short ones are over before
// the processor has seen what is read.
void ask_ahead(const Part& next, size_t head) {
  const size_t begin = next.bytes * head / next.heads, end = next.bytes * (head + 1) / next.heads;
  for (size_t i = begin; i < end; i += 64) __builtin_prefetch(next.data + i, 0, 2);
}

}  // namespace

size_t blob_bytes(const ChunksShape& s, size_t heads, int bits) {
  return part_bytes(s, heads, bits, s.keys_by_token) + part_bytes(s, heads, bits, s.values_by_token);
}

Failure load_chunks(const ChunksLayer* layers, size_t layer_count, const int32_t* bits, size_t count,
                    const ChunksShape& s) {
  std::vector<size_t> real;
  for (size_t i = 0; i < count; i++) {
    if (bits[i] >= 0 && i * s.tokens < s.capacity) real.push_back(i);
  }
  const size_t runs = (real.size() + kRun - 1) / kRun;
  std::atomic<bool> failed{false};
  const auto load = [&](size_t task) {
    float* scratch = static_cast<float*>(thread_scratch(kTaskWork, chunk_scratch(s.width) * sizeof(float)));
    if (!scratch) {
      failed = true;
      return;
    }
    const ChunksLayer& layer = layers[task / runs];
    const size_t first = task % runs * kRun, last = std::min(real.size(), first + kRun);
    for (size_t i = first; i < last; i++) {
      for (const bool values : {false, true}) {
        const size_t chunk = real[i], ahead = real[i + 1 < last ? i + 1 : i];
        const Part part(s, layer, chunk, bits[chunk], values), next(s, layer, ahead, bits[ahead], values);
        for (size_t head = 0; head < layer.kv_heads; head++) {
          if (ahead != chunk) ask_ahead(next, head);
          backend().load_chunk(part.head(s, bits[chunk], head), scratch);
        }
      }
    }
    backend().stream_fence();
  };
  parallel(layer_count * runs, load);
  return failed ? kNoMemory : nullptr;
}

}  // namespace jaxllm
