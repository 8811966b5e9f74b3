// Attention as XLA calls it.
#include <algorithm>

#include "chunk_tables.h"
#include "ffi_checks.h"

namespace jaxllm {
namespace {

// The chunks of a layer, of which `tokens` [] are attended to, by the handle of their table [2] and the layer
// []; empty for none. What is wrong, or null.
const char* read_chunks(const AnyBuffer& table, const AnyBuffer& layer, const AnyBuffer& tokens,
                        AttentionShape& s, OpenChunks& open) {
  if (table.element_count() == 0 && tokens.element_count() == 0) return nullptr;
  const auto is = [](const AnyBuffer& each, ffi::DataType type, size_t count) {
    return each.element_type() == type && each.element_count() == count;
  };
  if (!is(table, ffi::DataType::U32, 2) || !is(layer, ffi::DataType::S32, 1) ||
      !is(tokens, ffi::DataType::S32, 1)) {
    return "chunks need a table uint32 [2], a layer and a number of tokens, one int32 each";
  }
  const int32_t count = *tokens.reinterpret_data<int32_t>(), at = *layer.reinterpret_data<int32_t>();
  if (count == 0) return nullptr;
  const uint32_t* const half = table.reinterpret_data<uint32_t>();
  const ChunkTable* const found = open.open(static_cast<uint64_t>(half[1]) << 32 | half[0]);
  if (!found) return "there is no such table of chunks, or it is closed";
  const ChunkForm& form = found->form;
  const size_t chunks = found->bits.size(), size = static_cast<size_t>(count);
  if (at < 0 || static_cast<size_t>(at) >= found->heads.size()) return "a table of chunks has no such layer";
  if (s.batch != 1 || form.width != s.width || form.half != s.half || found->heads[at] < s.used_heads ||
      found->heads[at] > s.kv_heads) {
    return "chunks do not fit the cache";
  }
  if (count < 0 || size % form.tokens || size / form.tokens > chunks)
    return "a table has not so many tokens in whole chunks";
  if (static_cast<size_t>(s.rows[0]) < size) return "new tokens lie among those of chunks";
  s.chunks = {found->blobs.data() + static_cast<size_t>(at) * chunks, found->bits.data(), found->heads[at],
              size, form};
  return nullptr;
}

// q [B, T, K, G, H], new k and v [B, T, K, H] or nothing, cos and sin [T, rotary], caches [B, K, S, H] or of
// several layers [n, B, K, S, H] and the layer's slot [] among them, mass [B, S] or of a tree [B, 1 + T, S]
// or nothing, rows and positions [T], valid [], base [] and seen [T, N] or nothing, chunks before the cache
// (see read_chunks) and their mass [B, n] or of a tree [B, 1 + T, n] or nothing, what is added to scores by
// distance [K, G, distances] or nothing, sink logits [K, G] or nothing -> y like q, and caches and both
// masses, in place. Operand: counts. Of the K heads counts[heads_at] are used. Outputs of one sequence's
// tokens that are not valid are left as they are.
Error attention_call(AnyBuffer q, AnyBuffer k, AnyBuffer v, AnyBuffer cos, AnyBuffer sin, AnyBuffer keys,
                     AnyBuffer values, AnyBuffer mass, AnyBuffer slot, AnyBuffer rows, AnyBuffer positions,
                     AnyBuffer valid, AnyBuffer base, AnyBuffer seen, AnyBuffer chunks, AnyBuffer chunk_layer,
                     AnyBuffer chunk_tokens, AnyBuffer chunk_mass, AnyBuffer bias, AnyBuffer sink_logits,
                     AnyBuffer table, AnyBuffer row, ffi::RemainingArgs buffers, ffi::Result<AnyBuffer> y,
                     ffi::Result<AnyBuffer> new_keys, ffi::Result<AnyBuffer> new_values,
                     ffi::Result<AnyBuffer> new_mass, ffi::Result<AnyBuffer> new_chunk_mass, float scale,
                     float softcap, int64_t window, int64_t heads_at, Columns columns) {
  const Timer timer;
  Operands in;
  if (!in.read(table, row, buffers, columns) || in.size() != 1) return wrong(kOperands);
  const auto is_float = [](const AnyBuffer& each) { return each.element_type() == ffi::DataType::F32; };
  const size_t stacked = slot.element_count() != 0;
  const bool writes = k.element_count() != 0;
  if (rank(q) != 5 || (writes && rank(k) != 4) || rank(keys) != 4 + stacked || !is_float(q) || !is_float(k) ||
      !is_float(v) || q.element_count() == 0) {
    return wrong("queries must be float32 [B, T, K, G, H], new keys and values [B, T, K, H]");
  }
  const size_t batch = dim(q, 0), tokens = dim(q, 1), kv_heads = dim(q, 2), width = dim(q, 4),
               capacity = dim(keys, stacked + 2), layers = stacked ? dim(keys, 0) : 1;
  if ((writes &&
       (dim(k, 0) != batch || dim(k, 1) != tokens || dim(k, 2) != kv_heads || dim(k, 3) != width)) ||
      v.element_count() != k.element_count()) {
    return wrong("new keys and values do not fit the queries");
  }
  const auto type = keys.element_type();
  if ((type != ffi::DataType::F32 && type != ffi::DataType::F16) || values.element_type() != type)
    return wrong("a cache must be float32 or float16");
  if (dim(keys, stacked) != batch || dim(keys, stacked + 1) != kv_heads || dim(keys, stacked + 3) != width ||
      capacity == 0 || values.element_count() != keys.element_count() ||
      new_keys->size_bytes() != keys.size_bytes() || new_values->size_bytes() != values.size_bytes()) {
    return wrong("the cache does not fit the queries");
  }
  const size_t rotary = cos.element_count() / tokens;
  if (!is_float(cos) || !is_float(sin) || cos.element_count() != rotary * tokens ||
      sin.element_count() != cos.element_count() || 2 * rotary > width) {
    return wrong("cosines and sines must be float32 [T, rotary], at most half the head");
  }
  const auto is_int = [](const AnyBuffer& each, size_t count) {
    return each.element_type() == ffi::DataType::S32 && each.element_count() == count;
  };
  if (!is_int(rows, tokens) || !is_int(positions, tokens) || !is_int(valid, 1) || window < 0)
    return wrong("rows and positions must be int32 [T], and how many are valid one int32");
  const int32_t *lie = rows.reinterpret_data<int32_t>(), *stand = positions.reinterpret_data<int32_t>();
  const int32_t count = *valid.reinterpret_data<int32_t>();
  if (lie[0] < 0 || !std::is_sorted(lie, lie + tokens) || *std::min_element(stand, stand + tokens) < 0 ||
      count < 0 || static_cast<size_t>(count) > tokens) {
    return wrong("a row or a position is out of range, or rows do not ascend");
  }
  const size_t nodes = seen.element_count() / tokens;
  if (seen.element_type() != ffi::DataType::PRED || seen.element_count() != nodes * tokens ||
      (nodes && (!is_int(base, 1) || *base.reinterpret_data<int32_t>() < 0))) {
    return wrong("what is seen of a tree must be bool [T, N], and its first row one int32");
  }
  const int32_t layer = stacked && is_int(slot, 1) ? *slot.reinterpret_data<int32_t>() : 0;
  if (stacked && (!is_int(slot, 1) || layer < 0 || static_cast<size_t>(layer) >= layers))
    return wrong("a cache has no such layer");
  size_t used_heads;
  if (!read_count(in[0], heads_at, 0, kv_heads, used_heads)) return wrong("a count is out of range");
  float* attended = nullptr;
  const bool by_node = rank(mass) == 3;
  if (mass.element_count() != 0) {
    if (!is_float(mass) || mass.element_count() != batch * (by_node ? 1 + tokens : 1) * capacity ||
        new_mass->size_bytes() != mass.size_bytes() || (by_node && nodes == 0)) {
      return wrong("the mass must be float32 [B, S], or of a tree [B, 1 + T, S]");
    }
    attended = static_cast<float*>(in_place(mass, new_mass));
  }
  const size_t scored = kv_heads * dim(q, 3), distances = bias.element_count() / scored;
  if (!is_float(bias) || bias.element_count() != scored * distances || (distances && softcap > 0.0f))
    return wrong("what is added to scores must be float32 [K, G, distances], and they are not capped");
  const size_t sinks = sink_logits.element_count();
  if (!is_float(sink_logits) || (sinks && sinks != scored))
    return wrong("sink logits must be float32 [K, G]");
  if (!is_float(*y) || y->element_count() != q.element_count()) return wrong("the result has another shape");
  // Rows of other sequences would begin elsewhere.
  const size_t computed = batch == 1 && count > 0 ? static_cast<size_t>(count) : tokens;
  const size_t offset = keys.size_bytes() / layers * static_cast<size_t>(layer);
  char* const key_cache = static_cast<char*>(in_place(keys, new_keys)) + offset;
  char* const value_cache = static_cast<char*>(in_place(values, new_values)) + offset;
  AttentionShape shape{batch,
                       computed,
                       kv_heads,
                       dim(q, 3),
                       width,
                       capacity,
                       used_heads,
                       rotary,
                       lie,
                       stand,
                       static_cast<size_t>(count),
                       nodes ? static_cast<const uint8_t*>(seen.untyped_data()) : nullptr,
                       nodes ? static_cast<size_t>(*base.reinterpret_data<int32_t>()) : 0,
                       nodes,
                       static_cast<size_t>(window),
                       scale,
                       softcap,
                       type == ffi::DataType::F16,
                       by_node,
                       distances ? bias.reinterpret_data<float>() : nullptr,
                       distances,
                       sinks ? sink_logits.reinterpret_data<float>() : nullptr};
  OpenChunks open;
  if (const char* const what = read_chunks(chunks, chunk_layer, chunk_tokens, shape, open))
    return wrong(what);
  if (chunk_mass.element_count() != 0) {
    const size_t entries = batch * (by_node ? 1 + tokens : 1);
    shape.masses = chunk_mass.element_count() / entries;
    if (!is_float(chunk_mass) || chunk_mass.element_count() != entries * shape.masses ||
        new_chunk_mass->size_bytes() != chunk_mass.size_bytes()) {
      return wrong("the mass of chunks must be float32 [B, n], or of a tree [B, 1 + T, n]");
    }
    shape.chunk_mass = static_cast<float*>(in_place(chunk_mass, new_chunk_mass));
  }
  if (used_heads == 0) return Error::Success();
  if (attended && shape.chunks.tokens && shape.masses * shape.chunks.form.tokens < shape.chunks.tokens)
    return wrong("the mass has no room for all chunks");
  return result(attention(q.reinterpret_data<float>(), writes ? k.reinterpret_data<float>() : nullptr,
                          v.reinterpret_data<float>(), cos.reinterpret_data<float>(),
                          sin.reinterpret_data<float>(), key_cache, value_cache, shape,
                          y->reinterpret_data<float>(), attended));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(AttentionHandler, attention_call,
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
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
                           .Ret<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Ret<AnyBuffer>()
                           .Attr<float>("scale")
                           .Attr<float>("softcap")
                           .Attr<int64_t>("window")
                           .Attr<int64_t>("heads_at")
                           .Attr<Columns>("columns"));

const Target kAttentionTargets[] = {
    {"jaxllm_attention", reinterpret_cast<void*>(+AttentionHandler)},
    {nullptr, nullptr},
};

}  // namespace jaxllm
