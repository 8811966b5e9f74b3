// Products as XLA calls them.
//
// Rows of activations are buffers; of `rows` rows the first `live` are computed. Everything else may be an
// entry of a weight table (see Operands), and is listed with its shape behind "operands".
#include <algorithm>

#include "ffi_checks.h"

namespace jaxllm {
namespace {

// Steps that activations are quantized by: `count` positive numbers, or none for scales of their own (zeros).
bool read_steps(const Array& array, size_t count, Step* out) {
  const float* steps;
  if (!read_floats(array, count, steps)) return false;
  for (size_t i = 0; i < count; i++) {
    out[i] = {steps ? steps[i] : 0.0f, nullptr, nullptr};
    // False for NaN, too; a step whose reciprocal overflows would make NaN of zeros.
    if (steps && !(steps[i] >= 1e-30f && steps[i] <= 1e30f)) return false;
  }
  return true;
}

// What a step clips is multiplied in floats: each of `width` channels' row in the weights' float rows (or
// below 0), and where the number of channels with outliers goes.
bool read_shadow(const Array& place, size_t width, int64_t bits, int64_t group, int32_t* count, Step& step) {
  if (bits != 8 || group != 0 || step.size == 0) return false;
  if (place.type != Type::kS32 || place.count != width) return false;
  step.place = place.as<int32_t>();
  step.channels = count;
  return true;
}

// Float rows [rows, all outputs] of a weight of which the first `outputs` are used.
bool read_float_rows(const Array& array, size_t outputs, FloatRows& out) {
  if (array.type != Type::kF16 || array.rank != 2 || array.dim(1) < outputs) return false;
  out = {array.as<uint16_t>(), array.dim(0), array.dim(1)};
  return true;
}

// Where the numbers of channels with outliers go: `count` int32, the only one of the results left.
int32_t* read_channels(ffi::RemainingRets& results, size_t at, size_t count) {
  auto out = results.get<AnyBuffer>(at);
  if (!out || (*out)->element_type() != ffi::DataType::S32 || (*out)->element_count() != count)
    return nullptr;
  return (*out)->reinterpret_data<int32_t>();
}

// Operands of a weight: its arrays, and both sides of its adapter.
constexpr size_t kWithAdapter = kWeightArrays + 2;

constexpr const char* kActivations = "activations must be float32 with at least one row";
constexpr const char* kLive = "the number of rows is out of range";
constexpr const char* kNorm = "a norm's scale must be float32 of the activations' width";
constexpr const char* kNoShadow = "a shadow does not fit";
constexpr const char* kSteps = "steps must be numbers in [1e-30, 1e30]";
constexpr const char* kMisfit = "an adapter does not fit";
constexpr const char* kCount = "a count is out of range";

// The result of a block without units: what is added to it, or zeros.
Error only_added(const float* add, size_t count, float* y) {
  if (add)
    std::copy_n(add, count, y);
  else
    std::fill_n(y, count, 0.0f);
  return Error::Success();
}

// x, live -> one result per weight. Operands: norm scale, counts, step, then the arrays of each weight and
// both sides of its adapter. Weights have `units` units each, of which counts[units_at] are computed. With a
// shadow each channel's place in float rows and these rows of each weight follow, and the last result is how
// many channels had outliers.
Error to_units_call(AnyBuffer x, AnyBuffer live, AnyBuffer table, AnyBuffer row, ffi::RemainingArgs buffers,
                    ffi::RemainingRets results, int64_t bits, int64_t group, bool widen, float eps,
                    int64_t units, int64_t units_at, bool shadowed, Columns columns) {
  const Timer timer;
  constexpr size_t kMost = 8;
  Operands in;
  if (!in.read(table, row, buffers, columns)) return wrong(kOperands);
  size_t rows, width;
  if (!read_rows(x, ffi::DataType::F32, rows, width)) return wrong(kActivations);
  const size_t per_weight = kWithAdapter + shadowed, others = shadowed ? 4 : 3;
  const size_t count = in.size() < others ? 0 : (in.size() - others) / per_weight;
  if (count == 0 || count > kMost || results.size() != count + shadowed ||
      in.size() != others + per_weight * count) {
    return wrong("each weight needs data, scales, an adapter and a result");
  }
  const size_t all_rows = rows;
  if (!read_live(live, rows)) return wrong(kLive);
  Norm applied{nullptr, eps};
  if (!read_floats(in[0], width, applied.scale)) return wrong(kNorm);
  Step step;
  if (!read_steps(in[2], 1, &step)) return wrong(kSteps);
  const size_t first = 3, shadow = first + kWithAdapter * count;
  if (shadowed) {
    int32_t* const channels = read_channels(results, count, 1);
    if (!channels || !read_shadow(in[shadow], width, bits, group, channels, step)) return wrong(kNoShadow);
  }
  size_t used;
  if (units <= 0 || !read_count(in[1], units_at, 0, static_cast<size_t>(units), used)) return wrong(kCount);
  Outputs to[kMost];
  for (size_t i = 0; i < count; i++) {
    const size_t at = first + kWithAdapter * i, sides = at + kWeightArrays;
    auto out = results.get<AnyBuffer>(i);
    if (!out) return wrong("a result is missing");
    size_t out_rows, outputs;
    if (!read_rows(**out, ffi::DataType::F32, out_rows, outputs) || out_rows != all_rows)
      return wrong("a result has other rows");
    if (!read_units(weight_at(in, at, bits, group), width, outputs, to[i].weight))
      return wrong("a weight's shape does not fit");
    to[i].weight.widen = widen && all_rows >= kWidenedRows;
    if (!read_adapter(in[sides], in[sides + 1], outputs, width, in[1], to[i].adapter)) return wrong(kMisfit);
    if (outputs % units) return wrong("the outputs do not divide into units");
    to[i].outputs = outputs / units * used;
    to[i].stride = outputs;
    to[i].y = (*out)->reinterpret_data<float>();
    to[i].floats = {};
    if (shadowed && !read_float_rows(in[shadow + 1 + i], outputs, to[i].floats)) return wrong(kNoShadow);
  }
  if (used == 0) return Error::Success();
  return result(to_units(x.reinterpret_data<float>(), rows, applied, step, to, count));
}

// h [rows, segments * length], live, residual or nothing -> y [rows, outputs]. Operands: the arrays of a
// weight, both sides of its adapter, counts, step. Of the segments, or of the inputs of the only one,
// counts[units_at] are summed. With a shadow each channel's place in float rows and these rows follow, and
// how many channels had outliers.
Error from_units_call(AnyBuffer h, AnyBuffer live, AnyBuffer residual, AnyBuffer table, AnyBuffer row,
                      ffi::RemainingArgs buffers, ffi::Result<AnyBuffer> y, ffi::RemainingRets channels,
                      int64_t bits, int64_t group, bool widen, int64_t segments, bool stacked,
                      int64_t units_at, Columns columns) {
  const Timer timer;
  Operands in;
  if (!in.read(table, row, buffers, columns)) return wrong(kOperands);
  constexpr size_t kCounts = kWithAdapter, kStep = kCounts + 1, kShadow = kStep + 1;
  const bool shadowed = in.size() == kShadow + 2;
  if (in.size() != kShadow + (shadowed ? 2 : 0) || channels.size() != shadowed)
    return wrong("a product needs data, scales and an adapter");
  size_t rows, width, out_rows, outputs;
  if (!read_rows(h, ffi::DataType::F32, rows, width)) return wrong(kActivations);
  if (!read_rows(*y, ffi::DataType::F32, out_rows, outputs) || out_rows != rows)
    return wrong("the result has other rows");
  const float* add;
  if (!read_floats(array_of(residual), rows * outputs, add)) return wrong("the residual has another shape");
  if (!read_live(live, rows)) return wrong(kLive);
  if (segments <= 0 || width % segments || (segments > 1 && !stacked))
    return wrong("the activations do not divide into segments");
  size_t count = static_cast<size_t>(segments), length = width / count;
  Reduction weight;
  if (!read_reduction(weight_at(in, 0, bits, group), count, length, outputs, weight))
    return wrong("the weight's shape does not fit");
  weight.widen = widen && out_rows >= kWidenedRows;
  Adapter adapter;
  if (!read_adapter(in[kWeightArrays], in[kWeightArrays + 1], width, outputs, in[kCounts], adapter))
    return wrong(kMisfit);
  size_t& units = stacked ? count : length;
  if (!read_count(in[kCounts], units_at, 0, units, units)) return wrong(kCount);
  Step step;
  if (!read_steps(in[kStep], 1, &step)) return wrong(kSteps);
  FloatRows floats{};
  if (shadowed) {
    int32_t* const found = read_channels(channels, 0, 1);
    if (!found || !read_shadow(in[kShadow], width, bits, group, found, step) ||
        !read_float_rows(in[kShadow + 1], outputs, floats)) {
      return wrong(kNoShadow);
    }
  }
  if (units == 0) return only_added(add, rows * outputs, y->reinterpret_data<float>());
  return result(from_units(h.reinterpret_data<float>(), rows, width, step, weight, adapter, floats, count,
                           length, outputs, add, y->reinterpret_data<float>()));
}

// x [rows, width], live -> y [rows, width]. Operands: norm scale, counts, steps (of x, of what down takes),
// then the arrays and both sides of an adapter of gate (empty: none), up and down. Of the `units`
// counts[units_at] are computed; where counts have more rows, row i of x uses counts[1 + i][units_at] of
// these. With a shadow places of x's channels, float rows of gate (empty: none) and
// of up, places of units and float rows of down follow, and how many channels of x and how many units had
// outliers.
Error feed_forward_call(AnyBuffer x, AnyBuffer live, AnyBuffer table, AnyBuffer row,
                        ffi::RemainingArgs buffers, ffi::Result<AnyBuffer> y, ffi::RemainingRets channels,
                        int64_t bits, int64_t group, bool widen, int64_t units, int64_t activation,
                        bool residual, float eps, int64_t units_at, Columns columns) {
  const Timer timer;
  constexpr size_t kFirst = 3, kShadowed = kFirst + 3 * kWithAdapter;
  Operands in;
  if (!in.read(table, row, buffers, columns)) return wrong(kOperands);
  const bool shadowed = in.size() == kShadowed + 5;
  if (in.size() != (shadowed ? kShadowed + 5 : kShadowed) || channels.size() != shadowed)
    return wrong("a block has three weights, each with scales and an adapter");
  size_t rows, width;
  if (!read_rows(x, ffi::DataType::F32, rows, width)) return wrong(kActivations);
  if (y->element_type() != ffi::DataType::F32 || y->element_count() != x.element_count())
    return wrong("the result has another shape");
  const size_t all_rows = rows;
  if (!read_live(live, rows)) return wrong(kLive);
  Norm applied{nullptr, eps};
  if (!read_floats(in[0], width, applied.scale)) return wrong(kNorm);
  if (units <= 0) return wrong("a feed-forward block has at least one unit");
  const size_t all = static_cast<size_t>(units);
  size_t used;
  if (!read_count(in[1], units_at, 0, all, used)) return wrong(kCount);
  Block block{};
  if (!read_row_counts(in[1], units_at, all_rows, used, block.row_units, block.unit_stride))
    return wrong(kCount);
  Adapter* const read[3] = {&block.gate_adapter, &block.up_adapter, &block.down_adapter};
  for (size_t i = 0; i < 3; i++) {
    const size_t at = kFirst + kWithAdapter * i, sides = at + kWeightArrays;
    const WeightArrays arrays = weight_at(in, at, bits, group);
    if (i == 0 && in[at].count == 0) continue;
    Units& outwards = i == 0 ? block.gate : block.up;
    if (i == 2 ? !read_reduction(arrays, 1, all, width, block.down)
               : !read_units(arrays, width, all, outwards)) {
      return wrong("a weight's shape does not fit");
    }
    if (!read_adapter(in[sides], in[sides + 1], all, width, in[1], *read[i])) return wrong(kMisfit);
  }
  block.gate.widen = block.up.widen = block.down.widen = widen && all_rows >= kWidenedRows;
  Step steps[2];
  if (!read_steps(in[2], 2, steps)) return wrong(kSteps);
  if (shadowed) {
    int32_t* const found = read_channels(channels, 0, 2);
    if (!found || !read_shadow(in[kShadowed], width, bits, group, found, steps[0])) return wrong(kNoShadow);
    if (!read_shadow(in[kShadowed + 3], all, bits, group, found + 1, steps[1])) return wrong(kNoShadow);
    FloatRows* const rows_of[3] = {&block.gate_floats, &block.up_floats, &block.down_floats};
    for (size_t i = 0; i < 3; i++) {
      if (i == 0 && !block.gate.stored.data) continue;
      const Array& floats = in[kShadowed + (i == 2 ? 4 : 1 + i)];
      if (!read_float_rows(floats, i == 2 ? width : all, *rows_of[i])) return wrong(kNoShadow);
    }
  }
  if (used == 0) {
    const float* const input = x.reinterpret_data<float>();
    return only_added(residual ? input : nullptr, rows * width, y->reinterpret_data<float>());
  }
  return result(feed_forward(x.reinterpret_data<float>(), rows, width, applied, {steps[0], steps[1]}, block,
                             used, static_cast<int>(activation), residual, y->reinterpret_data<float>()));
}

// x [rows, width], residual like x, live -> y like x. Operand: norm scale.
Error add_normed_call(AnyBuffer x, AnyBuffer residual, AnyBuffer live, AnyBuffer table, AnyBuffer row,
                      ffi::RemainingArgs buffers, ffi::Result<AnyBuffer> y, float eps, Columns columns) {
  const Timer timer;
  Operands in;
  if (!in.read(table, row, buffers, columns) || in.size() != 1) return wrong(kOperands);
  size_t rows, width;
  if (!read_rows(x, ffi::DataType::F32, rows, width)) return wrong(kActivations);
  if (y->element_type() != ffi::DataType::F32 || y->element_count() != x.element_count())
    return wrong("the result has another shape");
  Norm applied{nullptr, eps};
  if (!read_floats(in[0], width, applied.scale) || !applied.scale) return wrong(kNorm);
  const float* more;
  if (!read_floats(array_of(residual), rows * width, more) || !more)
    return wrong("the residual has another shape");
  if (!read_live(live, rows)) return wrong(kLive);
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
  const Units weight{{data.untyped_data(), nullptr, nullptr, 8, 0, false}, dim(data, 0), width, false};
  return result(
      integer_product(x.reinterpret_data<int8_t>(), rows, weight, outputs, y->reinterpret_data<int32_t>()));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(ToUnits, to_units_call,
                       takes<4>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("group")
                           .Attr<bool>("widen")
                           .Attr<float>("eps")
                           .Attr<int64_t>("units")
                           .Attr<int64_t>("units_at")
                           .Attr<bool>("shadowed")
                           .Attr<Columns>("columns"));
XLA_FFI_DEFINE_HANDLER(FromUnits, from_units_call,
                       takes<5>()
                           .RemainingArgs()
                           .Ret<AnyBuffer>()
                           .RemainingRets()
                           .Attr<int64_t>("bits")
                           .Attr<int64_t>("group")
                           .Attr<bool>("widen")
                           .Attr<int64_t>("segments")
                           .Attr<bool>("stacked")
                           .Attr<int64_t>("units_at")
                           .Attr<Columns>("columns"));
XLA_FFI_DEFINE_HANDLER(FeedForward, feed_forward_call,
                       takes<4>()
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
                           .Attr<Columns>("columns"));
XLA_FFI_DEFINE_HANDLER(
    AddNormed, add_normed_call,
    takes<5>().RemainingArgs().Ret<AnyBuffer>().Attr<float>("eps").Attr<Columns>("columns"));
XLA_FFI_DEFINE_HANDLER(IntegerProduct, integer_product_call, takes<2>().Ret<AnyBuffer>());

const Target kProductTargets[] = {
    {"jaxllm_to_units", reinterpret_cast<void*>(+ToUnits)},
    {"jaxllm_from_units", reinterpret_cast<void*>(+FromUnits)},
    {"jaxllm_feed_forward", reinterpret_cast<void*>(+FeedForward)},
    {"jaxllm_add_normed", reinterpret_cast<void*>(+AddNormed)},
    {"jaxllm_integer_product", reinterpret_cast<void*>(+IntegerProduct)},
    {nullptr, nullptr},
};

}  // namespace jaxllm
