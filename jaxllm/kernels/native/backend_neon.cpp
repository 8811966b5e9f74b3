// The kernels for Arm with dot products.
#if defined(__ARM_FEATURE_DOTPROD)
#include "lanes_neon.h"

#include "compute.inl"

const jaxllm::Backend* jaxllm::neon_backend() {
  static const Backend backend = table("neon");
  return &backend;
}
#else
#include "backend.h"

const jaxllm::Backend* jaxllm::neon_backend() { return nullptr; }
#endif
