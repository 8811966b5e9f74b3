// Attention over the cache: new rows written, then tiles of queries (and, for one tile alone, cuts of its
// keys) spread over the threads.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#include "ops.h"
#include "pool.h"

namespace jaxllm {
namespace {

constexpr size_t kCutKeys = 512;
static_assert(kCutKeys % kKeyBlock == 0);
// Queries in a tile of a tree, whose cuts' parts are all there together.
constexpr size_t kTreeRows = 64;
// Fewer new tokens than this are written by the caller alone.
constexpr size_t kFewTokens = 8;

using Buffers = AttentionBuffers;

size_t row_bytes(const AttentionShape& s) { return s.width * (s.half ? 2 : 4); }
// Heads that are used, one batch row's after the other's, and where each lies among all.
size_t heads(const AttentionShape& s) { return s.batch * s.used_heads; }
size_t place(const AttentionShape& s, size_t head) {
  return head / s.used_heads * s.kv_heads + head % s.used_heads;
}

size_t row(const AttentionShape& s, size_t token) { return static_cast<size_t>(s.rows[token]); }
// Rows that tokens up to `last` may see: of a tree all, which need not lie before them.
size_t end_of(const AttentionShape& s, size_t last) {
  return std::min(s.end(), std::max(row(s, last) + 1, s.seen ? s.base + s.nodes : 0));
}
size_t visible(const AttentionShape& s) { return end_of(s, s.tokens - 1); }
// The first row that any of the tokens [first, last) may see.
size_t oldest(const AttentionShape& s, size_t first, size_t last) {
  if (!s.window) return 0;
  const size_t least = static_cast<size_t>(*std::min_element(s.positions + first, s.positions + last));
  return least + 1 > s.window ? least + 1 - s.window : 0;
}

// Turns the valid new keys of one kv head and stores them, and its new values; false without memory.
bool write_head(const Buffers& b, const AttentionShape& s, size_t used) {
  const size_t head = place(s, used);
  float* scratch = static_cast<float*>(thread_scratch(kTaskWork, padded_width(s.width) * sizeof(float)));
  if (!scratch) return false;
  const Backend& kernels = backend();
  for (size_t t = 0; t < s.valid && row(s, t) < s.end(); t++) {
    const size_t token = head / s.kv_heads * s.tokens + t;
    const size_t from = (token * s.kv_heads + head % s.kv_heads) * s.width;
    const size_t to = (head * s.capacity + row(s, t) - s.chunks.tokens) * row_bytes(s);
    const float *cos = s.rotary ? b.cos + t * s.rotary : nullptr,
                *sin = s.rotary ? b.sin + t * s.rotary : nullptr;
    kernels.store_row(b.k + from, s.width, cos, sin, s.rotary, s.half, b.keys + to, scratch);
    kernels.store_row(b.v + from, s.width, nullptr, nullptr, 0, s.half, b.values + to, scratch);
  }
  return true;
}

bool write_new_rows(const Buffers& b, const AttentionShape& s) {
  if (!b.k) return true;
  std::atomic<bool> failed{false};
  const auto write = [&](size_t head) {
    if (!write_head(b, s, head)) failed = true;
  };
  if (s.tokens < kFewTokens) {
    for (size_t head = 0; head < heads(s); head++) write(head);
  } else {
    parallel(heads(s), write);
  }
  return !failed;
}

// One kv head as kernels take it.
Attention head_of(const Buffers& b, const AttentionShape& s, size_t used) {
  const size_t head = place(s, used);
  const size_t row_stride = s.kv_heads * s.group * s.width, cache = head * s.capacity * row_bytes(s);
  const size_t at = head / s.kv_heads * s.tokens * row_stride + head % s.kv_heads * s.group * s.width;
  Attention a{};
  a.q = b.q + at, a.out = b.y + at, a.row_stride = row_stride;
  a.k = b.keys + cache, a.v = b.values + cache;
  a.cos = s.rotary ? b.cos : nullptr, a.sin = b.sin, a.rotary = s.rotary, a.half = s.half;
  a.tokens = s.tokens, a.group = s.group, a.width = s.width;
  a.rows = s.rows, a.positions = s.positions, a.window = s.window;
  a.seen = s.seen, a.base = s.base, a.nodes = s.nodes;
  a.present = std::min(s.nodes, s.end() - std::min(s.end(), s.base));
  a.scale = s.scale, a.softcap = s.softcap;
  a.bias = s.bias ? s.bias + head % s.kv_heads * s.group * s.distances : nullptr, a.distances = s.distances;
  a.sink_logits = s.sink_logits ? s.sink_logits + head % s.kv_heads * s.group : nullptr;
  a.chunks = s.chunks, a.head = used;
  return a;
}

// How the work is divided.
struct Division {
  size_t tokens;     // of a tile, at most
  size_t tiles;      // of a head
  size_t first_cut;  // of the keys that any token sees
  size_t cuts;       // of a tile's keys
  size_t most_rows;  // queries of a tile
  size_t wide;       // floats of a row of sums
  size_t seen_keys;  // that weights have room for; 0 where nobody wants them

  Division(const AttentionShape& s, bool weights) : first_cut(0), cuts(1), wide(padded_width(s.width)) {
    tokens = std::max<size_t>(1, (s.seen ? kTreeRows : kAttentionRows) / s.group);
    tiles = (s.tokens + tokens - 1) / tokens;
    most_rows = std::min(s.tokens, tokens) * s.group;
    // One tile alone walks the whole cache: cut it, so that all threads have a part. Where depends neither on
    // the number of threads nor on what else there is to do, lest they change results: a node of a tree is
    // cut as a token alone.
    const size_t end = visible(s);
    size_t keys = end;
    if (tiles == 1 || s.seen) {
      first_cut = oldest(s, 0, s.tokens) / kCutKeys;
      cuts = std::max<size_t>(1, (end + kCutKeys - 1) / kCutKeys - std::min(first_cut, end / kCutKeys));
      keys = std::min(end, kCutKeys);
    }
    // Whole blocks, and in a tree rows behind the last place where a token stands.
    seen_keys = weights ? (keys + s.nodes + kKeyBlock - 1) / kKeyBlock * kKeyBlock : 0;
  }
  size_t room() const { return padded_width(most_rows); }
  // What a cut leaves: sums, largest scores and totals of its rows, and what they see of each key.
  size_t part_floats() const { return most_rows * (wide + seen_keys) + room() * (2 + seen_keys / kKeyBlock); }

  void lay_out(AttentionTile& t, float* part) const {
    t.sums = part;
    t.top = t.sums + most_rows * wide;
    t.total = t.top + room();
    t.weights = seen_keys ? t.total + room() : nullptr;
    t.tops = t.weights + most_rows * seen_keys;
  }

  AttentionTile tile(const AttentionShape& s, size_t tile, size_t cut) const {
    AttentionTile t{};
    t.first = tile * tokens;
    t.last = std::min(s.tokens, t.first + tokens);
    const size_t begin = oldest(s, t.first, t.last) / kKeyBlock * kKeyBlock;
    const size_t end = end_of(s, t.last - 1);
    t.from = std::min(end, begin), t.to = end;
    if (cuts > 1) {
      const size_t at = (first_cut + cut) * kCutKeys;
      t.from = std::min(end, std::max(begin, at));
      t.to = std::min(end, at + kCutKeys);
    }
    t.reach = s.seen && t.to > s.base / kKeyBlock * kKeyBlock ? end : t.to;
    return t;
  }
};

// The softmax over all cuts of a tile, from what each left: parts of part_floats() floats, one after another.
// Totals become what `add_mass` multiplies by: 0 for rows of tokens that are not valid.
void join(const Attention& a, const AttentionShape& s, const AttentionTile& t, const Division& d,
          float* parts) {
  const size_t stride = d.part_floats(), rows = (t.last - t.first) * a.group;
  for (size_t r = 0; r < rows; r++) {
    const float *sums = parts + r * d.wide, *top = parts + d.most_rows * d.wide + r;
    float* total = parts + d.most_rows * d.wide + d.room() + r;
    const float* const sink = a.sink_logits ? a.sink_logits + r % a.group : nullptr;
    float best = sink ? *sink : -INFINITY;
    for (size_t c = 0; c < d.cuts; c++) {
      if (total[c * stride] != 0.0f) best = std::max(best, top[c * stride]);
    }
    const auto weight = [&](size_t c) {
      // A cut may see nothing, or NaN.
      return total[c * stride] == 0.0f ? 0.0f : d.cuts == 1 && !sink ? 1.0f : expf(top[c * stride] - best);
    };
    float all = sink ? expf(*sink - best) : 0.0f;
    for (size_t c = 0; c < d.cuts; c++) all += weight(c) * total[c * stride];
    // A row that saw nothing (more tokens than the cache holds) is all zeros.
    const float factor = all != 0.0f ? 1.0f / all : 0.0f;
    float* to = a.out + (t.first + r / a.group) * a.row_stride + r % a.group * a.width;
    const bool real = t.first + r / a.group < s.valid;
    bool first = true;
    for (size_t c = 0; c < d.cuts; c++) {
      const float share = weight(c) * factor;
      total[c * stride] = real ? share : 0.0f;
      // What sees nothing is left out, lest it matter how many such cuts there are.
      if (share == 0.0f) continue;
      const float* from = sums + c * stride;
      for (size_t h = 0; h < a.width; h++) to[h] = first ? from[h] * share : to[h] + from[h] * share;
      first = false;
    }
    if (first) std::fill(to, to + a.width, 0.0f);
  }
}

// To sums [batch][keys] what a joined token attends to, from the parts of all heads, one after another.
void add_heads(const AttentionShape& s, const Division& d, float* parts, size_t keys, float* sums) {
  for (size_t head = 0; head < heads(s); head++) {
    for (size_t cut = 0; cut < d.cuts; cut++, parts += d.part_floats()) {
      AttentionTile t = d.tile(s, 0, cut);
      d.lay_out(t, parts);
      backend().add_mass(t, s.tokens * s.group, t.total, sums + head / s.used_heads * keys);
    }
  }
}

// Adds what is attended to each of the rows that are seen to entry `i` of the mass of the cache's rows, and
// of the chunks.
void add_to(const AttentionShape& s, const float* sums, size_t i, float* mass) {
  const size_t seen = visible(s), coded = std::min(seen, s.chunks.tokens);
  for (size_t key = 0; key < coded; key++)
    s.chunk_mass[i * s.masses + key / s.chunks.form.tokens] += sums[key];
  float* to = mass + i * s.capacity;
  for (size_t key = coded; key < seen; key++) to[key - s.chunks.tokens] += sums[key];
}

// mass [batch][1 + tokens][capacity] += sums [tiles][batch][heads][tokens of a tile][keys], each token's
// behind the first row.
void add_sums_by_node(const AttentionShape& s, const Division& d, const float* sums, size_t keys,
                      float* mass) {
  for (size_t i = 0; i < d.tiles * heads(s); i++, sums += d.tokens * keys) {
    const size_t first = i / heads(s) * d.tokens, last = std::min(s.tokens, first + d.tokens);
    const size_t row = i % heads(s) / s.used_heads * (1 + s.tokens) + 1;
    for (size_t token = first; token < last; token++) {
      add_to(s, sums + (token - first) * keys, row + token, mass);
    }
  }
}

// Of a tile's rows each token's alone: the other factors are 0. `own` has room for the tile's rows.
void add_mass_by_node(const AttentionShape& s, const AttentionTile& t, float* own, size_t keys, float* sums) {
  const size_t rows = (t.last - t.first) * s.group;
  for (size_t first = 0; first < rows; first += s.group, sums += keys) {
    std::fill(own, own + padded_width(rows), 0.0f);
    std::copy(t.total + first, t.total + first + s.group, own + first);
    backend().add_mass(t, rows, own, sums);
  }
}

// mass [batch][capacity] += sums [tiles][batch][count][keys].
void add_sums(const AttentionShape& s, const Division& d, const float* sums, size_t count, size_t keys,
              float* mass) {
  for (size_t i = 0; i < d.tiles * s.batch * count; i++, sums += keys) {
    add_to(s, sums, i / count % s.batch, mass);
  }
}

// Attends to `count` cuts of a tile from `first` on, each into its part of the tile's `parts`; `t` is the
// last one. False without memory.
bool attend_cuts(const Attention& a, const AttentionShape& s, const Division& d, size_t tile, size_t first,
                 size_t count, float* parts, AttentionTile& t) {
  const size_t scratch = attention_scratch(d.most_rows, s.width) * sizeof(float);
  float* work = static_cast<float*>(thread_scratch(kTaskWork, scratch));
  if (!work || !parts) return false;
  const auto run = s.seen ? backend().attend_tree : backend().attend;
  for (size_t cut = first; cut < first + count; cut++) {
    t = d.tile(s, tile, cut);
    t.scratch = work;
    d.lay_out(t, parts + cut * d.part_floats());
    run(a, t);
  }
  return true;
}

// What this thread's tile leaves: parts of all its cuts.
float* own_parts(const Division& d) {
  return static_cast<float*>(thread_scratch(kTaskOut, d.cuts * d.part_floats() * sizeof(float)));
}

}  // namespace

Failure attention(const float* q, const float* k, const float* v, const float* cos, const float* sin,
                  void* key_cache, void* value_cache, const AttentionShape& s, float* y, float* mass) {
  const Buffers b{q, k, v, cos, sin, static_cast<char*>(key_cache), static_cast<char*>(value_cache), y};
  Upcoming next;
  if (s.tokens == 1) {
    next = begin_reading({key_cache, value_cache, heads(s), s.capacity * row_bytes(s),
                          (visible(s) - std::min(visible(s), s.chunks.tokens)) * row_bytes(s)});
  }
  if (!write_new_rows(b, s)) return kNoMemory;
  const Division d(s, mass != nullptr);
  // The cuts of a tile alone are tasks of their own, and whoever is last joins them; those of the many tiles
  // of a tree are one thread's, one after another.
  const bool shared = d.cuts > 1 && !s.seen;
  float* parts = nullptr;                    // of all heads and cuts
  std::atomic<uint32_t>* missing = nullptr;  // of each head, the cuts that are not done
  if (shared) {
    const size_t all = heads(s) * d.cuts * d.part_floats();
    parts = static_cast<float*>(thread_scratch(kHidden, all * sizeof(float) + heads(s) * sizeof(*missing)));
    if (!parts) return kNoMemory;
    missing = reinterpret_cast<std::atomic<uint32_t>*>(parts + all);
    for (size_t i = 0; i < heads(s); i++)
      new (missing + i) std::atomic<uint32_t>(static_cast<uint32_t>(d.cuts));
  }
  // What is attended to, in whole blocks of keys. Heads and tiles that have no parts have sums of their own,
  // so that these do not depend on which thread was first.
  const size_t keys = (visible(s) + kKeyBlock - 1) / kKeyBlock * kKeyBlock;
  const size_t summed = shared ? 1 : s.used_heads * (s.by_node ? d.tokens : 1);
  const size_t sums_bytes = d.tiles * s.batch * summed * keys * sizeof(float);
  float* sums = mass ? static_cast<float*>(thread_scratch(kMass, sums_bytes)) : nullptr;
  if (mass && !sums) return kNoMemory;
  if (mass) memset(sums, 0, sums_bytes);
  const size_t tasks_of_tile = shared ? d.cuts : 1, cuts_of_task = shared ? 1 : d.cuts;
  std::atomic<bool> failed{false};
  const auto attend = [&](size_t task) {
    const size_t first_cut = task % tasks_of_tile, head = task / tasks_of_tile % heads(s);
    // The last tiles see most keys: they go first, so that no thread ends with the longest one.
    const size_t tile = d.tiles - 1 - task / tasks_of_tile / heads(s);
    const Attention a = head_of(b, s, head);
    float* of_tile = shared ? parts + head * d.cuts * d.part_floats() : own_parts(d);
    AttentionTile t{};
    if (!attend_cuts(a, s, d, tile, first_cut, cuts_of_task, of_tile, t)) {
      failed = true;
      return;
    }
    float* const work = t.scratch;
    if (shared && missing[head].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    // Always in the same order, whoever it is.
    join(a, s, t, d, of_tile);
    for (size_t cut = 0; mass && !shared && cut < d.cuts; cut++) {
      t = d.tile(s, tile, cut);
      d.lay_out(t, of_tile + cut * d.part_floats());
      if (s.by_node) {
        add_mass_by_node(s, t, work, keys, sums + (tile * heads(s) + head) * d.tokens * keys);
        continue;
      }
      const size_t rows = (t.last - t.first) * s.group;
      backend().add_mass(t, rows, t.total, sums + (tile * heads(s) + head) * keys);
    }
  };
  parallel(heads(s) * d.tiles * tasks_of_tile, attend, next);
  if (failed) return kNoMemory;
  if (mass) {
    if (parts) add_heads(s, d, parts, keys, sums);
    if (s.by_node) {
      add_sums_by_node(s, d, sums, keys, mass);
    } else {
      add_sums(s, d, sums, summed, keys, mass);
    }
  }
  return nullptr;
}

Failure attention_of_rows(const AttentionBuffers* each, const AttentionShape* shapes, size_t count) {
  std::vector<Division> divisions;
  std::vector<size_t> first{0};  // task of each row, and behind the last
  for (size_t i = 0; i < count; i++) {
    if (!write_new_rows(each[i], shapes[i])) return kNoMemory;
    divisions.emplace_back(shapes[i], false);
    first.push_back(first.back() + heads(shapes[i]));
  }
  std::atomic<bool> failed{false};
  // A head's cuts are one task's, and joined in the order in which `attention` joins them.
  parallel(first.back(), [&](size_t task) {
    const size_t i =
        static_cast<size_t>(std::upper_bound(first.begin(), first.end(), task) - first.begin()) - 1;
    const AttentionShape& s = shapes[i];
    const Division& d = divisions[i];
    const Attention a = head_of(each[i], s, task - first[i]);
    float* parts = own_parts(d);
    AttentionTile t{};
    if (!attend_cuts(a, s, d, 0, 0, d.cuts, parts, t)) {
      failed = true;
      return;
    }
    join(a, s, t, d, parts);
  });
  return failed ? kNoMemory : nullptr;
}

}  // namespace jaxllm
