// Where a step begins as XLA calls it: rows of an embedding. And arrays of a weight table for XLA's own code,
// and empty caches.
#include "ffi_checks.h"

namespace jaxllm {
namespace {

// index int32 [...], live -> y [..., inputs]. Of the rows the first `live` are written. Operands: the
// arrays of a weight [outputs, inputs].
Error unit_rows_call(AnyBuffer index, AnyBuffer live, AnyBuffer table, AnyBuffer row,
                     ffi::RemainingArgs buffers, ffi::Result<AnyBuffer> y, int64_t bits, int64_t group,
                     int64_t outputs, Columns columns) {
  const Timer timer;
  Operands in;
  if (!in.read(table, row, buffers, columns) || in.size() != kWeightArrays) return wrong(kOperands);
  size_t rows, width;
  if (!read_rows(*y, ffi::DataType::F32, rows, width)) return wrong("rows must be float32");
  if (index.element_type() != ffi::DataType::S32 || index.element_count() != rows)
    return wrong("indices must be int32, one for each row");
  if (!read_live(live, rows)) return wrong("the number of rows is out of range");
  Units weight;
  if (outputs <= 0 || outputs > INT32_MAX ||
      !read_units(weight_at(in, 0, bits, group), width, static_cast<size_t>(outputs), weight))
    return wrong("the weight's shape does not fit");
  unit_rows(index.reinterpret_data<int32_t>(), rows, weight, outputs, y->reinterpret_data<float>());
  return Error::Success();
}

// -> y, the only operand.
Error copy_call(AnyBuffer table, AnyBuffer row, ffi::RemainingArgs buffers, ffi::Result<AnyBuffer> y,
                Columns columns) {
  const Timer timer;
  Operands in;
  if (!in.read(table, row, buffers, columns) || in.size() != 1) return wrong(kOperands);
  const Array to = array_of(*y);
  bool same = to.type == in[0].type && to.rank == in[0].rank;
  for (size_t i = 0; same && i < to.rank; i++) same = to.dim(i) == in[0].dim(i);
  if (!same) return wrong("an array of a weight table has another shape");
  memcpy(y->untyped_data(), in[0].data, y->size_bytes());
  return Error::Success();
}

// -> zeros.
Error zeros_call(ffi::RemainingRets results) {
  const Timer timer;
  for (size_t i = 0; i < results.size(); i++) {
    auto out = results.get<AnyBuffer>(i);
    if (!out) return wrong("a result is missing");
    zero((*out)->untyped_data(), (*out)->size_bytes());
  }
  return Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(UnitRows, unit_rows_call,
                       takes<4>()
                           .RemainingArgs()
                           .Ret<AnyBuffer>()
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("group")
                           .Attr<int64_t>("outputs")
                           .Attr<Columns>("columns"));
XLA_FFI_DEFINE_HANDLER(Copy, copy_call, takes<2>().RemainingArgs().Ret<AnyBuffer>().Attr<Columns>("columns"));
XLA_FFI_DEFINE_HANDLER(Zeros, zeros_call, ffi::Ffi::Bind().RemainingRets());

const Target kTokenTargets[] = {
    {"jaxllm_unit_rows", reinterpret_cast<void*>(+UnitRows)},
    {"jaxllm_copy", reinterpret_cast<void*>(+Copy)},
    {"jaxllm_zeros", reinterpret_cast<void*>(+Zeros)},
    {nullptr, nullptr},
};

}  // namespace jaxllm
