// Sixteen lanes in four registers: 64-bit Arm with the dot-product instructions (Armv8.2 and later).
#pragma once
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

namespace {

struct F {
  float32x4_t v[4];
};
struct I {
  int32x4_t v[4];
};
struct W {
  int8x16_t v[4];
};
using X = int8x16_t;

constexpr int kBias8 = 0, kBias4 = 0, kBias2 = 0;  // signed by signed
constexpr int kRows = 4, kPanels = 1;
constexpr int kGroupRows = 3, kGroupPanels = 1;
constexpr int kFloatRows = 4, kFloatPanels = 1;
// Of few_rows.inl: rows and sums that registers hold, and up to how many rows it is faster than tile.inl.
constexpr int kRowsTogether = 4, kSumsTogether = 4;
constexpr size_t kFewRowsAtMost = 4;

#define EACH(expression)         \
  {                              \
    {                            \
      [&] {                      \
        constexpr int j = 0;     \
        return expression;       \
      }(),                       \
          [&] {                  \
            constexpr int j = 1; \
            return expression;   \
          }(),                   \
          [&] {                  \
            constexpr int j = 2; \
            return expression;   \
          }(),                   \
          [&] {                  \
            constexpr int j = 3; \
            return expression;   \
          }()                    \
    }                            \
  }

inline F fset(float x) { return EACH(vdupq_n_f32(x)); }
inline F fzero() { return fset(0.0f); }
inline F fload(const float* p) { return EACH(vld1q_f32(p + 4 * j)); }
inline F fload_half(const uint16_t* p) {
  return EACH(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * j))));
}
inline void fstore_half(uint16_t* p, F a) {
  for (int j = 0; j < 4; j++) vst1_u16(p + 4 * j, vreinterpret_u16_f16(vcvt_f16_f32(a.v[j])));
}
inline void fstream_half(uint16_t* p, F a) { fstore_half(p, a); }
inline void stream_bytes32(void* p, const void* from) { memcpy(p, from, 32); }
inline void stream_fence() {}
inline void fstore(float* p, F a) {
  for (int j = 0; j < 4; j++) vst1q_f32(p + 4 * j, a.v[j]);
}
inline F fadd(F a, F b) { return EACH(vaddq_f32(a.v[j], b.v[j])); }
inline F fsub(F a, F b) { return EACH(vsubq_f32(a.v[j], b.v[j])); }
inline F fmul(F a, F b) { return EACH(vmulq_f32(a.v[j], b.v[j])); }
inline F fdiv(F a, F b) { return EACH(vdivq_f32(a.v[j], b.v[j])); }
inline F fma(F a, F b, F c) { return EACH(vfmaq_f32(c.v[j], a.v[j], b.v[j])); }
inline F fmax(F a, F b) { return EACH(vbslq_f32(vcgtq_f32(a.v[j], b.v[j]), a.v[j], b.v[j])); }
inline F fmin(F a, F b) { return EACH(vbslq_f32(vcltq_f32(a.v[j], b.v[j]), a.v[j], b.v[j])); }
inline float fsum(F a) { return vaddvq_f32(vaddq_f32(vaddq_f32(a.v[0], a.v[1]), vaddq_f32(a.v[2], a.v[3]))); }
inline float ftop(F a) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3]))); }
inline F to_float(I a) { return EACH(vcvtq_f32_s32(a.v[j])); }
inline I round_to_int(F a) { return EACH(vcvtnq_s32_f32(a.v[j])); }
inline F pow2(I n) {
  return EACH(vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.v[j], vdupq_n_s32(127)), 23)));
}

inline I iset(int32_t x) { return EACH(vdupq_n_s32(x)); }
inline I izero() { return iset(0); }
inline I iload_bytes(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
  I out;
  out.v[0] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low)));
  out.v[1] = vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low)));
  out.v[2] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high)));
  out.v[3] = vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)));
  return out;
}
// See lanes_avx512.h.
inline I iload_nibbles(const uint8_t* p) {
  const uint8x8_t both = vld1_u8(p);
  const uint16x8_t low = vmovl_u8(vand_u8(both, vdup_n_u8(15))), high = vmovl_u8(vshr_n_u8(both, 4));
  I out;
  out.v[0] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low)));
  out.v[1] = vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low)));
  out.v[2] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high)));
  out.v[3] = vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)));
  return out;
}
inline I iload(const void* p) { return EACH(vld1q_s32(static_cast<const int32_t*>(p) + 4 * j)); }
inline void istore(void* p, I a) {
  for (int j = 0; j < 4; j++) vst1q_s32(static_cast<int32_t*>(p) + 4 * j, a.v[j]);
}
inline I iadd(I a, I b) { return EACH(vaddq_s32(a.v[j], b.v[j])); }
inline I iand(I a, I b) { return EACH(vandq_s32(a.v[j], b.v[j])); }
inline I imax(I a, I b) { return EACH(vmaxq_s32(a.v[j], b.v[j])); }
// See lanes_avx512.h.
inline uint32_t ilarger(I a, I b) {
  const uint32x4_t bits = {1, 2, 4, 8};
  uint32_t all = 0;
  for (int j = 0; j < 4; j++) all |= vaddvq_u32(vandq_u32(vcgtq_s32(a.v[j], b.v[j]), bits)) << (4 * j);
  return all;
}
inline int32_t isum(I a) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3])));
}
inline int32_t itop(I a) {
  return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.v[0], a.v[1]), vmaxq_s32(a.v[2], a.v[3])));
}
inline void store_bytes(int8_t* p, I a) {
  const int16x8_t low = vcombine_s16(vqmovn_s32(a.v[0]), vqmovn_s32(a.v[1]));
  const int16x8_t high = vcombine_s16(vqmovn_s32(a.v[2]), vqmovn_s32(a.v[3]));
  vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}

inline W wload(const void* p) { return EACH(vld1q_s8(static_cast<const int8_t*>(p) + 16 * j)); }
inline void wstore(void* p, W w) {
  for (int j = 0; j < 4; j++) vst1q_s8(static_cast<int8_t*>(p) + 16 * j, w.v[j]);
}
inline W wbiased(W w) { return w; }
inline void wnibbles(const void* p, W& low, W& high) {
  const uint8_t* bytes = static_cast<const uint8_t*>(p);
  const int8x16_t eight = vdupq_n_s8(8);
  for (int j = 0; j < 4; j++) {
    const uint8x16_t both = vld1q_u8(bytes + 16 * j);
    low.v[j] = vsubq_s8(vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), eight);
    high.v[j] = vsubq_s8(vreinterpretq_s8_u8(vshrq_n_u8(both, 4)), eight);
  }
}
// See lanes_avx512.h.
inline void wplanes(const void* high, const void* low, W& former, W& latter) {
  W high_former, high_latter;
  wnibbles(high, high_former, high_latter);
  wnibbles(low, former, latter);
  for (int j = 0; j < 4; j++) {
    former.v[j] = vaddq_s8(vshlq_n_s8(high_former.v[j], 4), former.v[j]);
    latter.v[j] = vaddq_s8(vshlq_n_s8(high_latter.v[j], 4), latter.v[j]);
  }
}
// Levels -3, -1, 1 and 3, of codes of 2 bits.
inline void wcrumbs(const void* p, W (&quarter)[4]) {
  const uint8_t* bytes = static_cast<const uint8_t*>(p);
  const int8x16_t three = vdupq_n_s8(3);
  const uint8x16_t mask = vdupq_n_u8(6);
  for (int j = 0; j < 4; j++) {
    const uint8x16_t all = vld1q_u8(bytes + 16 * j);
    quarter[0].v[j] = vsubq_s8(vreinterpretq_s8_u8(vandq_u8(vshlq_n_u8(all, 1), mask)), three);
    quarter[1].v[j] = vsubq_s8(vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(all, 1), mask)), three);
    quarter[2].v[j] = vsubq_s8(vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(all, 3), mask)), three);
    quarter[3].v[j] = vsubq_s8(vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(all, 5), mask)), three);
  }
}
inline X xload(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
inline I dot(I sum, W w, X x) { return EACH(vdotq_s32(sum.v[j], w.v[j], x)); }

inline I dot_at(I sum, W w, const int8_t* x) { return dot(sum, w, xload(x)); }

#undef EACH

}  // namespace
