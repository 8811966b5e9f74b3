// The operations as XLA calls them.
#pragma once
#include <stdint.h>

namespace jaxllm {

struct Target {
  const char* name;
  void* handler;
};
// Ends with a null name.
extern const Target kTargets[];

// Nanoseconds that all operations have taken since the process began.
int64_t busy_ns();

}  // namespace jaxllm
