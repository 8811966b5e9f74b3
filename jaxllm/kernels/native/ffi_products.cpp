// Products as XLA calls them.
#include "ffi_checks.h"

namespace jaxllm {
namespace {

bool good_format(int64_t bits, int64_t group, const AnyBuffer& data, const AnyBuffer& scale) {
  if (bits != 4 && bits != 8) return false;
  if (group != 0 && group != 32 && group != 64) return false;
  if (data.element_type() != (bits == 8 ? ffi::DataType::S8 : ffi::DataType::U8)) return false;
  return scale.element_type() == (group ? ffi::DataType::F16 : ffi::DataType::F32);
}

// A weight [segments, blocks, panels, bytes] whose units are inputs; `segments` of `length` are used.
bool read_reduction(const AnyBuffer& data, const AnyBuffer& scale, int64_t bits, int64_t group,
                    size_t segments, size_t length, size_t outputs, Reduction& out) {
  if (!good_format(bits, group, data, scale) || rank(data) != 4) return false;
  if (segments == 0 || length == 0 || outputs == 0) return false;
  const size_t blocks = dim(data, 1), panels = dim(data, 2);
  if (dim(data, 3) != static_cast<size_t>(bits) * 64 || segments > dim(data, 0)) return false;
  if (divide_up(outputs, kPanel) > panels || divide_up(length, kBlock) > blocks) return false;
  // Segments follow each other by what they use: only the only one may be cut short.
  if (dim(data, 0) > 1 && divide_up(length, kBlock) != blocks) return false;
  const size_t groups = group ? scale.element_count() / (dim(data, 0) * panels * kPanel) : 1;
  if (scale.element_count() != dim(data, 0) * groups * panels * kPanel) return false;
  if (group &&
      (groups < divide_up(length, group) || (dim(data, 0) > 1 && groups != divide_up(length, group))))
    return false;
  out = {data.untyped_data(),
         scale.untyped_data(),
         static_cast<int>(bits),
         static_cast<int>(group),
         segments,
         blocks,
         panels};
  return true;
}

// x, norm scale, then data and scale of each weight -> one result per weight.
Error to_units_call(AnyBuffer x, AnyBuffer norm, ffi::RemainingArgs weights, ffi::RemainingRets results,
                    int64_t bits, int64_t group, float eps) {
  const Timer timer;
  constexpr size_t kMost = 8;
  size_t rows, width;
  if (!read_rows(x, ffi::DataType::F32, rows, width))
    return wrong("activations must be float32 with at least one row");
  Norm applied{nullptr, eps};
  if (!read_floats(norm, width, applied.scale))
    return wrong("a norm's scale must be float32 of the activations' width");
  const size_t count = results.size();
  if (count == 0 || count > kMost || weights.size() != 2 * count)
    return wrong("each weight needs data, scales and a result");
  Units units[kMost];
  size_t outputs[kMost];
  float* y[kMost];
  for (size_t i = 0; i < count; i++) {
    auto data = weights.get<AnyBuffer>(2 * i), scale = weights.get<AnyBuffer>(2 * i + 1);
    auto out = results.get<AnyBuffer>(i);
    if (!data || !scale || !out) return wrong("a weight or a result is missing");
    size_t out_rows;
    if (!read_rows(**out, ffi::DataType::F32, out_rows, outputs[i]) || out_rows != rows)
      return wrong("a result has other rows");
    if (!read_units(*data, *scale, bits, group, width, outputs[i], units[i]))
      return wrong("a weight's shape does not fit");
    y[i] = (*out)->reinterpret_data<float>();
  }
  return result(to_units(x.reinterpret_data<float>(), rows, applied, units, outputs, y, count));
}

// h [rows, segments * length], data, scale, residual or nothing -> y [rows, outputs].
Error from_units_call(AnyBuffer h, AnyBuffer data, AnyBuffer scale, AnyBuffer residual,
                      ffi::Result<AnyBuffer> y, int64_t bits, int64_t group, int64_t segments) {
  const Timer timer;
  size_t rows, width, out_rows, outputs;
  if (!read_rows(h, ffi::DataType::F32, rows, width))
    return wrong("activations must be float32 with at least one row");
  if (!read_rows(*y, ffi::DataType::F32, out_rows, outputs) || out_rows != rows)
    return wrong("the result has other rows");
  if (segments <= 0 || width % segments) return wrong("the activations do not divide into segments");
  Reduction weight;
  if (!read_reduction(data, scale, bits, group, segments, width / segments, outputs, weight))
    return wrong("the weight's shape does not fit");
  const float* add;
  if (!read_floats(residual, rows * outputs, add)) return wrong("the residual has another shape");
  return result(from_units(h.reinterpret_data<float>(), rows, weight, segments, width / segments, outputs,
                           add, y->reinterpret_data<float>()));
}

// x [rows, width], norm scale, data and scale of gate (empty: none), up and down -> y [rows, width].
Error feed_forward_call(AnyBuffer x, AnyBuffer norm, AnyBuffer gate, AnyBuffer gate_scale, AnyBuffer up,
                        AnyBuffer up_scale, AnyBuffer down, AnyBuffer down_scale, ffi::Result<AnyBuffer> y,
                        int64_t bits, int64_t group, int64_t units, int64_t activation, bool residual,
                        float eps) {
  const Timer timer;
  size_t rows, width;
  if (!read_rows(x, ffi::DataType::F32, rows, width))
    return wrong("activations must be float32 with at least one row");
  if (y->element_type() != ffi::DataType::F32 || y->element_count() != x.element_count())
    return wrong("the result has another shape");
  Norm applied{nullptr, eps};
  if (!read_floats(norm, width, applied.scale))
    return wrong("a norm's scale must be float32 of the activations' width");
  if (units <= 0) return wrong("a feed-forward block has at least one unit");
  const bool gated = gate.element_count() != 0;
  Units gate_units, up_units;
  Reduction down_units;
  if ((gated && !read_units(gate, gate_scale, bits, group, width, units, gate_units)) ||
      !read_units(up, up_scale, bits, group, width, units, up_units) ||
      !read_reduction(down, down_scale, bits, group, 1, units, width, down_units)) {
    return wrong("a weight's shape does not fit");
  }
  return result(feed_forward(x.reinterpret_data<float>(), rows, width, applied, gated ? &gate_units : nullptr,
                             up_units, down_units, units, static_cast<int>(activation), residual,
                             y->reinterpret_data<float>()));
}

// x [rows, inputs] int8, data [panels, blocks, 512] -> y [rows, outputs] int32.
Error integer_product_call(AnyBuffer x, AnyBuffer data, ffi::Result<AnyBuffer> y) {
  const Timer timer;
  size_t rows, width, out_rows, outputs;
  if (!read_rows(x, ffi::DataType::S8, rows, width))
    return wrong("activations must be int8 with at least one row");
  if (!read_rows(*y, ffi::DataType::S32, out_rows, outputs) || out_rows != rows)
    return wrong("the result must be int32 with as many rows");
  if (data.element_type() != ffi::DataType::S8 || rank(data) != 3 ||
      dim(data, 1) != divide_up(width, kBlock) || dim(data, 2) != 512 ||
      divide_up(outputs, kPanel) > dim(data, 0)) {
    return wrong("the weight's shape does not fit");
  }
  const Units weight{data.untyped_data(), nullptr, 8, 0, dim(data, 0), width};
  return result(
      integer_product(x.reinterpret_data<int8_t>(), rows, weight, outputs, y->reinterpret_data<int32_t>()));
}

}  // namespace

bool read_units(const AnyBuffer& data, const AnyBuffer& scale, int64_t bits, int64_t group, size_t inputs,
                size_t outputs, Units& out) {
  if (!good_format(bits, group, data, scale) || rank(data) != 3 || inputs == 0 || outputs == 0) return false;
  const size_t panels = dim(data, 0), blocks = dim(data, 1);
  if (blocks != divide_up(inputs, kBlock) || dim(data, 2) != static_cast<size_t>(bits) * 64) return false;
  if (divide_up(outputs, kPanel) > panels) return false;
  const size_t scales = panels * kPanel * (group ? divide_up(inputs, group) : 1);
  if (scale.element_count() != scales) return false;
  out = {data.untyped_data(),
         scale.untyped_data(),
         static_cast<int>(bits),
         static_cast<int>(group),
         panels,
         inputs};
  return true;
}

XLA_FFI_DEFINE_HANDLER(ToUnits, to_units_call,
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("group")
                           .Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER(FromUnits, from_units_call,
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("group")
                           .Attr<int64_t>("segments"));
XLA_FFI_DEFINE_HANDLER(FeedForward, feed_forward_call,
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("group")
                           .Attr<int64_t>("units")
                           .Attr<int64_t>("activation")
                           .Attr<bool>("residual")
                           .Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER(IntegerProduct, integer_product_call,
                       ffi::Ffi::Bind().Arg<AnyBuffer>().Arg<AnyBuffer>().Ret<AnyBuffer>());

const Target kProductTargets[] = {
    {"jaxllm_to_units", reinterpret_cast<void*>(+ToUnits)},
    {"jaxllm_from_units", reinterpret_cast<void*>(+FromUnits)},
    {"jaxllm_feed_forward", reinterpret_cast<void*>(+FeedForward)},
    {"jaxllm_integer_product", reinterpret_cast<void*>(+IntegerProduct)},
    {nullptr, nullptr},
};

}  // namespace jaxllm
