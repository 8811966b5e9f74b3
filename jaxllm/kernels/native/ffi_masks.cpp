// Masks of grammars as XLA asks for them, while a step decodes.
#include "ffi_checks.h"
#include "masks.h"

namespace jaxllm {
namespace {

// channel uint32 [2], tokens int32 [block], mask [width]; int32 [4]: whether to ask, the first token that was
// not asked about, the end of tokens and the number left -> mask [width], in place; int32 [1], `Reply`.
Error follow_call(AnyBuffer channel, AnyBuffer tokens, AnyBuffer mask, AnyBuffer ints,
                  ffi::Result<AnyBuffer> next, ffi::Result<AnyBuffer> reply) {
  if (channel.element_type() != ffi::DataType::U32 || channel.element_count() != 2)
    return wrong("a channel must be two uint32");
  const ffi::DataType whole = ffi::DataType::S32;
  if (tokens.element_type() != whole || ints.element_type() != whole || ints.element_count() != 4 ||
      reply->element_type() != whole || reply->element_count() != 1)
    return wrong("tokens, what is asked about them and the reply must be int32");
  const size_t width = mask.element_count();
  if (mask.element_type() != ffi::DataType::F32 || next->element_type() != ffi::DataType::F32 ||
      next->element_count() != width)
    return wrong("masks must be float32, as many before and after");
  const int32_t *const asked = ints.reinterpret_data<int32_t>(), first = asked[1], end = asked[2];
  if (first < 0 || end < first || static_cast<size_t>(end) > tokens.element_count())
    return wrong("tokens to ask about must be some of the block");
  float* const out = static_cast<float*>(in_place(mask, next));
  const uint32_t* const halves = channel.reinterpret_data<uint32_t>();
  const uint64_t handle = static_cast<uint64_t>(halves[1]) << 32 | halves[0];
  const Tokens those = {tokens.reinterpret_data<int32_t>() + first, static_cast<size_t>(end - first),
                        asked[3]};
  const Reply found = asked[0] ? follow(handle, those, out, width) : Reply::kKept;
  *reply->reinterpret_data<int32_t>() = static_cast<int32_t>(found);
  return Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(Follow, follow_call, takes<4>().Ret<AnyBuffer>().Ret<AnyBuffer>());

const Target kMaskTargets[] = {
    {"jaxllm_follow", reinterpret_cast<void*>(+Follow)},
    {nullptr, nullptr},
};

}  // namespace jaxllm
