// The kernels for AVX2.
#if defined(__AVX2__)
#include "lanes_avx2.h"

#include "compute.inl"

static constexpr Backend kBackend = table("avx2");
const jaxllm::Backend* const jaxllm::avx2_backend = &kBackend;
#else
#include "backend.h"

const jaxllm::Backend* const jaxllm::avx2_backend = nullptr;
#endif
