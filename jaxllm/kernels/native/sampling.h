// What sampling needs of random numbers, for every instruction set.
#pragma once
#include <stdint.h>

namespace jaxllm {
namespace {

// Encrypts two words in place with a key of two: Threefry-2x32, 20 rounds.
inline __attribute__((always_inline)) void threefry(const uint32_t* key, uint32_t& a, uint32_t& b) {
  constexpr uint32_t kParity = 0x1bd11bda;
  constexpr int kTurns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ kParity};
  a += keys[0], b += keys[1];
  for (uint32_t group = 0; group < 5; group++) {
    for (int turn : kTurns[group % 2]) {
      a += b;
      b = (b << turn | b >> (32 - turn)) ^ a;
    }
    a += keys[(group + 1) % 3], b += keys[(group + 2) % 3] + group + 1;
  }
}

}  // namespace
}  // namespace jaxllm
