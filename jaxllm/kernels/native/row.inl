// Products of one row of activations, bound by how fast weights are read: part of compute.inl.
//
// Sums are made in the order of tile.inl, so that a row comes out the same alone and among others.

// How weights are scaled, and in which planes they lie.
enum Scaling {
  kChannels,  // a float for each output
  kHalves,    // a half for each output and group of inputs
  kMinima,    // the same, and another half that is added to all of them
  kHigh,      // nested scales, with the high plane alone
  kNested,    // the same, with both planes
  kEarly,     // what the high plane gives kNested, kept as whole numbers
  kLate,      // kNested, from what was kept and the low plane
};

// Of nested weights the high plane counts sixteenfold.
ALWAYS_INLINE I sixteenfold(I x) {
  UNROLL for (int i = 0; i < 4; i++) x = iadd(x, x);
  return x;
}

// A panel's factors of a group, whole numbers.
ALWAYS_INLINE I factors(const uint8_t* p) {
  const I stored = iload_nibbles(p), upper = iand(stored, iset(8));
  return iadd(stored, iadd(iadd(upper, upper), iset(-16)));
}

// Scales of groups, each of a panel's 16 outputs: of some groups, or of some panels.
template <Scaling How>
struct GroupScales {
  const uint8_t *at, *channel;
  size_t stride, channel_stride;
  ALWAYS_INLINE F operator()(size_t i) const {
    if constexpr (How == kHalves || How == kMinima) {
      return fload_half(reinterpret_cast<const uint16_t*>(at + i * stride));
    } else {
      const F whole = fload(reinterpret_cast<const float*>(channel + i * channel_stride));
      return fmul(to_float(factors(at + i * stride)), How == kHigh ? fmul(whole, fset(16.0f)) : whole);
    }
  }
  // What is added to all inputs of a group.
  ALWAYS_INLINE F minimum(size_t i) const {
    return fload_half(reinterpret_cast<const uint16_t*>(at + i * stride) + kPanel);
  }
};

// Those of group `group` and panel `panel`, from which either panels or groups are counted on.
template <Scaling How>
ALWAYS_INLINE GroupScales<How> group_scales(const Matrix& m, size_t segment, size_t group, size_t panel,
                                            bool by_panel) {
  const uint8_t* scale = static_cast<const uint8_t*>(m.scale);
  GroupScales<How> out;
  constexpr bool halves = How == kHalves || How == kMinima;
  constexpr size_t unit = halves ? 2 : 1;  // bytes that the strides count
  if constexpr (halves) {
    scale += unit * segment * m.groups() * m.scale_group_stride;
    out.channel = nullptr;
  } else {
    scale += segment * m.scale_segment_stride;
    out.channel = scale + panel * m.channel_stride;
    scale += m.factors_at;
  }
  out.at = scale + unit * (panel * m.scale_panel_stride + group * m.scale_group_stride);
  out.stride = unit * (by_panel ? m.scale_panel_stride : m.scale_group_stride);
  out.channel_stride = by_panel ? m.channel_stride : 0;
  return out;
}

// The same of one group and panel, however the matrix is scaled.
ALWAYS_INLINE F group_scale(const Matrix& m, size_t segment, size_t group, size_t panel) {
  if (!m.nested) return group_scales<kHalves>(m, segment, group, panel, false)(0);
  return m.low ? group_scales<kNested>(m, segment, group, panel, false)(0)
               : group_scales<kHigh>(m, segment, group, panel, false)(0);
}
ALWAYS_INLINE F group_minimum(const Matrix& m, size_t segment, size_t group, size_t panel) {
  return group_scales<kMinima>(m, segment, group, panel, false).minimum(0);
}

// Of few bits products may first be summed over a block in lanes of 16 bits: `begin_sum`, a `product` for
// each four inputs, `end_sum`. Where they are, sums of products need all registers, which compilers would
// fill with others.
#ifdef LANES_PAIRS
template <int Bits>
constexpr bool kInPairs = Bits != 8;
constexpr bool kSumsFillRegisters = true;
#else
template <int Bits>
constexpr bool kInPairs = false;
constexpr bool kSumsFillRegisters = false;
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
// The same, of weights with minima for levels in 0..15.
template <int Bits, Scaling How>
constexpr int kOffset = bias_of(Bits) - (How == kMinima ? 8 : 0);

template <int Bits>
ALWAYS_INLINE void prefetch_block(const uint8_t* w, size_t ahead) {
  UNROLL for (int i = 0; i < Bits; i++) __builtin_prefetch(w + ahead + 64 * i, 0, 3);
}

// How far ahead of use weights are asked for: about what memory delivers while it is underway.
constexpr size_t kAhead = 4096;

// Blocks that share a scale, as a shift: 1 or 2 of them.
ALWAYS_INLINE size_t group_shift(const Matrix& m) { return m.group == 2 * kBlock; }

// How far the low plane lies behind the high one; of weights of one plane 0.
ALWAYS_INLINE size_t low_plane(const Matrix& m) {
  return m.low ? reinterpret_cast<uintptr_t>(m.low) - reinterpret_cast<uintptr_t>(m.data) : 0;
}

// Sum over the one or two blocks of a group in one plane, `block_stride` apart, on top of `dots`.
template <int Bits>
ALWAYS_INLINE I plane_dot(const uint8_t* w, size_t block_stride, const int8_t* x, bool two, I dots) {
  prefetch_block<Bits>(w, kAhead);
  dots = block_dot<Bits>(w, x, dots);
  if (two) {
    prefetch_block<Bits>(w + block_stride, kAhead);
    dots = block_dot<Bits>(w + block_stride, x + kBlock, dots);
  }
  return dots;
}

// The same of all planes; what the high one gives is `kept` or comes from there.
template <int Bits, Scaling How>
ALWAYS_INLINE I group_dot(const uint8_t* w, size_t block_stride, size_t low, const int8_t* x, bool two,
                          I none, int32_t* kept) {
  I dots = How == kLate ? iload(kept) : plane_dot<Bits>(w, block_stride, x, two, none);
  if constexpr (How == kEarly) istore(kept, dots);
  if constexpr (How == kNested || How == kLate)
    dots = plane_dot<Bits>(w + low, block_stride, x, two, iadd(sixteenfold(dots), none));
  return dots;
}

// The four inputs' weights of a block that stand at `quarter`.
template <int Bits>
ALWAYS_INLINE W quarter_of(const uint8_t* block, size_t quarter) {
  if constexpr (Bits == 8) {
    return wbiased(wload(block + 64 * quarter));
  } else if constexpr (Bits == 4) {
    W low, high;
    wnibbles(block + 64 * (quarter / 2), low, high);
    return quarter % 2 ? high : low;
  } else {
    W all[4];
    wcrumbs(block + 64 * (quarter / 4), all);
    return quarter % 2 ? (quarter % 4 == 1 ? all[1] : all[3]) : (quarter % 4 == 0 ? all[0] : all[2]);
  }
}

// A row's outliers in a span as operands, with what takes the bias off their products.
struct HighOperands {
  X four[kOutliers];
  I none[kOutliers], none_at_all;
  ALWAYS_INLINE HighOperands(const Outliers& o, int bias) {
    int32_t all = 0;
    UNROLL for (int e = 0; e < kOutliers; e++) {
      four[e] = xload(o.high[e]);
      none[e] = iset(-bias * o.sum[e]);
      all += o.sum[e];
    }
    none_at_all = iset(-bias * all);
  }
};

// A panel of one span: of many rows it is found once, because that takes as long as what an outlier gives.
template <Scaling How>
struct PanelOfSpan {
  const uint8_t* w;
  GroupScales<How> scale;  // of the span's groups
  size_t block_stride, low, shift;
};
template <Scaling How>
ALWAYS_INLINE PanelOfSpan<How> panel_of_span(const Matrix& m, size_t span, size_t panel) {
  const size_t first = m.inputs.span_block(span), segment = span / m.inputs.spans(), shift = group_shift(m);
  GroupScales<How> scale{};
  if constexpr (How != kChannels)
    scale = group_scales<How>(m, segment, (first - segment * m.inputs.blocks()) >> shift, panel, false);
  const uint8_t* w = m.data + panel * m.panel_stride + first * m.block_stride;
  return {w, scale, m.block_stride, low_plane(m), shift};
}

// What the high parts of a span's outliers give a panel, before the row's scale and, of weights with one for
// each output, the weight's.
template <int Bits, Scaling How>
ALWAYS_INLINE F high_part(const PanelOfSpan<How>& at, const Outliers& o, const HighOperands& high) {
  I whole = high.none_at_all;
  F part = fzero();
  UNROLL for (int e = 0; e < kOutliers; e++) {
    const size_t block = o.quarter[e] / 8, quarter = o.quarter[e] % 8;
    const uint8_t* own = at.w + block * at.block_stride;
    if constexpr (How == kChannels) {
      whole = dot(whole, quarter_of<Bits>(own, quarter), high.four[e]);
    } else {
      I dots = dot(high.none[e], quarter_of<Bits>(own, quarter), high.four[e]);
      if constexpr (How == kNested || How == kLate) {
        dots = iadd(sixteenfold(dots), high.none[e]);
        dots = dot(dots, quarter_of<Bits>(own + at.low, quarter), high.four[e]);
      }
      part = fma(to_float(dots), at.scale(block >> at.shift), part);
      if constexpr (How == kMinima)
        part = fma(to_float(iset(o.sum[e])), at.scale.minimum(block >> at.shift), part);
    }
  }
  return How == kChannels ? to_float(whole) : part;
}
template <int Bits, Scaling How>
ALWAYS_INLINE F high_part(const PanelOfSpan<How>& at, const Outliers& o) {
  return high_part<Bits>(at, o, HighOperands(o, kOffset<Bits, How>));
}

template <int Bits, Scaling How>
void row_panels_of(const Matrix& m, const Activations& a, size_t from, size_t to, float* y) {
  const Inputs& in = m.inputs;
  // Divisions stay out of the loop over blocks: each takes as long as a block.
  const size_t spans = in.all_spans(), shift = group_shift(m), low = low_plane(m);
  for (size_t panel = from; panel < to; panel++, y += kPanel) {
    const uint8_t* data = m.data + panel * m.panel_stride;
    F total = fzero();
    for (size_t span = 0; span < spans; span++) {
      const size_t first = in.span_block(span), count = in.span_blocks(span);
      const size_t segment = span / in.spans();
      const uint8_t* w = data + first * m.block_stride;
      const int8_t* x = a.q + first * kBlock;
      PanelOfSpan<How> at{w, {}, m.block_stride, low, shift};
      if constexpr (How != kChannels) {
        F part = fzero();
        const size_t local = first - segment * in.blocks();
        const auto scale = at.scale = group_scales<How>(m, segment, local >> shift, panel, false);
        for (size_t b = 0; b < count;) {
          const F channel = scale(b >> shift);
          // A span begins with a group, and a group of two blocks may end after its first.
          const bool two = shift && b + 1 < count;
          const int32_t* sums = a.block_sum + first + b;
          const int32_t all = two ? sums[0] + sums[1] : sums[0];
          const I none = iset(-kOffset<Bits, How> * all);
          int32_t* kept = nullptr;
          if constexpr (How == kEarly || How == kLate)
            kept = m.early + (panel * m.groups() + ((local + b) >> shift)) * kPanel;
          const I dots = group_dot<Bits, How>(w, m.block_stride, low, x, two, none, kept);
          part = fma(to_float(dots), channel, part);
          if constexpr (How == kMinima) part = fma(to_float(iset(all)), scale.minimum(b >> shift), part);
          const size_t blocks = two ? 2 : 1;
          b += blocks, w += blocks * m.block_stride, x += blocks * kBlock;
        }
        total = fma(part, fset(a.scale[span]), total);
        if constexpr (How != kEarly) {
          if (a.outliers && a.outliers[span].some)
            total = fma(high_part<Bits>(at, a.outliers[span]), fset(kOutlierSteps * a.scale[span]), total);
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
        total = fma(to_float(iadd(even, odd)), fmul(fset(a.scale[span]), channel), total);
        if (a.outliers && a.outliers[span].some)
          total = fma(high_part<Bits>(at, a.outliers[span]),
                      fmul(fset(kOutlierSteps * a.scale[span]), channel), total);
      }
    }
    fstore(y, total);
  }
}

// The panels of one input block lie in a row of memory, and so do the rows: they are read in that order, both
// rows of a group of two together, while the sums of all panels wait in y, as whole numbers where all of a
// span shares its scales.
template <int Bits, Scaling How>
void row_span_of(const Matrix& m, const Activations& a, size_t span, size_t from, size_t to, float* y,
                 float* high) {
  const Inputs& in = m.inputs;
  const size_t first = in.span_block(span), count = in.span_blocks(span), panels = to - from;
  const size_t segment = span / in.spans(), local = first - segment * in.blocks(), shift = group_shift(m);
  const size_t run = panels * m.panel_stride;  // of a block's row; the next one's begins block_stride on
  const size_t low = low_plane(m);
  for (size_t b = 0; b < count;) {
    const bool two = How != kChannels && shift && b + 1 < count;
    const size_t skip = (two ? 2 : 1) * m.block_stride - run;
    const uint8_t* w = m.data + (first + b) * m.block_stride + from * m.panel_stride;
    const int8_t* bytes = a.q + (first + b) * kBlock;
    const int32_t* sums = a.block_sum + first + b;
    X x[8];
    UNROLL for (int i = 0; i < 8; i++) x[i] = xload(bytes + 4 * i);
    const int32_t all = How == kChannels ? a.span_sum[span] : two ? sums[0] + sums[1] : sums[0];
    const I none = iset(-kOffset<Bits, How> * all);
    for (size_t p = 0, at = 0; p < panels; p++, at += m.panel_stride) {
      const size_t ahead = at + kAhead < run ? kAhead : kAhead + skip;
      prefetch_block<Bits>(w + at, ahead);
      float* sum = y + p * kPanel;
      if constexpr (How != kChannels) {
        I dots = block_dot_with<Bits>(w + at, x, none);
        if (two) {
          prefetch_block<Bits>(w + m.block_stride + at, ahead);
          dots = block_dot<Bits>(w + m.block_stride + at, bytes + kBlock, dots);
        }
        if constexpr (How == kNested) {
          const uint8_t* other = w + low + at;
          prefetch_block<Bits>(other, ahead);
          dots = block_dot_with<Bits>(other, x, iadd(sixteenfold(dots), none));
          if (two) {
            prefetch_block<Bits>(other + m.block_stride, ahead);
            dots = block_dot<Bits>(other + m.block_stride, bytes + kBlock, dots);
          }
        }
        const auto scale = group_scales<How>(m, segment, (local + b) >> shift, from, true);
        F part = fma(to_float(dots), scale(p), b ? fload(sum) : fzero());
        if constexpr (How == kMinima) part = fma(to_float(iset(all)), scale.minimum(p), part);
        fstore(sum, part);
      } else {
        istore(sum, block_dot_with<Bits>(w + at, x, b ? iload(sum) : none));
      }
    }
    b += two ? 2 : 1;
  }
  if (!a.outliers || !a.outliers[span].some) return;
  const Outliers& o = a.outliers[span];
  const HighOperands operands(o, kOffset<Bits, How>);
  for (size_t p = 0; p < panels; p++)
    fstore(high + p * kPanel, high_part<Bits>(panel_of_span<How>(m, span, from + p), o, operands));
}

void join_spans(const Matrix& m, const Activations& a, const float* parts, const float* high, float* y) {
  const size_t spans = m.inputs.all_spans(), stride = m.panels * kPanel;
  for (size_t panel = 0; panel < m.panels; panel++) {
    F total = fzero();
    for (size_t span = 0; span < spans; span++) {
      const size_t at = span * stride + panel * kPanel;
      const bool outliers = a.outliers && a.outliers[span].some;
      F row = fset(a.scale[span]), high_row = fset(kOutlierSteps * a.scale[span]), part = fload(parts + at);
      if (!m.group) {
        const F scale =
            fload(static_cast<const float*>(m.scale) +
                  (span / m.inputs.spans() * m.scale_group_stride + panel * m.scale_panel_stride));
        row = fmul(row, scale), high_row = fmul(high_row, scale), part = to_float(iload(parts + at));
      }
      total = fma(part, row, total);
      if (outliers) total = fma(fload(high + at), high_row, total);
    }
    fstore(y + panel * kPanel, total);
  }
}

// Calls a kernel of the matrix's format. Fewer bits than 8 have scales of groups.
#define OF_FORMAT(m, kernel, ...)                                                  \
  if (m.nested) {                                                                  \
    m.low ? kernel<4, kNested>(__VA_ARGS__) : kernel<4, kHigh>(__VA_ARGS__);       \
  } else if (m.bits == 8) {                                                        \
    m.group ? kernel<8, kHalves>(__VA_ARGS__) : kernel<8, kChannels>(__VA_ARGS__); \
  } else {                                                                         \
    m.bits == 2 ? kernel<2, kHalves>(__VA_ARGS__)                                  \
    : m.minima  ? kernel<4, kMinima>(__VA_ARGS__)                                  \
                : kernel<4, kHalves>(__VA_ARGS__);                                  \
  }

void row_panels(const Matrix& m, const Activations& a, size_t from, size_t to, float* y) {
  if (m.early) {
    return m.finishing ? row_panels_of<4, kLate>(m, a, from, to, y)
                       : row_panels_of<4, kEarly>(m, a, from, to, y);
  }
  OF_FORMAT(m, row_panels_of, m, a, from, to, y)
}

void row_span(const Matrix& m, const Activations& a, size_t span, size_t from, size_t to, float* y,
              float* high) {
  OF_FORMAT(m, row_span_of, m, a, span, from, to, y, high)
}

// Adds what the high parts of a span's outliers give rows [from, to) and some panels to `out` (see `tile`),
// from weights as they are stored.
template <int Bits, Scaling How>
void add_high_of(const Matrix& m, const Activations& a, size_t span, size_t from, size_t to, size_t panel,
                 size_t panels, float* out) {
  const size_t spans = m.inputs.all_spans();
  const float* scale = static_cast<const float*>(m.scale) + span / m.inputs.spans() * m.scale_group_stride;
  for (size_t p = 0; p < panels; p++, out += kPanel) {
    const auto at = panel_of_span<How>(m, span, panel + p);
    F channel = fset(1.0f);
    if constexpr (How == kChannels) channel = fload(scale + (panel + p) * m.scale_panel_stride);
    float* to_row = out;
    for (size_t row = from; row < to; row++, to_row += kTaskPanels * kPanel) {
      const Outliers& o = a.outliers[row * spans + span];
      if (!o.some) continue;
      const F steps = fset(kOutlierSteps * a.scale[row * spans + span]);
      const F part = high_part<Bits>(at, o);
      fstore(to_row, fma(part, How == kChannels ? fmul(steps, channel) : steps, fload(to_row)));
    }
  }
}
