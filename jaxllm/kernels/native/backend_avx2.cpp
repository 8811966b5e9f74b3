// The kernels for AVX2.
#if defined(__AVX2__)
#include "lanes_avx2.h"

#include "compute.inl"

const jaxllm::Backend* jaxllm::avx2_backend() {
  static const Backend backend = table("avx2");
  return &backend;
}
#else
#include "backend.h"

const jaxllm::Backend* jaxllm::avx2_backend() { return nullptr; }
#endif
