// The two ends of a step as XLA calls them: rows of an embedding, and the likeliest token.
#include "ffi_checks.h"

namespace jaxllm {
namespace {

// index int32 [...], data and scale of a weight [outputs, inputs] -> y [..., inputs].
Error unit_rows_call(AnyBuffer index, AnyBuffer data, AnyBuffer scale, ffi::Result<AnyBuffer> y, int64_t bits,
                     int64_t group, int64_t outputs) {
  const Timer timer;
  size_t rows, width;
  if (!read_rows(*y, ffi::DataType::F32, rows, width)) return wrong("rows must be float32");
  if (index.element_type() != ffi::DataType::S32 || index.element_count() != rows)
    return wrong("indices must be int32, one for each row");
  Units weight;
  if (outputs <= 0 || outputs > INT32_MAX || !read_units(data, scale, bits, group, width, outputs, weight))
    return wrong("the weight's shape does not fit");
  unit_rows(index.reinterpret_data<int32_t>(), rows, weight, outputs, y->reinterpret_data<float>());
  return Error::Success();
}

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

}  // namespace

XLA_FFI_DEFINE_HANDLER(UnitRows, unit_rows_call,
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("group")
                           .Attr<int64_t>("outputs"));
XLA_FFI_DEFINE_HANDLER(Largest, largest_call, ffi::Ffi::Bind().Arg<AnyBuffer>().Ret<AnyBuffer>());

const Target kTokenTargets[] = {
    {"jaxllm_unit_rows", reinterpret_cast<void*>(+UnitRows)},
    {"jaxllm_largest", reinterpret_cast<void*>(+Largest)},
    {nullptr, nullptr},
};

}  // namespace jaxllm
