// Attention with a running softmax (Flash Attention's, arXiv 2205.14135): part of compute.inl.

// Scores of one row's keys [from, to) of a block become their weights against the largest score so far, the
// others zeros; what the row has summed up shrinks when that grows. Returns whether it sees any key.
ALWAYS_INLINE bool weigh(float* row, size_t from, size_t to, float softcap, float* sums, size_t wide,
                         float* top, float* total) {
  constexpr int kVectors = kKeyBlock / 16;
  F score[kVectors];
  if (from >= to) {
    UNROLL for (int i = 0; i < kVectors; i++) fstore(row + 16 * i, fzero());
    return false;
  }
  const bool all = from == 0 && to == kKeyBlock;
  if (softcap > 0.0f) {
    const F cap = fset(softcap), inverse = fset(1.0f / softcap);
    UNROLL for (int i = 0; i < kVectors; i++) {
      fstore(row + 16 * i, fmul(tanh_of(fmul(fload(row + 16 * i), inverse)), cap));
    }
  }
  if (!all) {
    for (size_t s = 0; s < from; s++) row[s] = -1e30f;
    for (size_t s = to; s < kKeyBlock; s++) row[s] = -1e30f;
  }
  F best = score[0] = fload(row);
  UNROLL for (int i = 1; i < kVectors; i++) {
    score[i] = fload(row + 16 * i);
    best = fmax(score[i], best);
  }
  const float largest = ftop(best);
  if (largest > *top) {
    const float shrink = *total > 0.0f ? __builtin_expf(*top - largest) : 0.0f;
    *top = largest;
    *total *= shrink;
    for (size_t h = 0; h < wide; h += 16) fstore(sums + h, fmul(fload(sums + h), fset(shrink)));
  }
  const F base = fset(*top);
  UNROLL for (int i = 0; i < kVectors; i++) {
    score[i] = exponential(fsub(score[i], base));
    fstore(row + 16 * i, score[i]);
  }
  if (!all) {
    for (size_t s = 0; s < from; s++) row[s] = 0.0f;
    for (size_t s = to; s < kKeyBlock; s++) row[s] = 0.0f;
    UNROLL for (int i = 0; i < kVectors; i++) score[i] = fload(row + 16 * i);
  }
  F sum = score[0];
  UNROLL for (int i = 1; i < kVectors; i++) sum = fadd(sum, score[i]);
  *total += fsum(sum);
  return true;
}

// Fewer queries of a block of keys than this use each key a few times only: they read along the head.
constexpr size_t kFewRows = 9;

// What a tile works in: queries [rows][wide], as they are and transformed as coded keys are, scores
// [rows][kKeyBlock], keys and values [kKeyBlock][wide], and what chunks take.
struct TileScratch {
  size_t rows, wide;
  float *q, *spread_q, *scores, *keys, *values;
  CodedScratch coded;
  TileScratch(const Attention& a, const AttentionTile& t)
      : rows((t.last - t.first) * a.group),
        wide(padded_width(a.width)),
        q(t.scratch),
        spread_q(q + rows * wide),
        scores(spread_q + rows * wide),
        keys(scores + rows * kKeyBlock),
        values(keys + kKeyBlock * wide),
        coded(values + kKeyBlock * wide, wide) {}
  // Where the rows' scores of a block of keys become weights. Those that are asked for later stay there.
  float* weights_of(const AttentionTile& t, size_t block) const {
    return t.weights ? t.weights + (block - t.from) * rows : scores;
  }
  // Where the rows' largest scores are kept beside them.
  float* tops_of(const AttentionTile& t, size_t block) const {
    return t.tops + (block - t.from) / kKeyBlock * padded_width(rows);
  }
};

// Scales and turns a tile's queries; nothing is summed up yet.
void begin_tile(const Attention& a, const AttentionTile& t, const TileScratch& own) {
  const size_t width = a.width, wide = own.wide;
  for (size_t r = 0; r < own.rows; r++) {
    const size_t token = t.first + r / a.group;
    const float* from = a.q + token * a.row_stride + r % a.group * width;
    float* q = own.q + r * wide;
    for (size_t h = 0; h < wide; h++) q[h] = h < width ? from[h] * a.scale : 0.0f;
    if (a.cos) turn(q, a.cos + token * a.rotary, a.sin + token * a.rotary, a.rotary);
    if (a.chunks.tokens) {
      memcpy(own.spread_q + r * wide, q, wide * sizeof(float));
      if (a.chunks.form.rotated) spread(own.spread_q + r * wide, width, a.chunks.form.block());
    }
    t.top[r] = -__builtin_inff();
    t.total[r] = 0.0f;
    for (size_t h = 0; h < wide; h += 16) fstore(t.sums + r * wide + h, fzero());
  }
}

// The first row of the cache that a token at `position` may see.
ALWAYS_INLINE size_t oldest_row(const Attention& a, size_t token) {
  const size_t position = static_cast<size_t>(a.positions[token]);
  return a.window && position + 1 > a.window ? position + 1 - a.window : 0;
}

// Adds to the scores of the keys that stand at [block + from, block + to) what belongs to their distance from
// a query at `position` (see Attention).
ALWAYS_INLINE void add_bias(const float* bias, size_t distances, size_t position, size_t block, size_t from,
                            size_t to, float* scores) {
  // Keys before `near` are as far as the first entry says.
  const size_t near = position + 1 > distances ? position + 1 - distances : 0;
  size_t s = from;
  for (; s < to && block + s < near; s++) scores[s] += bias[0];
  const float* const of_key = bias + (block + s + distances - 1 - position);
  // A key behind its query has the query's own place.
  const size_t last = position + 1 > block ? position + 1 - block : 0, end = last < to ? last : to;
  const size_t begin = s;
  for (; s < end; s++) scores[s] += of_key[s - begin];
  for (; s < to; s++) scores[s] += bias[distances - 1];
}

// Weighs row r's scores of the keys [block, block + count), of which those before `end` are there for it.
ALWAYS_INLINE bool weigh_row(const Attention& a, const AttentionTile& t, const TileScratch& own,
                             float* scores, size_t r, size_t block, size_t count, size_t end) {
  const size_t oldest = oldest_row(a, t.first + r / a.group), last = end < block ? 0 : end - block;
  const size_t to = last < count ? last : count;
  const size_t from = oldest > block ? (oldest - block < to ? oldest - block : to) : 0;
  if (a.bias) {
    add_bias(a.bias + r % a.group * a.distances, a.distances,
             static_cast<size_t>(a.positions[t.first + r / a.group]), block, from, to, scores);
  }
  return weigh(scores, from, to, a.softcap, t.sums + r * own.wide, own.wide, t.top + r, t.total + r);
}

// Rows of the cache, which come behind the chunks', as `cached_rows` gives them.
ALWAYS_INLINE const char* rows_at(const Attention& a, const void* cache, size_t row) {
  return static_cast<const char*>(cache) + (row - a.chunks.tokens) * a.width * (a.half ? 2 : 4);
}

// Of the rows [block, block + count), how many are chunks'.
ALWAYS_INLINE size_t coded_count(const Attention& a, size_t block, size_t count) {
  const size_t tokens = a.chunks.tokens > block ? a.chunks.tokens - block : 0;
  return tokens < count ? tokens : count;
}

// Coded keys or values [block, block + count) as floats [count][wide], transformed as they are kept.
void coded_block(const Attention& a, const TileScratch& own, size_t block, size_t count, bool values,
                 float* out) {
  each_chunk(a.chunks, block, block + count, [&](const ChunkRows& rows) {
    const CodedRows each(a.chunks, a.head, rows, values);
    float* to = out + (rows.row - block) * own.wide;
    if (each.part.bits) return coded_floats(each, own.wide, own.coded, to);
    const float* there = cached_rows(each.data(), a.half, a.width, own.wide, 0, rows.count, to);
    if (there != to) memcpy(to, there, rows.count * own.wide * sizeof(float));
  });
}

// scores [rows][kKeyBlock] of `rows` queries from `first` on with a head's rows as they lie in memory. Few
// are widened on the way instead of in scratch.
void plain_scores(const Attention& a, const TileScratch& own, size_t first, size_t rows, const void* keys,
                  size_t count, float* scores) {
  const float* q = own.q + first * own.wide;
  if (a.half && a.width == own.wide && rows < kFewRows) {
    return scores_of_few(rows, q, static_cast<const uint16_t*>(keys), count, own.wide, scores);
  }
  const float* from = cached_rows(keys, a.half, a.width, own.wide, 0, count, own.values);
  scores_of_few(rows, q, from, count, own.wide, scores);
}

// The same of coded keys [block, block + count), for rows that are `few`.
void coded_key_scores(const Attention& a, const TileScratch& own, size_t first, size_t rows, size_t block,
                      size_t count, float* scores) {
  each_chunk(a.chunks, block, block + count, [&](const ChunkRows& of) {
    const CodedRows keys(a.chunks, a.head, of, false);
    const float* q = own.spread_q + first * own.wide;
    float* to = scores + (of.row - block);
    if (!keys.part.bits) {
      plain_scores(a, own, first, rows, keys.data(), of.count, to);
    } else if (whole_vectors(a.chunks, keys.part.bits)) {
      coded_scores(keys, rows, q, own.wide, own.coded, to);
    } else {
      coded_floats(keys, own.wide, own.coded, own.keys);
      scores_of_few(rows, q, own.keys, of.count, own.wide, to);
    }
  });
}

// scores [rows][kKeyBlock] of `rows` queries from `first` on with the keys [block, block + count); `few`:
// by products along the head.
void score_keys(const Attention& a, const TileScratch& own, size_t first, size_t rows, size_t block,
                size_t count, bool few, float* scores) {
  const size_t coded = coded_count(a, block, count);
  if (few) {
    coded_key_scores(a, own, first, rows, block, coded, scores);
    if (coded == count) return;
    const char* keys = rows_at(a, a.k, block + coded);
    return plain_scores(a, own, first, rows, keys, count - coded, scores + coded);
  }
  const float *q = own.q + first * own.wide, *from = own.values;
  if (coded == 0) {
    from = cached_rows(rows_at(a, a.k, block), a.half, a.width, own.wide, 0, count, own.values);
  } else {
    coded_block(a, own, block, coded, false, own.values);
    if (coded == count) {
      q = own.spread_q + first * own.wide;
    } else {
      float* to = own.values + coded * own.wide;
      for (size_t s = 0; s < coded && a.chunks.form.rotated; s++)
        spread(own.values + s * own.wide, a.width, a.chunks.form.block());
      const char* rest = rows_at(a, a.k, block + coded);
      const float* there = cached_rows(rest, a.half, a.width, own.wide, 0, count - coded, to);
      if (there != to) memcpy(to, there, (count - coded) * own.wide * sizeof(float));
    }
  }
  scores_of_many(rows, q, from, count, own.wide, own.keys, scores);
}

// Sums of values that were transformed, back.
void settle_sums(const Attention& a, size_t rows, size_t wide, float* sums) {
  for (size_t r = 0; r < rows; r++) spread(sums + r * wide, a.width, a.chunks.form.block());
}

// sums [rows][wide] += weights [rows][kKeyBlock] x values, rows of a head as they lie in memory.
void plain_sums(const Attention& a, const TileScratch& own, size_t rows, const float* weights,
                const void* values, size_t count, float* sums) {
  const size_t wide = own.wide;
  if (a.half && a.width == wide && rows < kFewRows) {
    const uint16_t* from = static_cast<const uint16_t*>(values);
    return float_product(rows, wide, weights, kKeyBlock, from, wide, count, sums, wide, true);
  }
  const float* from = cached_rows(values, a.half, a.width, wide, 0, count, own.values);
  float_product(rows, wide, weights, kKeyBlock, from, wide, count, sums, wide, true);
}

// sums [rows][wide] += weights [rows][kKeyBlock] x coded values [block, block + count), transformed as they
// are kept.
void add_coded_values(const Attention& a, const TileScratch& own, size_t rows, size_t block, size_t count,
                      bool few, const float* weights, float* sums) {
  if (!few) {
    coded_block(a, own, block, count, true, own.values);
    return float_product(rows, own.wide, weights, kKeyBlock, own.values, own.wide, count, sums, own.wide,
                         true);
  }
  each_chunk(a.chunks, block, block + count, [&](const ChunkRows& of) {
    const CodedRows values(a.chunks, a.head, of, true);
    const float* each = weights + (of.row - block);
    if (!values.part.bits) {
      plain_sums(a, own, rows, each, values.data(), of.count, sums);
    } else if (whole_vectors(a.chunks, values.part.bits)) {
      coded_values(values, rows, each, own.wide, own.coded, sums);
    } else {
      coded_floats(values, own.wide, own.coded, own.values);
      float_product(rows, own.wide, each, kKeyBlock, own.values, own.wide, of.count, sums, own.wide, true);
    }
  });
}

// Whether sums from row `from` on begin transformed: coded values come first, and sums of theirs go back
// before anything is added to them.
ALWAYS_INLINE bool begins_spread(const Attention& a, size_t from) {
  return a.chunks.form.rotated && from < a.chunks.tokens;
}

// Adds the weighted values [block, block + count); `is_spread`: whether sums are transformed, before and
// then.
void sum_values(const Attention& a, const TileScratch& own, size_t rows, size_t block, size_t count, bool few,
                const float* weights, float* sums, bool& is_spread) {
  const size_t coded = coded_count(a, block, count);
  if (coded) add_coded_values(a, own, rows, block, coded, few, weights, sums);
  if (coded == count) return;
  if (is_spread) settle_sums(a, rows, own.wide, sums);
  is_spread = false;
  const char* values = rows_at(a, a.v, block + coded);
  plain_sums(a, own, rows, weights + coded, values, count - coded, sums);
}

void attend(const Attention& a, const AttentionTile& t) {
  const TileScratch own(a, t);
  const size_t rows = own.rows;
  const bool few = rows < kFewRows;
  bool is_spread = begins_spread(a, t.from);
  begin_tile(a, t, own);
  for (size_t block = t.from; block < t.to; block += kKeyBlock) {
    const size_t count = t.to - block < kKeyBlock ? t.to - block : kKeyBlock;
    float* scores = own.weights_of(t, block);
    score_keys(a, own, 0, rows, block, count, few, scores);
    bool any = false;
    for (size_t r = 0; r < rows; r++) {
      const size_t end = static_cast<size_t>(a.rows[t.first + r / a.group]) + 1;
      any |= weigh_row(a, t, own, scores + r * kKeyBlock, r, block, count, end);
    }
    if (t.weights) memcpy(own.tops_of(t, block), t.top, rows * sizeof(float));
    if (any) sum_values(a, own, rows, block, count, few, scores, t.sums, is_spread);
  }
  if (is_spread) settle_sums(a, rows, own.wide, t.sums);
}

void add_mass(const AttentionTile& t, size_t rows, const float* factors, float* mass) {
  constexpr int kVectors = kKeyBlock / 16;
  const float *weights = t.weights, *tops = t.tops;
  for (size_t block = t.from; block < t.reach; block += kKeyBlock, tops += padded_width(rows)) {
    F sum[kVectors];
    UNROLL for (int i = 0; i < kVectors; i++) sum[i] = fload(mass + block + 16 * i);
    for (size_t first = 0; first < rows; first += 16) {
      float shrink[16];
      const F grown = fsub(fload(tops + first), fload(t.top + first));
      fstore(shrink, fmul(fload(factors + first), exponential(grown)));
      for (size_t r = first; r < rows && r < first + 16; r++, weights += kKeyBlock) {
        // A block is all zeros of which the row sees no key, and its largest score may then be none.
        if (!(shrink[r - first] > 0.0f)) continue;
        const F factor = fset(shrink[r - first]);
        UNROLL for (int i = 0; i < kVectors; i++) sum[i] = fma(factor, fload(weights + 16 * i), sum[i]);
      }
    }
    UNROLL for (int i = 0; i < kVectors; i++) fstore(mass + block + 16 * i, sum[i]);
  }
}
