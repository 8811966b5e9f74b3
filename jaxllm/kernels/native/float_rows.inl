// Products of float rows with keys and values of a cache, and the rows themselves: part of compute.inl.

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

// Of fewer rows than registers hold, `rows` of them: as many sums as of all, of more columns.
template <int Rows, class Element>
void last_rows(size_t rows, size_t width, const float* a, size_t a_stride, const Element* b, size_t b_stride,
               size_t count, float* c, size_t c_stride, bool add) {
  if constexpr (Rows > 1) {
    if (rows != Rows)
      return last_rows<Rows - 1>(rows, width, a, a_stride, b, b_stride, count, c, c_stride, add);
  }
  constexpr int most = kFloatRows * kFloatPanels / Rows, panels = most < 4 ? most : 4;
  size_t at = 0;
  for (; at + 16 * panels <= width; at += 16 * panels)
    float_tile<Rows, panels>(a, a_stride, b + at, b_stride, count, c + at, c_stride, add);
  for (; at < width; at += 16)
    float_tile<Rows, 1>(a, a_stride, b + at, b_stride, count, c + at, c_stride, add);
}

// C [rows][width] = or += A [rows][count] x B [count][width], `width` a multiple of 16.
template <class Element>
void float_product(size_t rows, size_t width, const float* a, size_t a_stride, const Element* b,
                   size_t b_stride, size_t count, float* c, size_t c_stride, bool add) {
  const size_t last = rows % kFloatRows, whole = rows - last;
  for (size_t at = 0; whole && at < width;) {
    const bool all = at + 16 * kFloatPanels <= width;
    for (size_t r = 0; r < whole; r += kFloatRows) {
      const float* from = a + r * a_stride;
      float* to = c + r * c_stride + at;
      if (all) {
        float_tile<kFloatRows, kFloatPanels>(from, a_stride, b + at, b_stride, count, to, c_stride, add);
      } else {
        float_tile<kFloatRows, 1>(from, a_stride, b + at, b_stride, count, to, c_stride, add);
      }
    }
    at += all ? 16 * kFloatPanels : 16;
  }
  if (last) {
    last_rows<kFloatRows - 1>(last, width, a + whole * a_stride, a_stride, b, b_stride, count,
                              c + whole * c_stride, c_stride, add);
  }
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

// Dot products whose sums registers hold.
constexpr int kDots = kFloatRows * kFloatPanels < 16 ? 4 : 16;

// scores [Rows][kKeyBlock] of `count` keys by dot products along the head, sixteen at a time; beyond `count`
// they mean nothing.
template <int Rows, class Element>
void scores_by_dots(const float* q, const Element* keys, size_t count, size_t wide, float* scores) {
  constexpr int kKeys = 16 / Rows, kTogether = kDots / Rows;
  static_assert(kKeys % kTogether == 0);
  for (size_t s = 0; s < count; s += kKeys) {
    F all[16];
    UNROLL for (int i = Rows * kKeys; i < 16; i++) all[i] = fzero();
    UNROLL for (int first = 0; first < kKeys; first += kTogether) {
      const Element* key[kTogether];
      F sum[Rows][kTogether];
      UNROLL for (int j = 0; j < kTogether; j++) {
        key[j] = keys + (s + first + j < count ? s + first + j : count - 1) * wide;
        UNROLL for (int r = 0; r < Rows; r++) sum[r][j] = fzero();
      }
      for (size_t h = 0; h < wide; h += 16) {
        F row[Rows];
        UNROLL for (int r = 0; r < Rows; r++) row[r] = fload(q + r * wide + h);
        UNROLL for (int j = 0; j < kTogether; j++) {
          // The next block of keys, by then half a block's work away.
          __builtin_prefetch(key[j] + kKeyBlock * wide + h, 0, 2);
          const F each = load_element(key[j] + h);
          UNROLL for (int r = 0; r < Rows; r++) sum[r][j] = fma(row[r], each, sum[r][j]);
        }
      }
      UNROLL for (int r = 0; r < Rows; r++) {
        UNROLL for (int j = 0; j < kTogether; j++) all[r * kKeys + first + j] = sum[r][j];
      }
    }
    float together[16];
    sums_of(all, together);
    // Those of a cache may begin in the middle of a block, behind a chunk's.
    const bool whole = s + kKeys <= count;
    UNROLL for (int r = 0; r < Rows; r++) {
      float* to = scores + r * kKeyBlock + s;
      memcpy(to, together + r * kKeys, whole ? kKeys * sizeof(float) : (count - s) * sizeof(float));
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
  q += r * wide, scores += r * kKeyBlock;
  if (rows - r == 3) scores_by_dots<3>(q, keys, count, wide, scores);
  if (rows - r == 2) scores_by_dots<2>(q, keys, count, wide, scores);
  if (rows - r == 1) scores_by_dots<1>(q, keys, count, wide, scores);
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

// scores [rows][kKeyBlock] of many rows by products of tiles; `turned` is scratch for the keys, heads first.
void scores_of_many(size_t rows, const float* q, const float* keys, size_t count, size_t wide, float* turned,
                    float* scores) {
  for (size_t h = 0; h < wide; h++) {
    for (size_t s = 0; s < count; s++) turned[h * kKeyBlock + s] = keys[s * wide + h];
    for (size_t s = count; s < kKeyBlock; s++) turned[h * kKeyBlock + s] = 0.0f;
  }
  float_product(rows, kKeyBlock, q, wide, turned, kKeyBlock, wide, scores, kKeyBlock, false);
}
