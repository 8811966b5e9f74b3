// Sixteen lanes in one register: AVX-512 with VNNI.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

using F = __m512;   // 16 floats
using I = __m512i;  // 16 int32
using W = __m512i;  // 64 weight bytes: 16 outputs x 4 inputs
using X = __m512i;  // 4 activation bytes, repeated for every output

// vpdpbusd multiplies unsigned by signed bytes: weights are shifted up and the sums corrected.
constexpr int kBias8 = 128, kBias4 = 8, kBias2 = 3;
constexpr int kRows = 6, kPanels = 4;            // tile of accumulators, one scale for all inputs
constexpr int kGroupRows = 6, kGroupPanels = 2;  // tile of accumulators, scales by group
constexpr int kFloatRows = 6, kFloatPanels = 4;
// Of few_rows.inl: rows and sums that registers hold, and up to how many rows it is faster than tile.inl.
constexpr int kRowsTogether = 8, kSumsTogether = 16;
constexpr size_t kFewRowsAtMost = 16;

inline F fzero() { return _mm512_setzero_ps(); }
inline F fset(float x) { return _mm512_set1_ps(x); }
inline F fload(const float* p) { return _mm512_loadu_ps(p); }
inline F fload_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void fstore_half(uint16_t* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
// Past the caches, to a multiple of 32 bytes; others see it after a fence.
inline void fstream_half(uint16_t* p, F a) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
inline void stream_bytes32(void* p, const void* from) {
  _mm256_stream_si256(static_cast<__m256i*>(p), _mm256_loadu_si256(static_cast<const __m256i*>(from)));
}
inline void stream_fence() { _mm_sfence(); }
inline void fstore(float* p, F a) { _mm512_storeu_ps(p, a); }
inline F fadd(F a, F b) { return _mm512_add_ps(a, b); }
inline F fsub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F fmul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F fdiv(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F fmax(F a, F b) { return _mm512_max_ps(a, b); }  // b where either is NaN
inline F fmin(F a, F b) { return _mm512_min_ps(a, b); }  // b where either is NaN
inline F fabs(F a) { return _mm512_abs_ps(a); }
inline float fsum(F a) { return _mm512_reduce_add_ps(a); }
// Sixteen sums at a time: lane i is the sum over the lanes of v[i].
#define LANES_SUMS
inline __attribute__((always_inline)) F fsums(const F (&v)[16]) {
  F quarter[4];  // lanes 4l..4l+3: what v[4i], v[4i+1], ... have in their own lanes 4l..4l+3
  for (int i = 0; i < 4; i++) {
    const F* four = v + 4 * i;
    const F low = _mm512_add_ps(_mm512_unpacklo_ps(four[0], four[1]), _mm512_unpackhi_ps(four[0], four[1]));
    const F high = _mm512_add_ps(_mm512_unpacklo_ps(four[2], four[3]), _mm512_unpackhi_ps(four[2], four[3]));
    const __m512d a = _mm512_castps_pd(low), b = _mm512_castps_pd(high);
    quarter[i] =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto halved = [](F a, F b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return halved(halved(quarter[0], quarter[1]), halved(quarter[2], quarter[3]));
}
inline float ftop(F a) { return _mm512_reduce_max_ps(a); }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
inline I round_to_int(F a) { return _mm512_cvtps_epi32(a); }
// (i >> Shift & Mask) as floats, where i is the low four bits of each number.
#define LANES_LOOK_UP
template <int Shift, int Mask>
inline __attribute__((always_inline)) F flook_up(I a) {
  const I all = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const F levels =
      _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(all, Shift), _mm512_set1_epi32(Mask)));
  return _mm512_permutexvar_ps(a, levels);
}
inline F pow2(I n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}

inline I izero() { return _mm512_setzero_si512(); }
inline I iset(int32_t x) { return _mm512_set1_epi32(x); }
inline I iload(const void* p) { return _mm512_loadu_si512(p); }
inline I iload_bytes(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// Sixteen numbers of 4 bits: those in the low bits of 8 bytes, then those in the high ones.
inline I iload_nibbles(const uint8_t* p) {
  const __m128i both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), mask = _mm_set1_epi8(15);
  return _mm512_cvtepu8_epi32(
      _mm_unpacklo_epi64(_mm_and_si128(both, mask), _mm_and_si128(_mm_srli_epi16(both, 4), mask)));
}
inline void istore(void* p, I a) { _mm512_storeu_si512(p, a); }
inline I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
inline I iand(I a, I b) { return _mm512_and_si512(a, b); }
inline I imax(I a, I b) { return _mm512_max_epi32(a, b); }
// Bit j is set where a is larger in lane j.
inline uint32_t ilarger(I a, I b) { return _mm512_cmpgt_epi32_mask(a, b); }
inline int32_t isum(I a) { return _mm512_reduce_add_epi32(a); }
inline int32_t itop(I a) { return _mm512_reduce_max_epi32(a); }
inline void store_bytes(int8_t* p, I a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
}

inline W wload(const void* p) { return _mm512_loadu_si512(p); }
inline void wstore(void* p, W w) { _mm512_storeu_si512(p, w); }
inline W wbiased(W w) { return _mm512_xor_si512(w, _mm512_set1_epi8(static_cast<char>(0x80))); }
inline void wnibbles(const void* p, W& low, W& high) {
  const W both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
  low = _mm512_and_si512(both, mask);
  high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
}
// Two planes of 4 bits as bytes, biased as 8-bit weights are: of the low bits, and of the high ones.
inline void wplanes(const void* high, const void* low, W& former, W& latter) {
  const W h = _mm512_loadu_si512(high), l = _mm512_loadu_si512(low), mask = _mm512_set1_epi8(15);
  const W bias = _mm512_set1_epi8(kBias8 - 17 * kBias4);
  former = _mm512_or_si512(_mm512_slli_epi16(_mm512_and_si512(h, mask), 4), _mm512_and_si512(l, mask));
  latter = _mm512_or_si512(_mm512_andnot_si512(mask, h), _mm512_and_si512(_mm512_srli_epi16(l, 4), mask));
  former = _mm512_add_epi8(former, bias);
  latter = _mm512_add_epi8(latter, bias);
}
// Twice the codes of 2 bits: levels -3, -1, 1 and 3, plus kBias2.
inline void wcrumbs(const void* p, W (&quarter)[4]) {
  const W all = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(6);
  quarter[0] = _mm512_and_si512(_mm512_slli_epi16(all, 1), mask);
  quarter[1] = _mm512_and_si512(_mm512_srli_epi16(all, 1), mask);
  quarter[2] = _mm512_and_si512(_mm512_srli_epi16(all, 3), mask);
  quarter[3] = _mm512_and_si512(_mm512_srli_epi16(all, 5), mask);
}
// Weights of 4 and 2 bits with different group scales as 8-bit ones of one scale: level * factor, rounded,
// where the product is in [-127, 127]. Two bytes at a time, as 16-bit fixed point.
#define LANES_WIDEN
inline I widening(F factor) {
  const I fixed = _mm512_cvtps_epi32(_mm512_mul_ps(factor, _mm512_set1_ps(128.0f)));
  return _mm512_or_si512(_mm512_and_si512(fixed, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(fixed, 16));
}
template <int Bias>
inline W widen_bytes(W biased, I factor) {
  const W bias = _mm512_set1_epi16(Bias << 8), upper = _mm512_set1_epi16(static_cast<short>(0xff00));
  const W even = _mm512_mulhrs_epi16(_mm512_sub_epi16(_mm512_slli_epi16(biased, 8), bias), factor);
  const W odd = _mm512_mulhrs_epi16(_mm512_sub_epi16(_mm512_and_si512(biased, upper), bias), factor);
  // Bits of the odd product where `upper` is set, else of the even one.
  return _mm512_ternarylogic_epi32(upper, _mm512_slli_epi16(odd, 8), even, 0xca);
}
inline void wwiden(const void* p, I factor, W& low, W& high) {
  const W both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
  low = widen_bytes<8>(_mm512_and_si512(both, mask), factor);
  high = widen_bytes<8>(_mm512_and_si512(_mm512_srli_epi16(both, 4), mask), factor);
}
inline void wwiden_crumbs(const void* p, I factor, W (&quarter)[4]) {
  wcrumbs(p, quarter);
  for (int i = 0; i < 4; i++) quarter[i] = widen_bytes<3>(quarter[i], factor);
}
// Signed bytes times a factor in [-1, 1], rounded.
inline I share(F factor) {
  const I fixed = _mm512_cvtps_epi32(_mm512_mul_ps(factor, _mm512_set1_ps(32767.0f)));
  return _mm512_or_si512(_mm512_and_si512(fixed, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(fixed, 16));
}
inline W wshare(W w, I factor) {
  const W upper = _mm512_set1_epi16(static_cast<short>(0xff00)), half = _mm512_set1_epi16(128);
  const W even = _mm512_adds_epi16(_mm512_mulhrs_epi16(_mm512_slli_epi16(w, 8), factor), half);
  const W odd = _mm512_adds_epi16(_mm512_mulhrs_epi16(_mm512_and_si512(w, upper), factor), half);
  return _mm512_or_si512(_mm512_and_si512(odd, upper), _mm512_srli_epi16(even, 8));
}
inline X xload(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
// The intrinsic costs a register copy per product with some compilers; this keeps the sum in place.
inline __attribute__((always_inline)) I dot(I sum, W w, X x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
  return sum;
}

// The same with the activations still in memory, in one instruction.
inline __attribute__((always_inline)) I dot_at(I sum, W w, const int8_t* x) {
  struct Four {
    int8_t bytes[4];
  };
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const Four*>(x)));
  return sum;
}

}  // namespace
