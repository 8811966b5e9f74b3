// The kernels for any processor.
#include "lanes_portable.h"

#include "compute.inl"

const jaxllm::Backend* jaxllm::portable_backend() {
  static const Backend backend = table("portable");
  return &backend;
}
