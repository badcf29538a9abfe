// The product of panels_int8.h in vector registers: with AVX512-VNNI, with AVX2, or with vectors that the compiler
// translates.
#pragma once

#include "numbers.h"

namespace outrider {

// Weights of four k of a panel, and the sums of one row and a panel. No step may saturate: sums of two products, up to
// 2 * 255 * 127, exceed 16 bits.
#if defined(__AVX512VNNI__)
constexpr int kByteRows = 6;

struct PanelQuad {
  __m512i bytes;
  explicit PanelQuad(const int8_t* from) : bytes(_mm512_loadu_si512(from)) {}
};

struct PanelSums {
  __m512i sums;
  void begin(int32_t start) { sums = _mm512_set1_epi32(start); }
  // Around the intrinsic GCC 12 would copy sums between registers.
  void add(const PanelQuad& weights, int32_t quad) {
#if defined(_mm512_dpbusd_epi32)  // simulated by tests
    sums = _mm512_dpbusd_epi32(sums, weights.bytes, _mm512_set1_epi32(quad));
#else
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights.bytes), "v"(_mm512_set1_epi32(quad)));
#endif
  }
  Ints columns(int) const { return reinterpret_cast<Ints>(sums); }
};
#elif defined(__AVX2__)
constexpr int kByteRows = 2;  // for one panel: each row has four registers of sums

struct PanelQuad {
  __m256i words[4];  // four columns each
  explicit PanelQuad(const int8_t* from) {
    for (int i = 0; i < 4; i++)
      words[i] = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * i)));
  }
};

struct PanelSums {
  __m256i pairs[4];  // for each column, its even and its odd pairs of k
  void begin(int32_t start) {
    for (__m256i& pair : pairs) pair = _mm256_set1_epi64x(static_cast<uint32_t>(start));
  }
  void add(const PanelQuad& weights, int32_t quad) {
    const __m256i x = _mm256_cvtepi8_epi16(_mm_set1_epi32(quad));
    for (int i = 0; i < 4; i++) pairs[i] = _mm256_add_epi32(pairs[i], _mm256_madd_epi16(weights.words[i], x));
  }
  Ints columns(int vector) const {
    const __m256i sums = _mm256_hadd_epi32(pairs[2 * vector], pairs[2 * vector + 1]);  // within halves of 128 bits
    return reinterpret_cast<Ints>(_mm256_permute4x64_epi64(sums, 0b11011000));
  }
};
#else
constexpr int kByteRows = 3;

struct PanelQuad {
  const int8_t* bytes;
  explicit PanelQuad(const int8_t* from) : bytes(from) {}
};

struct PanelSums {
  int32_t sums[kPanel];
  void begin(int32_t start) {
    for (int32_t& sum : sums) sum = start;
  }
  void add(const PanelQuad& weights, int32_t quad) {
    int8_t x[kQuad];
    std::memcpy(x, &quad, sizeof x);
    for (int c = 0; c < kPanel; c++)
      for (int i = 0; i < kQuad; i++) sums[c] += static_cast<uint8_t>(weights.bytes[c * kQuad + i]) * x[i];
  }
  Ints columns(int vector) const {
    Ints some;
    std::memcpy(&some, sums + vector * kWidth, sizeof some);
    return some;
  }
};
#endif

// Multiplies `Rows` rows, `stride` groups apart, by `Panels` panels.
template <int Rows, int Panels>
[[gnu::noinline]] static void multiply_by_quads(const QuantisedGroup* x, int64_t stride, const int8_t* panels,
                                                int64_t panel_size, int64_t depth, float* tile, Prefetch prefetch) {
  Floats totals[Rows][Panels][kVectorsPerPanel] = {};
  for (int64_t first = 0; first < depth; first += kDepthOfGroup, x++) {
    PanelSums sums[Rows][Panels];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 2
      for (int p = 0; p < Panels; p++) sums[r][p].begin(x[r * stride].start);
    for (int64_t k = 0; k < kDepthOfGroup; k += kQuad) {
      const int8_t* from = panels + (first + k) * kPanel;
      const PanelQuad weights[2] = {PanelQuad(from), PanelQuad(from + (Panels - 1) * panel_size)};
      prefetch(Panels);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; r++) {
        int32_t quad;
        std::memcpy(&quad, x[r * stride].values + k, sizeof quad);
#pragma GCC unroll 2
        for (int p = 0; p < Panels; p++) sums[r][p].add(weights[p], quad);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 2
      for (int p = 0; p < Panels; p++)
#pragma GCC unroll 2
        for (int v = 0; v < kVectorsPerPanel; v++)
          totals[r][p][v] = add_group(sums[r][p].columns(v), x[r * stride].scale, totals[r][p][v]);
  }
  for (int r = 0; r < Rows; r++)
    for (int p = 0; p < Panels; p++)
      for (int v = 0; v < kVectorsPerPanel; v++)
        store(tile + r * kTileColumns + p * kPanel + v * kWidth, totals[r][p][v]);
}

}  // namespace outrider
