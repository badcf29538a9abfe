// SIMULATED AVX512F, AVX512-BF16 (unless SIMULATED_WITHOUT_BF16) and AVX512-VNNI in plain C++, as far as the kernels
// use them.
//
// This file is for machines without these instructions. It is included before all others
// (-include), so that the kernels' files are compiled unchanged: the macros below replace the
// compiler's intrinsics and its macros for available instructions. Semantics are those of
// Intel's manual (Software Developer's Manual, volume 2, "Operation" of each instruction);
// undefined behaviour is not simulated.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace simulated {

// Inputs and results of bfloat16 products: subnormal numbers count as zeros, MXCSR does not matter.
inline float flushed(float value) {
  const float magnitude = value < 0 ? -value : value;
  return magnitude < 1.17549435e-38f ? __builtin_copysignf(0.0f, value) : value;
}

inline float widened(uint16_t bfloat16) {
  const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return flushed(wide);
}

// Returns a * b + c, rounded once.
inline float multiply_add(uint16_t a, uint16_t b, float c) {
  return flushed(__builtin_fmaf(widened(a), widened(b), flushed(c)));
}

inline __m512 set1_ps(float value) {
  __m512 all;
  for (int i = 0; i < 16; i++) all[i] = value;
  return all;
}

inline __m512i set1_epi32(int32_t value) {
  int32_t lanes[16];
  for (int32_t& lane : lanes) lane = value;
  __m512i all;
  std::memcpy(&all, lanes, sizeof all);
  return all;
}

inline __m512 setzero_ps() { return set1_ps(0.0f); }

inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
  for (int i = 0; i < 16; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}

inline __m512i loadu_si512(const void* from) {
  __m512i all;
  std::memcpy(&all, from, sizeof all);
  return all;
}

inline void storeu_ps(void* to, __m512 value) { std::memcpy(to, &value, sizeof value); }

inline __m512 castsi512_ps(__m512i value) { return reinterpret_cast<__m512>(value); }

inline __m512i cvtepu16_epi32(__m256i narrow) {
  uint16_t from[16];
  uint32_t to[16];
  std::memcpy(from, &narrow, sizeof from);
  for (int i = 0; i < 16; i++) to[i] = from[i];
  return loadu_si512(to);
}

inline __m512i cvtepi8_epi32(__m128i narrow) {
  int8_t from[16];
  int32_t to[16];
  std::memcpy(from, &narrow, sizeof from);
  for (int i = 0; i < 16; i++) to[i] = from[i];
  return loadu_si512(to);
}

inline __m512 cvtph_ps(__m256i halves) {
  __m128i half[2];
  __m256 wide[2];
  std::memcpy(half, &halves, sizeof half);
  for (int i = 0; i < 2; i++) wide[i] = _mm256_cvtph_ps(half[i]);
  __m512 all;
  std::memcpy(&all, wide, sizeof all);
  return all;
}

inline __m256i cvtepi32_epi16(__m512i wide) {
  uint32_t from[16];
  uint16_t to[16];
  std::memcpy(from, &wide, sizeof from);
  for (int i = 0; i < 16; i++) to[i] = static_cast<uint16_t>(from[i]);
  __m256i narrow;
  std::memcpy(&narrow, to, sizeof narrow);
  return narrow;
}

inline __m512i slli_epi32(__m512i value, unsigned count) {
  uint32_t lanes[16];
  std::memcpy(lanes, &value, sizeof lanes);
  for (uint32_t& lane : lanes) lane = count < 32 ? lane << count : 0;
  return loadu_si512(lanes);
}

// Returns the 64-bit products of the even 32-bit lanes; 0 in lanes whose bit in the mask is 0.
inline __m512i maskz_mul_epu32(uint8_t mask, __m512i a, __m512i b) {
  uint64_t left[8], right[8];
  std::memcpy(left, &a, sizeof left);
  std::memcpy(right, &b, sizeof right);
  for (int i = 0; i < 8; i++) left[i] = (mask >> i & 1) * (left[i] & 0xffffffff) * (right[i] & 0xffffffff);
  return loadu_si512(left);
}

// Returns a bit for each lane, set if a & b is not zero.
inline uint16_t test_epi32_mask(__m512i a, __m512i b) {
  uint32_t left[16], right[16];
  std::memcpy(left, &a, sizeof left);
  std::memcpy(right, &b, sizeof right);
  uint16_t mask = 0;
  for (int i = 0; i < 16; i++) mask |= static_cast<uint16_t>(((left[i] & right[i]) != 0) << i);
  return mask;
}

inline __m256d extractf64x4_pd(__m512d value, int part) {
  double lanes[8];
  std::memcpy(lanes, &value, sizeof lanes);
  __m256d half;
  std::memcpy(&half, lanes + 4 * (part & 1), sizeof half);
  return half;
}

inline __m256d castpd512_pd256(__m512d value) { return extractf64x4_pd(value, 0); }

inline __m512d cvtps_pd(__m256 narrow) {
  __m512d wide;
  for (int i = 0; i < 8; i++) wide[i] = narrow[i];
  return wide;
}

// VDPBF16PS: the upper product of each pair is added first.
__attribute__((noinline)) inline __m512 dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
  uint16_t left[32], right[32];
  std::memcpy(left, &a, sizeof left);
  std::memcpy(right, &b, sizeof right);
  for (int i = 0; i < 16; i++) {
    const float upper = multiply_add(left[2 * i + 1], right[2 * i + 1], sums[i]);
    sums[i] = multiply_add(left[2 * i], right[2 * i], upper);
  }
  return sums;
}

// VPDPBUSD: unsigned bytes of a times signed bytes of b, four for each sum, which wraps around.
inline __m512i dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
  uint32_t sum[16];
  uint8_t left[64];
  int8_t right[64];
  std::memcpy(sum, &sums, sizeof sum);
  std::memcpy(left, &a, sizeof left);
  std::memcpy(right, &b, sizeof right);
  for (int i = 0; i < 64; i++) sum[i / 4] += static_cast<uint32_t>(left[i] * right[i]);
  return loadu_si512(sum);
}

}  // namespace simulated

#define _mm512_set1_ps simulated::set1_ps
#define _mm512_set1_epi32 simulated::set1_epi32
#define _mm512_setzero_ps simulated::setzero_ps
#define _mm512_fmadd_ps simulated::fmadd_ps
#define _mm512_loadu_si512 simulated::loadu_si512
#define _mm512_storeu_ps simulated::storeu_ps
#define _mm512_castsi512_ps simulated::castsi512_ps
#define _mm512_cvtepu16_epi32 simulated::cvtepu16_epi32
#define _mm512_cvtepi8_epi32 simulated::cvtepi8_epi32
#define _mm512_cvtph_ps simulated::cvtph_ps
#define _mm512_cvtepi32_epi16 simulated::cvtepi32_epi16
#define _mm512_slli_epi32 simulated::slli_epi32
#define _mm512_maskz_mul_epu32 simulated::maskz_mul_epu32
#define _mm512_test_epi32_mask simulated::test_epi32_mask
#define _mm512_extractf64x4_pd simulated::extractf64x4_pd
#define _mm512_castpd512_pd256 simulated::castpd512_pd256
#define _mm512_cvtps_pd simulated::cvtps_pd
#define _mm512_dpbf16_ps simulated::dpbf16_ps
#define _mm512_dpbusd_epi32 simulated::dpbusd_epi32

#define __AVX512F__ 1
#if !defined(SIMULATED_WITHOUT_BF16)
#define __AVX512BF16__ 1
#endif
#define __AVX512VNNI__ 1
