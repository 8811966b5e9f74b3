// Chunks of a cache from bytes, beside a plain decoding in double: part of native_check.cpp.

// One head's keys or values of a chunk, [tokens][width], from its part of a blob (jaxllm/contexts/codecs.py).
std::vector<double> decoded(const ChunksShape& s, size_t heads, const uint8_t* part, int bits, bool by_token,
                            size_t head) {
  const size_t row_bytes = s.width * static_cast<size_t>(bits) / 8, levels = s.tokens * row_bytes;
  const size_t shared = by_token ? s.tokens : s.width;
  const auto half_at = [](const uint8_t* p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return half_value(h);
  };
  std::vector<double> out(s.tokens * s.width);
  for (size_t i = 0; i < out.size(); i++) {
    const size_t t = i / s.width, h = i % s.width;
    const uint8_t byte = part[head * levels + t * row_bytes + h % row_bytes];
    const int level = byte >> h / row_bytes * static_cast<size_t>(bits) & ((1 << bits) - 1);
    const uint8_t* low = part + heads * levels + 2 * (head * shared + (by_token ? t : h));
    out[i] = half_at(low) + half_at(low + 2 * heads * shared) * level;
  }
  if (!s.rotated) return out;
  const size_t block = s.width & (~s.width + 1);
  for (size_t from = 0; from < out.size(); from += block) {
    std::vector<double> turned(block);
    for (size_t i = 0; i < block; i++) {
      for (size_t j = 0; j < block; j++)
        turned[i] += __builtin_parityll(i & j) ? -out[from + j] : out[from + j];
    }
    for (size_t i = 0; i < block; i++) out[from + i] = turned[i] / sqrt(static_cast<double>(block));
  }
  return out;
}

void check_chunks(Random& random) {
  ChunksShape s{};
  s.tokens = random.in(1, 20), s.width = 4 * random.in(1, 40);
  s.half = random.below(2), s.rotated = random.below(3) == 0;
  s.keys_by_token = s.rotated || random.below(2), s.values_by_token = s.rotated || random.below(2);
  const size_t count = random.in(1, 20), element = s.half ? 2 : 4, heads = random.in(1, 3);
  // The last chunks may be cut at the capacity, or lie beyond it.
  s.capacity = random.in(1, count * s.tokens + 3);
  shape = "chunks " + std::to_string(count) + " of " + std::to_string(s.tokens) + " K " +
          std::to_string(heads) + " H " + std::to_string(s.width) + " S " + std::to_string(s.capacity) +
          (s.half ? " half" : "") + (s.rotated ? " rotated" : "");
  const size_t values = heads * s.tokens * s.width, cache = heads * s.capacity * s.width * element;
  const auto part_bytes = [&](int bits, bool by_token) {
    return values * static_cast<size_t>(bits) / 8 + 4 * heads * (by_token ? s.tokens : s.width);
  };
  std::vector<Buffer<uint8_t>> blobs;
  std::vector<const uint8_t*> at(count);
  std::vector<int32_t> bits(count);
  for (size_t i = 0; i < count; i++) {
    bits[i] = std::vector<int32_t>{8, 4, 2, 0, -1}[random.below(5)];
    const size_t of_keys = bits[i] > 0 ? part_bytes(bits[i], s.keys_by_token) : values * element;
    const size_t of_values = bits[i] > 0 ? part_bytes(bits[i], s.values_by_token) : values * element;
    blobs.emplace_back(bits[i] < 0 ? 0 : of_keys + of_values);
    for (size_t b = 0; b < blobs[i].size(); b++) blobs[i].data()[b] = static_cast<uint8_t>(random.below(256));
    for (size_t half = 0; bits[i] > 0 && half < 2; half++) {
      const size_t from = half * of_keys, levels = values * static_cast<size_t>(bits[i]) / 8;
      for (size_t b = from + levels; b < from + (half ? of_values : of_keys); b += 2) {
        const uint16_t h = draw_half(random);
        memcpy(blobs[i].data() + b, &h, 2);
      }
    }
    at[i] = blobs[i].data();
  }
  // Two layers of the same chunks.
  Buffer<float> y(4 * cache / sizeof(float));
  everywhere(
      y,
      [&] {
        char* keys = reinterpret_cast<char*>(y.data());
        const ChunksLayer layers[] = {{at.data(), heads, keys, keys + cache},
                                      {at.data(), heads, keys + 2 * cache, keys + 3 * cache}};
        must(load_chunks(layers, 2, bits.data(), count, s));
      },
      [&] {
        const float untouched = NAN;
        for (size_t i = 0; i < count * heads * 4; i++) {
          const size_t chunk = i / 4 / heads, head = i / 4 % heads, from = chunk * s.tokens;
          const uint8_t* part = at[chunk];
          const bool by_token = i % 2 ? s.values_by_token : s.keys_by_token;
          if (i % 2) part += bits[chunk] > 0 ? part_bytes(bits[chunk], s.keys_by_token) : values * element;
          std::vector<double> wanted;
          if (bits[chunk] > 0) wanted = decoded(s, heads, part, bits[chunk], by_token, head);
          for (size_t j = 0; j < s.tokens * s.width && from + j / s.width < s.capacity; j++) {
            const uint8_t* got = reinterpret_cast<const uint8_t*>(y.data()) + i % 4 * cache +
                                 ((head * s.capacity + from) * s.width + j) * element;
            const uint8_t* same = reinterpret_cast<const uint8_t*>(&untouched) +
                                  (element == 2 ? (head * s.capacity + from) * s.width + j : 0) % 2 * 2;
            if (bits[chunk] == 0) same = part + (head * s.tokens * s.width + j) * element;
            if (bits[chunk] <= 0) {
              if (memcmp(got, same, element)) fail("a row has changed", chunk, j, 0, 0, 0);
              continue;
            }
            uint16_t h;
            float value;
            memcpy(s.half ? static_cast<void*>(&h) : &value, got, element);
            const double found = s.half ? half_value(h) : value;
            const double room = (s.half ? 1e-3 : 1e-5) * (fabs(wanted[j]) + 4);
            if (!(fabs(found - wanted[j]) <= room))
              fail("a chunk is wrong", chunk, j, found, wanted[j], room);
          }
        }
      });
}
