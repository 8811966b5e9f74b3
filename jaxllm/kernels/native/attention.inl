// Attention with a running softmax (Flash Attention's, arXiv 2205.14135): part of compute.inl.

ALWAYS_INLINE F load_element(const float* p) { return fload(p); }
ALWAYS_INLINE F load_element(const uint16_t* p) { return fload_half(p); }

// C [Rows][Panels * 16] = or += A [Rows][count] x B [count][Panels * 16], B of floats or halves.
template <int Rows, int Panels, class Element>
ALWAYS_INLINE void float_tile(const float* a, size_t a_stride, const Element* b, size_t b_stride,
                              size_t count, float* c, size_t c_stride, bool add) {
  F sum[Rows][Panels];
  UNROLL for (int r = 0; r < Rows; r++) {
    UNROLL for (int p = 0; p < Panels; p++) sum[r][p] = add ? fload(c + r * c_stride + p * 16) : fzero();
  }
  for (size_t i = 0; i < count; i++, b += b_stride) {
    F row[Panels];
    UNROLL for (int p = 0; p < Panels; p++) row[p] = load_element(b + 16 * p);
    if constexpr (sizeof(Element) < sizeof(float)) {
      // Straight from the cache: the next block of keys is then on its way too.
      UNROLL for (int p = 0; p < Panels; p += 2) __builtin_prefetch(b + kKeyBlock * b_stride + 16 * p, 0, 2);
    }
    UNROLL for (int r = 0; r < Rows; r++) {
      const F x = fset(a[r * a_stride + i]);
      UNROLL for (int p = 0; p < Panels; p++) sum[r][p] = fma(x, row[p], sum[r][p]);
    }
  }
  UNROLL for (int r = 0; r < Rows; r++) {
    UNROLL for (int p = 0; p < Panels; p++) fstore(c + r * c_stride + p * 16, sum[r][p]);
  }
}

template <int Panels, class Element>
void float_rows(size_t rows, const float* a, size_t a_stride, const Element* b, size_t b_stride, size_t count,
                float* c, size_t c_stride, bool add) {
  size_t r = 0;
  for (; r + kFloatRows <= rows; r += kFloatRows) {
    float_tile<kFloatRows, Panels>(a + r * a_stride, a_stride, b, b_stride, count, c + r * c_stride, c_stride,
                                   add);
  }
  if constexpr (kFloatRows > 4) {
    for (; r + 4 <= rows; r += 4) {
      float_tile<4, Panels>(a + r * a_stride, a_stride, b, b_stride, count, c + r * c_stride, c_stride, add);
    }
  }
  for (; r < rows; r++) {
    float_tile<1, Panels>(a + r * a_stride, a_stride, b, b_stride, count, c + r * c_stride, c_stride, add);
  }
}

// The same for any number of rows and `width` columns, a multiple of 16.
template <class Element>
void float_product(size_t rows, size_t width, const float* a, size_t a_stride, const Element* b,
                   size_t b_stride, size_t count, float* c, size_t c_stride, bool add) {
  size_t at = 0;
  for (; at + 16 * kFloatPanels <= width; at += 16 * kFloatPanels) {
    float_rows<kFloatPanels>(rows, a, a_stride, b + at, b_stride, count, c + at, c_stride, add);
  }
  for (; at < width; at += 16)
    float_rows<1>(rows, a, a_stride, b + at, b_stride, count, c + at, c_stride, add);
}

// Rows [from, from + count) of keys or values as floats [count][wide], zeros beyond the width. Returns
// where they are: in the cache itself when nothing must be changed.
const float* cached_rows(const void* cache, bool half, size_t width, size_t wide, size_t from, size_t count,
                         float* scratch) {
  if (!half) {
    const float* rows = static_cast<const float*>(cache) + from * width;
    if (width == wide) return rows;
    for (size_t s = 0; s < count; s++) {
      memcpy(scratch + s * wide, rows + s * width, width * sizeof(float));
      memset(scratch + s * wide + width, 0, (wide - width) * sizeof(float));
    }
    return scratch;
  }
  const uint16_t* rows = static_cast<const uint16_t*>(cache) + from * width;
  for (size_t s = 0; s < count; s++) {
    size_t h = 0;
    // The next block of the same, by then half a block's work away.
    for (size_t ahead = 0; ahead < width; ahead += 32) {
      __builtin_prefetch(rows + (s + kKeyBlock) * width + ahead, 0, 2);
    }
    for (; h + 16 <= width; h += 16) fstore(scratch + s * wide + h, fload_half(rows + s * width + h));
    if (h < width) {
      uint16_t tail[16] = {};
      memcpy(tail, rows + s * width + h, (width - h) * sizeof(uint16_t));
      fstore(scratch + s * wide + h, fload_half(tail));
    }
  }
  return scratch;
}

// out[i] = the sum over the lanes of v[i].
ALWAYS_INLINE void sums_of(const F (&v)[16], float* out) {
#ifdef LANES_SUMS
  fstore(out, fsums(v));
#else
  UNROLL for (int i = 0; i < 16; i++) out[i] = fsum(v[i]);
#endif
}

// scores [Rows][kKeyBlock] of `count` keys by dot products along the head, sixteen at a time; beyond `count`
// they mean nothing.
template <int Rows, class Element>
void scores_by_dots(const float* q, const Element* keys, size_t count, size_t wide, float* scores) {
  constexpr int kKeys = 16 / Rows;
  for (size_t s = 0; s < count; s += kKeys) {
    const Element* key[kKeys];
    UNROLL for (int j = 0; j < kKeys; j++) key[j] = keys + (s + j < count ? s + j : count - 1) * wide;
    F sum[16];
    UNROLL for (int i = 0; i < 16; i++) sum[i] = fzero();
    for (size_t h = 0; h < wide; h += 16) {
      F row[Rows];
      UNROLL for (int r = 0; r < Rows; r++) row[r] = fload(q + r * wide + h);
      UNROLL for (int j = 0; j < kKeys; j++) {
        // The next block of keys, by then half a block's work away.
        __builtin_prefetch(key[j] + kKeyBlock * wide + h, 0, 2);
        const F each = load_element(key[j] + h);
        UNROLL for (int r = 0; r < Rows; r++) sum[r * kKeys + j] = fma(row[r], each, sum[r * kKeys + j]);
      }
    }
    float together[16];
    sums_of(sum, together);
    UNROLL for (int r = 0; r < Rows; r++) {
      memcpy(scores + r * kKeyBlock + s, together + r * kKeys, kKeys * sizeof(float));
    }
  }
}

template <class Element>
void scores_of_few(size_t rows, const float* q, const Element* keys, size_t count, size_t wide,
                   float* scores) {
  size_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    scores_by_dots<4>(q + r * wide, keys, count, wide, scores + r * kKeyBlock);
  }
  for (; r + 2 <= rows; r += 2) {
    scores_by_dots<2>(q + r * wide, keys, count, wide, scores + r * kKeyBlock);
  }
  if (r < rows) scores_by_dots<1>(q + r * wide, keys, count, wide, scores + r * kKeyBlock);
}

// Rotary embedding of one head, halves paired: x[i] with x[i + rotary].
void turn(float* x, const float* cos, const float* sin, size_t rotary) {
  for (size_t i = 0; i < rotary; i++) {
    const float first = x[i], second = x[i + rotary];
    x[i] = first * cos[i] - second * sin[i];
    x[i + rotary] = second * cos[i] + first * sin[i];
  }
}

void store_row(const float* x, size_t width, const float* cos, const float* sin, size_t rotary, bool half,
               void* out, float* scratch) {
  memcpy(scratch, x, width * sizeof(float));
  if (cos) turn(scratch, cos, sin, rotary);
  if (!half) {
    memcpy(out, scratch, width * sizeof(float));
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(out);
  size_t h = 0;
  for (; h + 16 <= width; h += 16) fstore_half(to + h, fload(scratch + h));
  if (h < width) {
    uint16_t tail[16];
    memset(scratch + width, 0, (padded_width(width) - width) * sizeof(float));
    fstore_half(tail, fload(scratch + h));
    memcpy(to + h, tail, (width - h) * sizeof(uint16_t));
  }
}

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
constexpr size_t kFewRows = 8;

// What a tile works in: queries [rows][wide], scores [rows][kKeyBlock], keys and values [kKeyBlock][wide].
struct TileScratch {
  size_t rows, wide;
  float *q, *scores, *keys, *values;
  TileScratch(const Attention& a, const AttentionTile& t)
      : rows((t.last - t.first) * a.group),
        wide(padded_width(a.width)),
        q(t.scratch),
        scores(q + rows * wide),
        keys(scores + rows * kKeyBlock),
        values(keys + kKeyBlock * wide) {}
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
    t.top[r] = -__builtin_inff();
    t.total[r] = 0.0f;
    for (size_t h = 0; h < wide; h += 16) fstore(t.sums + r * wide + h, fzero());
  }
}

// scores [rows][kKeyBlock] of many rows by products of tiles; `turned` is scratch for the keys, heads first.
void scores_of_many(size_t rows, const float* q, const float* keys, size_t count, size_t wide, float* turned,
                    float* scores) {
  for (size_t h = 0; h < wide; h++) {
    for (size_t s = 0; s < count; s++) turned[h * kKeyBlock + s] = keys[s * wide + h];
    for (size_t s = count; s < kKeyBlock; s++) turned[h * kKeyBlock + s] = 0.0f;
  }
  float_product(rows, kKeyBlock, q, wide, turned, kKeyBlock, wide, scores, kKeyBlock, false);
}

// The first row of the cache that a token at `position` may see.
ALWAYS_INLINE size_t oldest_row(const Attention& a, size_t token) {
  const size_t position = static_cast<size_t>(a.positions[token]);
  return a.window && position + 1 > a.window ? position + 1 - a.window : 0;
}

// Weighs row r's scores of the keys [block, block + count), of which those before `end` are there for it.
ALWAYS_INLINE bool weigh_row(const Attention& a, const AttentionTile& t, const TileScratch& own,
                             float* scores, size_t r, size_t block, size_t count, size_t end) {
  const size_t oldest = oldest_row(a, t.first + r / a.group), last = end < block ? 0 : end - block;
  const size_t to = last < count ? last : count;
  const size_t from = oldest > block ? (oldest - block < to ? oldest - block : to) : 0;
  return weigh(scores, from, to, a.softcap, t.sums + r * own.wide, own.wide, t.top + r, t.total + r);
}

void attend(const Attention& a, const AttentionTile& t) {
  const TileScratch own(a, t);
  const size_t width = a.width, wide = own.wide, rows = own.rows;
  begin_tile(a, t, own);
  // Few rows: what they read is widened on the way instead of in scratch.
  const bool halves = a.half && width == wide && rows < kFewRows;
  for (size_t block = t.from; block < t.to; block += kKeyBlock) {
    const size_t count = t.to - block < kKeyBlock ? t.to - block : kKeyBlock;
    float* scores = own.weights_of(t, block);
    if (halves) {
      const uint16_t* from = static_cast<const uint16_t*>(a.k) + block * width;
      scores_of_few(rows, own.q, from, count, wide, scores);
    } else if (rows < kFewRows) {
      const float* from = cached_rows(a.k, a.half, width, wide, block, count, own.keys);
      scores_of_few(rows, own.q, from, count, wide, scores);
    } else {
      const float* from = cached_rows(a.k, a.half, width, wide, block, count, own.values);
      scores_of_many(rows, own.q, from, count, wide, own.keys, scores);
    }
    bool any = false;
    for (size_t r = 0; r < rows; r++) {
      const size_t end = static_cast<size_t>(a.rows[t.first + r / a.group]) + 1;
      any |= weigh_row(a, t, own, scores + r * kKeyBlock, r, block, count, end);
    }
    if (t.weights) memcpy(own.tops_of(t, block), t.top, rows * sizeof(float));
    if (!any) continue;
    if (halves) {
      const uint16_t* from = static_cast<const uint16_t*>(a.v) + block * width;
      float_product(rows, wide, scores, kKeyBlock, from, width, count, t.sums, wide, true);
      continue;
    }
    const float* from = cached_rows(a.v, a.half, width, wide, block, count, own.values);
    float_product(rows, wide, scores, kKeyBlock, from, wide, count, t.sums, wide, true);
  }
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
