// Mixtures of experts as XLA calls them.
#include <vector>

#include "ffi_checks.h"

namespace jaxllm {
namespace {

using Numbers = ffi::Span<const int64_t>;

bool is_indices(const AnyBuffer& buffer, size_t count) {
  return buffer.element_type() == ffi::DataType::S32 && buffer.element_count() == count;
}

// x [rows, width] -> logits [rows, experts], weights and ids [rows, choices]. Operands: norm scale or
// nothing, router [experts, width], bias [experts] or nothing.
Error route_call(AnyBuffer x, AnyBuffer table, AnyBuffer row, ffi::RemainingArgs buffers,
                 ffi::Result<AnyBuffer> logits, ffi::Result<AnyBuffer> weights, ffi::Result<AnyBuffer> ids,
                 float eps, bool normalized, Columns columns) {
  const Timer timer;
  Operands in;
  if (!in.read(table, row, buffers, columns) || in.size() != 3) return wrong(kOperands);
  size_t rows, width, out_rows, choices;
  if (!read_rows(x, ffi::DataType::F32, rows, width))
    return wrong("activations must be float32 with at least one row");
  const Array& router = in[1];
  if (router.type != Type::kF32 || router.rank != 2 || router.dim(1) != width || router.dim(0) == 0)
    return wrong("a router must be float32 of the activations' width");
  const size_t experts = router.dim(0);
  Norm applied{nullptr, eps};
  if (!read_floats(in[0], width, applied.scale))
    return wrong("a norm's scale must be float32 of the activations' width");
  const float* bias = nullptr;
  if (!read_floats(in[2], experts, bias))
    return wrong("a router's bias must be float32, one for each expert");
  if (logits->element_type() != ffi::DataType::F32 || logits->element_count() / experts != rows ||
      !read_rows(*weights, ffi::DataType::F32, out_rows, choices) || out_rows != rows || choices > experts ||
      !is_indices(*ids, rows * choices)) {
    return wrong("the choices have other shapes");
  }
  return result(route(x.reinterpret_data<float>(), rows, width, applied, router.as<float>(), bias, experts,
                      choices, normalized, logits->reinterpret_data<float>(),
                      weights->reinterpret_data<float>(), ids->reinterpret_data<int32_t>()));
}

// The tiles of `pairs` rows of x [rows, width], of which each begins where the one before ends; false where
// one would read or write elsewhere.
bool read_tiles(const AnyBuffer& token, const AnyBuffer& expert, const AnyBuffer& size,
                const AnyBuffer& count, size_t rows, size_t pairs, size_t experts, std::vector<Tile>& out) {
  size_t most, most_rows;
  if (!read_rows(token, ffi::DataType::S32, most, most_rows)) return false;
  if (!is_indices(expert, most) || !is_indices(size, most) || !is_indices(count, 1)) return false;
  const int32_t* tokens = token.reinterpret_data<int32_t>();
  const int32_t used = count.reinterpret_data<int32_t>()[0];
  if (used < 0 || static_cast<size_t>(used) > most) return false;
  size_t start = 0;
  for (size_t i = 0; i < static_cast<size_t>(used); i++) {
    const int32_t number = expert.reinterpret_data<int32_t>()[i], own = size.reinterpret_data<int32_t>()[i];
    if (number < 0 || static_cast<size_t>(number) >= experts) return false;
    if (own <= 0 || static_cast<size_t>(own) > most_rows || static_cast<size_t>(own) > pairs - start)
      return false;
    const Tile tile{tokens + i * most_rows, static_cast<size_t>(own), static_cast<size_t>(number), start};
    for (size_t row = 0; row < tile.rows; row++) {
      if (tile.tokens[row] < 0 || static_cast<size_t>(tile.tokens[row]) >= rows) return false;
    }
    out.push_back(tile);
    start += tile.rows;
  }
  return true;
}

// Factors of the adapters of all experts, [experts, rank, width]: those of one of them.
bool expert_side(const Array& sides, size_t expert, size_t experts, Array& out) {
  out = sides;
  if (sides.count == 0) return true;
  if (sides.rank != 3 || sides.dim(0) != experts || sides.type != Type::kF32) return false;
  out.rank = 2;
  out.dims[0] = sides.dim(1), out.dims[1] = sides.dim(2);
  out.count = sides.count / experts;
  out.data = sides.as<float>() + expert * out.count;
  return true;
}

// x [rows, width], the tiles' tokens, experts, sizes and count -> y [pairs, width], zeros behind the last
// tile. Operands: norm scale or nothing, both sides of the adapters of gate, up and down, [experts, rank,
// units] and [experts, rank, width] (empty: none), then the arrays of gate, up and down of each expert.
Error experts_call(AnyBuffer x, AnyBuffer token, AnyBuffer expert, AnyBuffer size, AnyBuffer count,
                   AnyBuffer table, AnyBuffer row, ffi::RemainingArgs buffers, ffi::Result<AnyBuffer> y,
                   int64_t units, int64_t activation, float eps, Numbers bits, Numbers groups,
                   Columns columns) {
  const Timer timer;
  constexpr size_t kSides = 1, kFirst = 7, kPerExpert = 3 * kWeightArrays;
  Array all_ranks;
  all_ranks.type = Type::kS32;
  Operands in;
  if (!in.read(table, row, buffers, columns)) return wrong(kOperands);
  size_t rows, width, pairs, out_width;
  if (!read_rows(x, ffi::DataType::F32, rows, width))
    return wrong("activations must be float32 with at least one row");
  if (!read_rows(*y, ffi::DataType::F32, pairs, out_width) || out_width != width)
    return wrong("the result has another width");
  const size_t experts = bits.size();
  if (units <= 0 || experts == 0 || groups.size() != experts || in.size() != kFirst + kPerExpert * experts)
    return wrong("each expert needs the arrays of three weights");
  Norm applied{nullptr, eps};
  if (!read_floats(in[0], width, applied.scale))
    return wrong("a norm's scale must be float32 of the activations' width");
  std::vector<Tile> tiles;
  if (!read_tiles(token, expert, size, count, rows, pairs, experts, tiles))
    return wrong("a tile lies outside of its tokens, experts or results");
  const size_t all = static_cast<size_t>(units);
  std::vector<Block> blocks(experts);
  for (size_t e = 0; e < experts; e++) {
    Block& block = blocks[e];
    Adapter* const adapters[3] = {&block.gate_adapter, &block.up_adapter, &block.down_adapter};
    for (size_t i = 0; i < 3; i++) {
      const WeightArrays arrays =
          weight_at(in, kFirst + kPerExpert * e + kWeightArrays * i, bits[e], groups[e]);
      Units& outwards = i == 0 ? block.gate : block.up;
      if (i == 2 ? !read_reduction(arrays, 1, all, width, block.down)
                 : !read_units(arrays, width, all, outwards)) {
        return wrong("a weight's shape does not fit");
      }
      Array left, right;
      if (!expert_side(in[kSides + 2 * i], e, experts, left) ||
          !expert_side(in[kSides + 2 * i + 1], e, experts, right) ||
          !read_adapter(left, right, all, width, all_ranks, *adapters[i])) {
        return wrong("an adapter does not fit");
      }
    }
  }
  float* to = y->reinterpret_data<float>();
  const size_t end = tiles.empty() ? 0 : tiles.back().start + tiles.back().rows;
  memset(to + end * width, 0, (pairs - end) * width * sizeof(float));
  return result(visit_experts(x.reinterpret_data<float>(), width, applied, tiles.data(), tiles.size(),
                              blocks.data(), all, static_cast<int>(activation), to));
}

// What is done with a tile: nothing, all of it, or of one row of a nested expert first what its high planes
// give, then the rest.
enum Action : int32_t { kLeave, kRun, kBegin, kFinish };

// How many inputs share a scale, by the scales [..., groups, ...] of `inputs` inputs; -1 for no number of
// them.
int64_t group_of(const Array& scale, size_t inputs) {
  if (scale.type == Type::kU8) return 64;
  if (scale.type != Type::kF16) return 0;
  const size_t groups = scale.rank > 1 ? scale.dim(1) : 0;
  return groups == divide_up(inputs, 32) ? 32 : groups == divide_up(inputs, 64) ? 64 : -1;
}

// A weight of an expert by the arrays of a table's row from `column` on, in whatever format they have.
bool stored_weight(const TableRow& row, size_t column, bool high_alone, size_t inputs, bool& nested,
                   const Array* (&parts)[kWeightArrays], int64_t& bits, int64_t& group) {
  static const Array none;
  for (size_t i = 0; i < kWeightArrays; i++) {
    parts[i] = row.at(column + i);
    if (!parts[i]) return false;
  }
  const Array& data = *parts[0];
  if (data.rank == 0) return false;
  bits = static_cast<int64_t>(data.dim(data.rank - 1) / 64);
  group = group_of(*parts[1], inputs);
  nested = parts[2]->type != Type::kNone;
  if (high_alone) parts[2] = &none;
  return nested || !high_alone;
}

// x [rows, width], the tiles as for `experts`, of which those of `experts` and above stand for the high
// planes alone, the action of each, and a norm's scale or nothing; a table with a row per layer, of three
// weights of each expert, and the row. Changes in place: the outputs [pairs, width], and what was begun,
// int32 [tiles, 2, panels, groups, 16] or nothing.
Error stored_experts_call(AnyBuffer x, AnyBuffer token, AnyBuffer expert, AnyBuffer size, AnyBuffer count,
                          AnyBuffer action, AnyBuffer norm, AnyBuffer table, AnyBuffer row, AnyBuffer outputs,
                          AnyBuffer begun, ffi::Result<AnyBuffer> y, ffi::Result<AnyBuffer> early,
                          int64_t units, int64_t experts, int64_t activation, float eps) {
  const Timer timer;
  size_t rows, width, pairs, out_width;
  if (!read_rows(x, ffi::DataType::F32, rows, width))
    return wrong("activations must be float32 with at least one row");
  if (!read_rows(*y, ffi::DataType::F32, pairs, out_width) || out_width != width ||
      outputs.element_type() != ffi::DataType::F32 || outputs.element_count() != y->element_count())
    return wrong("the result has another width");
  if (units <= 0 || experts <= 0) return wrong("each expert needs the arrays of three weights");
  const size_t all = static_cast<size_t>(units), number = static_cast<size_t>(experts);
  Norm applied{nullptr, eps};
  if (!read_floats(array_of(norm), width, applied.scale))
    return wrong("a norm's scale must be float32 of the activations' width");
  std::vector<Tile> tiles;
  if (!read_tiles(token, expert, size, count, rows, pairs, 2 * number, tiles) ||
      !is_indices(action, expert.element_count()))
    return wrong("a tile lies outside of its tokens, experts or results");
  const size_t each = divide_up(all, kPanel) * divide_up(width, 64) * kPanel, kept = 2 * each;
  const bool keeps = begun.element_count() != 0;
  if (begun.element_type() != ffi::DataType::S32 || early->element_type() != ffi::DataType::S32 ||
      early->element_count() != begun.element_count() ||
      (keeps && begun.element_count() != expert.element_count() * kept))
    return wrong("what was begun has another shape");
  if (table.element_type() != ffi::DataType::U32 || table.element_count() != 2 ||
      row.element_type() != ffi::DataType::S32 || row.element_count() != 1)
    return wrong(kOperands);
  const uint32_t* halves = table.reinterpret_data<uint32_t>();
  TableRow weights;
  if (!weights.open(static_cast<uint64_t>(halves[1]) << 32 | halves[0], *row.reinterpret_data<int32_t>()))
    return wrong(kOperands);
  float* to = static_cast<float*>(in_place(outputs, y));
  int32_t* sums = static_cast<int32_t*>(in_place(begun, early));
  const int32_t* actions = action.reinterpret_data<int32_t>();
  std::vector<Tile> chosen;
  std::vector<Block> blocks;
  for (size_t i = 0; i < tiles.size(); i++) {
    if (actions[i] == kLeave) continue;
    if (actions[i] < kLeave || actions[i] > kFinish) return wrong("there is no such action");
    const bool high_alone = tiles[i].expert >= number;
    Block block{};
    bool nested = false;
    for (size_t part = 0; part < 3; part++) {
      const Array* arrays[kWeightArrays];
      int64_t bits, group;
      const size_t column = (tiles[i].expert % number * 3 + part) * kWeightArrays;
      if (!stored_weight(weights, column, high_alone, part == 2 ? all : width, nested, arrays, bits, group))
        return wrong("an expert is not in the table, or has no high plane");
      const WeightArrays weight{*arrays[0], *arrays[1], *arrays[2], bits, group};
      Units& outwards = part == 0 ? block.gate : block.up;
      if (part == 2 ? !read_reduction(weight, 1, all, width, block.down)
                    : !read_units(weight, width, all, outwards))
        return wrong("a weight's shape does not fit");
    }
    if (actions[i] != kRun) {
      if (!keeps || !nested || high_alone || tiles[i].rows != 1)
        return wrong("only one row of a nested expert can be begun");
      block.early = sums + i * kept;
      block.finishing = actions[i] == kFinish;
    }
    chosen.push_back(tiles[i]);
    chosen.back().expert = blocks.size();
    blocks.push_back(block);
  }
  return result(visit_experts(x.reinterpret_data<float>(), width, applied, chosen.data(), chosen.size(),
                              blocks.data(), all, static_cast<int>(activation), to));
}

// visits [pairs, width], places and weights [rows, choices], residual or nothing -> y [rows, width].
Error sum_visits_call(AnyBuffer visits, AnyBuffer places, AnyBuffer weights, AnyBuffer residual,
                      ffi::Result<AnyBuffer> y) {
  const Timer timer;
  size_t pairs, width, rows, out_width, weight_rows, choices;
  if (!read_rows(visits, ffi::DataType::F32, pairs, width)) return wrong("visits must be float32");
  if (!read_rows(*y, ffi::DataType::F32, rows, out_width) || out_width != width)
    return wrong("the result has another width");
  if (!read_rows(weights, ffi::DataType::F32, weight_rows, choices) || weight_rows != rows ||
      !is_indices(places, rows * choices)) {
    return wrong("the places and weights of visits have other shapes");
  }
  const float* add;
  if (!read_floats(array_of(residual), rows * width, add)) return wrong("the residual has another shape");
  const int32_t* at = places.reinterpret_data<int32_t>();
  for (size_t i = 0; i < rows * choices; i++) {
    if (at[i] < 0 || static_cast<size_t>(at[i]) >= pairs) return wrong("a place lies outside of the visits");
  }
  sum_visits(visits.reinterpret_data<float>(), width, at, weights.reinterpret_data<float>(), rows, choices,
             add, y->reinterpret_data<float>());
  return Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(Route, route_call,
                       takes<3>()
                           .RemainingArgs()
                           .Ret<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Attr<float>("eps")
                           .Attr<bool>("normalized")
                           .Attr<Columns>("columns"));
XLA_FFI_DEFINE_HANDLER(Experts, experts_call,
                       takes<7>()
                           .RemainingArgs()
                           .Ret<AnyBuffer>()
                           .Attr<int64_t>("units")
                           .Attr<int64_t>("activation")
                           .Attr<float>("eps")
                           .Attr<Numbers>("bits")
                           .Attr<Numbers>("groups")
                           .Attr<Columns>("columns"));
XLA_FFI_DEFINE_HANDLER(StoredExperts, stored_experts_call,
                       takes<11>()
                           .Ret<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Attr<int64_t>("units")
                           .Attr<int64_t>("experts")
                           .Attr<int64_t>("activation")
                           .Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER(SumVisits, sum_visits_call, takes<4>().Ret<AnyBuffer>());

const Target kExpertTargets[] = {
    {"jaxllm_route", reinterpret_cast<void*>(+Route)},
    {"jaxllm_experts", reinterpret_cast<void*>(+Experts)},
    {"jaxllm_stored_experts", reinterpret_cast<void*>(+StoredExperts)},
    {"jaxllm_sum_visits", reinterpret_cast<void*>(+SumVisits)},
    {nullptr, nullptr},
};

}  // namespace jaxllm
