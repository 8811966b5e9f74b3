// Where a step begins, the row of a token's embedding: part of compute.inl.

// Row `row` of a weight whose units are outputs, as floats [inputs].
void unit_row(const Matrix& m, size_t row, float* out) {
  const size_t panel = row / kPanel, lane = row % kPanel, length = m.inputs.length;
  const uint8_t* data = m.data + panel * m.panel_stride;
  float scales[kPanel], minima[kPanel] = {};
  const size_t low = low_plane(m);
  if (!m.group) scales[lane] = static_cast<const float*>(m.scale)[row];
  for (size_t at = 0; at < length; at += kBlock, data += m.block_stride) {
    if (m.group && at % m.group == 0) {
      fstore(scales, group_scale(m, 0, at / m.group, panel));
      if (m.minima) fstore(minima, group_minimum(m, 0, at / m.group, panel));
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
          int level = (both[i] >> (four % 2 * 4) & 15) - 8;
          if (m.low) level = 16 * level + (both[low + i] >> (four % 2 * 4) & 15) - 8;
          levels[4 * four + i] = static_cast<int8_t>(level);
        }
      }
    }
    const size_t count = length - at < kBlock ? length - at : kBlock;
    for (size_t i = 0; i < count; i++) out[at + i] = static_cast<float>(levels[i]) * scales[lane];
    if (m.minima) {
      for (size_t i = 0; i < count; i++)
        out[at + i] = static_cast<float>(levels[i] + 8) * scales[lane] + minima[lane];
    }
  }
}
