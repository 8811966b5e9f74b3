// Products of one row of activations, bound by how fast weights are read: part of compute.inl.

// Sum over one block's 32 inputs, on top of `sum`.
template <int Bits>
ALWAYS_INLINE I block_dot(const uint8_t* w, const int8_t* x, I sum) {
  if (Bits == 8) {
    UNROLL for (int i = 0; i < 8; i++) sum = dot_at(sum, wbiased(wload(w + 64 * i)), x + 4 * i);
  } else if (Bits == 2) {
    UNROLL for (int i = 0; i < 2; i++) {
      W quarter[4];
      wcrumbs(w + 64 * i, quarter);
      UNROLL for (int j = 0; j < 4; j++) sum = dot_at(sum, quarter[j], x + 16 * i + 4 * j);
    }
  } else {
    UNROLL for (int i = 0; i < 4; i++) {
      W low, high;
      wnibbles(w + 64 * i, low, high);
      sum = dot_at(sum, low, x + 8 * i);
      sum = dot_at(sum, high, x + 8 * i + 4);
    }
  }
  return sum;
}

// The same with the block's inputs in registers.
template <int Bits>
ALWAYS_INLINE I block_dot_with(const uint8_t* w, const X (&x)[8], I sum) {
  if (Bits == 8) {
    UNROLL for (int i = 0; i < 8; i++) sum = dot(sum, wbiased(wload(w + 64 * i)), x[i]);
  } else if (Bits == 2) {
    UNROLL for (int i = 0; i < 2; i++) {
      W quarter[4];
      wcrumbs(w + 64 * i, quarter);
      UNROLL for (int j = 0; j < 4; j++) sum = dot(sum, quarter[j], x[4 * i + j]);
    }
  } else {
    UNROLL for (int i = 0; i < 4; i++) {
      W low, high;
      wnibbles(w + 64 * i, low, high);
      sum = dot(sum, low, x[2 * i]);
      sum = dot(sum, high, x[2 * i + 1]);
    }
  }
  return sum;
}

constexpr int bias_of(int bits) { return bits == 8 ? kBias8 : bits == 4 ? kBias4 : kBias2; }

template <int Bits>
ALWAYS_INLINE void prefetch_block(const uint8_t* w, size_t ahead) {
  UNROLL for (int i = 0; i < Bits; i++) __builtin_prefetch(w + ahead + 64 * i, 0, 3);
}

// How far ahead of use weights are asked for: about what memory delivers while it is underway.
constexpr size_t kAhead = 4096;

// Blocks that share a scale, as a shift: 1 or 2 of them.
ALWAYS_INLINE size_t group_shift(const Matrix& m) { return m.group == 2 * kBlock; }

template <int Bits, bool Grouped>
void row_panels_of(const Matrix& m, const Activations& a, size_t from, size_t to, float* y) {
  const Inputs& in = m.inputs;
  // Divisions stay out of the loop over blocks: each takes as long as a block.
  const size_t spans = in.all_spans(), shift = group_shift(m), groups = m.groups();
  for (size_t panel = from; panel < to; panel++, y += kPanel) {
    const uint8_t* data = m.data + panel * m.panel_stride;
    F total = fzero();
    for (size_t span = 0; span < spans; span++) {
      const size_t first = in.span_block(span), count = in.span_blocks(span);
      const size_t segment = span / in.spans();
      const uint8_t* w = data + first * m.block_stride;
      const int8_t* x = a.q + first * kBlock;
      F part;
      if (Grouped) {
        const uint16_t* scale = static_cast<const uint16_t*>(m.scale) + panel * m.scale_panel_stride +
                                segment * groups * m.scale_group_stride;
        const size_t local = first - segment * in.blocks();
        part = fzero();
        for (size_t b = 0; b < count; b++, w += m.block_stride, x += kBlock) {
          prefetch_block<Bits>(w, kAhead);
          const I sum = block_dot<Bits>(w, x, iset(-bias_of(Bits) * a.block_sum[first + b]));
          const F channel = fload_half(scale + ((local + b) >> shift) * m.scale_group_stride);
          part = fma(to_float(sum), channel, part);
        }
      } else {
        I even = iset(-bias_of(Bits) * a.span_sum[span]), odd = izero();
        size_t b = 0;
        for (; b + 2 <= count; b += 2, w += 2 * m.block_stride, x += 2 * kBlock) {
          prefetch_block<Bits>(w, kAhead);
          even = block_dot<Bits>(w, x, even);
          prefetch_block<Bits>(w + m.block_stride, kAhead);
          odd = block_dot<Bits>(w + m.block_stride, x + kBlock, odd);
        }
        if (b < count) even = block_dot<Bits>(w, x, even);
        const float* scale = static_cast<const float*>(m.scale);
        const F channel = fload(scale + (segment * m.scale_group_stride + panel * m.scale_panel_stride));
        part = fmul(to_float(iadd(even, odd)), channel);
      }
      total = fma(part, fset(a.scale[span]), total);
    }
    fstore(y, total);
  }
}

// The panels of one input block lie in a row of memory, and so do the rows: they are read in that order,
// while the sums of all panels wait in y, as whole numbers until their scale is known.
template <int Bits, bool Grouped>
void row_span_of(const Matrix& m, const Activations& a, size_t span, size_t from, size_t to, float* y) {
  const Inputs& in = m.inputs;
  const size_t first = in.span_block(span), count = in.span_blocks(span), panels = to - from;
  const size_t segment = span / in.spans(), local = first - segment * in.blocks(), shift = group_shift(m);
  const size_t run = panels * m.panel_stride;  // of a block's row; the next one's begins block_stride on
  const size_t skip = m.block_stride - run;
  for (size_t b = 0; b < count; b++) {
    const uint8_t* w = m.data + (first + b) * m.block_stride + from * m.panel_stride;
    const int8_t* bytes = a.q + (first + b) * kBlock;
    X x[8];
    UNROLL for (int i = 0; i < 8; i++) x[i] = xload(bytes + 4 * i);
    const uint16_t* scale = static_cast<const uint16_t*>(m.scale) + from * m.scale_panel_stride +
                            (segment * m.groups() + ((local + b) >> shift)) * m.scale_group_stride;
    const I none = iset(-bias_of(Bits) * (Grouped ? a.block_sum[first + b] : a.span_sum[span]));
    for (size_t p = 0, at = 0; p < panels; p++, at += m.panel_stride) {
      prefetch_block<Bits>(w + at, at + kAhead < run ? kAhead : kAhead + skip);
      float* sum = y + p * kPanel;
      if (Grouped) {
        const I dots = block_dot_with<Bits>(w + at, x, none);
        const F channel = fload_half(scale + p * m.scale_panel_stride);
        fstore(sum, fma(to_float(dots), channel, b ? fload(sum) : fzero()));
      } else {
        istore(sum, block_dot_with<Bits>(w + at, x, b ? iload(sum) : none));
      }
    }
  }
  const F row = fset(a.scale[span]);
  const float* scale = static_cast<const float*>(m.scale) + segment * m.scale_group_stride;
  for (size_t p = 0; p < panels; p++) {
    float* sum = y + p * kPanel;
    const F part =
        Grouped ? fload(sum) : fmul(to_float(iload(sum)), fload(scale + (from + p) * m.scale_panel_stride));
    fstore(sum, fmul(part, row));
  }
}

void row_panels(const Matrix& m, const Activations& a, size_t from, size_t to, float* y) {
  if (m.bits == 8)
    return m.group ? row_panels_of<8, true>(m, a, from, to, y) : row_panels_of<8, false>(m, a, from, to, y);
  if (m.bits == 2)
    return m.group ? row_panels_of<2, true>(m, a, from, to, y) : row_panels_of<2, false>(m, a, from, to, y);
  return m.group ? row_panels_of<4, true>(m, a, from, to, y) : row_panels_of<4, false>(m, a, from, to, y);
}

void row_span(const Matrix& m, const Activations& a, size_t span, size_t from, size_t to, float* y) {
  if (m.bits == 8) {
    return m.group ? row_span_of<8, true>(m, a, span, from, to, y)
                   : row_span_of<8, false>(m, a, span, from, to, y);
  }
  if (m.bits == 2) {
    return m.group ? row_span_of<2, true>(m, a, span, from, to, y)
                   : row_span_of<2, false>(m, a, span, from, to, y);
  }
  return m.group ? row_span_of<4, true>(m, a, span, from, to, y)
                 : row_span_of<4, false>(m, a, span, from, to, y);
}
