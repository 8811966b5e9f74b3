// Where a step begins and ends: the row of a token's embedding, and the likeliest token: part of compute.inl.

// Row `row` of a weight whose units are outputs, as floats [inputs].
void unit_row(const Matrix& m, size_t row, float* out) {
  const size_t panel = row / kPanel, lane = row % kPanel, length = m.inputs.length;
  const uint8_t* data = m.data + panel * m.panel_stride;
  float scales[kPanel];
  if (!m.group) scales[lane] = static_cast<const float*>(m.scale)[row];
  for (size_t at = 0; at < length; at += kBlock, data += m.block_stride) {
    if (m.group && at % m.group == 0) {
      const size_t group = panel * m.scale_panel_stride + at / m.group * m.scale_group_stride;
      fstore(scales, fload_half(static_cast<const uint16_t*>(m.scale) + group));
    }
    int8_t levels[kBlock];
    for (size_t four = 0; four < kBlock / 4; four++) {
      if (m.bits == 8) {
        memcpy(levels + 4 * four, data + (four * kPanel + lane) * 4, 4);
      } else if (m.bits == 2) {
        const uint8_t* all = data + (four / 4 * kPanel + lane) * 4;
        for (size_t i = 0; i < 4; i++) {
          levels[4 * four + i] = static_cast<int8_t>(2 * (all[i] >> (four % 4 * 2) & 3) - 3);
        }
      } else {
        const uint8_t* both = data + (four / 2 * kPanel + lane) * 4;
        for (size_t i = 0; i < 4; i++) {
          levels[4 * four + i] = static_cast<int8_t>((both[i] >> (four % 2 * 4) & 15) - 8);
        }
      }
    }
    const size_t count = length - at < kBlock ? length - at : kBlock;
    for (size_t i = 0; i < count; i++) out[at + i] = static_cast<float>(levels[i]) * scales[lane];
  }
}

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
