// The kernels for AVX-512 with AMX tiles: products of many rows go through the tile unit.
#if defined(__AMX_INT8__) && defined(__AVX512VNNI__)
#include "lanes_avx512.h"

#include "compute.inl"

namespace {

constexpr int kTile = 16;            // rows of a tile; 64 bytes each
constexpr int kStepBlocks = 2;       // input blocks that one tile holds
constexpr size_t kFewTileRows = 16;  // below this the tile unit's fixed cost does not pay

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

void configure_tiles() {
  TileConfig config;
  for (int t = 0; t < 8; t++) config.row_bytes[t] = 64, config.rows[t] = kTile;
  _tile_loadconfig(&config);
}

// Adds the sums [rows][32] of one pair of panels to out.
ALWAYS_INLINE void add_tile(const int32_t* sums, size_t rows, size_t panels, const float* row_scale,
                            size_t row_spans, const float* channel, float* out, size_t out_stride,
                            bool first) {
  for (size_t r = 0; r < rows; r++) {
    const F row = fset(row_scale[r * row_spans]);
    for (size_t p = 0; p < panels; p++) {
      float* at = out + r * out_stride + p * kPanel;
      const F factor = fmul(row, fload(channel + p * kPanel));
      fstore(at,
             fma(to_float(iload(sums + r * 2 * kPanel + p * kPanel)), factor, first ? fzero() : fload(at)));
    }
  }
}

void tile_amx(const Matrix& m, const Activations& a, size_t from, size_t to, size_t panel, size_t panels,
              float* out, void* scratch) {
  // The tile unit multiplies 8-bit weights of one scale per span, and narrower ones widened to that.
  const bool widened = m.widened(), whole = m.bits == 8 && !m.group;
  if ((!widened && !whole) || to - from < kFewTileRows)
    return tile(m, a, from, to, panel, panels, out, scratch);
  const Inputs& in = m.inputs;
  const size_t row_spans = in.all_spans(), out_stride = kTaskPanels * kPanel;
  uint8_t* operands = static_cast<uint8_t*>(scratch);
  alignas(64) int32_t sums[2 * kTile * 2 * kPanel];
  alignas(64) float channel[kTaskPanels * kPanel];
  configure_tiles();
  for (size_t span = 0; span < row_spans; span++) {
    const size_t first = in.span_block(span);
    const size_t steps = (in.span_blocks(span) + kStepBlocks - 1) / kStepBlocks;
    if (widened) {
      unpack_span<1, true, kWidened>(m, span, panel, panels, steps * kStepBlocks, operands, channel);
    } else {
      unpack_span<1, true, kAsStored>(m, span, panel, panels, steps * kStepBlocks, operands, channel);
      span_channels(m, span, panel, panels, channel);
    }
    for (size_t row = from; row < to; row += 2 * kTile) {
      const bool two = to - row > kTile;
      const int8_t* x = a.q + row * a.stride + first * kBlock;
      for (size_t p = 0; p < panels; p += 2) {
        const size_t pair = panels - p < 2 ? 1 : 2;
        const uint8_t* w0 = operands + p * steps * 1024;
        const uint8_t* w1 = pair == 2 ? w0 + steps * 1024 : w0;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (size_t step = 0; step < steps; step++) {
          _tile_loadd(4, x + step * 64, a.stride);
          _tile_loadd(6, w0 + step * 1024, 64);
          _tile_loadd(7, w1 + step * 1024, 64);
          _tile_dpbssd(0, 4, 6);
          _tile_dpbssd(1, 4, 7);
          if (two) {
            _tile_loadd(5, x + kTile * a.stride + step * 64, a.stride);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
          }
        }
        _tile_stored(0, sums, 2 * kPanel * 4);
        _tile_stored(1, sums + kPanel, 2 * kPanel * 4);
        if (two) {
          _tile_stored(2, sums + kTile * 2 * kPanel, 2 * kPanel * 4);
          _tile_stored(3, sums + kTile * 2 * kPanel + kPanel, 2 * kPanel * 4);
        }
        const size_t rows = to - row < 2 * kTile ? to - row : 2 * kTile;
        add_tile(sums, rows, pair, a.scale + row * row_spans + span, row_spans, channel + p * kPanel,
                 out + (row - from) * out_stride + p * kPanel, out_stride, span == 0);
      }
    }
    if (a.outliers) {
      add_unpacked_high<1, false>(m, a, span, from, to, panels, operands, steps * kStepBlocks, kBias8,
                                  channel, 1, out, [](const uint8_t* w) { return wbiased(wload(w)); });
    }
  }
  _tile_release();
}

constexpr Backend with_tiles() {
  Backend backend = table("amx");
  backend.tile = tile_amx;
  return backend;
}

constexpr Backend kBackend = with_tiles();

}  // namespace

const jaxllm::Backend* const jaxllm::amx_backend = &kBackend;
#else
#include "backend.h"

const jaxllm::Backend* const jaxllm::amx_backend = nullptr;
#endif
