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

// seed uint32 [n, 2], drawn int32 [n] -> y uint32 [n, ...].
Error random_bits_call(AnyBuffer seed, AnyBuffer drawn, ffi::Result<AnyBuffer> y) {
  const Timer timer;
  const size_t n = drawn.element_count();
  if (seed.element_type() != ffi::DataType::U32 || drawn.element_type() != ffi::DataType::S32 || n == 0 ||
      seed.element_count() != 2 * n)
    return wrong("seeds must be two uint32 each, with one int32 that is folded in");
  if (y->element_type() != ffi::DataType::U32 || y->element_count() % n)
    return wrong("random bits must be uint32, as many for each seed");
  const size_t count = y->element_count() / n;
  for (size_t i = 0; i < n; i++) {
    random_bits(seed.reinterpret_data<uint32_t>() + 2 * i,
                static_cast<uint32_t>(drawn.reinterpret_data<int32_t>()[i]), count,
                y->reinterpret_data<uint32_t>() + i * count);
  }
  return Error::Success();
}

// x [n, ..., width], k int32 [n] -> y uint32 [n, ...].
Error kth_largest_call(AnyBuffer x, AnyBuffer k, ffi::Result<AnyBuffer> y) {
  const Timer timer;
  size_t rows, width;
  if (!read_rows(x, ffi::DataType::F32, rows, width)) return wrong("rows must be float32");
  const size_t n = k.element_count();
  if (k.element_type() != ffi::DataType::S32 || n == 0 || rows % n)
    return wrong("k must be int32, one for as many rows each");
  if (y->element_type() != ffi::DataType::U32 || y->element_count() != rows)
    return wrong("the result must be one uint32 for each row");
  const int32_t* counts = k.reinterpret_data<int32_t>();
  for (size_t i = 0; i < n; i++) {
    if (counts[i] < 0) return wrong("k must not be negative");
  }
  kth_largest(x.reinterpret_data<float>(), rows, width, counts, rows / n, y->reinterpret_data<uint32_t>());
  return Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(Largest, largest_call, ffi::Ffi::Bind().Arg<AnyBuffer>().Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(RandomBits, random_bits_call,
                       ffi::Ffi::Bind().Arg<AnyBuffer>().Arg<AnyBuffer>().Ret<AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(KthLargest, kth_largest_call,
                       ffi::Ffi::Bind().Arg<AnyBuffer>().Arg<AnyBuffer>().Ret<AnyBuffer>());

const Target kSamplingTargets[] = {
    {"jaxllm_largest", reinterpret_cast<void*>(+Largest)},
    {"jaxllm_random_bits", reinterpret_cast<void*>(+RandomBits)},
    {"jaxllm_kth_largest", reinterpret_cast<void*>(+KthLargest)},
    {nullptr, nullptr},
};

}  // namespace jaxllm
