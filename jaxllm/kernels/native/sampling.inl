// Where a step ends, choosing tokens: part of compute.inl.

// Whole numbers in the order of the floats, NaN above all; both zeros are 0.
ALWAYS_INLINE int32_t order_of(float x) {
  int32_t bits;
  memcpy(&bits, &x, 4);
  const int32_t magnitude = bits & 0x7fffffff;
  const int32_t ordered = bits < 0 ? -magnitude : magnitude;
  return magnitude > 0x7f800000 ? 0x7fffffff : ordered;
}

// The first index of the largest number, or of the first NaN.
int32_t largest(const float* x, size_t count) {
  constexpr size_t kTogether = 256;
  int32_t top = -0x7fffffff - 1;
  size_t where = 0;
  for (size_t at = 0; at < count; at += kTogether) {
    const size_t end = count - at < kTogether ? count : at + kTogether;
    int32_t here = -0x7fffffff - 1;
    for (size_t i = at; i < end; i++) {
      const int32_t each = order_of(x[i]);
      here = each > here ? each : here;
    }
    if (here > top) {
      top = here;
      where = at;
    }
  }
  while (where < count && order_of(x[where]) != top) where++;
  return static_cast<int32_t>(where);
}

// y [count] = random bits by Threefry-2x32 (Salmon et al. 2011, 20 rounds): of the block of each index from
// `first` on, both halves combined, as `jax.random.bits` gives them.
void random_bits(const uint32_t* key, uint64_t first, size_t count, uint32_t* y) {
  for (size_t i = 0; i < count; i++) {
    const uint64_t index = first + i;
    uint32_t high = static_cast<uint32_t>(index >> 32), low = static_cast<uint32_t>(index);
    threefry(key, high, low);
    y[i] = high ^ low;
  }
}

// Unsigned numbers in the order of the floats, by their bits: -0 is below 0, a NaN beyond the infinity of its
// sign.
ALWAYS_INLINE uint32_t key_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The key of the k-th largest number; 0 where there are fewer.
uint32_t kth_largest(const float* x, size_t count, size_t k) {
  uint32_t least = 0;
  for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
    const uint32_t candidate = least | bit;
    size_t above = 0;
    constexpr size_t kTogether = 1 << 16;
    for (size_t at = 0; at < count && above < k; at += kTogether) {
      const size_t end = count - at < kTogether ? count : at + kTogether;
      uint32_t here = 0;
      for (size_t i = at; i < end; i++) here += key_of(x[i]) >= candidate;
      above += here;
    }
    if (above >= k) least = candidate;
  }
  return least;
}
