// Products of many rows, bound by arithmetic: part of compute.inl.

// How the weights of a span become operands, once for all rows.
enum Unpacking {
  kAsStored,  // 8 bits as they are; fewer as whole numbers, whose group scales come later
  kWidened,   // 4 or 2 bits as 8 bits of one scale for the span
};

// [panels / Panels][8 * blocks][Panels][64] bytes. Panels and blocks that do not exist give zeros. Fills
// `channel` [panels][16] with the span's scales when it widens.
template <int Panels, bool Signed, Unpacking How>
void unpack_span(const Matrix& m, size_t span, size_t panel, size_t panels, size_t blocks, uint8_t* out,
                 float* channel) {
  const size_t first = m.inputs.span_block(span), count = m.inputs.span_blocks(span), low = low_plane(m);
  for (size_t p = 0; p < (panels + Panels - 1) / Panels * Panels; p++) {
    uint8_t* at = out + (p / Panels * blocks * 8 * Panels + p % Panels) * 64;
    const size_t present = p < panels ? count : 0;
    const uint8_t* w = m.data + (panel + p) * m.panel_stride + first * m.block_stride;
    const auto put = [&](W value) {
      wstore(at, Signed ? value : wbiased(value));
      at += Panels * 64;
    };
#ifdef LANES_WIDEN
    if constexpr (How == kWidened) {
      const Inputs& in = m.inputs;
      const size_t segment = span / in.spans(), per = m.group / kBlock, groups = (present + per - 1) / per;
      const size_t first_group = span % in.spans() * (kSpan / m.group);
      const auto scale = [&](size_t g) { return group_scale(m, segment, first_group + g, panel + p); };
      F most = fset(kTiny);
      for (size_t g = 0; g < groups; g++) most = fmax(fabs(scale(g)), most);
      const float top = m.low         ? 127.0f
                        : m.bits == 4 ? 8.0f
                                      : 3.0f;  // the largest level, nearly of nested ones
      fstore(channel + p * kPanel, fmul(most, fset(top / 127.0f)));
      const F inverse = fdiv(fset(127.0f / top), most);
      for (size_t g = 0; g < groups; g++) {
        const F own = fmul(scale(g), inverse);
        const I factor = m.low ? share(own) : widening(own);
        for (size_t b = g * per; b < present && b < (g + 1) * per; b++, w += m.block_stride) {
          prefetch_block<4>(w, kSpanBlocks * m.block_stride);
          if (m.low) {
            prefetch_block<4>(w + low, kSpanBlocks * m.block_stride);
            UNROLL for (int i = 0; i < 4; i++) {
              W former, latter;
              wplanes(w + 64 * i, w + low + 64 * i, former, latter);
              put(wshare(wbiased(former), factor));
              put(wshare(wbiased(latter), factor));
            }
            continue;
          }
          if (m.bits == 2) {
            UNROLL for (int i = 0; i < 2; i++) {
              W quarter[4];
              wwiden_crumbs(w + 64 * i, factor, quarter);
              UNROLL for (int j = 0; j < 4; j++) put(quarter[j]);
            }
            continue;
          }
          UNROLL for (int i = 0; i < 4; i++) {
            W low, high;
            wwiden(w + 64 * i, factor, low, high);
            put(low);
            put(high);
          }
        }
      }
    } else
#endif
    {
      for (size_t b = 0; b < present; b++, w += m.block_stride) {
        prefetch_block<8>(w, kSpanBlocks * m.block_stride);  // of the next span, a whole tile's work away
        if (m.low) {
          prefetch_block<4>(w + low, kSpanBlocks * m.block_stride);
          UNROLL for (int i = 0; i < 4; i++) {
            W former, latter;
            wplanes(w + 64 * i, w + low + 64 * i, former, latter);
            put(wbiased(former));
            put(wbiased(latter));
          }
        } else if (m.bits == 8) {
          UNROLL for (int i = 0; i < 8; i++) put(wload(w + 64 * i));
        } else if (m.bits == 2) {
          UNROLL for (int i = 0; i < 2; i++) {
            W quarter[4];
            wcrumbs(w + 64 * i, quarter);
            UNROLL for (int j = 0; j < 4; j++, at += Panels * 64) wstore(at, quarter[j]);
          }
        } else {
          UNROLL for (int i = 0; i < 4; i++) {
            W low, high;
            wnibbles(w + 64 * i, low, high);
            wstore(at, low);
            at += Panels * 64;
            wstore(at, high);
            at += Panels * 64;
          }
        }
      }
    }
    for (size_t i = 8 * present; i < 8 * blocks; i++, at += Panels * 64) memset(at, 0, 64);
  }
}

// Fills `channel` [panels][16] of a span of weights with one scale per output.
void span_channels(const Matrix& m, size_t span, size_t panel, size_t panels, float* channel) {
  const float* scale = static_cast<const float*>(m.scale) + span / m.inputs.spans() * m.scale_group_stride;
  for (size_t p = 0; p < panels; p++)
    fstore(channel + p * kPanel, fload(scale + (panel + p) * m.scale_panel_stride));
}

// Group scales of one span as floats: [panels / Panels][groups][Panels][16]; minima, if there are any, alike
// behind all of them.
template <int Panels>
void unpack_scales(const Matrix& m, size_t span, size_t panel, size_t panels, size_t groups, float* out) {
  const Inputs& in = m.inputs;
  const size_t segment = span / in.spans();
  const size_t first = span % in.spans() * (kSpan / m.group);
  float* minima = out + (panels + Panels - 1) / Panels * Panels * groups * kPanel;
  for (size_t p = 0; p < (panels + Panels - 1) / Panels * Panels; p++) {
    for (size_t g = 0; g < groups; g++) {
      const size_t at = ((p / Panels * groups + g) * Panels + p % Panels) * kPanel;
      fstore(out + at, p < panels ? group_scale(m, segment, first + g, panel + p) : fzero());
      if (m.minima)
        fstore(minima + at, p < panels ? group_minimum(m, segment, first + g, panel + p) : fzero());
    }
  }
}

// Rows x Panels sums of `quarters` times four inputs, on top of what `sum` holds; see `product`.
template <int Rows, int Panels, int Bits = 8>
ALWAYS_INLINE void tile_dot(const uint8_t* w, const int8_t* x, size_t stride, size_t quarters,
                            I (&sum)[Rows][Panels]) {
  for (size_t i = 0; i < quarters; i++, w += Panels * 64, x += 4) {
    W weights[Panels];
    UNROLL for (int p = 0; p < Panels; p++) weights[p] = wload(w + 64 * p);
    UNROLL for (int r = 0; r < Rows; r++) {
      const X four = xload(x + r * stride);
      UNROLL for (int p = 0; p < Panels; p++) sum[r][p] = product<Bits>(sum[r][p], weights[p], four);
    }
  }
}

struct SpanTile {
  const uint8_t* w;
  const int8_t* x;
  size_t stride, blocks;
  const float* channel;      // [Panels * 16], or null with group scales
  const float* group_scale;  // [groups][Panels][16]
  const float* minimum;      // like it, or null
  size_t group_blocks;
  const float* row_scale;  // first row's, rows apart by row_spans
  const int32_t *span_sum, *block_sum;
  size_t row_spans, row_blocks;
  float* out;
  size_t out_stride;
  bool first;  // nothing in out yet
};

template <int Rows, int Panels>
void span_tile_whole(const SpanTile& t) {
  I sum[Rows][Panels];
  UNROLL for (int r = 0; r < Rows; r++) {
    UNROLL for (int p = 0; p < Panels; p++) sum[r][p] = iset(-kBias8 * t.span_sum[r * t.row_spans]);
  }
  tile_dot<Rows, Panels>(t.w, t.x, t.stride, 8 * t.blocks, sum);
  UNROLL for (int r = 0; r < Rows; r++) {
    const F row = fset(t.row_scale[r * t.row_spans]);
    UNROLL for (int p = 0; p < Panels; p++) {
      float* out = t.out + r * t.out_stride + p * kPanel;
      const F factor = fmul(row, fload(t.channel + p * kPanel));
      fstore(out, fma(to_float(sum[r][p]), factor, t.first ? fzero() : fload(out)));
    }
  }
}

// One block's products of few bits, which are summed in pairs.
template <int Bits, int Rows, int Panels>
ALWAYS_INLINE void tile_block(const uint8_t* w, const int8_t* x, size_t stride, I (&sum)[Rows][Panels]) {
  I part[Rows][Panels];
  UNROLL for (int r = 0; r < Rows; r++) {
    UNROLL for (int p = 0; p < Panels; p++) part[r][p] = begin_sum<Bits>(sum[r][p]);
  }
  tile_dot<Rows, Panels, Bits>(w, x, stride, 8, part);
  UNROLL for (int r = 0; r < Rows; r++) {
    UNROLL for (int p = 0; p < Panels; p++) sum[r][p] = end_sum<Bits>(sum[r][p], part[r][p]);
  }
}

// Of operands that were unpacked from `Bits`.
template <int Bits, Scaling How, int Rows, int Panels>
void span_tile_grouped(const SpanTile& t) {
  F part[Rows][Panels];
  UNROLL for (int r = 0; r < Rows; r++) { UNROLL for (int p = 0; p < Panels; p++) part[r][p] = fzero(); }
  const uint8_t* w = t.w;
  const int8_t* x = t.x;
  const float *scale = t.group_scale, *minimum = t.minimum;
  for (size_t b = 0; b < t.blocks; b += t.group_blocks) {
    const size_t count = t.blocks - b < t.group_blocks ? t.blocks - b : t.group_blocks;
    I sum[Rows][Panels];
    UNROLL for (int r = 0; r < Rows; r++) {
      const int32_t* sums = t.block_sum + r * t.row_blocks + b;
      const I start = iset(-kOffset<Bits, How> * (count == 2 ? sums[0] + sums[1] : sums[0]));
      UNROLL for (int p = 0; p < Panels; p++) sum[r][p] = start;
    }
    if constexpr (kSumsFillRegisters) asm("" : "+m"(part));
    if constexpr (kInPairs<Bits>) {
      for (size_t i = 0; i < count; i++)
        tile_block<Bits, Rows, Panels>(w + i * 8 * Panels * 64, x + i * kBlock, t.stride, sum);
    } else if (count == 1) {
      UNROLL for (int i = 0; i < 8; i++)
          tile_dot<Rows, Panels>(w + i * Panels * 64, x + 4 * i, t.stride, 1, sum);
    } else {
      tile_dot<Rows, Panels>(w, x, t.stride, 16, sum);
    }
    UNROLL for (int p = 0; p < Panels; p++) {
      const F channel = fload(scale + p * kPanel);
      UNROLL for (int r = 0; r < Rows; r++) part[r][p] = fma(to_float(sum[r][p]), channel, part[r][p]);
    }
    if constexpr (How == kMinima) {
      UNROLL for (int r = 0; r < Rows; r++) {
        const int32_t* sums = t.block_sum + r * t.row_blocks + b;
        const F all = to_float(iset(count == 2 ? sums[0] + sums[1] : sums[0]));
        UNROLL for (int p = 0; p < Panels; p++) part[r][p] =
            fma(all, fload(minimum + p * kPanel), part[r][p]);
      }
      minimum += Panels * kPanel;
    }
    w += count * 8 * Panels * 64;
    x += count * kBlock;
    scale += Panels * kPanel;
  }
  UNROLL for (int r = 0; r < Rows; r++) {
    const F row = fset(t.row_scale[r * t.row_spans]);
    UNROLL for (int p = 0; p < Panels; p++) {
      float* out = t.out + r * t.out_stride + p * kPanel;
      fstore(out, fma(part[r][p], row, t.first ? fzero() : fload(out)));
    }
  }
}

template <int Bits, Scaling How, int Rows>
void span_tile(const SpanTile& t, size_t rows) {
  if constexpr (Rows > 0) {
    if (rows != Rows) return span_tile<Bits, How, Rows - 1>(t, rows);
    if constexpr (How == kChannels) {
      span_tile_whole<Rows, kPanels>(t);
    } else {
      span_tile_grouped<Bits, How, Rows, kGroupPanels>(t);
    }
  }
}

// Adds what the high parts of a span's outliers give rows [from, to) of a tile, from unpacked weights, which
// `load` makes operands with a `bias`; scales as in SpanTile.
template <int Panels, bool Grouped, class Load>
void add_unpacked_high(const Matrix& m, const Activations& a, size_t span, size_t from, size_t to,
                       size_t panels, const uint8_t* operands, size_t blocks, int bias, const float* scales,
                       size_t groups, float* out, Load&& load) {
  const size_t spans = m.inputs.all_spans(), group_blocks = Grouped ? m.group / kBlock : 1;
  const float* minima = scales + (panels + Panels - 1) / Panels * Panels * groups * kPanel;
  for (size_t row = from; row < to; row++, out += kTaskPanels * kPanel) {
    const Outliers& o = a.outliers[row * spans + span];
    if (!o.some) continue;
    const F steps = fset(kOutlierSteps * a.scale[row * spans + span]);
    const HighOperands high(o, bias);
    size_t at[kOutliers], group[kOutliers];
    UNROLL for (int e = 0; e < kOutliers; e++) {
      at[e] = o.quarter[e] * Panels * 64;
      group[e] = o.quarter[e] / 8 / group_blocks * Panels * kPanel;
    }
    for (size_t first = 0; first < panels; first += Panels) {
      const uint8_t* w = operands + first * blocks * 8 * 64;
      const float* scale = scales + first * (Grouped ? groups : 1) * kPanel;
      UNROLL for (int p = 0; p < Panels; p++, w += 64, scale += kPanel) {
        I whole = high.none_at_all;
        F part = fzero();
        UNROLL for (int e = 0; e < kOutliers; e++) {
          const W own = load(w + at[e]);
          if constexpr (Grouped) {
            part = fma(to_float(dot(high.none[e], own, high.four[e])), fload(scale + group[e]), part);
            if (m.minima)
              part = fma(to_float(iset(o.sum[e])), fload(scale + (minima - scales) + group[e]), part);
          } else {
            whole = dot(whole, own, high.four[e]);
          }
        }
        const F factor = Grouped ? steps : fmul(steps, fload(scale));
        float* to_panel = out + (first + p) * kPanel;
        fstore(to_panel, fma(Grouped ? part : to_float(whole), factor, fload(to_panel)));
      }
    }
  }
}

// Operands are of `Bits`, and are scaled alike.
template <int Bits, Scaling Scales, Unpacking How>
void tile_of(const Matrix& m, const Activations& a, size_t from, size_t to, size_t panel, size_t panels,
             float* out, void* scratch) {
  constexpr bool Grouped = Scales != kChannels;
  constexpr int rows_at_once = Grouped ? kGroupRows : kRows,
                panels_at_once = Grouped ? kGroupPanels : kPanels;
  const Inputs& in = m.inputs;
  uint8_t* operands = static_cast<uint8_t*>(scratch);
  float* scales = reinterpret_cast<float*>(operands + kTaskPanels * kSpanBlocks * kBlock * kPanel);
  for (size_t span = 0; span < in.all_spans(); span++) {
    const size_t first = in.span_block(span), blocks = in.span_blocks(span);
    const size_t group_blocks = Grouped ? m.group / kBlock : 1;
    const size_t groups = (blocks + group_blocks - 1) / group_blocks;
    unpack_span<panels_at_once, false, How>(m, span, panel, panels, blocks, operands, scales);
    if (Grouped) {
      unpack_scales<panels_at_once>(m, span, panel, panels, groups, scales);
    } else if (How == kAsStored) {
      span_channels(m, span, panel, panels, scales);
    }
    const size_t all_panels = (panels + panels_at_once - 1) / panels_at_once * panels_at_once;
    SpanTile t;
    t.stride = a.stride;
    t.blocks = blocks;
    t.group_blocks = group_blocks;
    t.row_spans = in.all_spans();
    t.row_blocks = in.all_blocks();
    t.out_stride = kTaskPanels * kPanel;
    t.first = span == 0;
    for (size_t row = from; row < to; row += rows_at_once) {
      const size_t rows = to - row < rows_at_once ? to - row : rows_at_once;
      t.x = a.q + row * a.stride + first * kBlock;
      t.row_scale = a.scale + row * t.row_spans + span;
      t.span_sum = a.span_sum + row * t.row_spans + span;
      t.block_sum = a.block_sum + row * t.row_blocks + first;
      for (size_t p = 0; p < panels; p += panels_at_once) {
        t.w = operands + p * blocks * 8 * 64;
        t.channel = scales + p * kPanel;
        t.group_scale = scales + p * groups * kPanel;
        t.minimum = m.minima ? t.group_scale + all_panels * groups * kPanel : nullptr;
        t.out = out + (row - from) * t.out_stride + p * kPanel;
        span_tile<Bits, Scales, rows_at_once>(t, rows);
      }
      if (a.outliers) {
        add_unpacked_high<panels_at_once, Grouped>(
            m, a, span, row, row + rows, panels, operands, blocks, kOffset<Bits, Scales>, scales, groups,
            out + (row - from) * t.out_stride, [](const uint8_t* w) { return wload(w); });
      }
    }
  }
}

template <int Bits, Scaling How>
void tile_as_stored(const Matrix& m, const Activations& a, size_t from, size_t to, size_t panel,
                    size_t panels, float* out, void* scratch) {
  // Both planes together are 8 bits, and scales are unpacked, however they are stored.
  constexpr bool nested = How == kNested || How == kHigh;
  tile_of<How == kNested ? 8 : Bits, nested ? kHalves : How, kAsStored>(m, a, from, to, panel, panels, out,
                                                                        scratch);
}

void tile(const Matrix& m, const Activations& a, size_t from, size_t to, size_t panel, size_t panels,
          float* out, void* scratch) {
  if (!m.widened() && to - from <= kFewRowsAtMost) return few_rows(m, a, from, to, panel, panels, out);
#ifdef LANES_WIDEN
  if (m.widened()) {
    return tile_of<8, kChannels, kWidened>(m, a, from, to, panel, panels, out, scratch);
  }
#endif
  OF_FORMAT(m, tile_as_stored, m, a, from, to, panel, panels, out, scratch)
}

template <int Rows, int Panels>
void int32_rows(const uint8_t* w, const int8_t* x, size_t stride, size_t quarters, const int32_t* span_sum,
                size_t row_spans, int32_t* out, bool first) {
  I sum[Rows][Panels];
  for (int r = 0; r < Rows; r++) {
    const I start = iset(-kBias8 * span_sum[r * row_spans]);
    for (int p = 0; p < Panels; p++) {
      const int32_t* at = out + (static_cast<size_t>(r) * kTaskPanels + p) * kPanel;
      sum[r][p] = first ? start : iadd(start, iload(at));
    }
  }
  tile_dot<Rows, Panels>(w, x, stride, quarters, sum);
  for (int r = 0; r < Rows; r++) {
    for (int p = 0; p < Panels; p++)
      istore(out + (static_cast<size_t>(r) * kTaskPanels + p) * kPanel, sum[r][p]);
  }
}

void tile_int32(const Matrix& m, const Activations& a, size_t from, size_t to, size_t panel, size_t panels,
                int32_t* out, void* scratch) {
  const Inputs& in = m.inputs;
  const size_t spans = in.all_spans();
  uint8_t* operands = static_cast<uint8_t*>(scratch);
  for (size_t span = 0; span < spans; span++) {
    const size_t first = in.span_block(span), blocks = in.span_blocks(span);
    unpack_span<kPanels, false, kAsStored>(m, span, panel, panels, blocks, operands, nullptr);
    for (size_t p = 0; p < panels; p += kPanels) {
      const uint8_t* w = operands + p * blocks * 8 * 64;
      size_t row = from;
      for (; row + kRows <= to; row += kRows) {
        int32_rows<kRows, kPanels>(w, a.q + row * a.stride + first * kBlock, a.stride, 8 * blocks,
                                   a.span_sum + row * spans + span, spans,
                                   out + ((row - from) * kTaskPanels + p) * kPanel, span == 0);
      }
      for (; row < to; row++) {
        int32_rows<1, kPanels>(w, a.q + row * a.stride + first * kBlock, a.stride, 8 * blocks,
                               a.span_sum + row * spans + span, spans,
                               out + ((row - from) * kTaskPanels + p) * kPanel, span == 0);
      }
    }
  }
}
