// The kernels for AVX-512 with VNNI.
#if defined(__AVX512VNNI__)
#include "lanes_avx512.h"

#include "compute.inl"

static constexpr Backend kBackend = table("avx512");
const jaxllm::Backend* const jaxllm::avx512_backend = &kBackend;
#else
#include "backend.h"

const jaxllm::Backend* const jaxllm::avx512_backend = nullptr;
#endif
