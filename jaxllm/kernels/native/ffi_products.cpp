// Products as XLA calls them.
#include "ffi_checks.h"

namespace jaxllm {
namespace {

// Steps that activations are quantized by: `count` positive numbers, or none for scales of their own (zeros).
bool read_steps(const AnyBuffer& buffer, size_t count, Step* out) {
  const float* steps;
  if (!read_floats(buffer, count, steps)) return false;
  for (size_t i = 0; i < count; i++) {
    out[i] = {steps ? steps[i] : 0.0f, nullptr, nullptr};
    // False for NaN, too; a step whose reciprocal overflows would make NaN of zeros.
    if (steps && !(steps[i] >= 1e-30f && steps[i] <= 1e30f)) return false;
  }
  return true;
}

// What a step clips is multiplied in floats: each of `width` channels' row in the weights' float rows (or
// below 0), and where the number of channels with outliers goes.
bool read_shadow(const AnyBuffer& place, size_t width, int64_t bits, int64_t group, int32_t* count,
                 Step& step) {
  if (bits != 8 || group != 0 || step.size == 0) return false;
  if (place.element_type() != ffi::DataType::S32 || place.element_count() != width) return false;
  step.place = place.reinterpret_data<int32_t>();
  step.channels = count;
  return true;
}

// Float rows [rows, all outputs] of a weight of which the first `outputs` are used.
bool read_float_rows(const AnyBuffer& buffer, size_t outputs, FloatRows& out) {
  if (buffer.element_type() != ffi::DataType::F16 || rank(buffer) != 2 || dim(buffer, 1) < outputs)
    return false;
  out = {static_cast<const uint16_t*>(buffer.untyped_data()), dim(buffer, 0), dim(buffer, 1)};
  return true;
}

// Where the numbers of channels with outliers go: `count` int32, the only one of the results left.
int32_t* read_channels(ffi::RemainingRets& results, size_t at, size_t count) {
  auto out = results.get<AnyBuffer>(at);
  if (!out || (*out)->element_type() != ffi::DataType::S32 || (*out)->element_count() != count)
    return nullptr;
  return (*out)->reinterpret_data<int32_t>();
}

constexpr const char* kShadow = "a shadow does not fit";
constexpr const char* kSteps = "steps must be numbers in [1e-30, 1e30]";
constexpr const char* kMisfit = "an adapter does not fit";
constexpr const char* kCount = "a count is out of range";

// x, norm scale, counts, step, then data, scale and both sides of an adapter of each weight -> one result per
// weight. Weights have `units` units each, of which counts[units_at] are computed; adapters have
// counts[rank_at] ranks. With a shadow each channel's place in float rows and these rows of each weight
// follow, and the last result is how many channels had outliers.
Error to_units_call(AnyBuffer x, AnyBuffer norm, AnyBuffer counts, AnyBuffer steps,
                    ffi::RemainingArgs weights, ffi::RemainingRets results, int64_t bits, int64_t group,
                    bool widen, float eps, int64_t units, int64_t units_at, int64_t rank_at,
                    Places adapters) {
  const Timer timer;
  constexpr size_t kMost = 8;
  size_t rows, width;
  if (!read_rows(x, ffi::DataType::F32, rows, width))
    return wrong("activations must be float32 with at least one row");
  Norm applied{nullptr, eps};
  if (!read_floats(norm, width, applied.scale))
    return wrong("a norm's scale must be float32 of the activations' width");
  Step step;
  if (!read_steps(steps, 1, &step)) return wrong(kSteps);
  const size_t count = adapters.size() / 3;
  const bool shadowed = weights.size() == 5 * count + 1;
  if (count == 0 || count > kMost || results.size() != count + shadowed || adapters.size() != 3 * count ||
      weights.size() != (shadowed ? 5 * count + 1 : 4 * count)) {
    return wrong("each weight needs data, scales, an adapter and a result");
  }
  if (shadowed) {
    auto place = weights.get<AnyBuffer>(4 * count);
    int32_t* const channels = read_channels(results, count, 1);
    if (!place || !channels || !read_shadow(*place, width, bits, group, channels, step))
      return wrong(kShadow);
  }
  size_t used;
  if (units <= 0 || !read_count(counts, units_at, 1, static_cast<size_t>(units), used)) return wrong(kCount);
  Outputs to[kMost];
  for (size_t i = 0; i < count; i++) {
    auto data = weights.get<AnyBuffer>(4 * i), scale = weights.get<AnyBuffer>(4 * i + 1);
    auto left = weights.get<AnyBuffer>(4 * i + 2), right = weights.get<AnyBuffer>(4 * i + 3);
    auto out = results.get<AnyBuffer>(i);
    if (!data || !scale || !left || !right || !out) return wrong("a weight or a result is missing");
    size_t out_rows, outputs;
    if (!read_rows(**out, ffi::DataType::F32, out_rows, outputs) || out_rows != rows)
      return wrong("a result has other rows");
    if (!read_units(*data, *scale, bits, group, width, outputs, to[i].weight))
      return wrong("a weight's shape does not fit");
    to[i].weight.widen = widen;
    if (!read_adapter(*left, *right, adapters, 3 * i, outputs, width, counts, rank_at, to[i].adapter))
      return wrong(kMisfit);
    if (outputs % units) return wrong("the outputs do not divide into units");
    to[i].outputs = outputs / units * used;
    to[i].stride = outputs;
    to[i].y = (*out)->reinterpret_data<float>();
    to[i].floats = {};
    if (shadowed) {
      auto floats = weights.get<AnyBuffer>(4 * count + 1 + i);
      if (!floats || !read_float_rows(*floats, outputs, to[i].floats)) return wrong(kShadow);
    }
  }
  return result(to_units(x.reinterpret_data<float>(), rows, applied, step, to, count));
}

// h [rows, segments * length], data, scale, both sides of an adapter, residual or nothing, counts, step -> y
// [rows, outputs]. Of the segments, or of the inputs of the only one, counts[units_at] are summed. With a
// shadow each channel's place in float rows and these rows follow, and how many channels had outliers.
Error from_units_call(AnyBuffer h, AnyBuffer data, AnyBuffer scale, AnyBuffer left, AnyBuffer right,
                      AnyBuffer residual, AnyBuffer counts, AnyBuffer steps, ffi::RemainingArgs shadow,
                      ffi::Result<AnyBuffer> y, ffi::RemainingRets channels, int64_t bits, int64_t group,
                      bool widen, int64_t segments, bool stacked, int64_t units_at, int64_t rank_at,
                      Places adapters) {
  const Timer timer;
  size_t rows, width, out_rows, outputs;
  if (!read_rows(h, ffi::DataType::F32, rows, width))
    return wrong("activations must be float32 with at least one row");
  if (!read_rows(*y, ffi::DataType::F32, out_rows, outputs) || out_rows != rows)
    return wrong("the result has other rows");
  if (segments <= 0 || width % segments || (segments > 1 && !stacked))
    return wrong("the activations do not divide into segments");
  size_t count = static_cast<size_t>(segments), length = width / count;
  Reduction weight;
  if (!read_reduction(data, scale, bits, group, count, length, outputs, weight))
    return wrong("the weight's shape does not fit");
  weight.widen = widen;
  Adapter adapter;
  if (adapters.size() != 3 ||
      !read_adapter(left, right, adapters, 0, width, outputs, counts, rank_at, adapter)) {
    return wrong(kMisfit);
  }
  size_t& units = stacked ? count : length;
  if (!read_count(counts, units_at, 1, units, units)) return wrong(kCount);
  const float* add;
  if (!read_floats(residual, rows * outputs, add)) return wrong("the residual has another shape");
  Step step;
  if (!read_steps(steps, 1, &step)) return wrong(kSteps);
  FloatRows floats{};
  if (shadow.size() || channels.size()) {
    auto place = shadow.get<AnyBuffer>(0), rows_of = shadow.get<AnyBuffer>(1);
    int32_t* const found = read_channels(channels, 0, 1);
    if (shadow.size() != 2 || channels.size() != 1 || !place || !rows_of || !found ||
        !read_shadow(*place, width, bits, group, found, step) ||
        !read_float_rows(*rows_of, outputs, floats)) {
      return wrong(kShadow);
    }
  }
  return result(from_units(h.reinterpret_data<float>(), rows, width, step, weight, adapter, floats, count,
                           length, outputs, add, y->reinterpret_data<float>()));
}

// x [rows, width], norm scale, counts, steps (of x, of what down takes), then data, scale and both sides of
// an adapter of gate (empty: none), up and down -> y [rows, width]. Of the `units` counts[units_at] are
// computed. With a shadow places of x's channels, float rows of gate (empty: none) and of up, places of units
// and float rows of down follow, and how many channels of x and how many units had outliers.
Error feed_forward_call(AnyBuffer x, AnyBuffer norm, AnyBuffer counts, AnyBuffer both,
                        ffi::RemainingArgs weights, ffi::Result<AnyBuffer> y, ffi::RemainingRets channels,
                        int64_t bits, int64_t group, bool widen, int64_t units, int64_t activation,
                        bool residual, float eps, int64_t units_at, int64_t rank_at, Places adapters) {
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
  const size_t all = static_cast<size_t>(units);
  size_t used;
  if (!read_count(counts, units_at, 1, all, used)) return wrong(kCount);
  const bool shadowed = weights.size() == 17;
  if (weights.size() != (shadowed ? 17 : 12) || channels.size() != shadowed || adapters.size() != 9)
    return wrong("a block has three weights, each with scales and an adapter");
  Block block{};
  Adapter* const read[3] = {&block.gate_adapter, &block.up_adapter, &block.down_adapter};
  for (size_t i = 0; i < 3; i++) {
    auto data = weights.get<AnyBuffer>(4 * i), scale = weights.get<AnyBuffer>(4 * i + 1);
    auto left = weights.get<AnyBuffer>(4 * i + 2), right = weights.get<AnyBuffer>(4 * i + 3);
    if (!data || !scale || !left || !right) return wrong("a weight is missing");
    if (i == 0 && data->element_count() == 0) continue;
    Units& outwards = i == 0 ? block.gate : block.up;
    if (i == 2 ? !read_reduction(*data, *scale, bits, group, 1, all, width, block.down)
               : !read_units(*data, *scale, bits, group, width, all, outwards)) {
      return wrong("a weight's shape does not fit");
    }
    if (!read_adapter(*left, *right, adapters, 3 * i, all, width, counts, rank_at, *read[i]))
      return wrong(kMisfit);
  }
  block.gate.widen = block.up.widen = block.down.widen = widen;
  Step steps[2];
  if (!read_steps(both, 2, steps)) return wrong(kSteps);
  if (shadowed) {
    int32_t* const found = read_channels(channels, 0, 2);
    auto outer = weights.get<AnyBuffer>(12), inner = weights.get<AnyBuffer>(15);
    if (!found || !outer || !read_shadow(*outer, width, bits, group, found, steps[0])) return wrong(kShadow);
    if (!inner || !read_shadow(*inner, all, bits, group, found + 1, steps[1])) return wrong(kShadow);
    FloatRows* const rows_of[3] = {&block.gate_floats, &block.up_floats, &block.down_floats};
    for (size_t i = 0; i < 3; i++) {
      if (i == 0 && !block.gate.data) continue;
      auto floats = weights.get<AnyBuffer>(i == 2 ? 16 : 13 + i);
      if (!floats || !read_float_rows(*floats, i == 2 ? width : all, *rows_of[i])) return wrong(kShadow);
    }
  }
  return result(feed_forward(x.reinterpret_data<float>(), rows, width, applied, {steps[0], steps[1]}, block,
                             used, static_cast<int>(activation), residual, y->reinterpret_data<float>()));
}

// x [rows, width], norm scale, residual like x -> y like x.
Error add_normed_call(AnyBuffer x, AnyBuffer norm, AnyBuffer residual, ffi::Result<AnyBuffer> y, float eps) {
  const Timer timer;
  size_t rows, width;
  if (!read_rows(x, ffi::DataType::F32, rows, width))
    return wrong("activations must be float32 with at least one row");
  if (y->element_type() != ffi::DataType::F32 || y->element_count() != x.element_count())
    return wrong("the result has another shape");
  Norm applied{nullptr, eps};
  if (!read_floats(norm, width, applied.scale) || !applied.scale)
    return wrong("a norm's scale must be float32 of the activations' width");
  const float* more;
  if (!read_floats(residual, rows * width, more) || !more) return wrong("the residual has another shape");
  add_normed(x.reinterpret_data<float>(), rows, width, applied, more, y->reinterpret_data<float>());
  return Error::Success();
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
  const Units weight{data.untyped_data(), nullptr, 8, 0, dim(data, 0), width, false};
  return result(
      integer_product(x.reinterpret_data<int8_t>(), rows, weight, outputs, y->reinterpret_data<int32_t>()));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(ToUnits, to_units_call,
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("group")
                           .Attr<bool>("widen")
                           .Attr<float>("eps")
                           .Attr<int64_t>("units")
                           .Attr<int64_t>("units_at")
                           .Attr<int64_t>("rank_at")
                           .Attr<Places>("adapters"));
XLA_FFI_DEFINE_HANDLER(FromUnits, from_units_call,
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .RemainingArgs()
                           .Ret<AnyBuffer>()
                           .RemainingRets()
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("group")
                           .Attr<bool>("widen")
                           .Attr<int64_t>("segments")
                           .Attr<bool>("stacked")
                           .Attr<int64_t>("units_at")
                           .Attr<int64_t>("rank_at")
                           .Attr<Places>("adapters"));
XLA_FFI_DEFINE_HANDLER(FeedForward, feed_forward_call,
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .RemainingArgs()
                           .Ret<AnyBuffer>()
                           .RemainingRets()
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("group")
                           .Attr<bool>("widen")
                           .Attr<int64_t>("units")
                           .Attr<int64_t>("activation")
                           .Attr<bool>("residual")
                           .Attr<float>("eps")
                           .Attr<int64_t>("units_at")
                           .Attr<int64_t>("rank_at")
                           .Attr<Places>("adapters"));
XLA_FFI_DEFINE_HANDLER(
    AddNormed, add_normed_call,
    ffi::Ffi::Bind().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Ret<AnyBuffer>().Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER(IntegerProduct, integer_product_call,
                       ffi::Ffi::Bind().Arg<AnyBuffer>().Arg<AnyBuffer>().Ret<AnyBuffer>());

const Target kProductTargets[] = {
    {"jaxllm_to_units", reinterpret_cast<void*>(+ToUnits)},
    {"jaxllm_from_units", reinterpret_cast<void*>(+FromUnits)},
    {"jaxllm_feed_forward", reinterpret_cast<void*>(+FeedForward)},
    {"jaxllm_add_normed", reinterpret_cast<void*>(+AddNormed)},
    {"jaxllm_integer_product", reinterpret_cast<void*>(+IntegerProduct)},
    {nullptr, nullptr},
};

}  // namespace jaxllm
