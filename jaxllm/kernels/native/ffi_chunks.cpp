// Chunks of a cache as XLA calls for them.
#include <vector>

#include "ffi_checks.h"

namespace jaxllm {
namespace {

// keys and values [1, K, S, H], addresses uint32 [N, 2] (the lower half first) and bits int32 [N] of N blobs
// in this process's memory, and counts -> keys and values with their rows, in place. Blobs are of the first
// counts[heads_at] of the K heads.
Error load_chunks_call(AnyBuffer keys, AnyBuffer values, AnyBuffer addresses, AnyBuffer bits,
                       AnyBuffer counts, ffi::Result<AnyBuffer> new_keys, ffi::Result<AnyBuffer> new_values,
                       int64_t tokens, bool keys_by_token, bool values_by_token, bool rotated,
                       int64_t heads_at, bool spread) {
  const Timer timer;
  const auto type = keys.element_type();
  if (rank(keys) != 4 || dim(keys, 0) != 1 || keys.element_count() == 0 || values.element_type() != type ||
      (type != ffi::DataType::F32 && type != ffi::DataType::F16) || dim(keys, 3) % 4 ||
      values.element_count() != keys.element_count() || new_keys->size_bytes() != keys.size_bytes() ||
      new_values->size_bytes() != values.size_bytes()) {
    return wrong("a cache to load chunks into must be float32 or float16 [1, K, S, H], H a multiple of 4");
  }
  size_t heads;
  if (!read_count(counts, heads_at, 1, dim(keys, 1), heads)) return wrong("a count is out of range");
  const size_t count = bits.element_count();
  if (bits.element_type() != ffi::DataType::S32 || addresses.element_type() != ffi::DataType::U32 ||
      addresses.element_count() != 2 * count || tokens < 1) {
    return wrong("chunks must have an address uint32 [N, 2] and bits int32 [N] each");
  }
  const int32_t* widths = bits.reinterpret_data<int32_t>();
  const uint32_t* halves = addresses.reinterpret_data<uint32_t>();
  std::vector<const uint8_t*> blobs(count);
  for (size_t i = 0; i < count; i++) {
    const uint64_t address = static_cast<uint64_t>(halves[2 * i + 1]) << 32 | halves[2 * i];
    blobs[i] = reinterpret_cast<const uint8_t*>(static_cast<uintptr_t>(address));
    const int32_t width = widths[i];
    if (width > 8 || width == 1 || width == 3 || width == 5 || width == 6 || width == 7)
      return wrong("chunks have levels of 8, 4 or 2 bits, or none");
    if (width >= 0 && !address) return wrong("a chunk has no address");
  }
  const ChunksShape shape{heads,
                          static_cast<size_t>(tokens),
                          dim(keys, 3),
                          dim(keys, 2),
                          type == ffi::DataType::F16,
                          keys_by_token,
                          values_by_token,
                          rotated,
                          spread};
  return result(load_chunks(blobs.data(), widths, count, shape, in_place(keys, new_keys),
                            in_place(values, new_values)));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(LoadChunks, load_chunks_call,
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Attr<int64_t>("tokens")
                           .Attr<bool>("keys_by_token")
                           .Attr<bool>("values_by_token")
                           .Attr<bool>("rotated")
                           .Attr<int64_t>("heads_at")
                           .Attr<bool>("spread"));

const Target kChunkTargets[] = {
    {"jaxllm_load_chunks", reinterpret_cast<void*>(+LoadChunks)},
    {nullptr, nullptr},
};

}  // namespace jaxllm
