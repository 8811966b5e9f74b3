// Chunks of a cache as XLA calls for them.
#include <vector>

#include "ffi_checks.h"

namespace jaxllm {
namespace {

using Places = ffi::Span<const int64_t>;

// Of a chunk: nobody's has more, and none that has is multiplied out.
constexpr int64_t kMostTokens = 1 << 20;

// extents uint32 [L, N, 3] (an address, its lower half first, and the bytes there) and bits int32 [N] of each
// layer's N blobs in this process's memory, counts, then keys and values [1, K, S, H] of each layer -> keys
// and values with their rows, in place. Blobs of layer l are of the first counts[heads_at[l]] of its K heads.
Error load_chunks_call(AnyBuffer extents, AnyBuffer bits, AnyBuffer counts, ffi::RemainingArgs caches,
                       ffi::RemainingRets results, int64_t tokens, bool keys_by_token, bool values_by_token,
                       bool rotated, Places heads_at) {
  const Timer timer;
  const size_t layers = caches.size() / 2, count = bits.element_count();
  if (layers == 0 || caches.size() != 2 * layers || results.size() != 2 * layers || heads_at.size() != layers)
    return wrong("each layer needs keys and values, and as many results");
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
  ChunksShape shape{static_cast<size_t>(tokens), 0, 0, false, keys_by_token, values_by_token, rotated};
  std::vector<ChunksLayer> all(layers);
  for (size_t l = 0; l < layers; l++) {
    auto keys = caches.get<AnyBuffer>(2 * l), values = caches.get<AnyBuffer>(2 * l + 1);
    auto new_keys = results.get<AnyBuffer>(2 * l), new_values = results.get<AnyBuffer>(2 * l + 1);
    if (!keys || !values || !new_keys || !new_values) return wrong("a cache is missing");
    const auto type = keys->element_type();
    if (rank(*keys) != 4 || dim(*keys, 0) != 1 || keys->element_count() == 0 ||
        values->element_type() != type || (type != ffi::DataType::F32 && type != ffi::DataType::F16) ||
        dim(*keys, 3) % 4 || values->element_count() != keys->element_count() ||
        (*new_keys)->size_bytes() != keys->size_bytes() ||
        (*new_values)->size_bytes() != values->size_bytes()) {
      return wrong("a cache to load chunks into must be float32 or float16 [1, K, S, H], H a multiple of 4");
    }
    const size_t capacity = dim(*keys, 2), width = dim(*keys, 3);
    const bool half = type == ffi::DataType::F16;
    if (l && (capacity != shape.capacity || width != shape.width || half != shape.half))
      return wrong("layers must have caches of one length, width and type");
    shape.capacity = capacity, shape.width = width, shape.half = half;
    all[l].blobs = blobs.data() + l * count;
    if (!read_count(counts, heads_at[l], 1, dim(*keys, 1), all[l].kv_heads))
      return wrong("a count is out of range");
    for (size_t i = 0; i < count; i++) {
      if (widths[i] >= 0 && places[3 * (l * count + i) + 2] != blob_bytes(shape, all[l].kv_heads, widths[i]))
        return wrong("a chunk has not the bytes of its width");
    }
    all[l].keys = in_place(*keys, *new_keys), all[l].values = in_place(*values, *new_values);
  }
  return result(load_chunks(all.data(), layers, widths, count, shape));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(LoadChunks, load_chunks_call,
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<int64_t>("tokens")
                           .Attr<bool>("keys_by_token")
                           .Attr<bool>("values_by_token")
                           .Attr<bool>("rotated")
                           .Attr<Places>("heads_at"));

const Target kChunkTargets[] = {
    {"jaxllm_load_chunks", reinterpret_cast<void*>(+LoadChunks)},
    {nullptr, nullptr},
};

}  // namespace jaxllm
