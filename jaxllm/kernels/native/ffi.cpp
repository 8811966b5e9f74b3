#include "ffi.h"

#include <atomic>

#include "ffi_checks.h"

namespace jaxllm {
namespace {

std::atomic<int64_t> busy{0};

}  // namespace

const Target* const kTargets[] = {kProductTargets, kAttentionTargets, kDocumentTargets,
                                  kTokenTargets,   kSamplingTargets,  kChunkTargets,
                                  kExpertTargets,  kMaskTargets,      nullptr};

int64_t busy_ns() { return busy; }
void add_busy_ns(int64_t ns) { busy += ns; }

}  // namespace jaxllm
