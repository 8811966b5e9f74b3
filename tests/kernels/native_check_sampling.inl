// The likeliest token, and one that is drawn: part of native_check.cpp.

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
  // Of the logits that top-k keeps, with the noise of the first of `jax.random.bits` with the key of seed (1,
  // 2) into which 3 is folded.
  const uint32_t seed[2] = {1, 2}, first[4] = {0xfa4ab881u, 0xc6314ac2u, 0x7c84a4a7u, 0xafe6e647u};
  const size_t few = std::min<size_t>(4, width), top_k = random.in(1, few);
  const float temperature = 0.5f + static_cast<float>(random.in(0, 10)) / 10;
  everywhere(
      y, [&] { draw(x.data(), 1, few, {temperature, 1, 0, static_cast<int32_t>(top_k)}, seed, 3, found); },
      [&] {
        std::vector<float> sorted(x.data(), x.data() + few), scores(few);
        std::sort(sorted.begin(), sorted.end(), std::greater<float>());
        for (size_t i = 0; i < few; i++) {
          const double uniform = static_cast<double>(first[i] >> 9) / (1 << 23);
          const float noise = static_cast<float>(-std::log(-std::log(uniform)));
          const bool kept = x.data()[i] >= sorted[top_k - 1];
          scores[i] = kept ? (x.data()[i] - sorted[0]) / temperature + noise : -INFINITY;
        }
        const auto best = std::max_element(scores.begin(), scores.end());
        if (found[0] != best - scores.begin())
          fail("another is drawn", 0, 0, found[0], static_cast<double>(best - scores.begin()), 0);
      });
}
