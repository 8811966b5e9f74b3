// Products of one row of activations, bound by how fast weights are read: part of compute.inl.
//
// Sums are made in the order of tile.inl, so that a row comes out the same alone and among others.

// Of few bits products may first be summed over a block in lanes of 16 bits: `begin_sum`, a `product` for
// each four inputs, `end_sum`.
#ifdef LANES_PAIRS
template <int Bits>
constexpr bool kInPairs = Bits != 8;
#else
template <int Bits>
constexpr bool kInPairs = false;
ALWAYS_INLINE I dot_pairs(I pairs, W, X) { return pairs; }
ALWAYS_INLINE I add_pairs(I sum, I) { return sum; }
#endif

template <int Bits>
ALWAYS_INLINE I begin_sum(I sum) {
  return kInPairs<Bits> ? izero() : sum;
}
template <int Bits>
ALWAYS_INLINE I product(I part, W w, X x) {
  return kInPairs<Bits> ? dot_pairs(part, w, x) : dot(part, w, x);
}
template <int Bits>
ALWAYS_INLINE I product_at(I part, W w, const int8_t* x) {
  return kInPairs<Bits> ? dot_pairs(part, w, xload(x)) : dot_at(part, w, x);
}
template <int Bits>
ALWAYS_INLINE I end_sum(I sum, I part) {
  return kInPairs<Bits> ? add_pairs(sum, part) : part;
}

// Sum over one block's 32 inputs, on top of `sum`.
template <int Bits>
ALWAYS_INLINE I block_dot(const uint8_t* w, const int8_t* x, I sum) {
  I part = begin_sum<Bits>(sum);
  if (Bits == 8) {
    UNROLL for (int i = 0; i < 8; i++) part = product_at<Bits>(part, wbiased(wload(w + 64 * i)), x + 4 * i);
  } else if (Bits == 2) {
    UNROLL for (int i = 0; i < 2; i++) {
      W quarter[4];
      wcrumbs(w + 64 * i, quarter);
      UNROLL for (int j = 0; j < 4; j++) part = product_at<Bits>(part, quarter[j], x + 16 * i + 4 * j);
    }
  } else {
    UNROLL for (int i = 0; i < 4; i++) {
      W low, high;
      wnibbles(w + 64 * i, low, high);
      part = product_at<Bits>(part, low, x + 8 * i);
      part = product_at<Bits>(part, high, x + 8 * i + 4);
    }
  }
  return end_sum<Bits>(sum, part);
}

// The same with the block's inputs in registers.
template <int Bits>
ALWAYS_INLINE I block_dot_with(const uint8_t* w, const X (&x)[8], I sum) {
  I part = begin_sum<Bits>(sum);
  if (Bits == 8) {
    UNROLL for (int i = 0; i < 8; i++) part = product<Bits>(part, wbiased(wload(w + 64 * i)), x[i]);
  } else if (Bits == 2) {
    UNROLL for (int i = 0; i < 2; i++) {
      W quarter[4];
      wcrumbs(w + 64 * i, quarter);
      UNROLL for (int j = 0; j < 4; j++) part = product<Bits>(part, quarter[j], x[4 * i + j]);
    }
  } else {
    UNROLL for (int i = 0; i < 4; i++) {
      W low, high;
      wnibbles(w + 64 * i, low, high);
      part = product<Bits>(part, low, x[2 * i]);
      part = product<Bits>(part, high, x[2 * i + 1]);
    }
  }
  return end_sum<Bits>(sum, part);
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
      if (Grouped) {
        F part = fzero();
        const uint16_t* scale = static_cast<const uint16_t*>(m.scale) + panel * m.scale_panel_stride +
                                segment * groups * m.scale_group_stride;
        const size_t local = first - segment * in.blocks();
        for (size_t b = 0; b < count;) {
          const F channel = fload_half(scale + ((local + b) >> shift) * m.scale_group_stride);
          // A span begins with a group, and a group of two blocks may end after its first.
          const bool two = shift && b + 1 < count;
          const int32_t* sums = a.block_sum + first + b;
          prefetch_block<Bits>(w, kAhead);
          I dots = block_dot<Bits>(w, x, iset(-bias_of(Bits) * (two ? sums[0] + sums[1] : sums[0])));
          b++, w += m.block_stride, x += kBlock;
          if (two) {
            prefetch_block<Bits>(w, kAhead);
            dots = block_dot<Bits>(w, x, dots);
            b++, w += m.block_stride, x += kBlock;
          }
          part = fma(to_float(dots), channel, part);
        }
        total = fma(part, fset(a.scale[span]), total);
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
        total = fma(to_float(iadd(even, odd)), fmul(fset(a.scale[span]), channel), total);
      }
    }
    fstore(y, total);
  }
}

// The panels of one input block lie in a row of memory, and so do the rows: they are read in that order, both
// rows of a group of two together, while the sums of all panels wait in y, as whole numbers where all of a
// span shares its scales.
template <int Bits, bool Grouped>
void row_span_of(const Matrix& m, const Activations& a, size_t span, size_t from, size_t to, float* y) {
  const Inputs& in = m.inputs;
  const size_t first = in.span_block(span), count = in.span_blocks(span), panels = to - from;
  const size_t segment = span / in.spans(), local = first - segment * in.blocks(), shift = group_shift(m);
  const size_t run = panels * m.panel_stride;  // of a block's row; the next one's begins block_stride on
  for (size_t b = 0; b < count;) {
    const bool two = Grouped && shift && b + 1 < count;
    const size_t skip = (two ? 2 : 1) * m.block_stride - run;
    const uint8_t* w = m.data + (first + b) * m.block_stride + from * m.panel_stride;
    const int8_t* bytes = a.q + (first + b) * kBlock;
    const int32_t* sums = a.block_sum + first + b;
    X x[8];
    UNROLL for (int i = 0; i < 8; i++) x[i] = xload(bytes + 4 * i);
    const uint16_t* scale = static_cast<const uint16_t*>(m.scale) + from * m.scale_panel_stride +
                            (segment * m.groups() + ((local + b) >> shift)) * m.scale_group_stride;
    const I none = iset(-bias_of(Bits) * (!Grouped ? a.span_sum[span] : two ? sums[0] + sums[1] : sums[0]));
    for (size_t p = 0, at = 0; p < panels; p++, at += m.panel_stride) {
      const size_t ahead = at + kAhead < run ? kAhead : kAhead + skip;
      prefetch_block<Bits>(w + at, ahead);
      float* sum = y + p * kPanel;
      if (Grouped) {
        I dots = block_dot_with<Bits>(w + at, x, none);
        if (two) {
          prefetch_block<Bits>(w + m.block_stride + at, ahead);
          dots = block_dot<Bits>(w + m.block_stride + at, bytes + kBlock, dots);
        }
        const F channel = fload_half(scale + p * m.scale_panel_stride);
        fstore(sum, fma(to_float(dots), channel, b ? fload(sum) : fzero()));
      } else {
        istore(sum, block_dot_with<Bits>(w + at, x, b ? iload(sum) : none));
      }
    }
    b += two ? 2 : 1;
  }
}

void join_spans(const Matrix& m, const Activations& a, const float* parts, float* y) {
  const size_t spans = m.inputs.all_spans(), stride = m.panels * kPanel;
  for (size_t panel = 0; panel < m.panels; panel++) {
    F total = fzero();
    for (size_t span = 0; span < spans; span++) {
      const float* part = parts + span * stride + panel * kPanel;
      const F row = fset(a.scale[span]);
      if (m.group) {
        total = fma(fload(part), row, total);
      } else {
        const float* scale = static_cast<const float*>(m.scale) +
                             (span / m.inputs.spans() * m.scale_group_stride + panel * m.scale_panel_stride);
        total = fma(to_float(iload(part)), fmul(row, fload(scale)), total);
      }
    }
    fstore(y + panel * kPanel, total);
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
