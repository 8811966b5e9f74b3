// Choosing tokens, spread over the pool's threads.
#include "sampling.h"

#include <algorithm>

#include "ops.h"
#include "pool.h"

namespace jaxllm {

void largest(const float* x, size_t rows, size_t width, int32_t* y) {
  for (size_t row = 0; row < rows; row++) y[row] = backend().largest(x + row * width, width);
}

void random_bits(const uint32_t* seed, uint32_t drawn, size_t count, uint32_t* y) {
  uint32_t key[2] = {0, drawn};
  threefry(seed, key[0], key[1]);
  constexpr size_t kPiece = 1 << 14;
  const Backend& kernels = backend();
  parallel((count + kPiece - 1) / kPiece, [&](size_t i) {
    const size_t from = i * kPiece;
    kernels.random_bits(key, from, std::min(kPiece, count - from), y + from);
  });
}

void kth_largest(const float* x, size_t rows, size_t width, const int32_t* k, size_t each, uint32_t* y) {
  const Backend& kernels = backend();
  parallel(rows, [&](size_t row) {
    y[row] = kernels.kth_largest(x + row * width, width, static_cast<size_t>(k[row / each]));
  });
}

}  // namespace jaxllm
