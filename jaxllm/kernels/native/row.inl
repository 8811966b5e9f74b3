// Products of one row of activations, bound by how fast weights are read: part of compute.inl.

// Sum over one block's 32 inputs, on top of `sum`.
template <int Bits>
ALWAYS_INLINE I block_dot(const uint8_t* w, const int8_t* x, I sum) {
  if (Bits == 8) {
    UNROLL for (int i = 0; i < 8; i++) sum = dot_at(sum, wbiased(wload(w + 64 * i)), x + 4 * i);
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

template <int Bits>
constexpr int bias() {
  return Bits == 8 ? kBias8 : kBias4;
}

template <int Bits>
ALWAYS_INLINE void prefetch_block(const uint8_t* w, size_t ahead) {
  UNROLL for (int i = 0; i < Bits; i++) __builtin_prefetch(w + ahead + 64 * i, 0, 3);
}

// How far ahead of use weights are asked for: about what memory delivers while it is underway.
constexpr size_t kAhead = 4096;

template <int Bits, bool Grouped>
void row_panels_of(const Matrix& m, const Activations& a, size_t from, size_t to, float* y) {
  const Inputs& in = m.inputs;
  const size_t spans = in.all_spans();
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
        const uint16_t* scale = static_cast<const uint16_t*>(m.scale) + panel * m.scale_panel_stride;
        const size_t per = m.group / kBlock, local = first - segment * in.blocks();
        part = fzero();
        for (size_t b = 0; b < count; b++, w += m.block_stride, x += kBlock) {
          prefetch_block<Bits>(w, kAhead);
          const I sum = block_dot<Bits>(w, x, iset(-bias<Bits>() * a.block_sum[first + b]));
          const size_t group = segment * m.groups() + (local + b) / per;
          part = fma(to_float(sum), fload_half(scale + group * m.scale_group_stride), part);
        }
      } else {
        I even = iset(-bias<Bits>() * a.span_sum[span]), odd = izero();
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

// One span of `Panels` neighbouring panels, whose blocks of one input block lie in a row of memory. Sums stay
// in registers; meanwhile the next panels' blocks are on their way.
template <int Bits, bool Grouped, int Panels>
void row_span_panels(const Matrix& m, const Activations& a, size_t span, size_t panel, float* y) {
  const Inputs& in = m.inputs;
  const size_t first = in.span_block(span), count = in.span_blocks(span);
  const size_t segment = span / in.spans(), local = first - segment * in.blocks();
  const uint8_t* w = m.data + first * m.block_stride + panel * m.panel_stride;
  const int8_t* x = a.q + first * kBlock;
  const size_t soon = Panels * m.panel_stride;
  I sum[Panels];
  F part[Panels];
  UNROLL for (int p = 0; p < Panels; p++) {
    sum[p] = iset(-bias<Bits>() * a.span_sum[span]);
    part[p] = fzero();
  }
  for (size_t b = 0; b < count; b++, w += m.block_stride, x += kBlock) {
    if (Grouped) {
      const size_t group = segment * m.groups() + (local + b) / (m.group / kBlock);
      const uint16_t* scale =
          static_cast<const uint16_t*>(m.scale) + group * m.scale_group_stride + panel * m.scale_panel_stride;
      const I start = iset(-bias<Bits>() * a.block_sum[first + b]);
      UNROLL for (int p = 0; p < Panels; p++) {
        prefetch_block<Bits>(w + p * m.panel_stride, soon);
        const I dots = block_dot<Bits>(w + p * m.panel_stride, x, start);
        part[p] = fma(to_float(dots), fload_half(scale + p * m.scale_panel_stride), part[p]);
      }
    } else {
      UNROLL for (int p = 0; p < Panels; p++) {
        prefetch_block<Bits>(w + p * m.panel_stride, soon);
        sum[p] = block_dot<Bits>(w + p * m.panel_stride, x, sum[p]);
      }
    }
  }
  const F row = fset(a.scale[span]);
  UNROLL for (int p = 0; p < Panels; p++) {
    if (!Grouped) {
      const float* scale = static_cast<const float*>(m.scale);
      const F channel = fload(scale + segment * m.scale_group_stride + (panel + p) * m.scale_panel_stride);
      part[p] = fmul(to_float(sum[p]), channel);
    }
    fstore(y + p * kPanel, fmul(part[p], row));
  }
}

template <int Bits, bool Grouped>
void row_span_of(const Matrix& m, const Activations& a, size_t span, size_t from, size_t to, float* y) {
  constexpr int kTogether = 4;
  size_t panel = from;
  for (; panel + kTogether <= to; panel += kTogether, y += kTogether * kPanel) {
    row_span_panels<Bits, Grouped, kTogether>(m, a, span, panel, y);
  }
  for (; panel < to; panel++, y += kPanel) row_span_panels<Bits, Grouped, 1>(m, a, span, panel, y);
}

void row_panels(const Matrix& m, const Activations& a, size_t from, size_t to, float* y) {
  if (m.bits == 8)
    return m.group ? row_panels_of<8, true>(m, a, from, to, y) : row_panels_of<8, false>(m, a, from, to, y);
  return m.group ? row_panels_of<4, true>(m, a, from, to, y) : row_panels_of<4, false>(m, a, from, to, y);
}

void row_span(const Matrix& m, const Activations& a, size_t span, size_t from, size_t to, float* y) {
  if (m.bits == 8) {
    return m.group ? row_span_of<8, true>(m, a, span, from, to, y)
                   : row_span_of<8, false>(m, a, span, from, to, y);
  }
  return m.group ? row_span_of<4, true>(m, a, span, from, to, y)
                 : row_span_of<4, false>(m, a, span, from, to, y);
}
