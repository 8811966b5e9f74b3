// Sixteen lanes in C++ with the vectors that GCC and Clang have for every processor: what no register holds,
// they divide. Loops over arrays of sixteen compute the same, but take five times as long to compile.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace {

struct F {
  float __attribute__((vector_size(64))) v;
};
struct I {
  int32_t __attribute__((vector_size(64))) v;
};
struct W {
  int8_t v[64];
};
struct X {
  int8_t v[4];
};

constexpr int kBias8 = 0, kBias4 = 0, kBias2 = 0;
constexpr int kRows = 2, kPanels = 1;
constexpr int kGroupRows = 2, kGroupPanels = 1;
constexpr int kFloatRows = 2, kFloatPanels = 1;
// Of few_rows.inl: rows and sums that registers hold, and up to how many rows it is faster than tile.inl.
constexpr int kRowsTogether = 1, kSumsTogether = 1;
constexpr size_t kFewRowsAtMost = 0;

#define EACH(Type, expression)                        \
  Type out;                                           \
  for (int j = 0; j < 16; j++) out.v[j] = expression; \
  return out

// A difference, since 0 + -0 is 0.
inline F fset(float x) { return {x - decltype(F::v){}}; }
inline F fzero() { return fset(0.0f); }
inline F fload(const float* p) {
  F out;
  memcpy(&out.v, p, sizeof out.v);
  return out;
}
inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31,
                 mantissa = h & 1023;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    return sign ? -value : value;
  }
  const uint32_t bits = sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (mantissa << 13);
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline F fload_half(const uint16_t* p) { EACH(F, half_to_float(p[j])); }
inline uint16_t float_to_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;   // NaN
  if (bits >= 0x477ff000) return sign | 0x7c00;  // rounds to more than 65504
  if (bits < 0x38800000) {                       // subnormal: whole multiples of 2^-24
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    return sign | static_cast<uint16_t>(lrintf(magnitude * 16777216.0f));
  }
  bits += 0xfff + (bits >> 13 & 1);  // to nearest, ties to even
  return sign | static_cast<uint16_t>((bits >> 13) - (112 << 10));
}
inline void fstore_half(uint16_t* p, F a) {
  for (int j = 0; j < 16; j++) p[j] = float_to_half(a.v[j]);
}
inline void fstream_half(uint16_t* p, F a) { fstore_half(p, a); }
inline void stream_bytes32(void* p, const void* from) { memcpy(p, from, 32); }
inline void stream_fence() {}
inline void fstore(float* p, F a) { memcpy(p, &a.v, sizeof a.v); }
inline F fadd(F a, F b) { return {a.v + b.v}; }
inline F fsub(F a, F b) { return {a.v - b.v}; }
inline F fmul(F a, F b) { return {a.v * b.v}; }
inline F fdiv(F a, F b) { return {a.v / b.v}; }
inline F fma(F a, F b, F c) { return {a.v * b.v + c.v}; }
inline F fmax(F a, F b) { return {a.v > b.v ? a.v : b.v}; }
inline F fmin(F a, F b) { return {a.v < b.v ? a.v : b.v}; }
inline float fsum(F a) {
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; i++) a.v[i] += a.v[i + step];
  return a.v[0];
}
inline float ftop(F a) {
  float top = a.v[0];
  for (int j = 1; j < 16; j++) top = a.v[j] > top ? a.v[j] : top;
  return top;
}
inline F to_float(I a) { return {__builtin_convertvector(a.v, decltype(F::v))}; }
inline int32_t round_even(float x) {
  // In range the sum is exact to the nearest even whole number; NaN and the rest are not worth an int.
  if (!(x > -2147483648.0f && x < 2147483520.0f)) return INT32_MIN;
  return static_cast<int32_t>(lrintf(x));
}
inline I round_to_int(F a) { EACH(I, round_even(a.v[j])); }
inline F pow2(I n) {
  // Of unsigned numbers, whose overflow is defined.
  using Bits = uint32_t __attribute__((vector_size(64)));
  const Bits bits = (reinterpret_cast<Bits>(n.v) + 127u) << 23;
  return {reinterpret_cast<decltype(F::v)>(bits)};
}

inline I iset(int32_t x) { return {x - decltype(I::v){}}; }
inline I izero() { return iset(0); }
inline I iload_bytes(const uint8_t* p) { EACH(I, p[j]); }
// See lanes_avx512.h.
inline I iload_nibbles(const uint8_t* p) { EACH(I, p[j % 8] >> (j / 8 * 4) & 15); }
inline I iload(const void* p) {
  I out;
  memcpy(&out.v, p, sizeof out.v);
  return out;
}
inline void istore(void* p, I a) { memcpy(p, &a.v, sizeof a.v); }
inline I iadd(I a, I b) { return {a.v + b.v}; }
inline I iand(I a, I b) { return {a.v & b.v}; }
inline I imax(I a, I b) { return {a.v > b.v ? a.v : b.v}; }
// See lanes_avx512.h.
inline uint32_t ilarger(I a, I b) {
  uint32_t all = 0;
  for (int j = 0; j < 16; j++) all |= static_cast<uint32_t>(a.v[j] > b.v[j]) << j;
  return all;
}
inline int32_t isum(I a) {
  int32_t sum = 0;
  for (int j = 0; j < 16; j++) sum += a.v[j];
  return sum;
}
inline int32_t itop(I a) {
  int32_t top = a.v[0];
  for (int j = 1; j < 16; j++) top = a.v[j] > top ? a.v[j] : top;
  return top;
}
inline void store_bytes(int8_t* p, I a) {
  for (int j = 0; j < 16; j++) {
    const int32_t x = a.v[j];
    p[j] = static_cast<int8_t>(x > 127 ? 127 : x < -128 ? -128 : x);
  }
}

inline W wload(const void* p) {
  W out;
  memcpy(out.v, p, sizeof out.v);
  return out;
}
inline void wstore(void* p, W w) { memcpy(p, w.v, sizeof w.v); }
inline W wbiased(W w) { return w; }
inline void wnibbles(const void* p, W& low, W& high) {
  const uint8_t* bytes = static_cast<const uint8_t*>(p);
  for (int j = 0; j < 64; j++) {
    low.v[j] = static_cast<int8_t>((bytes[j] & 15) - 8);
    high.v[j] = static_cast<int8_t>((bytes[j] >> 4) - 8);
  }
}
// See lanes_avx512.h.
inline void wplanes(const void* high, const void* low, W& former, W& latter) {
  W high_former, high_latter;
  wnibbles(high, high_former, high_latter);
  wnibbles(low, former, latter);
  for (int j = 0; j < 64; j++) {
    former.v[j] = static_cast<int8_t>(16 * high_former.v[j] + former.v[j]);
    latter.v[j] = static_cast<int8_t>(16 * high_latter.v[j] + latter.v[j]);
  }
}
// Levels -3, -1, 1 and 3, of codes of 2 bits.
inline void wcrumbs(const void* p, W (&quarter)[4]) {
  const uint8_t* bytes = static_cast<const uint8_t*>(p);
  for (int j = 0; j < 64; j++) {
    for (int i = 0; i < 4; i++) quarter[i].v[j] = static_cast<int8_t>(2 * (bytes[j] >> 2 * i & 3) - 3);
  }
}
inline X xload(const int8_t* p) {
  X out;
  memcpy(out.v, p, sizeof out.v);
  return out;
}
inline I dot(I sum, W w, X x) {
  decltype(I::v) bytes;
  memcpy(&bytes, w.v, sizeof bytes);
  for (int i = 0; i < 4; i++) sum.v += (bytes << (24 - 8 * i) >> 24) * static_cast<int32_t>(x.v[i]);
  return sum;
}

inline I dot_at(I sum, W w, const int8_t* x) { return dot(sum, w, xload(x)); }

#undef EACH

}  // namespace
