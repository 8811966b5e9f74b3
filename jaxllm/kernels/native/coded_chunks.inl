// Keys and values of chunks as they are kept, for attention (jaxllm/kv/codecs.py): part of compute.inl.
//
// Scales do not meet every level. A key's score is the sum over its channels of query times (low + scale *
// level): where channels have scales, these are multiplied into the query and lows are summed up once for a
// chunk; where tokens have them, scores are scaled after the sum. The sum of values is taken apart alike.

// Sixteen levels of a row: of plane `plane`, from byte i on, each times 2^(plane * Bits).
template <int Bits>
ALWAYS_INLINE F levels_at(I packed, int plane) {
  return to_float(iand(packed, iset(((1 << Bits) - 1) << plane * Bits)));
}

// Whether rows of levels come in whole vectors, so that they are read where they lie.
ALWAYS_INLINE bool whole_vectors(const CodedChunks& c, int bits) {
  return c.form.width * static_cast<size_t>(bits) / 8 % 16 == 0;
}

// What is read of a head's part soon.
ALWAYS_INLINE void ask_for(const ChunkForm& form, const ChunkPart& part) {
  const size_t bytes = form.tokens * form.row_bytes(part.bits);
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(part.data + i, 0, 2);
  if (!part.bits) return;
  const size_t scales = 2 * (part.by_token ? form.tokens : form.width);
  for (size_t i = 0; i < scales; i += 64) {
    __builtin_prefetch(part.low + i, 0, 2);
    __builtin_prefetch(part.scale + i, 0, 2);
  }
}

// Some tokens of one head of a chunk: from token `from` on, `count` of them.
struct CodedRows {
  const CodedChunks& chunks;
  ChunkPart part;
  size_t from, count;

  CodedRows(const CodedChunks& chunks, size_t head, size_t chunk, size_t from, size_t count, bool values)
      : chunks(chunks),
        part(chunks.form, chunks.blobs[chunk], chunks.heads, head, chunks.bits[chunk], values),
        from(from),
        count(count) {
    const size_t next = chunk + 1;
    if (next * chunks.form.tokens < chunks.tokens) {
      ask_for(chunks.form,
              ChunkPart(chunks.form, chunks.blobs[next], chunks.heads, head, chunks.bits[next], values));
    }
  }
  size_t row_bytes() const { return chunks.form.row_bytes(part.bits); }
  const uint8_t* data() const { return part.data + from * row_bytes(); }
};

// Calls `use(chunk, token of it, count, row)` for each part of a chunk in rows [begin, end).
template <class Use>
ALWAYS_INLINE void each_chunk(const CodedChunks& c, size_t begin, size_t end, const Use& use) {
  const size_t tokens = c.form.tokens;
  for (size_t row = begin; row < end;) {
    const size_t from = row % tokens, left = tokens - from, count = end - row < left ? end - row : left;
    use(row / tokens, from, count, row);
    row += count;
  }
}

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

// Scales of some rows as floats: of channels, those of planes above the first divided as levels stand there;
// of tokens, and those of channels settle planes alone.
void read_scales(const CodedRows& rows, const CodedScratch& own) {
  const ChunkPart& part = rows.part;
  const size_t width = rows.chunks.form.width, bytes = rows.row_bytes();
  if (part.by_token) {
    const size_t last = rows.count / 16 * 16;
    if (last < rows.count) {
      fstore(own.token_low + last, fzero());
      fstore(own.token_scale + last, fzero());
    }
    halves(part.low + 2 * rows.from, rows.count, own.token_low);
    halves(part.scale + 2 * rows.from, rows.count, own.token_scale);
    for (size_t h = 0; h < width; h++) own.scale[h] = 1.0f;
  } else {
    halves(part.low, width, own.low);
    halves(part.scale, width, own.scale);
  }
  for (int shift = part.bits; shift < 8; shift += part.bits) {
    float* plane = own.scale + bytes * static_cast<size_t>(shift / part.bits);
    for (size_t i = 0; i < bytes; i++) plane[i] *= settled(shift);
  }
}

// scores [Rows][kKeyBlock] of `count` rows of levels by products with q [Rows][wide].
template <int Rows, int Bits>
void level_dots(const float* q, const uint8_t* data, size_t bytes, size_t count, size_t wide, float* scores) {
  constexpr int kKeys = 16 / Rows, kPlanes = 8 / Bits;
  for (size_t s = 0; s < count; s += kKeys) {
    const uint8_t* key[kKeys];
    UNROLL for (int j = 0; j < kKeys; j++) key[j] = data + (s + j < count ? s + j : count - 1) * bytes;
    F sum[16];
    UNROLL for (int i = 0; i < 16; i++) sum[i] = fzero();
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
    // Whole vectors: behind the last row they mean nothing.
    UNROLL for (int r = 0; r < Rows; r++) {
      memcpy(scores + r * kKeyBlock + s, together + r * kKeys, kKeys * sizeof(float));
    }
  }
}

template <int Rows, int Bits>
void coded_dots(const CodedRows& keys, const float* q, size_t wide, const CodedScratch& own, float* scores) {
  const size_t width = keys.chunks.form.width, count = keys.count;
  const bool by_token = keys.part.by_token;
  float base[Rows], dots[Rows * kKeyBlock];
  for (size_t r = 0; r < Rows; r++) {
    F sum = fzero();
    // The width has whole vectors where the bytes have.
    for (size_t h = 0; h < width; h += 16) {
      const F x = fload(q + r * wide + h);
      sum = by_token ? fadd(sum, x) : fma(x, fload(own.low + h), sum);
      fstore(own.folded + r * wide + h, fmul(x, fload(own.scale + h)));
    }
    base[r] = fsum(sum);
  }
  level_dots<Rows, Bits>(own.folded, keys.data(), keys.row_bytes(), count, wide, dots);
  for (size_t r = 0; r < Rows; r++) {
    float* row = dots + r * kKeyBlock;
    for (size_t t = 0; t < count; t += 16) {
      const F dot = fload(row + t), b = fset(base[r]);
      const F low = fmul(b, fload(own.token_low + t));
      fstore(row + t, by_token ? fma(dot, fload(own.token_scale + t), low) : fadd(dot, b));
    }
    memcpy(scores + r * kKeyBlock, row, count * sizeof(float));
  }
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
  read_scales(keys, own);
  if (keys.part.bits == 8) coded_scores_of<8>(keys, rows, q, wide, own, scores);
  if (keys.part.bits == 4) coded_scores_of<4>(keys, rows, q, wide, own, scores);
  if (keys.part.bits == 2) coded_scores_of<2>(keys, rows, q, wide, own, scores);
}

// sums [Rows][wide] += weights [Rows][kKeyBlock] x rows of levels: scaled by channel, plus the rows' lows.
template <int Rows, int Bits>
void coded_sums(const CodedRows& values, const float* weights, size_t wide, const CodedScratch& own,
                float* sums) {
  constexpr int kPlanes = 8 / Bits;
  const size_t bytes = values.row_bytes(), count = values.count;
  const bool by_token = values.part.by_token;
  float scaled[Rows][kKeyBlock], base[Rows];
  for (size_t r = 0; r < Rows; r++) {
    memcpy(scaled[r], weights + r * kKeyBlock, count * sizeof(float));
    for (size_t t = count; t % 16; t++) scaled[r][t] = 0.0f;
    F sum = fzero();
    for (size_t t = 0; t < count; t += 16) {
      const F weight = fload(scaled[r] + t);
      sum = by_token ? fma(weight, fload(own.token_low + t), sum) : fadd(sum, weight);
      if (by_token) fstore(scaled[r] + t, fmul(weight, fload(own.token_scale + t)));
    }
    base[r] = fsum(sum);
  }
  for (size_t i = 0; i < bytes; i += 16) {
    F sum[Rows][kPlanes];
    UNROLL for (int r = 0; r < Rows; r++) {
      UNROLL for (int plane = 0; plane < kPlanes; plane++) sum[r][plane] = fzero();
    }
    const uint8_t* data = values.data() + i;
    for (size_t t = 0; t < count; t++, data += bytes) {
      const I packed = iload_bytes(data);
      F x[Rows];
      UNROLL for (int r = 0; r < Rows; r++) x[r] = fset(scaled[r][t]);
      UNROLL for (int plane = 0; plane < kPlanes; plane++) {
        const F level = levels_at<Bits>(packed, plane);
        UNROLL for (int r = 0; r < Rows; r++) sum[r][plane] = fma(x[r], level, sum[r][plane]);
      }
    }
    UNROLL for (int plane = 0; plane < kPlanes; plane++) {
      const size_t at = plane * bytes + i;
      const F scale = fload(own.scale + at);
      UNROLL for (int r = 0; r < Rows; r++) {
        float* to = sums + r * wide + at;
        // Fused here, or the compiler does so for some numbers of rows and not for others.
        const F low = by_token ? fset(1.0f) : fload(own.low + at);
        fstore(to, fma(fset(base[r]), low, fma(scale, sum[r][plane], fload(to))));
      }
    }
  }
}

template <int Bits>
void coded_sums_of(const CodedRows& values, size_t rows, const float* weights, size_t wide,
                   const CodedScratch& own, float* sums) {
  size_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    coded_sums<4, Bits>(values, weights + r * kKeyBlock, wide, own, sums + r * wide);
  }
  for (; r + 2 <= rows; r += 2) {
    coded_sums<2, Bits>(values, weights + r * kKeyBlock, wide, own, sums + r * wide);
  }
  if (r < rows) coded_sums<1, Bits>(values, weights + r * kKeyBlock, wide, own, sums + r * wide);
}

// What few rows' weights [rows][kKeyBlock] make of values, added to sums [rows][wide].
void coded_values(const CodedRows& values, size_t rows, const float* weights, size_t wide,
                  const CodedScratch& own, float* sums) {
  read_scales(values, own);
  if (values.part.bits == 8) coded_sums_of<8>(values, rows, weights, wide, own, sums);
  if (values.part.bits == 4) coded_sums_of<4>(values, rows, weights, wide, own, sums);
  if (values.part.bits == 2) coded_sums_of<2>(values, rows, weights, wide, own, sums);
}

// The rows as floats [count][wide], transformed as they are kept; zeros beyond the width.
void coded_floats(const CodedRows& rows, size_t wide, const CodedScratch& own, float* out) {
  const ChunkForm& form = rows.chunks.form;
  const int bits = rows.part.bits;
  const size_t bytes = rows.row_bytes();
  read_scales(rows, own);
  for (size_t t = 0; t < rows.count; t++) {
    float* row = out + t * wide;
    const uint8_t* data = rows.data() + t * bytes;
    const float *low = own.low, *scale = own.scale;
    if (rows.part.by_token) {
      // One after another in the place of folded queries: a low and a scale for each channel.
      float *lows = own.folded, *scales = lows + wide;
      for (size_t h = 0; h < form.width; h++) {
        lows[h] = own.token_low[t], scales[h] = own.scale[h] * own.token_scale[t];
      }
      low = lows, scale = scales;
    }
    if (bits == 8) levels_of<8>(data, form.width, low, scale, row);
    if (bits == 4) levels_of<4>(data, form.width, low, scale, row);
    if (bits == 2) levels_of<2>(data, form.width, low, scale, row);
    for (size_t h = form.width; h < wide; h++) row[h] = 0.0f;
  }
}
