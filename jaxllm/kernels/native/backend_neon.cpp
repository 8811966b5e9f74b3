// The kernels for Arm with dot products.
#if defined(__ARM_FEATURE_DOTPROD)
#include "lanes_neon.h"

#include "compute.inl"

static constexpr Backend kBackend = table("neon");
const jaxllm::Backend* const jaxllm::neon_backend = &kBackend;
#else
#include "backend.h"

const jaxllm::Backend* const jaxllm::neon_backend = nullptr;
#endif
