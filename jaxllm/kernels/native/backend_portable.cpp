// The kernels for any processor.
#include "lanes_portable.h"

#include "compute.inl"

static constexpr Backend kBackend = table("portable");
const jaxllm::Backend* const jaxllm::portable_backend = &kBackend;
