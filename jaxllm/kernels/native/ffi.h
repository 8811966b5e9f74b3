// The operations as XLA calls them.
#pragma once
#include <stdint.h>

namespace jaxllm {

struct Target {
  const char* name;
  void* handler;
};
// One list for each file of handlers; each ends with a null name.
extern const Target kProductTargets[], kAttentionTargets[], kDocumentTargets[], kTokenTargets[],
    kSamplingTargets[], kChunkTargets[], kExpertTargets[], kMaskTargets[];
// All lists; ends with null.
extern const Target* const kTargets[];

// Nanoseconds that all operations have taken since the process began.
int64_t busy_ns();

}  // namespace jaxllm
