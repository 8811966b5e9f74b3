// The two thin products of a low-rank adapter, and of outliers, in floats: part of compute.inl.

// The first `count` of 16 floats, zeros behind.
ALWAYS_INLINE F load_some(const float* p, size_t count) {
  if (count >= 16) return fload(p);
  float some[16] = {};
  memcpy(some, p, count * sizeof(float));
  return fload(some);
}

template <int Count>
ALWAYS_INLINE void some_sums(const float* x, const float* a, size_t stride, size_t width, float* sums) {
  F total[Count];
  UNROLL for (int r = 0; r < Count; r++) total[r] = fzero();
  size_t i = 0;
  for (; i + 16 <= width; i += 16) {
    const F v = fload(x + i);
    UNROLL for (int r = 0; r < Count; r++) total[r] = fma(v, fload(a + r * stride + i), total[r]);
  }
  if (i < width) {
    const F v = load_some(x + i, width - i);
    UNROLL for (int r = 0; r < Count; r++) total[r] =
        fma(v, load_some(a + r * stride + i, width - i), total[r]);
  }
  UNROLL for (int r = 0; r < Count; r++) sums[r] = fsum(total[r]);
}

void low_sums(const float* x, const float* a, size_t stride, size_t rank, size_t width, float* sums) {
  size_t r = 0;
  for (; r + 4 <= rank; r += 4) some_sums<4>(x, a + r * stride, stride, width, sums + r);
  for (; r < rank; r++) some_sums<1>(x, a + r * stride, stride, width, sums + r);
}

// A few rows at a time, so that what is read of `a` serves them all.
template <int Rows>
ALWAYS_INLINE void add_low_rows(const float* low, size_t low_stride, const float* a, size_t stride,
                                size_t rank, size_t width, float* y, size_t y_stride) {
  for (size_t i = 0; i < width; i += 16) {
    const size_t count = width - i < 16 ? width - i : 16;
    F total[Rows];
    UNROLL for (int row = 0; row < Rows; row++) total[row] = load_some(y + row * y_stride + i, count);
    for (size_t r = 0; r < rank; r++) {
      const F v = load_some(a + r * stride + i, count);
      UNROLL for (int row = 0; row < Rows; row++) {
        total[row] = fma(fset(low[row * low_stride + r]), v, total[row]);
      }
    }
    UNROLL for (int row = 0; row < Rows; row++) {
      float* to = y + row * y_stride + i;
      if (count == 16) {
        fstore(to, total[row]);
      } else {
        float some[16];
        fstore(some, total[row]);
        memcpy(to, some, count * sizeof(float));
      }
    }
  }
}

void add_low(const float* low, size_t low_stride, size_t rows, const float* a, size_t stride, size_t rank,
             size_t width, float* y, size_t y_stride) {
  size_t row = 0;
  for (; row + 4 <= rows; row += 4) {
    add_low_rows<4>(low + row * low_stride, low_stride, a, stride, rank, width, y + row * y_stride, y_stride);
  }
  for (; row < rows; row++) {
    add_low_rows<1>(low + row * low_stride, low_stride, a, stride, rank, width, y + row * y_stride, y_stride);
  }
}

void floats_of(const uint16_t* halves, size_t count, float* y) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16) fstore(y + i, fload_half(halves + i));
  if (i == count) return;
  uint16_t some[16] = {};
  float wide[16];
  memcpy(some, halves + i, (count - i) * sizeof(uint16_t));
  fstore(wide, fload_half(some));
  memcpy(y + i, wide, (count - i) * sizeof(float));
}
