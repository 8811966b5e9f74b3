// Choosing tokens, spread over the pool's threads.
#include "sampling.h"

#include <memory>

#include "ops.h"
#include "pool.h"

namespace jaxllm {

void largest(const float* x, size_t rows, size_t width, int32_t* y) {
  for (size_t row = 0; row < rows; row++) y[row] = backend().largest(x + row * width, width);
}

void draw(const float* x, size_t rows, size_t width, const Draw& how, const uint32_t* seed, uint32_t drawn,
          int32_t* y) {
  uint32_t key[2] = {0, drawn};
  threefry(seed, key[0], key[1]);
  const Backend& kernels = backend();
  parallel(rows, [&](size_t row) {
    // Not set to zero: of most rows little is used.
    const std::unique_ptr<uint32_t[]> keys(new uint32_t[width]);
    const std::unique_ptr<float[]> weights(new float[width]);
    y[row] = kernels.draw(x + row * width, width, how, key, row * width, keys.get(), weights.get());
  });
}

}  // namespace jaxllm
