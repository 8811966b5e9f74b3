// Attention beside a plain one in double: part of native_check.cpp.

void check_attention(Random& random) {
  AttentionShape s{};
  s.batch = random.in(1, 2), s.kv_heads = random.in(1, 3), s.group = random.in(1, 8);
  s.used_heads = random.below(2) ? s.kv_heads : random.in(1, s.kv_heads);
  s.tokens = random.below(2) ? 1 : random.in(1, 70);
  s.width = random.below(2) ? 16 * random.in(1, 8) : random.in(1, 40);
  s.capacity = random.below(4) ? random.in(1, 300) : random.in(1000, 3000);
  if (s.capacity > 300) s.batch = 1, s.tokens = std::min<size_t>(s.tokens, 2);
  // One behind the other, or with gaps; some beyond the capacity.
  const bool run = random.below(2);
  std::vector<int32_t> positions(s.tokens);
  positions[0] = static_cast<int32_t>(random.below(s.capacity + 1));
  for (size_t t = 1; t < s.tokens; t++)
    positions[t] = positions[t - 1] + (run ? 1 : static_cast<int32_t>(random.in(1, 5)));
  s.rows = s.positions = positions.data();
  size_t stale = static_cast<size_t>(positions.back()) + 1;
  // The new tokens may be the last nodes of a tree, which stand anywhere behind the sequence and see some of
  // each other.
  const bool tree = random.below(3) == 0;
  const size_t before = random.below(5);
  std::vector<int32_t> rows(positions);
  s.nodes = tree ? before + s.tokens : 0;
  s.base = static_cast<size_t>(positions[0]);
  Buffer<uint8_t> seen(s.tokens * s.nodes);
  if (tree) {
    for (size_t t = 0; t < s.tokens; t++) {
      rows[t] = static_cast<int32_t>(s.base + before + t);
      positions[t] = static_cast<int32_t>(s.base) - 1;
      for (size_t node = 0; node < s.nodes; node++) {
        const bool sees = node == before + t || (node < before + t && random.below(2));
        seen.data()[t * s.nodes + node] = sees;
        positions[t] += sees;
      }
    }
    s.rows = rows.data(), s.seen = seen.data();
    stale = s.base + s.nodes;
  }
  s.valid = random.below(3) ? s.tokens : random.below(s.tokens + 1);
  s.rotary = random.below(2) ? random.below(s.width / 2 + 1) : 0;
  s.window = random.below(2) ? 0 : random.in(1, 100);
  s.scale = 1.0f / sqrtf(static_cast<float>(s.width));
  s.softcap = random.below(2) ? 0.0f : 5.0f;
  s.half = random.below(2);
  s.distances = s.softcap > 0.0f ? 0 : random.below(2) * random.in(1, 150);
  const Buffer<float> bias(random.floats(s.kv_heads * s.group * s.distances, false));
  s.bias = s.distances ? bias.data() : nullptr;
  const Buffer<float> sinks(random.floats(s.kv_heads * s.group, false));
  s.sink_logits = random.below(2) ? sinks.data() : nullptr;
  // Without new keys and values none are written.
  const bool writes = random.below(4) != 0;
  shape = "attention B " + std::to_string(s.batch) + " T " + std::to_string(s.tokens) + " K " +
          std::to_string(s.kv_heads) + " used " + std::to_string(s.used_heads) + " G " +
          std::to_string(s.group) + " H " + std::to_string(s.width) + " S " + std::to_string(s.capacity) +
          (run ? " start " : " gaps from ") + std::to_string(positions[0]) + " valid " +
          std::to_string(s.valid) + " rotary " + std::to_string(s.rotary) + " window " +
          std::to_string(s.window) + (s.half ? " half" : "") + " distances " + std::to_string(s.distances) +
          (s.sink_logits ? " sinks" : "") + (writes ? "" : " reads");
  const size_t new_rows = s.batch * s.tokens * s.kv_heads;
  const Buffer<float> q(random.floats(new_rows * s.group * s.width, false)),
      k(random.floats(new_rows * s.width, false));
  const Buffer<float> v(random.floats(new_rows * s.width, false));
  Buffer<float> cos(s.tokens * s.rotary), sin(s.tokens * s.rotary);
  for (size_t i = 0; i < cos.size(); i++) {
    const double angle = random.unit() * 6;
    cos.data()[i] = static_cast<float>(::cos(angle)), sin.data()[i] = static_cast<float>(::sin(angle));
  }
  // Rows that no query may see are NaN.
  const Rows old_keys(random, s.batch * s.kv_heads, s.capacity, s.width, stale, s.half);
  const Rows old_values(random, s.batch * s.kv_heads, s.capacity, s.width, stale, s.half);
  Rows keys = old_keys.copy(), values = old_values.copy();
  Buffer<float> y(new_rows * s.group * s.width), mass(random.below(2) ? s.batch * s.capacity : 0);
  everywhere(
      y,
      [&] {
        keys = old_keys.copy(), values = old_values.copy();
        for (size_t i = 0; i < mass.size(); i++) mass.data()[i] = 1.0f;
        must(attention(q.data(), writes ? k.data() : nullptr, v.data(), cos.data(), sin.data(),
                       keys.bytes.data(), values.bytes.data(), s, y.data(),
                       mass.size() ? mass.data() : nullptr));
      },
      [&] {
        AttentionShape written = s;
        written.valid = writes ? s.valid : 0;
        judge_rows(written, k.data(), cos.data(), sin.data(), old_keys, keys);
        judge_rows(written, v.data(), nullptr, nullptr, old_values, values);
        std::vector<double> seen(s.batch * s.capacity, 1.0);
        const std::vector<double> expected =
            attended(s, q.data(), cos.data(), sin.data(), keys, values, seen);
        for (size_t i = 0; i < mass.size(); i++) {
          if (!(fabs(mass.data()[i] - seen[i]) <= 1e-3)) {
            fail("mass is wrong", i / s.capacity, i % s.capacity, mass.data()[i], seen[i], 1e-3);
          }
        }
        for (size_t i = 0; i < y.size(); i++) {
          if (i / s.width / s.group % s.kv_heads >= s.used_heads) continue;
          if (!(fabs(y.data()[i] - expected[i]) <= 5e-5)) {
            fail("attention is wrong", i / s.width, i % s.width, y.data()[i], expected[i], 5e-5);
          }
        }
      });
}
