// Chunks of a cache, from the bytes that they are kept as (jaxllm/contexts/codecs.py): part of compute.inl.

// A row of `width` at `bits` per level, each `low + scale * level` of its own channel. The lowest bits of all
// bytes are the first levels, the next the following ones. Scales are divided by 2^shift, for levels are
// taken where they stand in their bytes.
template <int Bits>
ALWAYS_INLINE void levels_of(const uint8_t* data, size_t width, const float* low, const float* scale,
                             float* out) {
  constexpr int kPlanes = 8 / Bits;
  const size_t bytes = width / kPlanes;
  size_t i = 0;
  for (; i + 16 <= bytes; i += 16) {
    const I packed = iload_bytes(data + i);
    UNROLL for (int plane = 0; plane < kPlanes; plane++) {
      const size_t at = plane * bytes + i;
      const F level = to_float(iand(packed, iset(((1 << Bits) - 1) << plane * Bits)));
      fstore(out + at, fma(fload(scale + at), level, fload(low + at)));
    }
  }
  for (; i < bytes; i++) {
    for (int plane = 0; plane < kPlanes; plane++) {
      const size_t at = plane * bytes + i;
      out[at] = low[at] + scale[at] * static_cast<float>(data[i] & ((1 << Bits) - 1) << plane * Bits);
    }
  }
}

// The Walsh-Hadamard transform of blocks of a row, orthonormal.
void spread(float* x, size_t width, size_t block) {
  for (size_t half = 1; half < block; half *= 2) {
    for (size_t at = 0; at < width; at += 2 * half) {
      for (size_t i = at; i < at + half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b, x[i + half] = a - b;
      }
    }
  }
  const float factor = 1.0f / __builtin_sqrtf(static_cast<float>(block));
  for (size_t i = 0; i < width; i++) x[i] *= factor;
}

// One float of a half.
ALWAYS_INLINE float half_at(const uint8_t* p) {
  uint16_t bits[16] = {};
  float out[16];
  memcpy(bits, p, 2);
  fstore(out, fload_half(bits));
  return out[0];
}

// Halves as floats.
void halves(const uint8_t* from, size_t count, float* out) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    uint16_t bits[16];
    memcpy(bits, from + 2 * i, sizeof bits);
    fstore(out + i, fload_half(bits));
  }
  for (; i < count; i++) out[i] = half_at(from + 2 * i);
}

// Sixteen halves as floats, at any address.
ALWAYS_INLINE F half_vector(const uint8_t* p) {
#if defined(__x86_64__)
  return fload_half(reinterpret_cast<const uint16_t*>(p));
#else
  uint16_t bits[16];
  memcpy(bits, p, sizeof bits);
  return fload_half(bits);
#endif
}

// What a scale is divided by where a level stands at a byte's bit `shift`.
ALWAYS_INLINE float settled(int shift) { return 1.0f / static_cast<float>(1 << shift); }

// Scales of levels of so many bits, in rows of `bytes`, as levels stand in their bytes.
void settle(float* scale, int bits, size_t bytes) {
  for (int shift = bits; shift < 8; shift += bits) {
    float* plane = scale + bytes * static_cast<size_t>(shift / bits);
    for (size_t i = 0; i < bytes; i++) plane[i] *= settled(shift);
  }
}

// The rows of a chunk whose channels have scales of their own, as halves: straight to where they stand. A
// cache is larger than the processor's caches, and what is written whole need not be read before. Others see
// it after `stream_fence`.
template <int Bits>
void stream_rows(const Chunk& c, const float* low, const float* scale) {
  constexpr int kPlanes = 8 / Bits;
  const size_t bytes = c.width / kPlanes;
  for (size_t t = 0; t < c.tokens; t++) {
    const uint8_t* data = c.data + t * bytes;
    uint16_t* out = static_cast<uint16_t*>(c.out) + t * c.width;
    UNROLL for (int plane = 0; plane < kPlanes; plane++) {
      for (size_t i = 0; i < bytes; i += 16) {
        const size_t at = plane * bytes + i;
        const F level = to_float(iand(iload_bytes(data + i), iset(((1 << Bits) - 1) << plane * Bits)));
        fstream_half(out + at, fma(fload(scale + at), level, fload(low + at)));
      }
    }
  }
}

// Whether a chunk's rows come in whole vectors and stand where they can be streamed to.
bool streams(const Chunk& c) {
  const size_t row_bytes = c.width * static_cast<size_t>(c.bits) / 8;
  return c.half && !c.by_token && c.block == 1 && row_bytes % 16 == 0 &&
         reinterpret_cast<uintptr_t>(c.out) % 32 == 0;
}

// Rows as they are.
void stream_same(const Chunk& c) {
  const size_t bytes = c.tokens * c.width * (c.half ? 2 : 4);
  char* out = static_cast<char*>(c.out);
  if (bytes % 32 || reinterpret_cast<uintptr_t>(out) % 32) {
    memcpy(out, c.data, bytes);
    return;
  }
  for (size_t i = 0; i < bytes; i += 32) stream_bytes32(out + i, c.data + i);
}

void load_chunk(const Chunk& c, float* scratch) {
  if (c.bits == 0) return stream_same(c);
  const size_t wide = padded_width(c.width), row_bytes = c.width * static_cast<size_t>(c.bits) / 8;
  float *row = scratch, *low = row + wide, *scale = low + wide, *rest = scale + wide;
  if (!c.by_token) {
    halves(c.low, c.width, low);
    halves(c.scale, c.width, scale);
    settle(scale, c.bits, row_bytes);
  }
  if (streams(c)) {
    if (c.bits == 8) stream_rows<8>(c, low, scale);
    if (c.bits == 4) stream_rows<4>(c, low, scale);
    if (c.bits == 2) stream_rows<2>(c, low, scale);
    return;
  }
  for (size_t t = 0; t < c.tokens; t++) {
    const uint8_t* data = c.data + t * row_bytes;
    if (c.by_token) {
      const float base = half_at(c.low + 2 * t), step = half_at(c.scale + 2 * t);
      for (size_t i = 0; i < c.width; i++) low[i] = base;
      for (int shift = 0; shift < 8; shift += c.bits) {
        float* plane = scale + row_bytes * static_cast<size_t>(shift / c.bits);
        for (size_t i = 0; i < row_bytes; i++) plane[i] = step * settled(shift);
      }
    }
    if (c.bits == 8) levels_of<8>(data, c.width, low, scale, row);
    if (c.bits == 4) levels_of<4>(data, c.width, low, scale, row);
    if (c.bits == 2) levels_of<2>(data, c.width, low, scale, row);
    if (c.block > 1) spread(row, c.width, c.block);
    char* out = static_cast<char*>(c.out) + t * c.width * (c.half ? 2 : 4);
    store_row(row, c.width, nullptr, nullptr, 0, c.half, out, rest);
  }
}
