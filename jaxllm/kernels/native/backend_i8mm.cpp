// The kernels for Arm with products of 8-bit matrices: products of many rows go through smmla, which adds
// to sums of 2 rows x 2 outputs what 8 inputs give. Its results are those of the dot products, to the bit.
#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_DOTPROD)
#include "lanes_neon.h"

#include "compute.inl"

namespace {

constexpr int kHalf = kPanel / 2;  // outputs at once, in four pairs
constexpr size_t kBlockSteps = kBlock / 8;
constexpr size_t kStepBytes = kHalf * 8;  // weights of a step
constexpr size_t kFewPairRows = 4;        // below this, pairing the weights costs what it saves
// Pairs of rows at once. With group scales, sums of both kinds stay in registers.
constexpr int kRowPairs = 4, kGroupRowPairs = 2;

enum Ending { kPerChannel, kPerGroup, kIntegers };

inline int32x4_t zip_low(int32x4_t a, int32x4_t b) {
  return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}
inline int32x4_t zip_high(int32x4_t a, int32x4_t b) {
  return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}

// A span's weights as operands of 2 outputs x 8 inputs: [panels][2 halves][steps][4 pairs][16] bytes.
void pair_outputs(const Matrix& m, size_t span, size_t panel, size_t panels, int8_t* out) {
  const size_t first = m.inputs.span_block(span), blocks = m.inputs.span_blocks(span);
  const size_t half = blocks * kBlockSteps * kStepBytes;
  for (size_t p = 0; p < panels; p++, out += half) {
    const uint8_t* w = m.data + (panel + p) * m.panel_stride + first * m.block_stride;
    for (size_t b = 0; b < blocks; b++, w += m.block_stride) {
      prefetch_block<8>(w, kSpanBlocks * m.block_stride);  // of the next span, a whole tile's work away
      W quarter[4];
      for (size_t i = 0; i < kBlockSteps; i++, out += kStepBytes) {
        W low, high;  // the first and the last four of eight inputs
        if (m.low) {
          wplanes(w + 64 * i, w + low_plane(m) + 64 * i, low, high);
        } else if (m.bits == 8) {
          low = wload(w + 128 * i), high = wload(w + 128 * i + 64);
        } else if (m.bits == 2) {
          if (i % 2 == 0) wcrumbs(w + 32 * i, quarter);
          low = quarter[i % 2 * 2], high = quarter[i % 2 * 2 + 1];
        } else {
          wnibbles(w + 64 * i, low, high);
        }
        UNROLL for (int j = 0; j < 4; j++) {
          int8_t* at = out + j / 2 * half + j % 2 * 32;
          const int32x4_t a = vreinterpretq_s32_s8(low.v[j]), b = vreinterpretq_s32_s8(high.v[j]);
          vst1q_s8(at, vreinterpretq_s8_s32(vzip1q_s32(a, b)));
          vst1q_s8(at + 16, vreinterpretq_s8_s32(vzip2q_s32(a, b)));
        }
      }
    }
  }
}

// Rows as operands of 2 rows x 8 inputs: [steps][pairs][16] bytes. A last odd row is its own partner.
void pair_rows(const int8_t* x, size_t stride, size_t rows, size_t blocks, int8_t* out) {
  const size_t pairs = (rows + 1) / 2;
  for (size_t p = 0; p < pairs; p++) {
    const int8_t* upper = x + 2 * p * stride;
    const int8_t* lower = 2 * p + 1 < rows ? upper + stride : upper;
    int8_t* at = out + p * 16;
    for (size_t i = 0; i < blocks * kBlock; i += 16, at += 2 * pairs * 16) {
      const int32x4_t a = vreinterpretq_s32_s8(vld1q_s8(upper + i));
      const int32x4_t b = vreinterpretq_s32_s8(vld1q_s8(lower + i));
      vst1q_s8(at, vreinterpretq_s8_s32(zip_low(a, b)));
      vst1q_s8(at + pairs * 16, vreinterpretq_s8_s32(zip_high(a, b)));
    }
  }
}

struct PairTile {
  const int8_t *w, *x;
  size_t blocks, rows;
  const float* scale;  // of each output, groups apart by a panel
  size_t group_blocks;
  const float* row_scale;  // first row's, rows apart by row_spans
  size_t row_spans;
  void* out;   // float or int32, rows apart by kTaskPanels * kPanel
  bool first;  // nothing in out yet
};

template <int Pairs>
ALWAYS_INLINE void pair_dot(const int8_t* w, const int8_t* x, size_t blocks, int32x4_t (&sum)[Pairs][4]) {
  UNROLL for (int p = 0; p < Pairs; p++) { UNROLL for (int q = 0; q < 4; q++) sum[p][q] = vdupq_n_s32(0); }
  for (size_t i = 0; i < blocks * kBlockSteps; i++, w += kStepBytes, x += Pairs * 16) {
    int8x16_t weights[4];
    UNROLL for (int q = 0; q < 4; q++) weights[q] = vld1q_s8(w + 16 * q);
    UNROLL for (int p = 0; p < Pairs; p++) {
      const int8x16_t two = vld1q_s8(x + 16 * p);
      UNROLL for (int q = 0; q < 4; q++) sum[p][q] = vmmlaq_s32(sum[p][q], two, weights[q]);
    }
  }
}

template <Ending How, int Pairs>
void pair_tile_of(const PairTile& t) {
  int32x4_t sum[Pairs][4];
  if constexpr (How == kPerGroup) {
    float32x4_t part[Pairs][4];
    UNROLL for (int p = 0; p < Pairs; p++) { UNROLL for (int q = 0; q < 4; q++) part[p][q] = vdupq_n_f32(0); }
    const float* scale = t.scale;
    for (size_t b = 0; b < t.blocks; b += t.group_blocks, scale += kPanel) {
      const size_t count = t.blocks - b < t.group_blocks ? t.blocks - b : t.group_blocks;
      pair_dot<Pairs>(t.w + b * kBlockSteps * kStepBytes, t.x + b * kBlockSteps * Pairs * 16, count, sum);
      UNROLL for (int q = 0; q < 4; q++) {
        const float32x2_t two = vld1_f32(scale + 2 * q);
        const float32x4_t both = vcombine_f32(two, two);
        UNROLL for (int p = 0; p < Pairs; p++) {
          part[p][q] = vfmaq_f32(part[p][q], vcvtq_f32_s32(sum[p][q]), both);
        }
      }
    }
    UNROLL for (int p = 0; p < Pairs; p++) {
      UNROLL for (int q = 0; q < 4; q++) sum[p][q] = vreinterpretq_s32_f32(part[p][q]);
    }
  } else {
    pair_dot<Pairs>(t.w, t.x, t.blocks, sum);
  }
  UNROLL for (int r = 0; r < 2 * Pairs; r++) {
    if (static_cast<size_t>(r) >= t.rows) continue;
    UNROLL for (int q = 0; q < 2; q++) {
      const int32x4_t left = sum[r / 2][2 * q], right = sum[r / 2][2 * q + 1];
      const int32x4_t four = r % 2 ? zip_high(left, right) : zip_low(left, right);
      const int offset = r * kTaskPanels * kPanel + 4 * q;
      if constexpr (How == kIntegers) {
        int32_t* out = static_cast<int32_t*>(t.out) + offset;
        vst1q_s32(out, t.first ? four : vaddq_s32(four, vld1q_s32(out)));
      } else {
        float* out = static_cast<float*>(t.out) + offset;
        const float32x4_t row = vdupq_n_f32(t.row_scale[r * t.row_spans]);
        const float32x4_t before = t.first ? vdupq_n_f32(0) : vld1q_f32(out);
        if (How == kPerGroup) {
          vst1q_f32(out, vfmaq_f32(before, vreinterpretq_f32_s32(four), row));
        } else {
          const float32x4_t factor = vmulq_f32(row, vld1q_f32(t.scale + 4 * q));
          vst1q_f32(out, vfmaq_f32(before, vcvtq_f32_s32(four), factor));
        }
      }
    }
  }
}

template <Ending How, int Pairs>
void pair_tile(const PairTile& t) {
  if constexpr (Pairs > 0) {
    if ((t.rows + 1) / 2 != Pairs) return pair_tile<How, Pairs - 1>(t);
    pair_tile_of<How, Pairs>(t);
  }
}

void add_high(const Matrix& m, const Activations& a, size_t span, size_t from, size_t to, size_t panel,
              size_t panels, float* out) {
  if (!a.outliers) return;
  OF_FORMAT(m, add_high_of, m, a, span, from, to, panel, panels, out)
}

template <Ending How, class Number>
void paired(const Matrix& m, const Activations& a, size_t from, size_t to, size_t panel, size_t panels,
            Number* out, void* scratch) {
  constexpr size_t pairs = How == kPerGroup ? kGroupRowPairs : kRowPairs;
  const Inputs& in = m.inputs;
  int8_t* operands = static_cast<int8_t*>(scratch);
  float* scales = reinterpret_cast<float*>(operands + kTaskPanels * kSpanBlocks * kBlock * kPanel);
  alignas(64) int8_t two[2 * pairs * kSpan];
  PairTile t;
  t.x = two;
  t.row_scale = nullptr;
  t.group_blocks = How == kPerGroup ? m.group / kBlock : kSpanBlocks;
  t.row_spans = in.all_spans();
  for (size_t span = 0; span < in.all_spans(); span++) {
    const size_t first = in.span_block(span);
    t.blocks = in.span_blocks(span);
    t.first = span == 0;
    const size_t groups = (t.blocks + t.group_blocks - 1) / t.group_blocks;
    pair_outputs(m, span, panel, panels, operands);
    if (How == kPerGroup) unpack_scales<1>(m, span, panel, panels, groups, scales);
    if (How == kPerChannel) span_channels(m, span, panel, panels, scales);
    for (size_t row = from; row < to; row += 2 * pairs) {
      t.rows = to - row < 2 * pairs ? to - row : 2 * pairs;
      if (How != kIntegers) t.row_scale = a.scale + row * t.row_spans + span;
      pair_rows(a.q + row * a.stride + first * kBlock, a.stride, t.rows, t.blocks, two);
      for (size_t half = 0; half < 2 * panels; half++) {
        t.w = operands + half * t.blocks * kBlockSteps * kStepBytes;
        t.scale = scales + half / 2 * groups * kPanel + half % 2 * kHalf;
        t.out = out + (row - from) * kTaskPanels * kPanel + half * kHalf;
        pair_tile<How, pairs>(t);
      }
    }
    if constexpr (How != kIntegers) add_high(m, a, span, from, to, panel, panels, out);
  }
}

void tile_i8mm(const Matrix& m, const Activations& a, size_t from, size_t to, size_t panel, size_t panels,
               float* out, void* scratch) {
  // Minima take the sums of a row's inputs, which pairs of rows do not have side by side.
  if (to - from < kFewPairRows || m.minima) return tile(m, a, from, to, panel, panels, out, scratch);
  return m.group ? paired<kPerGroup>(m, a, from, to, panel, panels, out, scratch)
                 : paired<kPerChannel>(m, a, from, to, panel, panels, out, scratch);
}

void tile_int32_i8mm(const Matrix& m, const Activations& a, size_t from, size_t to, size_t panel,
                     size_t panels, int32_t* out, void* scratch) {
  if (to - from < kFewPairRows) return tile_int32(m, a, from, to, panel, panels, out, scratch);
  return paired<kIntegers>(m, a, from, to, panel, panels, out, scratch);
}

constexpr Backend with_matrix_products() {
  Backend backend = table("i8mm");
  backend.tile = tile_i8mm;
  backend.tile_int32 = tile_int32_i8mm;
  return backend;
}

constexpr Backend kBackend = with_matrix_products();

}  // namespace

const jaxllm::Backend* const jaxllm::i8mm_backend = &kBackend;
#else
#include "backend.h"

const jaxllm::Backend* const jaxllm::i8mm_backend = nullptr;
#endif
