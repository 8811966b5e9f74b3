// Products of a few rows, bound by how fast weights are read: part of compute.inl.
//
// Weights are multiplied as they are read; tile.inl unpacks them first, which pays for many rows alone. Sums
// are made in the order of tile.inl and row.inl, so that a row comes out the same alone and among others.

// One address, from which others are counted: compilers would compute each of them, and run out of registers.
template <class T>
ALWAYS_INLINE const T* in_register(const T* p) {
  asm("" : "+r"(p));
  return p;
}

// Sums of Rows x Panels over one block's 32 inputs, on top of `sum`. Panels lie `panel_stride` bytes apart,
// rows of x `stride`.
template <int Bits, int Rows, int Panels>
ALWAYS_INLINE void few_dot(const uint8_t* w, size_t panel_stride, const int8_t* x, size_t stride,
                           I (&sum)[Rows][Panels]) {
  constexpr int at_once = Bits == 8 ? 1 : Bits == 4 ? 2 : 4;  // operands in 64 bytes
  I part[Rows][Panels];
  const int8_t* row[Rows];
  UNROLL for (int r = 0; r < Rows; r++) {
    row[r] = in_register(x + r * stride);
    UNROLL for (int p = 0; p < Panels; p++) part[r][p] = begin_sum<Bits>(sum[r][p]);
  }
  UNROLL for (int i = 0; i < 8 / at_once; i++) {
    W weights[at_once][Panels];
    UNROLL for (int p = 0; p < Panels; p++) {
      const uint8_t* from = w + p * panel_stride + 64 * i;
      if constexpr (Bits == 8) {
        weights[0][p] = wbiased(wload(from));
      } else if constexpr (Bits == 4) {
        wnibbles(from, weights[0][p], weights[1][p]);
      } else {
        W quarter[4];
        wcrumbs(from, quarter);
        UNROLL for (int j = 0; j < 4; j++) weights[j][p] = quarter[j];
      }
    }
    UNROLL for (int j = 0; j < at_once; j++) {
      UNROLL for (int r = 0; r < Rows; r++) {
        const int8_t* four = row[r] + 4 * (at_once * i + j);
        if constexpr (Panels == 1) {
          part[r][0] = product_at<Bits>(part[r][0], weights[j][0], four);
        } else {
          const X same = xload(four);
          UNROLL for (int p = 0; p < Panels; p++) part[r][p] = product<Bits>(part[r][p], weights[j][p], same);
        }
      }
    }
  }
  UNROLL for (int r = 0; r < Rows; r++) {
    UNROLL for (int p = 0; p < Panels; p++) sum[r][p] = end_sum<Bits>(sum[r][p], part[r][p]);
  }
}

// What one span adds to `out`, rows kTaskPanels * 16 floats apart.
template <int Bits, Scaling How, int Rows, int Panels>
void few_span(const Matrix& m, const Activations& a, size_t span, size_t from, size_t panel, float* out) {
  const Inputs& in = m.inputs;
  constexpr size_t out_stride = kTaskPanels * kPanel;
  const size_t row_spans = in.all_spans(), row_blocks = in.all_blocks();
  const size_t first = in.span_block(span), count = in.span_blocks(span), segment = span / in.spans();
  const uint8_t* w = m.data + panel * m.panel_stride + first * m.block_stride;
  const int8_t* x = a.q + from * a.stride + first * kBlock;
  // Of one panel blocks follow each other; where panels do, a block's next one is a row of memory away.
  const size_t ahead = m.block_stride > m.panel_stride ? 4 * m.block_stride : kAhead;
  // Of the block that follows `on` blocks later, in a plane that lies `plane` bytes behind.
  const auto block = [&](I(&sum)[Rows][Panels], size_t on, size_t plane) {
    const uint8_t* own = w + on * m.block_stride + plane;
    UNROLL for (int p = 0; p < Panels; p++)
        prefetch_block<Bits>(in_register(own + p * m.panel_stride + ahead), 0);
    few_dot<Bits, Rows, Panels>(own, m.panel_stride, x + on * kBlock, a.stride, sum);
  };
  if constexpr (How != kChannels) {
    const size_t shift = group_shift(m), low = low_plane(m), local = first - segment * in.blocks();
    F part[Rows][Panels];
    UNROLL for (int r = 0; r < Rows; r++) { UNROLL for (int p = 0; p < Panels; p++) part[r][p] = fzero(); }
    for (size_t b = 0; b < count;) {
      const bool two = shift && b + 1 < count;
      I sum[Rows][Panels];
      const auto all = [&](int r) {
        const int32_t* sums = a.block_sum + (from + r) * row_blocks + first + b;
        return two ? sums[0] + sums[1] : sums[0];
      };
      const auto none = [&](int r) { return iset(-kOffset<Bits, How> * all(r)); };
      UNROLL for (int r = 0; r < Rows; r++) {
        const I start = none(r);
        UNROLL for (int p = 0; p < Panels; p++) sum[r][p] = start;
      }
      block(sum, 0, 0);
      if (two) block(sum, 1, 0);
      if constexpr (How == kNested) {
        UNROLL for (int r = 0; r < Rows; r++) {
          const I start = none(r);
          UNROLL for (int p = 0; p < Panels; p++) sum[r][p] = iadd(sixteenfold(sum[r][p]), start);
        }
        block(sum, 0, low);
        if (two) block(sum, 1, low);
      }
      const auto scale = group_scales<How>(m, segment, (local + b) >> shift, panel, true);
      UNROLL for (int p = 0; p < Panels; p++) {
        const F channel = scale(p);
        UNROLL for (int r = 0; r < Rows; r++) part[r][p] = fma(to_float(sum[r][p]), channel, part[r][p]);
        if constexpr (How == kMinima) {
          const F minimum = scale.minimum(p);
          UNROLL for (int r = 0; r < Rows; r++) part[r][p] = fma(to_float(iset(all(r))), minimum, part[r][p]);
        }
      }
      const size_t blocks = two ? 2 : 1;
      b += blocks, w += blocks * m.block_stride, x += blocks * kBlock;
    }
    UNROLL for (int r = 0; r < Rows; r++) {
      const F row = fset(a.scale[(from + r) * row_spans + span]);
      UNROLL for (int p = 0; p < Panels; p++) {
        float* to = out + r * out_stride + p * kPanel;
        fstore(to, fma(part[r][p], row, span == 0 ? fzero() : fload(to)));
      }
    }
  } else {
    I sum[Rows][Panels];
    UNROLL for (int r = 0; r < Rows; r++) {
      const I start = iset(-bias_of(Bits) * a.span_sum[(from + r) * row_spans + span]);
      UNROLL for (int p = 0; p < Panels; p++) sum[r][p] = start;
    }
    for (size_t b = 0; b < count; b++, w += m.block_stride, x += kBlock) block(sum, 0, 0);
    const float* scale = static_cast<const float*>(m.scale) + segment * m.scale_group_stride;
    UNROLL for (int r = 0; r < Rows; r++) {
      const F row = fset(a.scale[(from + r) * row_spans + span]);
      UNROLL for (int p = 0; p < Panels; p++) {
        float* to = out + r * out_stride + p * kPanel;
        const F factor = fmul(row, fload(scale + (panel + p) * m.scale_panel_stride));
        fstore(to, fma(to_float(sum[r][p]), factor, span == 0 ? fzero() : fload(to)));
      }
    }
  }
}

// The same for `rows` <= Rows rows and all panels of a task.
template <int Bits, Scaling How, int Rows>
void few_spans(const Matrix& m, const Activations& a, size_t span, size_t from, size_t rows, size_t panel,
               size_t panels, float* out) {
  if constexpr (Rows > 1) {
    if (rows != Rows) return few_spans<Bits, How, Rows - 1>(m, a, span, from, rows, panel, panels, out);
  }
  size_t p = 0;
  // As many as registers hold the sums of, so that an input is loaded once for them.
  constexpr int together = kSumsTogether / Rows < kTaskPanels ? kSumsTogether / Rows : kTaskPanels;
  if constexpr (together > 1) {
    for (; p + together <= panels; p += together)
      few_span<Bits, How, Rows, together>(m, a, span, from, panel + p, out + p * kPanel);
  }
  for (; p < panels; p++) few_span<Bits, How, Rows, 1>(m, a, span, from, panel + p, out + p * kPanel);
}

// As `tile`. The rows behind the first kRowsTogether find a span's weights in the first-level cache.
template <int Bits, Scaling How>
void few_rows_of(const Matrix& m, const Activations& a, size_t from, size_t to, size_t panel, size_t panels,
                 float* out) {
  // Of panels that lie apart in memory only those that are multiplied together are read in turns.
  const size_t at_once = to - from < kRowsTogether ? to - from : kRowsTogether;
  const size_t together = at_once <= kSumsTogether / 2 ? 2 : 1;
  const size_t most = m.block_stride <= m.panel_stride ? together : panels;
  for (size_t p = 0; p < panels; p += most) {
    const size_t width = panels - p < most ? panels - p : most;
    for (size_t span = 0; span < m.inputs.all_spans(); span++) {
      for (size_t row = from; row < to; row += kRowsTogether) {
        const size_t rows = to - row < kRowsTogether ? to - row : kRowsTogether;
        float* to_rows = out + (row - from) * kTaskPanels * kPanel + p * kPanel;
        few_spans<Bits, How, kRowsTogether>(m, a, span, row, rows, panel + p, width, to_rows);
        if (a.outliers) add_high_of<Bits, How>(m, a, span, row, row + rows, panel + p, width, to_rows);
      }
    }
  }
}

void few_rows(const Matrix& m, const Activations& a, size_t from, size_t to, size_t panel, size_t panels,
              float* out) {
  OF_FORMAT(m, few_rows_of, m, a, from, to, panel, panels, out)
}
