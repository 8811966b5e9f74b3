// Chunks of a cache as XLA calls for them.
#include <vector>

#include "ffi_checks.h"

namespace jaxllm {
namespace {

using Places = ffi::Span<const int64_t>;

// Of a chunk: nobody's has more, and none that has is multiplied out.
constexpr int64_t kMostTokens = 1 << 20;

// extents uint32 [L, N, 3] (an address, its lower half first, and the bytes there) and bits int32 [N] of each
// layer's N blobs in this process's memory, slots int32 [L], counts int32 [L] or nothing, then keys and
// values of stacks of layers, [n, 1, K, S, H] -> keys and values with their rows, in place. Layer l is number
// slots[l] of stack stacks[l]. Its blobs are of the first counts[l] of its K heads.
Error load_chunks_call(AnyBuffer extents, AnyBuffer bits, AnyBuffer slots, AnyBuffer counts,
                       ffi::RemainingArgs caches, ffi::RemainingRets results, int64_t tokens,
                       bool keys_by_token, bool values_by_token, bool rotated, Places stacks) {
  const Timer timer;
  const size_t layers = stacks.size(), count = bits.element_count();
  if (layers == 0 || caches.size() % 2 || results.size() != caches.size())
    return wrong("each stack needs keys and values, and as many results");
  if (slots.element_type() != ffi::DataType::S32 || slots.element_count() != layers)
    return wrong("each layer needs a slot, one int32");
  const int32_t* const slot_of = slots.reinterpret_data<int32_t>();
  if (bits.element_type() != ffi::DataType::S32 || extents.element_type() != ffi::DataType::U32 ||
      extents.element_count() != 3 * count * layers || tokens < 1 || tokens > kMostTokens) {
    return wrong("chunks must have an address and a size uint32 [L, N, 3] and bits int32 [N] each");
  }
  const int32_t* widths = bits.reinterpret_data<int32_t>();
  const uint32_t* places = extents.reinterpret_data<uint32_t>();
  std::vector<const uint8_t*> blobs(count * layers);
  for (size_t i = 0; i < blobs.size(); i++) {
    const uint64_t address = static_cast<uint64_t>(places[3 * i + 1]) << 32 | places[3 * i];
    blobs[i] = reinterpret_cast<const uint8_t*>(static_cast<uintptr_t>(address));
    const int32_t width = widths[i % count];
    if (width > 8 || width == 1 || width == 3 || width == 5 || width == 6 || width == 7)
      return wrong("chunks have levels of 8, 4 or 2 bits, or none");
    if (width >= 0 && !address) return wrong("a chunk has no address");
  }
  ChunksShape shape{};
  shape.tokens = static_cast<size_t>(tokens), shape.rotated = rotated;
  shape.keys_by_token = keys_by_token, shape.values_by_token = values_by_token;
  std::vector<ChunksLayer> all(layers);
  std::vector<char*> memory(caches.size());
  for (size_t i = 0; i < memory.size(); i++) {
    auto cache = caches.get<AnyBuffer>(i);
    auto replaced = results.get<AnyBuffer>(i);
    if (!cache || !replaced || (*replaced)->size_bytes() != cache->size_bytes())
      return wrong("a cache is missing");
    memory[i] = static_cast<char*>(in_place(*cache, *replaced));
  }
  for (size_t l = 0; l < layers; l++) {
    if (stacks[l] < 0 || static_cast<size_t>(stacks[l]) >= caches.size() / 2)
      return wrong("a stack is missing");
    const size_t at = 2 * static_cast<size_t>(stacks[l]);
    auto keys = caches.get<AnyBuffer>(at), values = caches.get<AnyBuffer>(at + 1);
    const auto type = keys->element_type();
    if (rank(*keys) != 5 || dim(*keys, 1) != 1 || keys->element_count() == 0 ||
        values->element_type() != type || (type != ffi::DataType::F32 && type != ffi::DataType::F16) ||
        dim(*keys, 4) % 4 || values->element_count() != keys->element_count()) {
      return wrong(
          "a cache to load chunks into must be float32 or float16 [n, 1, K, S, H], H a multiple of 4");
    }
    if (slot_of[l] < 0 || static_cast<size_t>(slot_of[l]) >= dim(*keys, 0))
      return wrong("a stack has no such layer");
    const size_t capacity = dim(*keys, 3), width = dim(*keys, 4);
    const bool half = type == ffi::DataType::F16;
    if (l && (capacity != shape.capacity || width != shape.width || half != shape.half))
      return wrong("layers must have caches of one length, width and type");
    shape.capacity = capacity, shape.width = width, shape.half = half;
    all[l].blobs = blobs.data() + l * count;
    if (!read_count(array_of(counts), static_cast<int64_t>(l), 0, dim(*keys, 2), all[l].kv_heads))
      return wrong("a count is out of range");
    for (size_t i = 0; i < count; i++) {
      if (widths[i] >= 0 && places[3 * (l * count + i) + 2] != shape.blob_bytes(all[l].kv_heads, widths[i]))
        return wrong("a chunk has not the bytes of its width");
    }
    const size_t offset = keys->size_bytes() / dim(*keys, 0) * static_cast<size_t>(slot_of[l]);
    all[l].keys = memory[at] + offset, all[l].values = memory[at + 1] + offset;
  }
  return result(load_chunks(all.data(), layers, widths, count, shape));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(LoadChunks, load_chunks_call,
                       takes<4>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<int64_t>("tokens")
                           .Attr<bool>("keys_by_token")
                           .Attr<bool>("values_by_token")
                           .Attr<bool>("rotated")
                           .Attr<Places>("stacks"));

const Target kChunkTargets[] = {
    {"jaxllm_load_chunks", reinterpret_cast<void*>(+LoadChunks)},
    {nullptr, nullptr},
};

}  // namespace jaxllm
