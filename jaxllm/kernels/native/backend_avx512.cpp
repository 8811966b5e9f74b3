// The kernels for AVX-512 with VNNI.
#if defined(__AVX512VNNI__)
#include "lanes_avx512.h"

#include "compute.inl"

const jaxllm::Backend* jaxllm::avx512_backend() {
  static const Backend backend = table("avx512");
  return &backend;
}
#else
#include "backend.h"

const jaxllm::Backend* jaxllm::avx512_backend() { return nullptr; }
#endif
