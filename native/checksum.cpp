// The long form of XXH3 (Yann Collet, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md):
// stripes of 64 bytes in eight sums, with the default secret and no seed.

#include "checksum.h"

#include <cstdint>
#include <cstdio>
#include <cstring>

namespace jaxllm {
namespace {

constexpr size_t kStripe = 64, kSecretBytes = 192, kStep = 8;
constexpr size_t kStripesOfBlock = (kSecretBytes - kStripe) / kStep;
constexpr uint32_t kPrime32[] = {0x9E3779B1u, 0x85EBCA77u, 0xC2B2AE3Du};
constexpr uint64_t kPrime64[] = {0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u,
                                 0x85EBCA77C2B2AE63u, 0x27D4EB2F165667C5u};
constexpr unsigned char kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

// Little-endian, as all processors that LiteRT runs on.
uint64_t Word(const unsigned char* from) {
  uint64_t found;
  std::memcpy(&found, from, sizeof(found));
  return found;
}

void Add(uint64_t* sums, const unsigned char* stripe, const unsigned char* secret) {
  for (int lane = 0; lane < 8; ++lane) {
    uint64_t value = Word(stripe + 8 * lane), key = value ^ Word(secret + 8 * lane);
    sums[lane ^ 1] += value;
    sums[lane] += (key & 0xFFFFFFFFu) * (key >> 32);
  }
}

uint64_t Merged(const uint64_t* sums, const unsigned char* secret, uint64_t found) {
  for (int pair = 0; pair < 4; ++pair) {
    uint64_t left = sums[2 * pair] ^ Word(secret + 16 * pair);
    uint64_t right = sums[2 * pair + 1] ^ Word(secret + 16 * pair + 8);
    auto product = static_cast<unsigned __int128>(left) * right;
    found += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  found ^= found >> 37;
  found *= 0x165667919E3779F9u;
  return found ^ (found >> 32);
}

}  // namespace

std::string Checksum(const void* data, size_t bytes) {
  if (bytes < kLeastChecked) return "";
  auto* from = static_cast<const unsigned char*>(data);
  uint64_t sums[] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
                     kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
  constexpr size_t kBlock = kStripe * kStripesOfBlock;
  const unsigned char *at = from, *last = from + bytes - kStripe;
  for (size_t block = 0; block < (bytes - 1) / kBlock; ++block) {
    for (size_t stripe = 0; stripe < kStripesOfBlock; ++stripe, at += kStripe)
      Add(sums, at, kSecret + kStep * stripe);
    for (int lane = 0; lane < 8; ++lane) {
      sums[lane] ^= sums[lane] >> 47;
      sums[lane] ^= Word(kSecret + kSecretBytes - kStripe + 8 * lane);
      sums[lane] *= kPrime32[0];
    }
  }
  size_t left = (bytes - 1) % kBlock / kStripe;
  for (size_t stripe = 0; stripe < left; ++stripe, at += kStripe) Add(sums, at, kSecret + kStep * stripe);
  Add(sums, last, kSecret + kSecretBytes - kStripe - 7);
  uint64_t low = Merged(sums, kSecret + 11, bytes * kPrime64[0]);
  uint64_t high = Merged(sums, kSecret + kSecretBytes - kStripe - 11, ~(bytes * kPrime64[1]));
  char digits[33];
  std::snprintf(digits, sizeof(digits), "%016llx%016llx", static_cast<unsigned long long>(high),
                static_cast<unsigned long long>(low));
  return digits;
}

}  // namespace jaxllm
