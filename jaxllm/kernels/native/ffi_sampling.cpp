// Where a step ends as XLA calls it: choosing tokens.
#include "ffi_checks.h"

namespace jaxllm {
namespace {

// x [rows, width] -> y int32 [rows].
Error largest_call(AnyBuffer x, ffi::Result<AnyBuffer> y) {
  const Timer timer;
  size_t rows, width;
  if (!read_rows(x, ffi::DataType::F32, rows, width)) return wrong("rows must be float32");
  if (y->element_type() != ffi::DataType::S32 || y->element_count() != rows || width > INT32_MAX)
    return wrong("the result must be one int32 for each row");
  largest(x.reinterpret_data<float>(), rows, width, y->reinterpret_data<int32_t>());
  return Error::Success();
}

// x [n, ..., width], temperature, top_p and min_p [n, 3], top_k and drawn int32 [n, 2], seed uint32 [n, 2] ->
// y int32 [n, ...].
Error draw_call(AnyBuffer x, AnyBuffer floats, AnyBuffer ints, AnyBuffer seed, ffi::Result<AnyBuffer> y) {
  const Timer timer;
  size_t rows, width;
  if (!read_rows(x, ffi::DataType::F32, rows, width)) return wrong("rows must be float32");
  const size_t n = ints.element_count() / 2;
  if (ints.element_type() != ffi::DataType::S32 || n == 0 || ints.element_count() != 2 * n || rows % n)
    return wrong("top_k and the number of draws must be int32, for as many rows each");
  if (floats.element_type() != ffi::DataType::F32 || floats.element_count() != 3 * n)
    return wrong("temperature, top_p and min_p must be float32, as many as top_k");
  if (seed.element_type() != ffi::DataType::U32 || seed.element_count() != 2 * n)
    return wrong("seeds must be two uint32 each, as many as top_k");
  if (y->element_type() != ffi::DataType::S32 || y->element_count() != rows || width > INT32_MAX)
    return wrong("the result must be one int32 for each row");
  const size_t each = rows / n;
  for (size_t i = 0; i < n; i++) {
    const float* of = floats.reinterpret_data<float>() + 3 * i;
    const int32_t* counts = ints.reinterpret_data<int32_t>() + 2 * i;
    draw(x.reinterpret_data<float>() + i * each * width, each, width, {of[0], of[1], of[2], counts[0]},
         seed.reinterpret_data<uint32_t>() + 2 * i, static_cast<uint32_t>(counts[1]),
         y->reinterpret_data<int32_t>() + i * each);
  }
  return Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(Largest, largest_call, takes<1>().Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(Drawn, draw_call, takes<4>().Ret<AnyBuffer>());

const Target kSamplingTargets[] = {
    {"jaxllm_largest", reinterpret_cast<void*>(+Largest)},
    {"jaxllm_draw", reinterpret_cast<void*>(+Drawn)},
    {nullptr, nullptr},
};

}  // namespace jaxllm
