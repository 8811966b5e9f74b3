// The kernels for AVX2 with AVX-VNNI.
#if defined(__AVXVNNI__)
#include "lanes_avx2.h"

#include "compute.inl"

const jaxllm::Backend* jaxllm::avxvnni_backend() {
  static const Backend backend = table("avxvnni");
  return &backend;
}
#else
#include "backend.h"

const jaxllm::Backend* jaxllm::avxvnni_backend() { return nullptr; }
#endif
