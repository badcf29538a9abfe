// Philox4x32-10, kWidth counters at once.
//
// Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11). It uses
// integers only, so words are the same on every machine, and in ../../sampler/philox.py.
#pragma once

#include "numbers.h"

namespace outrider {

struct PhiloxWords {
  Words w0, w1, w2, w3;
};

typedef uint64_t Products __attribute__((vector_size(kWidth * 4)));  // products of every other lane

static inline Products multiply_even_lanes(Products a, Products b) {
#if defined(__AVX512F__)
  // Equals _mm512_mul_epu32, for which GCC 12 warns about uninitialised values in its own header.
  return reinterpret_cast<Products>(
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Products>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return (a & 0xffffffff) * (b & 0xffffffff);
#endif
}

// Computes both halves of the 64-bit products of all lanes.
static inline void multiply_wide(Words a, uint32_t multiplier, Words& high, Words& low) {
  const Products factors = reinterpret_cast<Products>(a), multipliers = Products{} + multiplier;
  const Products even = multiply_even_lanes(factors, multipliers);
  const Products odd = multiply_even_lanes(factors >> 32, multipliers);
  high = reinterpret_cast<Words>((even >> 32) | (odd & ~0xffffffffull));
  low = reinterpret_cast<Words>((even & 0xffffffff) | (odd << 32));
}

// Computes the words of counters (c0, c1, c2, c3); only c0 differs between lanes.
static inline PhiloxWords philox4x32(Words c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t seed) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  PhiloxWords words{c0, Words{} + c1, Words{} + c2, Words{} + c3};
  for (int round = 0; round < 10; round++) {
    Words high0, low0, high2, low2;
    multiply_wide(words.w0, 0xd2511f53u, high0, low0);
    multiply_wide(words.w2, 0xcd9e8d57u, high2, low2);
    words = {high2 ^ words.w1 ^ k0, low2, high0 ^ words.w3 ^ k1, low0};
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return words;
}

}  // namespace outrider
