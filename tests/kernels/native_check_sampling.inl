// The likeliest token, the k-th likeliest and random bits: part of native_check.cpp.

uint32_t key_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

void check_sampling(Random& random) {
  const size_t rows = random.in(1, 20), width = random.in(1, 500), each = 1 + random.below(rows);
  shape = "sampling of " + std::to_string(rows) + " rows of " + std::to_string(width);
  const Buffer<float> x(random.floats(rows * width));
  Buffer<float> y(rows);
  int32_t* found = reinterpret_cast<int32_t*>(y.data());
  everywhere(
      y, [&] { largest(x.data(), rows, width, found); },
      [&] {
        for (size_t row = 0; row < rows; row++) {
          const float* from = x.data() + row * width;
          const int32_t expected = static_cast<int32_t>(std::max_element(from, from + width) - from);
          if (found[row] != expected) fail("another is larger", row, 0, found[row], expected, 0);
        }
      });
  Buffer<int32_t> k((rows + each - 1) / each);
  for (size_t i = 0; i < k.size(); i++) k.data()[i] = static_cast<int32_t>(random.in(1, width));
  uint32_t* keys = reinterpret_cast<uint32_t*>(y.data());
  everywhere(
      y, [&] { kth_largest(x.data(), rows, width, k.data(), each, keys); },
      [&] {
        for (size_t row = 0; row < rows; row++) {
          std::vector<float> sorted(x.data() + row * width, x.data() + (row + 1) * width);
          std::sort(sorted.begin(), sorted.end(), std::greater<float>());
          const uint32_t expected = key_of(sorted[static_cast<size_t>(k.data()[row / each]) - 1]);
          if (keys[row] != expected) fail("not the k-th largest", row, 0, keys[row], expected, 0);
        }
      });
  // The first four of `jax.random.bits` with the key of seed (1, 2) into which 3 is folded.
  const uint32_t seed[2] = {1, 2}, expected[4] = {0xfa4ab881u, 0xc6314ac2u, 0x7c84a4a7u, 0xafe6e647u};
  Buffer<float> drawn(random.in(4, 40000));
  uint32_t* bits = reinterpret_cast<uint32_t*>(drawn.data());
  everywhere(
      drawn, [&] { random_bits(seed, 3, drawn.size(), bits); },
      [&] {
        for (size_t i = 0; i < 4; i++) {
          if (bits[i] != expected[i]) fail("other random bits", 0, i, bits[i], expected[i], 0);
        }
      });
}
