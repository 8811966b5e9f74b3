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

// One layer's keys or values of a chunk.
struct Part {
  const ChunksShape& shape;
  const ChunksLayer& layer;
  size_t chunk;
  int bits;
  bool values;

  size_t bytes() const {
    return shape.part_bytes(layer.kv_heads, bits, values ? shape.values_by_token : shape.keys_by_token);
  }
  const uint8_t* data() const {
    return layer.blobs[chunk] + (values ? shape.part_bytes(layer.kv_heads, bits, shape.keys_by_token) : 0);
  }

  Chunk head(size_t at) const {
    const ChunkPart part(shape, layer.blobs[chunk], layer.kv_heads, at, bits, values);
    const size_t from = chunk * shape.tokens;
    Chunk c{};
    c.data = part.data, c.low = part.low, c.scale = part.scale;
    c.bits = bits, c.by_token = part.by_token, c.block = shape.block();
    c.tokens = std::min(shape.tokens, shape.capacity - from);
    c.width = shape.width, c.half = shape.half;
    c.out = static_cast<char*>(values ? layer.values : layer.keys) +
            (at * shape.capacity + from) * shape.row_bytes(0);
    return c;
  }
};

// Asks memory for a head's share of what is decoded next: blobs lie anywhere, and short ones are over before
// the processor has seen what is read.
void ask_ahead(const Part& next, size_t head) {
  const size_t bytes = next.bytes(), heads = next.layer.kv_heads;
  const uint8_t* const data = next.data();
  for (size_t i = bytes * head / heads; i < bytes * (head + 1) / heads; i += 64) {
    __builtin_prefetch(data + i, 0, 2);
  }
}

}  // namespace

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
        const Part part{s, layer, chunk, bits[chunk], values}, next{s, layer, ahead, bits[ahead], values};
        for (size_t head = 0; head < layer.kv_heads; head++) {
          if (ahead != chunk) ask_ahead(next, head);
          backend().load_chunk(part.head(head), scratch);
        }
      }
    }
    backend().stream_fence();
  };
  parallel(layer_count * runs, load);
  return failed ? kNoMemory : nullptr;
}

}  // namespace jaxllm
