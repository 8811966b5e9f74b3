// Keys and values of chunks as they are kept, for attention (jaxllm/contexts/codecs.py): part of compute.inl.
//
// Scales do not meet every level. A key's score is the sum over its channels of query times (low + scale *
// level): where channels have scales, these are multiplied into the query and lows are summed up once for a
// chunk; where tokens have them, scores are scaled after the sum. The sum of values is taken apart alike.

// Sixteen levels of a row, of plane `plane`, each times 2^(plane * Bits) where it is not looked up (see
// `settled_at`).
template <int Bits>
ALWAYS_INLINE F levels_at(I packed, int plane) {
  if constexpr (Bits == 8) return to_float(packed);
#ifdef LANES_LOOK_UP
  if (Bits == 4 && plane == 0) return flook_up<0, 15>(packed);
  if (Bits == 2 && plane == 0) return flook_up<0, 3>(packed);
  if (Bits == 2 && plane == 1) return flook_up<2, 3>(packed);
#endif
  return to_float(iand(packed, iset(((1 << Bits) - 1) << plane * Bits)));
}

// A scale of such levels.
template <int Bits>
ALWAYS_INLINE F settled_at(F scale, int plane) {
#ifdef LANES_LOOK_UP
  if (plane * Bits < 4) return scale;
#endif
  return plane ? fmul(scale, fset(settled(plane * Bits))) : scale;
}

// Whether rows of levels come in whole vectors, so that they are read where they lie.
ALWAYS_INLINE bool whole_vectors(const CodedChunks& c, int bits) {
  return c.form.width * static_cast<size_t>(bits) / 8 % 16 == 0;
}

// Asks memory for all lines of some bytes, which may begin anywhere.
ALWAYS_INLINE void ask_for_bytes(const uint8_t* data, size_t bytes) {
  const uint8_t* const end = data + bytes;
  for (data -= reinterpret_cast<uintptr_t>(data) % 64; data < end; data += 64) __builtin_prefetch(data, 0, 2);
}

// What is read of a head's part soon.
ALWAYS_INLINE void ask_for(const ChunkForm& form, const ChunkPart& part) {
  ask_for_bytes(part.data, form.tokens * form.row_bytes(part.bits));
  if (!part.bits) return;
  const size_t scales = 2 * (part.by_token ? form.tokens : form.width);
  ask_for_bytes(part.low, scales);
  ask_for_bytes(part.scale, scales);
}

// Rows of a chunk, from its token `from` on: `count` of them, the first of which is row `row` of the
// sequence.
struct ChunkRows {
  size_t chunk, from, count, row;
  size_t ahead;  // how many chunks further on a block of keys later
};

// Calls `use(rows)` for each chunk's part of rows [begin, end).
template <class Use>
ALWAYS_INLINE void each_chunk(const CodedChunks& c, size_t begin, size_t end, const Use& use) {
  if (begin >= end) return;
  const size_t tokens = c.form.tokens, ahead = tokens < kKeyBlock ? kKeyBlock / tokens : 1;
  ChunkRows rows{begin / tokens, begin % tokens, 0, begin, ahead};
  for (; rows.row < end; rows.row += rows.count, rows.chunk++, rows.from = 0) {
    const size_t left = tokens - rows.from;
    rows.count = end - rows.row < left ? end - rows.row : left;
    use(rows);
  }
}

// The keys or values of such rows, of one head.
struct CodedRows {
  const CodedChunks& chunks;
  ChunkPart part;
  size_t from, count;

  CodedRows(const CodedChunks& chunks, size_t head, const ChunkRows& rows, bool values)
      : chunks(chunks),
        part(chunks.form, chunks.blobs[rows.chunk], chunks.heads, head, chunks.bits[rows.chunk], values),
        from(rows.from),
        count(rows.count) {
    // Blobs lie anywhere, and short ones are over before the processor has seen what is read.
    const size_t next = rows.chunk + rows.ahead;
    if (from == 0 && next * chunks.form.tokens < chunks.tokens) {
      ask_for(chunks.form,
              ChunkPart(chunks.form, chunks.blobs[next], chunks.heads, head, chunks.bits[next], values));
    }
  }
  size_t row_bytes() const { return chunks.form.row_bytes(part.bits); }
  const uint8_t* data() const { return part.data + from * row_bytes(); }
};

// What coded rows work in: scales and lows [wide], queries times scales [kCodedRows][wide], by token
// [kKeyBlock] each, zeros behind the last.
struct CodedScratch {
  float *low, *scale, *folded, *token_low, *token_scale;
  CodedScratch(float* at, size_t wide)
      : low(at),
        scale(low + wide),
        folded(scale + wide),
        token_low(folded + kCodedRows * wide),
        token_scale(token_low + kKeyBlock) {}
};

// Scales of tokens as floats.
void read_token_scales(const CodedRows& rows, const CodedScratch& own) {
  const size_t last = rows.count / 16 * 16;
  if (last < rows.count) {
    fstore(own.token_low + last, fzero());
    fstore(own.token_scale + last, fzero());
  }
  halves(rows.part.low + 2 * rows.from, rows.count, own.token_low);
  halves(rows.part.scale + 2 * rows.from, rows.count, own.token_scale);
}

// Scores [Rows][kKeyBlock] of `count` rows of levels by products with q [Rows][wide], whose sums begin with
// `base`.
template <int Rows, int Bits>
ALWAYS_INLINE void level_dots(const float* q, const F (&base)[Rows], const uint8_t* data, size_t bytes,
                              size_t count, size_t wide, float* scores) {
  constexpr int kKeys = 16 / Rows, kPlanes = 8 / Bits;
  for (size_t s = 0; s < count; s += kKeys) {
    const uint8_t* key[kKeys];
    UNROLL for (int j = 0; j < kKeys; j++) key[j] = data + (s + j < count ? s + j : count - 1) * bytes;
    F sum[16];
    UNROLL for (int r = 0; r < Rows; r++) {
      UNROLL for (int j = 0; j < kKeys; j++) sum[r * kKeys + j] = base[r];
    }
    for (size_t i = 0; i < bytes; i += 16) {
      UNROLL for (int j = 0; j < kKeys; j++) {
        const I packed = iload_bytes(key[j] + i);
        UNROLL for (int plane = 0; plane < kPlanes; plane++) {
          const F level = levels_at<Bits>(packed, plane);
          UNROLL for (int r = 0; r < Rows; r++) {
            const F x = fload(q + r * wide + plane * bytes + i);
            sum[r * kKeys + j] = fma(x, level, sum[r * kKeys + j]);
          }
        }
      }
    }
    float together[16];
    sums_of(sum, together);
    const bool whole = s + kKeys <= count;
    UNROLL for (int r = 0; r < Rows; r++) {
      float* to = scores + r * kKeyBlock + s;
      memcpy(to, together + r * kKeys, whole ? kKeys * sizeof(float) : (count - s) * sizeof(float));
    }
  }
}

// The same, of keys whose tokens have scales.
template <int Rows, int Bits>
void token_dots(const CodedRows& keys, const float* q, size_t wide, const CodedScratch& own, float* scores) {
  const size_t bytes = keys.row_bytes(), count = keys.count;
  float dots[Rows * kKeyBlock];
  F none[Rows], base[Rows];
  UNROLL for (int r = 0; r < Rows; r++) {
    F sum = fzero();
    for (int plane = 0; plane < 8 / Bits; plane++) {
      for (size_t h = plane * bytes; h < (plane + 1) * bytes; h += 16) {
        const F x = fload(q + r * wide + h);
        sum = fadd(sum, x);
        fstore(own.folded + r * wide + h, settled_at<Bits>(x, plane));
      }
    }
    none[r] = fzero(), base[r] = fset(fsum(sum));
  }
  level_dots<Rows, Bits>(own.folded, none, keys.data(), bytes, count, wide, dots);
  for (size_t r = 0; r < Rows; r++) {
    float* row = dots + r * kKeyBlock;
    for (size_t t = 0; t < count; t += 16) {
      const F low = fmul(base[r], fload(own.token_low + t));
      fstore(row + t, fma(fload(row + t), fload(own.token_scale + t), low));
    }
    memcpy(scores + r * kKeyBlock, row, count * sizeof(float));
  }
}

template <int Rows, int Bits>
void coded_dots(const CodedRows& keys, const float* q, size_t wide, const CodedScratch& own, float* scores) {
  if (keys.part.by_token) return token_dots<Rows, Bits>(keys, q, wide, own, scores);
  const size_t bytes = keys.row_bytes();
  F base[Rows];
  UNROLL for (int r = 0; r < Rows; r++) base[r] = fzero();
  UNROLL for (int plane = 0; plane < 8 / Bits; plane++) {
    for (size_t h = plane * bytes; h < (plane + 1) * bytes; h += 16) {
      const F low = half_vector(keys.part.low + 2 * h);
      const F scale = settled_at<Bits>(half_vector(keys.part.scale + 2 * h), plane);
      UNROLL for (int r = 0; r < Rows; r++) {
        const F x = fload(q + r * wide + h);
        base[r] = fma(x, low, base[r]);
        fstore(own.folded + r * wide + h, fmul(x, scale));
      }
    }
  }
  level_dots<Rows, Bits>(own.folded, base, keys.data(), bytes, keys.count, wide, scores);
}

template <int Bits>
void coded_scores_of(const CodedRows& keys, size_t rows, const float* q, size_t wide, const CodedScratch& own,
                     float* scores) {
  size_t r = 0;
  for (; r + 4 <= rows; r += 4) coded_dots<4, Bits>(keys, q + r * wide, wide, own, scores + r * kKeyBlock);
  for (; r + 2 <= rows; r += 2) coded_dots<2, Bits>(keys, q + r * wide, wide, own, scores + r * kKeyBlock);
  if (r < rows) coded_dots<1, Bits>(keys, q + r * wide, wide, own, scores + r * kKeyBlock);
}

// Scores of few rows of queries: q [rows][wide], scores [rows][kKeyBlock].
void coded_scores(const CodedRows& keys, size_t rows, const float* q, size_t wide, const CodedScratch& own,
                  float* scores) {
  if (keys.part.by_token) read_token_scales(keys, own);
  if (keys.part.bits == 8) coded_scores_of<8>(keys, rows, q, wide, own, scores);
  if (keys.part.bits == 4) coded_scores_of<4>(keys, rows, q, wide, own, scores);
  if (keys.part.bits == 2) coded_scores_of<2>(keys, rows, q, wide, own, scores);
}

// How values of so many bits are summed up. A sum waits for its last addition, so that even and odd tokens
// have sums of their own, and neighbouring vectors of channels are taken together.
template <int Bits>
struct SumsOf {
  static constexpr int kPlanes = 8 / Bits;
  static constexpr int kTurns = 2 * kPlanes <= kSumsTogether ? 2 : 1;  // of tokens
  static constexpr int kRows = kSumsTogether / (kPlanes * kTurns);     // of weights together, at most
  static constexpr int columns(int rows) {
    const int most = kSumsTogether / (kPlanes * kTurns * rows);
    return most < 1 ? 1 : most < 4 / kPlanes ? most : 4 / kPlanes > 1 ? 4 / kPlanes : 1;
  }
};

// sums [Rows][wide] += weights [Rows][kKeyBlock] x Columns vectors of rows of levels, from byte `i` on:
// scaled by channel, plus the lows times `base`.
template <int Rows, int Bits, int Columns>
ALWAYS_INLINE void level_sums(const CodedRows& values, const float* weights, const F (&base)[Rows],
                              size_t wide, size_t i, float* sums) {
  constexpr int kPlanes = 8 / Bits, kTurns = SumsOf<Bits>::kTurns;
  const size_t bytes = values.row_bytes(), count = values.count;
  const bool by_token = values.part.by_token;
  F sum[kTurns][Rows][Columns][kPlanes];
  UNROLL for (int each = 0; each < kTurns * Rows * Columns * kPlanes; each++)(&sum[0][0][0][0])[each] =
      fzero();
  const uint8_t* data = values.data() + i;
  const auto add = [&](size_t t, int turn) {
    F x[Rows];
    UNROLL for (int r = 0; r < Rows; r++) x[r] = fset(weights[r * kKeyBlock + t]);
    UNROLL for (int c = 0; c < Columns; c++) {
      const I packed = iload_bytes(data + 16 * c);
      UNROLL for (int plane = 0; plane < kPlanes; plane++) {
        const F level = levels_at<Bits>(packed, plane);
        UNROLL for (int r = 0; r < Rows; r++) sum[turn][r][c][plane] =
            fma(x[r], level, sum[turn][r][c][plane]);
      }
    }
    data += bytes;
  };
  size_t t = 0;
  for (; t + kTurns <= count; t += kTurns) {
    UNROLL for (int turn = 0; turn < kTurns; turn++) add(t + turn, turn);
  }
  if (t < count) add(t, 0);
  UNROLL for (int c = 0; c < Columns; c++) {
    UNROLL for (int plane = 0; plane < kPlanes; plane++) {
      const size_t at = plane * bytes + i + 16 * c;
      const F scale =
          settled_at<Bits>(by_token ? fset(1.0f) : half_vector(values.part.scale + 2 * at), plane);
      const F low = by_token ? fset(1.0f) : half_vector(values.part.low + 2 * at);
      UNROLL for (int r = 0; r < Rows; r++) {
        float* to = sums + r * wide + at;
        F all = sum[0][r][c][plane];
        if (kTurns > 1) all = fadd(all, sum[kTurns - 1][r][c][plane]);
        // Fused here, or the compiler does so for some numbers of rows and not for others.
        fstore(to, fma(base[r], low, fma(scale, all, fload(to))));
      }
    }
  }
}

// sums [Rows][wide] += weights [Rows][kKeyBlock] x coded values.
template <int Rows, int Bits>
void coded_sums(const CodedRows& values, const float* weights, size_t wide, const CodedScratch& own,
                float* sums) {
  const size_t bytes = values.row_bytes(), count = values.count;
  const bool by_token = values.part.by_token;
  float scaled[Rows][kKeyBlock];
  F base[Rows];
  UNROLL for (int r = 0; r < Rows; r++) {
    const float* from = weights + r * kKeyBlock;
    if (by_token || count % 16) {
      memcpy(scaled[r], from, count * sizeof(float));
      for (size_t t = count; t % 16; t++) scaled[r][t] = 0.0f;
      from = scaled[r];
    }
    F sum = fzero();
    for (size_t t = 0; t < count; t += 16) {
      const F weight = fload(from + t);
      sum = by_token ? fma(weight, fload(own.token_low + t), sum) : fadd(sum, weight);
      if (by_token) fstore(scaled[r] + t, fmul(weight, fload(own.token_scale + t)));
    }
    base[r] = fset(fsum(sum));
  }
  if (by_token) weights = scaled[0];
  constexpr int kColumns = SumsOf<Bits>::columns(Rows);
  size_t i = 0;
  for (; i + 16 * kColumns <= bytes; i += 16 * kColumns) {
    level_sums<Rows, Bits, kColumns>(values, weights, base, wide, i, sums);
  }
  for (; i < bytes; i += 16) level_sums<Rows, Bits, 1>(values, weights, base, wide, i, sums);
}

template <int Bits>
void coded_sums_of(const CodedRows& values, size_t rows, const float* weights, size_t wide,
                   const CodedScratch& own, float* sums) {
  size_t r = 0;
  if constexpr (SumsOf<Bits>::kRows >= 4) {
    for (; r + 4 <= rows; r += 4) {
      coded_sums<4, Bits>(values, weights + r * kKeyBlock, wide, own, sums + r * wide);
    }
  }
  if constexpr (SumsOf<Bits>::kRows >= 2) {
    for (; r + 2 <= rows; r += 2) {
      coded_sums<2, Bits>(values, weights + r * kKeyBlock, wide, own, sums + r * wide);
    }
  }
  for (; r < rows; r++) coded_sums<1, Bits>(values, weights + r * kKeyBlock, wide, own, sums + r * wide);
}

// What few rows' weights [rows][kKeyBlock] make of values, added to sums [rows][wide].
void coded_values(const CodedRows& values, size_t rows, const float* weights, size_t wide,
                  const CodedScratch& own, float* sums) {
  if (values.part.by_token) read_token_scales(values, own);
  if (values.part.bits == 8) coded_sums_of<8>(values, rows, weights, wide, own, sums);
  if (values.part.bits == 4) coded_sums_of<4>(values, rows, weights, wide, own, sums);
  if (values.part.bits == 2) coded_sums_of<2>(values, rows, weights, wide, own, sums);
}

// The rows as floats [count][wide], transformed as they are kept; zeros beyond the width.
void coded_floats(const CodedRows& rows, size_t wide, const CodedScratch& own, float* out) {
  const ChunkForm& form = rows.chunks.form;
  const int bits = rows.part.bits;
  const size_t bytes = rows.row_bytes();
  if (rows.part.by_token) {
    read_token_scales(rows, own);
  } else {
    halves(rows.part.low, form.width, own.low);
    halves(rows.part.scale, form.width, own.scale);
    settle(own.scale, bits, bytes);
  }
  for (size_t t = 0; t < rows.count; t++) {
    float* row = out + t * wide;
    const uint8_t* data = rows.data() + t * bytes;
    const float *low = own.low, *scale = own.scale;
    if (rows.part.by_token) {
      // One after another in the place of folded queries: a low and a scale for each channel.
      float *lows = own.folded, *scales = lows + wide;
      for (size_t h = 0; h < form.width; h++) lows[h] = own.token_low[t], scales[h] = own.token_scale[t];
      settle(scales, bits, bytes);
      low = lows, scale = scales;
    }
    if (bits == 8) levels_of<8>(data, form.width, low, scale, row);
    if (bits == 4) levels_of<4>(data, form.width, low, scale, row);
    if (bits == 2) levels_of<2>(data, form.width, low, scale, row);
    for (size_t h = form.width; h < wide; h++) row[h] = 0.0f;
  }
}
