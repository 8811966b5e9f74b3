// Attention inside documents and its gradients (FlashAttention-2's tiles, arXiv 2307.08691): part of
// compute.inl.
//
// A document's keys are packed once; then a tile of queries at a time meets blocks of kKeyBlock keys. All
// products are strips of a few rows whose sums stay in registers.

constexpr int kStripRows = kFloatPanels > 1 ? 8 : kFloatRows;
constexpr int kStripPanels = kFloatPanels > 1 ? 2 : 1;
static_assert(kDocumentRows % kStripRows == 0 && 16 % kStripRows == 0);

// C [kStripRows][Panels * 16] = or += A [kStripRows][count] x B [count][Panels * 16]; elements of A lie
// `a_row` apart from row to row and `a_step` from column to column.
template <int Panels>
ALWAYS_INLINE void strip(const float* a, size_t a_row, size_t a_step, const float* b, size_t b_stride,
                         size_t count, float* c, size_t c_stride, bool add) {
  F sum[kStripRows][Panels];
  UNROLL for (int r = 0; r < kStripRows; r++) {
    UNROLL for (int p = 0; p < Panels; p++) sum[r][p] = add ? fload(c + r * c_stride + p * 16) : fzero();
  }
  for (size_t i = 0; i < count; i++, a += a_step, b += b_stride) {
    F row[Panels];
    UNROLL for (int p = 0; p < Panels; p++) row[p] = fload(b + 16 * p);
    UNROLL for (int r = 0; r < kStripRows; r++) {
      const F x = fset(a[r * a_row]);
      UNROLL for (int p = 0; p < Panels; p++) sum[r][p] = fma(x, row[p], sum[r][p]);
    }
  }
  UNROLL for (int r = 0; r < kStripRows; r++) {
    UNROLL for (int p = 0; p < Panels; p++) fstore(c + r * c_stride + p * 16, sum[r][p]);
  }
}

// The same for `rows` of them, a multiple of kStripRows, and `width` columns, a multiple of 16.
ALWAYS_INLINE void strips(size_t rows, size_t width, const float* a, size_t a_row, size_t a_step,
                          const float* b, size_t b_stride, size_t count, float* c, size_t c_stride,
                          bool add) {
  size_t at = 0;
  for (; at + 16 * kStripPanels <= width; at += 16 * kStripPanels) {
    for (size_t r = 0; r < rows; r += kStripRows)
      strip<kStripPanels>(a + r * a_row, a_row, a_step, b + at, b_stride, count, c + r * c_stride + at,
                          c_stride, add);
  }
  if constexpr (kStripPanels > 1) {
    for (; at < width; at += 16) {
      for (size_t r = 0; r < rows; r += kStripRows)
        strip<1>(a + r * a_row, a_row, a_step, b + at, b_stride, count, c + r * c_stride + at, c_stride, add);
    }
  }
}

// scores [rows][kKeyBlock] of a block's first `columns` keys, a multiple of 16.
void score_strips(size_t rows, size_t columns, const float* q, size_t wide, const float* keys, size_t width,
                  float* scores) {
  strips(rows, columns, q, wide, 1, keys, kKeyBlock, width, scores, kKeyBlock, false);
}
// out [rows][wide] += weights [rows][kKeyBlock] x values [count][wide]
void value_strips(size_t rows, size_t wide, const float* weights, const float* values, size_t count,
                  float* out) {
  strips(rows, wide, weights, kKeyBlock, 1, values, wide, count, out, wide, true);
}
// out [columns][wide] += the first `columns` columns of weights [count][kKeyBlock], across, x x [count][wide]
void key_strips(size_t columns, size_t wide, const float* weights, const float* x, size_t count, float* out) {
  strips(columns, wide, weights, 1, kKeyBlock, x, wide, count, out, wide, true);
}

size_t round_up(size_t count, size_t step) { return (count + step - 1) / step * step; }

// Keys as blocks of [width][kKeyBlock], zeros beyond the last.
void pack_across(const float* from, size_t stride, size_t tokens, size_t width, float* to) {
  for (size_t block = 0; block < tokens; block += kKeyBlock, to += width * kKeyBlock) {
    const size_t count = tokens - block < kKeyBlock ? tokens - block : kKeyBlock;
    for (size_t s = 0; s < count; s++) {
      const float* row = from + (block + s) * stride;
      for (size_t h = 0; h < width; h++) to[h * kKeyBlock + s] = row[h];
    }
    if (count == kKeyBlock) continue;
    for (size_t h = 0; h < width; h++) {
      memset(to + h * kKeyBlock + count, 0, (kKeyBlock - count) * sizeof(float));
    }
  }
}

// One row times `factor`, zeros beyond the width.
ALWAYS_INLINE void pack_row(const float* from, size_t width, size_t wide, float factor, float* to) {
  size_t h = 0;
  for (; h + 16 <= width; h += 16) fstore(to + h, fmul(fload(from + h), fset(factor)));
  for (; h < width; h++) to[h] = from[h] * factor;
  for (; h < wide; h++) to[h] = 0.0f;
}
ALWAYS_INLINE void unpack_row(const float* from, size_t width, float factor, float* to) {
  size_t h = 0;
  for (; h + 16 <= width; h += 16) fstore(to + h, fmul(fload(from + h), fset(factor)));
  for (; h < width; h++) to[h] = from[h] * factor;
}

// Queries, or what has their shape, of tokens [first, last) as rows; zeros up to whole strips.
void pack_queries(const Document& d, const float* from, size_t first, size_t last, float factor, float* to) {
  const size_t wide = padded_width(d.width), rows = (last - first) * d.group;
  for (size_t token = first; token < last; token++) {
    // The next tile's rows: they lie too far apart for the processor to expect them.
    const size_t ahead = token + document_tile(d.group);
    if (ahead < d.tokens) {
      for (size_t h = 0; h < d.group * d.width; h += 16)
        __builtin_prefetch(from + ahead * d.query_stride + h, 0, 2);
    }
    for (size_t g = 0; g < d.group; g++, to += wide)
      pack_row(from + token * d.query_stride + g * d.width, d.width, wide, factor, to);
  }
  memset(to, 0, (round_up(rows, kStripRows) - rows) * wide * sizeof(float));
}

// Lane i of kLimits + kKeyBlock - n + ... is what a score may be at most where only n keys are seen, and of
// kSeen whether it is one of them.
struct Lanes {
  alignas(64) float limit[2 * kKeyBlock], seen[2 * kKeyBlock];
};
constexpr Lanes make_lanes() {
  Lanes lanes{};
  for (size_t i = 0; i < 2 * kKeyBlock; i++) {
    lanes.limit[i] = i < kKeyBlock ? __builtin_inff() : -__builtin_inff();
    lanes.seen[i] = i < kKeyBlock ? 1.0f : 0.0f;
  }
  return lanes;
}
constexpr Lanes kLanes = make_lanes();

// Scores of a row become weights against the largest so far, zeros from key `seen` on (at least one is
// seen); what the row has summed up shrinks when that grows. `total` has a lane for each of sixteen keys.
ALWAYS_INLINE void weigh_document(float* row, size_t columns, size_t seen, float* sums, size_t wide,
                                  float* top, float* total) {
  const bool all = seen >= columns;
  if (!all) {
    const float* limit = kLanes.limit + kKeyBlock - seen;
    for (size_t s = 0; s < columns; s += 16) fstore(row + s, fmin(fload(row + s), fload(limit + s)));
  }
  F best = fload(row);
  for (size_t s = 16; s < columns; s += 16) best = fmax(fload(row + s), best);
  const float largest = ftop(best);
  F sum = fload(total);
  if (largest > *top) {
    const F shrink = fset(__builtin_expf(*top - largest));  // 0 the first time
    *top = largest;
    sum = fmul(sum, shrink);
    for (size_t h = 0; h < wide; h += 16) fstore(sums + h, fmul(fload(sums + h), shrink));
  }
  const F base = fset(*top);
  const float* mask = kLanes.seen + kKeyBlock - seen;
  for (size_t s = 0; s < columns; s += 16) {
    F weight = exponential(fsub(fload(row + s), base));
    if (!all) weight = fmul(weight, fload(mask + s));
    sum = fadd(sum, weight);
    fstore(row + s, weight);
  }
  fstore(total, sum);
}

// Keys of a block that begins at `block` which a token sees.
ALWAYS_INLINE size_t seen_keys(size_t token, size_t block) {
  const size_t seen = token + 1 < block ? 0 : token + 1 - block;
  return seen < kKeyBlock ? seen : kKeyBlock;
}

void attend_document(const Document& d, float* out, float* lse, float* scratch) {
  const size_t width = d.width, wide = padded_width(width), tile = document_tile(d.group);
  const size_t padded = round_up(d.tokens, kKeyBlock), most = document_rows(d.group);
  float* keys = scratch;
  float* values = keys + padded * width;
  float* q = values + padded * wide;
  float* scores = q + most * wide;
  float* sums = scores + most * kKeyBlock;
  float* total = sums + most * wide;
  float* top = total + most * 16;
  pack_across(d.k, d.key_stride, d.tokens, width, keys);
  for (size_t s = 0; s < d.tokens; s++)
    pack_row(d.v + s * d.key_stride, width, wide, 1.0f, values + s * wide);
  for (size_t first = 0; first < d.tokens; first += tile) {
    const size_t last = first + tile < d.tokens ? first + tile : d.tokens;
    const size_t rows = (last - first) * d.group, strip_rows = round_up(rows, kStripRows);
    pack_queries(d, d.q, first, last, d.scale, q);
    memset(sums, 0, strip_rows * wide * sizeof(float));
    memset(total, 0, rows * 16 * sizeof(float));
    for (size_t r = 0; r < rows; r++) top[r] = -__builtin_inff();
    for (size_t block = 0; block < last; block += kKeyBlock) {
      const size_t count = last - block < kKeyBlock ? last - block : kKeyBlock, columns = round_up(count, 16);
      score_strips(strip_rows, columns, q, wide, keys + block * width, width, scores);
      for (size_t r = 0; r < rows; r++) {
        const size_t seen = seen_keys(first + r / d.group, block);
        float* row = scores + r * kKeyBlock;
        if (seen) {
          weigh_document(row, columns, seen, sums + r * wide, wide, top + r, total + r * 16);
        } else {
          memset(row, 0, columns * sizeof(float));
        }
      }
      value_strips(strip_rows, wide, scores, values + block * wide, count, sums);
    }
    for (size_t r = 0; r < rows; r++) {
      const size_t token = first + r / d.group, g = r % d.group;
      const float all = fsum(fload(total + r * 16));
      unpack_row(sums + r * wide, width, 1.0f / all, out + token * d.query_stride + g * width);
      lse[token * d.lse_stride + g] = top[r] + __builtin_logf(all);
    }
  }
}

// A row's scores become weights, and what reaches the weights becomes what reaches the scores.
ALWAYS_INLINE void weigh_gradients(float* scores, float* gradients, size_t columns, size_t seen, float lse,
                                   float delta) {
  const bool all = seen >= columns;
  const F base = fset(lse), mean = fset(delta);
  const float *limit = kLanes.limit + kKeyBlock - seen, *mask = kLanes.seen + kKeyBlock - seen;
  for (size_t s = 0; s < columns; s += 16) {
    F score = fload(scores + s);
    // What is not seen may be anything, NaN too.
    if (!all) score = fmin(score, fload(limit + s));
    F weight = exponential(fsub(score, base));
    if (!all) weight = fmul(weight, fload(mask + s));
    fstore(scores + s, weight);
    fstore(gradients + s, fmul(weight, fsub(fload(gradients + s), mean)));
  }
}

void attend_document_back(const Document& d, const float* out, const float* lse, const float* dout, float* dq,
                          float* dk, float* dv, float* scratch) {
  const size_t width = d.width, wide = padded_width(width), tile = document_tile(d.group);
  const size_t padded = round_up(d.tokens, kKeyBlock), most = document_rows(d.group);
  float* keys_across = scratch;
  float* values_across = keys_across + padded * width;
  float* keys = values_across + padded * width;
  float* key_sums = keys + padded * wide;
  float* value_sums = key_sums + padded * wide;
  float* q = value_sums + padded * wide;
  float* reaching = q + most * wide;
  float* sums = reaching + most * wide;
  float* scores = sums + most * wide;
  float* gradients = scores + most * kKeyBlock;
  float* delta = gradients + most * kKeyBlock;
  pack_across(d.k, d.key_stride, d.tokens, width, keys_across);
  pack_across(d.v, d.key_stride, d.tokens, width, values_across);
  for (size_t s = 0; s < d.tokens; s++) pack_row(d.k + s * d.key_stride, width, wide, 1.0f, keys + s * wide);
  memset(key_sums, 0, 2 * padded * wide * sizeof(float));
  for (size_t first = 0; first < d.tokens; first += tile) {
    const size_t last = first + tile < d.tokens ? first + tile : d.tokens;
    const size_t rows = (last - first) * d.group, strip_rows = round_up(rows, kStripRows);
    // The mean of what reaches the weights is what the output and its gradient say it is. `q` holds it first.
    pack_queries(d, out, first, last, 1.0f, q);
    pack_queries(d, dout, first, last, 1.0f, reaching);
    for (size_t r = 0; r < rows; r++) {
      F sum = fzero();
      for (size_t h = 0; h < wide; h += 16)
        sum = fma(fload(q + r * wide + h), fload(reaching + r * wide + h), sum);
      delta[r] = fsum(sum);
    }
    pack_queries(d, d.q, first, last, d.scale, q);
    memset(sums, 0, strip_rows * wide * sizeof(float));
    for (size_t block = 0; block < last; block += kKeyBlock) {
      const size_t count = last - block < kKeyBlock ? last - block : kKeyBlock, columns = round_up(count, 16);
      score_strips(strip_rows, columns, q, wide, keys_across + block * width, width, scores);
      score_strips(strip_rows, columns, reaching, wide, values_across + block * width, width, gradients);
      for (size_t r = 0; r < rows; r++) {
        const size_t token = first + r / d.group, seen = seen_keys(token, block);
        float *row = scores + r * kKeyBlock, *gradient = gradients + r * kKeyBlock;
        if (seen) {
          weigh_gradients(row, gradient, columns, seen, lse[token * d.lse_stride + r % d.group], delta[r]);
        } else {
          memset(row, 0, columns * sizeof(float));
          memset(gradient, 0, columns * sizeof(float));
        }
      }
      key_strips(columns, wide, scores, reaching, rows, value_sums + block * wide);
      key_strips(columns, wide, gradients, q, rows, key_sums + block * wide);
      value_strips(strip_rows, wide, gradients, keys + block * wide, count, sums);
    }
    for (size_t r = 0; r < rows; r++) {
      float* to = dq + (first + r / d.group) * d.query_stride + r % d.group * width;
      unpack_row(sums + r * wide, width, d.scale, to);
    }
  }
  for (size_t s = 0; s < d.tokens; s++) {
    unpack_row(key_sums + s * wide, width, 1.0f, dk + s * d.key_stride);
    unpack_row(value_sums + s * wide, width, 1.0f, dv + s * d.key_stride);
  }
}
