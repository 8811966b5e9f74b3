#include <stdint.h>
#include <string.h>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "ops.h"

namespace jaxllm {

void zero(void* data, size_t bytes) {
  char* const begin = static_cast<char*>(data);
#ifdef __linux__
  // Linux gives pages of private memory back at once, and zeroes when they are used again.
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(begin) + bytes) / page * page;
  if (first < last && madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED) == 0) {
    memset(begin, 0, first - reinterpret_cast<uintptr_t>(begin));
    memset(reinterpret_cast<void*>(last), 0, reinterpret_cast<uintptr_t>(begin) + bytes - last);
    return;
  }
#endif
  memset(begin, 0, bytes);
}

}  // namespace jaxllm
