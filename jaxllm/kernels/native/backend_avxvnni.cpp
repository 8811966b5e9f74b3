// The kernels for AVX2 with AVX-VNNI.
#if defined(__AVXVNNI__)
#include "lanes_avx2.h"

#include "compute.inl"

static constexpr Backend kBackend = table("avxvnni");
const jaxllm::Backend* const jaxllm::avxvnni_backend = &kBackend;
#else
#include "backend.h"

const jaxllm::Backend* const jaxllm::avxvnni_backend = nullptr;
#endif
