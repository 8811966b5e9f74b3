// Sixteen lanes in two registers: AVX2, with the byte products of AVX-VNNI where the compiler may use them.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
using W = I;
using X = __m256i;

#ifdef __AVXVNNI__
constexpr int kBias8 = 128, kBias4 = 8, kBias2 = 3;  // unsigned by signed, sums corrected
constexpr int kGroupRows = 3;
constexpr size_t kFewRowsAtMost = 8;
#else
constexpr int kBias8 = 0, kBias4 = 8, kBias2 = 3;  // 8 bits signed by signed
constexpr int kGroupRows = 4;
constexpr size_t kFewRowsAtMost = 24;
#define LANES_PAIRS  // see dot_pairs
#endif
constexpr int kRows = 4, kPanels = 1;
constexpr int kGroupPanels = 1;
constexpr int kFloatRows = 4, kFloatPanels = 1;
// Of few_rows.inl: rows and sums that registers hold, and up to how many rows it is faster than tile.inl.
constexpr int kRowsTogether = 4, kSumsTogether = 4;

inline F fzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F fset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F fload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F fload_half(const uint16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline void fstore_half(uint16_t* p, F x) {
  __m128i* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
// Past the caches, to a multiple of 32 bytes; others see it after a fence.
inline void fstream_half(uint16_t* p, F x) {
  __m128i* q = reinterpret_cast<__m128i*>(p);
  _mm_stream_si128(q, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_stream_si128(q + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline void stream_bytes32(void* p, const void* from) {
  _mm256_stream_si256(static_cast<__m256i*>(p), _mm256_loadu_si256(static_cast<const __m256i*>(from)));
}
inline void stream_fence() { _mm_sfence(); }
inline void fstore(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline F fadd(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F fsub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F fmul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F fdiv(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F fmax(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F fmin(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F fabs(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline __m128 fquarters(F x) {
  const __m256 half = _mm256_add_ps(x.a, x.b);
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
inline float fsum(F x) {
  const __m128 four = fquarters(x), two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// Each is added up as `fsum` does.
#define LANES_SUMS
inline __m128 fsums_of_four(const F* v) {
  const __m128 a = fquarters(v[0]), b = fquarters(v[1]), c = fquarters(v[2]), d = fquarters(v[3]);
  const __m128 ab = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
  const __m128 cd = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
  return _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd));
}
inline F fsums(const F (&v)[16]) {
  return {_mm256_set_m128(fsums_of_four(v + 4), fsums_of_four(v)),
          _mm256_set_m128(fsums_of_four(v + 12), fsums_of_four(v + 8))};
}
inline float ftop(F x) {
  const __m256 half = _mm256_max_ps(x.a, x.b);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I round_to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F pow2(I n) {
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.a, bias), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.b, bias), 23))};
}

inline I izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I iset(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I iload_bytes(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
// See lanes_avx512.h.
inline I iload_nibbles(const uint8_t* p) {
  const __m128i both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), mask = _mm_set1_epi8(15);
  return {_mm256_cvtepu8_epi32(_mm_and_si128(both, mask)),
          _mm256_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(both, 4), mask))};
}
inline I iload(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void istore(void* p, I x) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
inline I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I iand(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline I imax(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
// See lanes_avx512.h.
inline uint32_t ilarger(I x, I y) {
  const int a = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(x.a, y.a)));
  const int b = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(x.b, y.b)));
  return static_cast<uint32_t>(a | b << 8);
}
inline int32_t isum(I x) {
  int32_t lanes[16], sum = 0;
  istore(lanes, x);
  for (int i = 0; i < 16; i++) sum += lanes[i];
  return sum;
}
inline int32_t itop(I x) {
  int32_t lanes[16];
  istore(lanes, x);
  for (int i = 1; i < 16; i++) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
  return lanes[0];
}
inline void store_bytes(int8_t* p, I x) {
  const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

inline W wload(const void* p) { return iload(p); }
inline void wstore(void* p, W w) { istore(p, w); }
inline W wbiased(W w) {
  if (!kBias8) return w;
  const __m256i top = _mm256_set1_epi8(static_cast<char>(0x80));
  return {_mm256_xor_si256(w.a, top), _mm256_xor_si256(w.b, top)};
}
inline void wnibbles(const void* p, W& low, W& high) {
  const W both = iload(p);
  const __m256i mask = _mm256_set1_epi8(15), eight = _mm256_set1_epi8(kBias4 ? 0 : 8);
  low = {_mm256_sub_epi8(_mm256_and_si256(both.a, mask), eight),
         _mm256_sub_epi8(_mm256_and_si256(both.b, mask), eight)};
  high = {_mm256_sub_epi8(_mm256_and_si256(_mm256_srli_epi16(both.a, 4), mask), eight),
          _mm256_sub_epi8(_mm256_and_si256(_mm256_srli_epi16(both.b, 4), mask), eight)};
}
// See lanes_avx512.h.
inline void planes_half(__m256i h, __m256i l, __m256i& former, __m256i& latter) {
  const __m256i mask = _mm256_set1_epi8(15), bias = _mm256_set1_epi8(static_cast<char>(kBias8 - 17 * kBias4));
  former = _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(h, mask), 4), _mm256_and_si256(l, mask));
  latter = _mm256_or_si256(_mm256_andnot_si256(mask, h), _mm256_and_si256(_mm256_srli_epi16(l, 4), mask));
  former = _mm256_add_epi8(former, bias);
  latter = _mm256_add_epi8(latter, bias);
}
inline void wplanes(const void* high, const void* low, W& former, W& latter) {
  const W h = iload(high), l = iload(low);
  planes_half(h.a, l.a, former.a, latter.a);
  planes_half(h.b, l.b, former.b, latter.b);
}
inline __m256i crumb_half(__m256i shifted, int bias) {
  return _mm256_sub_epi8(_mm256_and_si256(shifted, _mm256_set1_epi8(6)),
                         _mm256_set1_epi8(static_cast<char>(bias)));
}
// Twice the codes, minus `Bias`.
template <int Bias>
inline void wcrumbs_less(const void* p, W (&quarter)[4]) {
  const W all = iload(p);
  quarter[0] = {crumb_half(_mm256_slli_epi16(all.a, 1), Bias), crumb_half(_mm256_slli_epi16(all.b, 1), Bias)};
  quarter[1] = {crumb_half(_mm256_srli_epi16(all.a, 1), Bias), crumb_half(_mm256_srli_epi16(all.b, 1), Bias)};
  quarter[2] = {crumb_half(_mm256_srli_epi16(all.a, 3), Bias), crumb_half(_mm256_srli_epi16(all.b, 3), Bias)};
  quarter[3] = {crumb_half(_mm256_srli_epi16(all.a, 5), Bias), crumb_half(_mm256_srli_epi16(all.b, 5), Bias)};
}
inline void wcrumbs(const void* p, W (&quarter)[4]) { wcrumbs_less<kBias2 ? 0 : 3>(p, quarter); }
#define LANES_WIDEN
inline __m256i widening_half(__m256 factor) {
  const __m256i fixed = _mm256_cvtps_epi32(_mm256_mul_ps(factor, _mm256_set1_ps(128.0f)));
  return _mm256_or_si256(_mm256_and_si256(fixed, _mm256_set1_epi32(0xffff)), _mm256_slli_epi32(fixed, 16));
}
inline I widening(F factor) { return {widening_half(factor.a), widening_half(factor.b)}; }
template <int Bias>
inline __m256i widen_half(__m256i biased, __m256i factor) {
  const __m256i bias = _mm256_set1_epi16(Bias << 8), upper = _mm256_set1_epi16(static_cast<short>(0xff00));
  const __m256i even = _mm256_mulhrs_epi16(_mm256_sub_epi16(_mm256_slli_epi16(biased, 8), bias), factor);
  const __m256i odd = _mm256_mulhrs_epi16(_mm256_sub_epi16(_mm256_and_si256(biased, upper), bias), factor);
  return _mm256_or_si256(_mm256_slli_epi16(odd, 8), _mm256_andnot_si256(upper, even));
}
inline void wwiden(const void* p, I factor, W& low, W& high) {
  const W both = iload(p);
  const __m256i mask = _mm256_set1_epi8(15);
  low = {widen_half<8>(_mm256_and_si256(both.a, mask), factor.a),
         widen_half<8>(_mm256_and_si256(both.b, mask), factor.b)};
  high = {widen_half<8>(_mm256_and_si256(_mm256_srli_epi16(both.a, 4), mask), factor.a),
          widen_half<8>(_mm256_and_si256(_mm256_srli_epi16(both.b, 4), mask), factor.b)};
}
inline void wwiden_crumbs(const void* p, I factor, W (&quarter)[4]) {
  wcrumbs_less<0>(p, quarter);
  for (int i = 0; i < 4; i++) {
    quarter[i] = {widen_half<3>(quarter[i].a, factor.a), widen_half<3>(quarter[i].b, factor.b)};
  }
}
inline __m256i share_half(__m256 factor) {
  const __m256i fixed = _mm256_cvtps_epi32(_mm256_mul_ps(factor, _mm256_set1_ps(32767.0f)));
  return _mm256_or_si256(_mm256_and_si256(fixed, _mm256_set1_epi32(0xffff)), _mm256_slli_epi32(fixed, 16));
}
inline I share(F factor) { return {share_half(factor.a), share_half(factor.b)}; }
inline __m256i wshare_half(__m256i w, __m256i factor) {
  const __m256i upper = _mm256_set1_epi16(static_cast<short>(0xff00)), half = _mm256_set1_epi16(128);
  const __m256i even = _mm256_adds_epi16(_mm256_mulhrs_epi16(_mm256_slli_epi16(w, 8), factor), half);
  const __m256i odd = _mm256_adds_epi16(_mm256_mulhrs_epi16(_mm256_and_si256(w, upper), factor), half);
  return _mm256_or_si256(_mm256_and_si256(odd, upper), _mm256_srli_epi16(even, 8));
}
inline W wshare(W w, I factor) { return {wshare_half(w.a, factor.a), wshare_half(w.b, factor.b)}; }
inline X xload(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}
// GCC adds products up as a tree, which takes more registers than there are: it may not where a sum passes
// here.
inline __attribute__((always_inline)) __m256i in_order(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}
inline __attribute__((always_inline)) __m256i dot_half(__m256i sum, __m256i w, __m256i x) {
#ifdef __AVXVNNI__
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
  return sum;
#else
  // |w| * (x with w's sign): 128 * 127 * 2 still fits the 16 bits that the pairs are summed in.
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return in_order(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
#endif
}
inline __attribute__((always_inline)) I dot(I sum, W w, X x) {
  return {dot_half(sum.a, w.a, x), dot_half(sum.b, w.b, x)};
}

inline I dot_at(I sum, W w, const int8_t* x) { return dot(sum, w, xload(x)); }

#ifdef LANES_PAIRS
// Products of weights of at most 4 bits, summed in 16 bits: those of a block fit, 16 of 15 by 127 in a lane.
inline __attribute__((always_inline)) I dot_pairs(I pairs, W w, X x) {
  return {in_order(_mm256_add_epi16(pairs.a, _mm256_maddubs_epi16(w.a, x))),
          in_order(_mm256_add_epi16(pairs.b, _mm256_maddubs_epi16(w.b, x)))};
}
inline __attribute__((always_inline)) I add_pairs(I sum, I pairs) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(pairs.a, ones)),
          _mm256_add_epi32(sum.b, _mm256_madd_epi16(pairs.b, ones))};
}
#endif

}  // namespace
