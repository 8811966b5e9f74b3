// Attention as XLA calls it.
#include <algorithm>
#include <vector>

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

// For one token of each of R sequences: q [R, K, G, H], new k and v [R, K, H], cos and sin [R, rotary],
// positions [R], written [R] 0 or 1, slot [] among the layers of stacked caches or nothing, used heads [R] or
// nothing, sink logits [K, G] or nothing, then each one's keys and values, [1, K, S, H] or [n, 1, K, S, H] ->
// y like q, with zeros for sequences that are not written, and the caches, in place.
Error row_attention_call(AnyBuffer q, AnyBuffer k, AnyBuffer v, AnyBuffer cos, AnyBuffer sin,
                         AnyBuffer positions, AnyBuffer written, AnyBuffer slot, AnyBuffer heads,
                         AnyBuffer sink_logits, ffi::RemainingArgs caches, ffi::Result<AnyBuffer> y,
                         ffi::RemainingRets results, float scale, float softcap, int64_t window) {
  const Timer timer;
  const auto is_float = [](const AnyBuffer& each) { return each.element_type() == ffi::DataType::F32; };
  if (rank(q) != 4 || !is_float(q) || !is_float(k) || !is_float(v) || q.element_count() == 0 || window < 0)
    return wrong("queries must be float32 [R, K, G, H], new keys and values [R, K, H]");
  const size_t count = dim(q, 0), kv_heads = dim(q, 1), group = dim(q, 2), width = dim(q, 3);
  const size_t fresh = count * kv_heads * width, rotary = cos.element_count() / count;
  if (k.element_count() != fresh || v.element_count() != fresh)
    return wrong("new keys and values do not fit the queries");
  if (!is_float(cos) || !is_float(sin) || cos.element_count() != rotary * count ||
      sin.element_count() != cos.element_count() || 2 * rotary > width) {
    return wrong("cosines and sines must be float32 [R, rotary], at most half the head");
  }
  const auto ints = [](const AnyBuffer& each) { return each.reinterpret_data<int32_t>(); };
  const auto is_int = [](const AnyBuffer& each, size_t length) {
    return each.element_type() == ffi::DataType::S32 && each.element_count() == length;
  };
  if (!is_int(positions, count) || !is_int(written, count))
    return wrong("positions, and which are written, must be int32 [R]");
  const size_t sinks = sink_logits.element_count();
  if (!is_float(sink_logits) || (sinks && sinks != kv_heads * group))
    return wrong("sink logits must be float32 [K, G]");
  if (!is_float(*y) || y->element_count() != q.element_count()) return wrong("the result has another shape");
  if (caches.size() != 2 * count || results.size() != caches.size())
    return wrong("each sequence needs keys and values, and as many results");
  const size_t stacked = slot.element_count() != 0;
  if (stacked && !is_int(slot, 1)) return wrong("a slot must be one int32");
  const auto type = caches.get<AnyBuffer>(0)->element_type();
  if (type != ffi::DataType::F32 && type != ffi::DataType::F16)
    return wrong("a cache must be float32 or float16");
  std::vector<AttentionBuffers> all;
  std::vector<AttentionShape> shapes;
  float* out = y->reinterpret_data<float>();
  const size_t of_one = kv_heads * group * width;
  for (size_t i = 0; i < count; i++) {
    char* memory[2];
    size_t capacity = 0;
    for (size_t j = 0; j < 2; j++) {
      auto cache = caches.get<AnyBuffer>(2 * i + j);
      auto replaced = results.get<AnyBuffer>(2 * i + j);
      if (!cache || !replaced || (*replaced)->size_bytes() != cache->size_bytes())
        return wrong("a cache is missing");
      const size_t layers = stacked && rank(*cache) == 5 ? dim(*cache, 0) : 1;
      if (rank(*cache) != 4 + stacked || cache->element_type() != type || dim(*cache, stacked) != 1 ||
          dim(*cache, stacked + 1) != kv_heads || dim(*cache, stacked + 3) != width ||
          (j && dim(*cache, stacked + 2) != capacity) || cache->element_count() == 0) {
        return wrong("the cache does not fit the queries");
      }
      capacity = dim(*cache, stacked + 2);
      const int32_t layer = stacked ? *ints(slot) : 0;
      if (layer < 0 || static_cast<size_t>(layer) >= layers) return wrong("a cache has no such layer");
      memory[j] = static_cast<char*>(in_place(*cache, *replaced)) +
                  cache->size_bytes() / layers * static_cast<size_t>(layer);
    }
    size_t used;
    if (!read_count(array_of(heads), static_cast<int64_t>(i), 0, kv_heads, used))
      return wrong("a count is out of range");
    const int32_t* at = ints(positions) + i;
    const int32_t writes = ints(written)[i];
    if (*at < 0 || writes < 0 || writes > 1)
      return wrong("a position is out of range, or more than one is written");
    if (!writes) {
      std::fill(out + i * of_one, out + (i + 1) * of_one, 0.0f);
      continue;
    }
    const size_t own = i * kv_heads * width;
    all.push_back({q.reinterpret_data<float>() + i * of_one, k.reinterpret_data<float>() + own,
                   v.reinterpret_data<float>() + own, cos.reinterpret_data<float>() + i * rotary,
                   sin.reinterpret_data<float>() + i * rotary, memory[0], memory[1], out + i * of_one});
    AttentionShape shape{1,     1,       kv_heads,
                         group, width,   capacity,
                         used,  rotary,  at,
                         at,    1,       nullptr,
                         0,     0,       static_cast<size_t>(window),
                         scale, softcap, type == ffi::DataType::F16,
                         false};
    if (sinks) shape.sink_logits = sink_logits.reinterpret_data<float>();
    shapes.push_back(shape);
  }
  return result(attention_of_rows(all.data(), shapes.data(), all.size()));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(AttentionHandler, attention_call,
                       takes<22>()
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

XLA_FFI_DEFINE_HANDLER(RowAttention, row_attention_call,
                       takes<10>()
                           .RemainingArgs()
                           .Ret<AnyBuffer>()
                           .RemainingRets()
                           .Attr<float>("scale")
                           .Attr<float>("softcap")
                           .Attr<int64_t>("window"));

const Target kAttentionTargets[] = {
    {"jaxllm_attention", reinterpret_cast<void*>(+AttentionHandler)},
    {"jaxllm_row_attention", reinterpret_cast<void*>(+RowAttention)},
    {nullptr, nullptr},
};

}  // namespace jaxllm
