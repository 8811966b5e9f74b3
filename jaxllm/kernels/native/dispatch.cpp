// Which kernels this processor runs.
#include <string.h>

#include <atomic>

#include "ops.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace jaxllm {
namespace {

#if defined(__x86_64__)
bool leaf_bit(unsigned leaf, unsigned subleaf, int reg, int bit) {
  unsigned r[4] = {};
  return __get_cpuid_count(leaf, subleaf, &r[0], &r[1], &r[2], &r[3]) && (r[reg] >> bit & 1);
}

// What the system saves of the processor's registers (XCR0).
bool saved(uint64_t mask) {
  if (!leaf_bit(1, 0, 2, 27)) return false;
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return ((static_cast<uint64_t>(high) << 32 | low) & mask) == mask;
}

bool has_avx2() {
  return saved(0x6) && leaf_bit(7, 0, 1, 5) && leaf_bit(1, 0, 2, 12) && leaf_bit(1, 0, 2, 29);
}
bool has_avxvnni() { return has_avx2() && leaf_bit(7, 1, 0, 4); }
bool has_avx512() {
  // F, DQ, BW, VL of leaf 7's second register, VNNI of its third.
  return has_avx2() && saved(0xe6) && leaf_bit(7, 0, 1, 16) && leaf_bit(7, 0, 1, 17) &&
         leaf_bit(7, 0, 1, 30) && leaf_bit(7, 0, 1, 31) && leaf_bit(7, 0, 2, 11);
}
bool has_amx() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return has_avx512() && saved(0x60000) && leaf_bit(7, 0, 3, 24) && leaf_bit(7, 0, 3, 25) &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

#if !defined(__x86_64__)
bool has_dot_products() {
#if defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kHalf = 1ul << 10, kDot = 1ul << 20;  // HWCAP_ASIMDHP, HWCAP_ASIMDDP
  return (getauxval(AT_HWCAP) & (kHalf | kDot)) == (kHalf | kDot);
#elif defined(__aarch64__)
  return true;  // every 64-bit Apple processor since 2018
#else
  return false;
#endif
}

bool has_matrix_products() {
#if defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kMatrix = 1ul << 13;  // HWCAP2_I8MM
  return has_dot_products() && (getauxval(AT_HWCAP2) & kMatrix);
#elif defined(__aarch64__) && defined(__APPLE__)
  int has = 0;  // since 2022
  size_t bytes = sizeof(has);
  return sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &bytes, nullptr, 0) == 0 && has;
#else
  return false;
#endif
}
#endif

struct List {
  const Backend *found[8], *built[8];
  int count = 0, built_count = 0;
  void add(bool runs, const Backend* each) {
    if (each) built[built_count++] = each;
    if (each && runs) found[count++] = each;
  }
  List() {
#if defined(__x86_64__)
    add(has_amx(), amx_backend);
    add(has_avx512(), avx512_backend);
    add(has_avxvnni(), avxvnni_backend);
    add(has_avx2(), avx2_backend);
#else
    add(has_matrix_products(), i8mm_backend);
    add(has_dot_products(), neon_backend);
#endif
    add(true, portable_backend);
  }
};

const List& all() {
  static const List list;
  return list;
}

std::atomic<const Backend*> chosen{nullptr};

}  // namespace

const Backend& backend() {
  const Backend* found = chosen.load(std::memory_order_relaxed);
  return found ? *found : *all().found[0];
}

bool use_backend(const char* name) {
  const List& list = all();
  for (int i = 0; i < list.count; i++) {
    if (!*name || !strcmp(list.found[i]->name, name)) {
      chosen.store(list.found[i]);
      return true;
    }
  }
  return false;
}

int backends(const char* (&names)[8], bool built) {
  const List& list = all();
  const int count = built ? list.built_count : list.count;
  for (int i = 0; i < count; i++) names[i] = (built ? list.built : list.found)[i]->name;
  return count;
}

}  // namespace jaxllm
