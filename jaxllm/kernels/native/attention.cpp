#include <math.h>
#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <new>

#include "ops.h"
#include "pool.h"

namespace jaxllm {

namespace {

constexpr size_t kCutKeys = 512, kMostCuts = 16;

}  // namespace

Failure attention(const float* q, const float* k, const float* v, const float* cos, const float* sin,
                  void* key_cache, void* value_cache, const AttentionShape& s, float* y) {
  const size_t wide = padded_width(s.width), element = s.half ? 2 : 4;
  const Backend& kernels = backend();
  std::atomic<bool> failed{false};
  Upcoming next;
  if (s.tokens == 1) {
    const size_t row_bytes = s.width * element;
    next = begin_reading({key_cache, value_cache, s.batch * s.kv_heads, s.capacity * row_bytes,
                          std::min(s.capacity, s.start + 1) * row_bytes});
  }
  const size_t written = s.start < s.capacity ? std::min(s.valid, s.capacity - s.start) : 0;
  const auto write_head = [&](size_t index) {
    const size_t b = index / s.kv_heads, kv = index % s.kv_heads;
    float* scratch = static_cast<float*>(thread_scratch(kTaskWork, wide * sizeof(float)));
    if (!scratch) {
      failed = true;
      return;
    }
    for (size_t t = 0; t < written; t++) {
      const size_t from = ((b * s.tokens + t) * s.kv_heads + kv) * s.width;
      const size_t to = (index * s.capacity + s.start + t) * s.width * element;
      const float *turn_cos = s.rotary ? cos + t * s.rotary : nullptr,
                  *turn_sin = s.rotary ? sin + t * s.rotary : nullptr;
      kernels.store_row(k + from, s.width, turn_cos, turn_sin, s.rotary, s.half,
                        static_cast<char*>(key_cache) + to, scratch);
      kernels.store_row(v + from, s.width, nullptr, nullptr, 0, s.half, static_cast<char*>(value_cache) + to,
                        scratch);
    }
  };
  if (s.tokens < 8) {
    for (size_t index = 0; index < s.batch * s.kv_heads; index++) write_head(index);
  } else {
    parallel(s.batch * s.kv_heads, write_head);
  }
  if (failed) return kNoMemory;
  const size_t head = s.group * s.width, row_stride = s.kv_heads * head;
  const size_t tile_tokens = std::max<size_t>(1, kAttentionRows / s.group);
  const size_t tiles = (s.tokens + tile_tokens - 1) / tile_tokens;
  const size_t heads = s.batch * s.kv_heads;
  const size_t visible = std::min(s.capacity, s.start + s.tokens);
  // One tile alone walks the whole cache: cut it, so that all threads have a part. The number of threads
  // plays no role, lest it change results.
  const size_t cuts = tiles > 1 ? 1 : std::min<size_t>(kMostCuts, visible / kCutKeys + 1);
  const size_t most_rows = std::min(s.tokens, tile_tokens) * s.group;
  const size_t part_floats = most_rows * (wide + 2);
  float* parts = nullptr;
  std::atomic<uint32_t>* missing = nullptr;  // of each head, the cuts that are not done
  if (cuts > 1) {
    const size_t part_bytes = heads * cuts * part_floats * sizeof(float);
    char* memory = static_cast<char*>(thread_scratch(kHidden, part_bytes + heads * sizeof(*missing)));
    if (!memory) return kNoMemory;
    parts = reinterpret_cast<float*>(memory);
    missing = reinterpret_cast<std::atomic<uint32_t>*>(memory + part_bytes);
    for (size_t i = 0; i < heads; i++) new (missing + i) std::atomic<uint32_t>(static_cast<uint32_t>(cuts));
  }
  const size_t oldest = s.window && s.start + 1 > s.window ? s.start + 1 - s.window : 0;
  const size_t per_cut = ((visible - std::min(oldest, visible)) / cuts / kKeyBlock + 1) * kKeyBlock;
  // Of `count` parts of the same rows, the softmax over all of them.
  const auto finish = [&](const Attention& a, size_t first, size_t rows, const float* part, size_t count) {
    for (size_t r = 0; r < rows; r++) {
      const float *sums = part + r * wide, *top = part + most_rows * wide + r, *total = top + most_rows;
      float best = -INFINITY, all = 0.0f, weights[kMostCuts];
      for (size_t c = 0; c < count; c++) {
        if (total[c * part_floats] != 0.0f) best = std::max(best, top[c * part_floats]);
      }
      for (size_t c = 0; c < count; c++) {
        const bool seen = total[c * part_floats] != 0.0f;  // a part may see nothing, or NaN
        weights[c] = !seen ? 0.0f : count == 1 ? 1.0f : expf(top[c * part_floats] - best);
        all += weights[c] * total[c * part_floats];
      }
      // A row that saw nothing (more tokens than the cache holds) is all zeros.
      const float factor = all != 0.0f ? 1.0f / all : 0.0f;
      float* to = a.out + (first + r / s.group) * row_stride + r % s.group * s.width;
      for (size_t h = 0; h < s.width; h++) to[h] = sums[h] * (weights[0] * factor);
      for (size_t c = 1; c < count; c++) {
        const float weight = weights[c] * factor;
        for (size_t h = 0; h < s.width; h++) to[h] += sums[c * part_floats + h] * weight;
      }
    }
  };
  const auto head_of = [&](size_t index) {
    const size_t b = index / s.kv_heads, kv = index % s.kv_heads;
    const size_t at = b * s.tokens * row_stride + kv * head,
                 cache = (b * s.kv_heads + kv) * s.capacity * s.width * element;
    return Attention{q + at,
                     y + at,
                     row_stride,
                     static_cast<const char*>(key_cache) + cache,
                     static_cast<const char*>(value_cache) + cache,
                     s.rotary ? cos : nullptr,
                     sin,
                     s.rotary,
                     s.half,
                     s.tokens,
                     s.group,
                     s.width,
                     s.start,
                     s.window,
                     s.scale,
                     s.softcap};
  };
  const auto attend = [&](size_t task) {
    const size_t cut = task % cuts, index = task / cuts % heads;
    // The last tiles see most keys: they go first, so that no thread ends with the longest one.
    const size_t tile = tiles - 1 - task / cuts / heads;
    const Attention a = head_of(index);
    AttentionTile t{};
    t.first = tile * tile_tokens;
    t.last = std::min(s.tokens, t.first + tile_tokens);
    const size_t position = s.start + t.first;
    const size_t begin = s.window && position + 1 > s.window ? position + 1 - s.window : 0;
    const size_t end = std::min(s.capacity, s.start + t.last);
    t.from = std::min(end, begin / kKeyBlock * kKeyBlock + cut * per_cut);
    t.to = cut + 1 == cuts ? end : std::min(end, begin / kKeyBlock * kKeyBlock + (cut + 1) * per_cut);
    const size_t rows = (t.last - t.first) * s.group;
    t.scratch =
        static_cast<float*>(thread_scratch(kTaskWork, attention_scratch(rows, s.width) * sizeof(float)));
    float* result = parts ? parts + (index * cuts + cut) * part_floats
                          : static_cast<float*>(thread_scratch(kTaskOut, part_floats * sizeof(float)));
    if (!t.scratch || !result) {
      failed = true;
      return;
    }
    t.sums = result;
    t.top = result + most_rows * wide;
    t.total = t.top + most_rows;
    kernels.attend(a, t);
    if (!parts) {
      finish(a, t.first, rows, result, 1);
    } else if (missing[index].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      // Whoever is last joins the parts of a head, always in the same order.
      finish(a, t.first, rows, parts + index * cuts * part_floats, cuts);
    }
  };
  parallel(heads * tiles * cuts, attend, next);
  if (failed) return kNoMemory;
  return nullptr;
}

}  // namespace jaxllm
