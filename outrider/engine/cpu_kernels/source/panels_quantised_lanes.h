// The product of panels_quantised.h in vector registers: with AVX512-VNNI, with AVX2, or with vectors that the compiler
// translates.
#pragma once

#include "panels_quantised.h"

namespace outrider {

// PanelQuad: codes of four k of a panel as unsigned bytes. PanelSums: the sums of one row and a panel. They begin with the
// negative of what the codes' offset adds, which is a start, shifted to the right if the offset is less than 128. `widen`
// is called after each 32 k. No step may saturate: sums of two products of 8-bit codes, up to 2 * 255 * 127, exceed 16
// bits.
#if defined(__AVX512VNNI__)
template <int Bits>
#if defined(__AMX_INT8__)
constexpr int kRowsOfLanes = 4;  // more rows are multiplied on tiles
#else
constexpr int kRowsOfLanes = 12;
#endif

template <int Bits>
struct PanelQuad {
  __m512i bytes;

  // Loads quad `i` of two.
  PanelQuad(const char* from, int i) {
    const Words codes = reinterpret_cast<Words>(_mm512_loadu_si512(from + (Bits == 8 ? i * kPanel * kQuad : 0)));
    if constexpr (Bits == 4) bytes = reinterpret_cast<__m512i>((i == 0 ? codes : codes >> 4) & 0x0f0f0f0f);
    else bytes = reinterpret_cast<__m512i>(codes ^ (kHasSignedCodes ? 0x80808080 : 0));
  }
};

template <int Bits>
struct PanelSums {
  __m512i sums{};

  void begin(const int32_t& start, int shift) { sums = reinterpret_cast<__m512i>((Ints{} + start) >> shift); }
  // Around the intrinsic GCC 12 would copy sums between registers.
  void add(const PanelQuad<Bits>& weights, const int8_t* quad) {
#if defined(_mm512_dpbusd_epi32)  // simulated by tests
    int32_t x;
    std::memcpy(&x, quad, sizeof x);
    sums = _mm512_dpbusd_epi32(sums, weights.bytes, _mm512_set1_epi32(x));
#else
    typedef int32_t InMemory __attribute__((may_alias, aligned(1)));
    const auto* x = reinterpret_cast<const InMemory*>(quad);
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(weights.bytes), "m"(*x));
#endif
  }
  void widen() {}
  Ints columns(int) const { return reinterpret_cast<Ints>(sums); }
};
#elif defined(__AVX2__)
template <int Bits>
constexpr int kRowsOfLanes = Bits == 8 ? 2 : 4;  // each row has four registers of sums, or two

template <int Bits>
struct PanelQuad {
  __m256i words[4];  // four columns each

  PanelQuad(const char* from, int i) {
    for (int part = 0; part < 4; part++)
      words[part] = _mm256_cvtepu8_epi16(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * kPanel * kQuad) + part));
  }
};

template <>
struct PanelQuad<4> {
  __m256i bytes[2];  // eight columns each

  PanelQuad(const char* from, int i) {
    for (int half = 0; half < 2; half++) {
      const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + half);
      bytes[half] = _mm256_and_si256(i == 0 ? codes : _mm256_srli_epi16(codes, 4), _mm256_set1_epi8(15));
    }
  }
};

template <int Bits>
struct PanelSums {
  __m256i pairs[4] = {};  // for each column, its even and its odd pairs of k

  void begin(int32_t start, int shift) {
    for (__m256i& pair : pairs) pair = _mm256_set1_epi64x(static_cast<uint32_t>(start >> shift));
  }
  void add(const PanelQuad<Bits>& weights, const int8_t* quad) {
    int32_t four;
    std::memcpy(&four, quad, sizeof four);
    const __m256i x = _mm256_cvtepi8_epi16(_mm_set1_epi32(four));
    for (int i = 0; i < 4; i++) pairs[i] = _mm256_add_epi32(pairs[i], _mm256_madd_epi16(weights.words[i], x));
  }
  void widen() {}
  Ints columns(int vector) const {
    const __m256i sums = _mm256_hadd_epi32(pairs[2 * vector], pairs[2 * vector + 1]);  // within halves of 128 bits
    return reinterpret_cast<Ints>(_mm256_permute4x64_epi64(sums, 0b11011000));
  }
};

template <>
struct PanelSums<4> {
  __m256i sums[2] = {}, pairs[2] = {};  // `pairs` in 16 bits, enough for 16 products of up to 15 * 127

  void begin(int32_t start, int shift) {
    for (__m256i& sum : sums) sum = _mm256_set1_epi32(start >> shift);
  }
  void add(const PanelQuad<4>& weights, const int8_t* quad) {
    int32_t four;
    std::memcpy(&four, quad, sizeof four);
    const __m256i x = _mm256_set1_epi32(four);
    for (int i = 0; i < 2; i++) pairs[i] = _mm256_add_epi16(pairs[i], _mm256_maddubs_epi16(weights.bytes[i], x));
  }
  void widen() {
    for (int i = 0; i < 2; i++) {
      sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs[i], _mm256_set1_epi16(1)));
      pairs[i] = _mm256_setzero_si256();
    }
  }
  Ints columns(int vector) const { return reinterpret_cast<Ints>(sums[vector]); }
};
#else
template <int Bits>
constexpr int kRowsOfLanes = 3;

template <int Bits>
struct PanelQuad {
  uint8_t bytes[kPanel * kQuad];

  PanelQuad(const char* from, int i) {
    std::memcpy(bytes, from + (Bits == 8 ? i * kPanel * kQuad : 0), sizeof bytes);
    if constexpr (Bits == 4)
      for (uint8_t& byte : bytes) byte = byte >> 4 * i & 15;
  }
};

template <int Bits>
struct PanelSums {
  int32_t sums[kPanel] = {};

  void begin(int32_t start, int shift) {
    for (int32_t& sum : sums) sum = start >> shift;
  }
  void add(const PanelQuad<Bits>& weights, const int8_t* quad) {
    for (int c = 0; c < kPanel; c++)
      for (int i = 0; i < kQuad; i++) sums[c] += weights.bytes[c * kQuad + i] * quad[i];
  }
  void widen() {}
  Ints columns(int vector) const {
    Ints some;
    std::memcpy(&some, sums + vector * kWidth, sizeof some);
    return some;
  }
};
#endif

// Multiplies `Rows` rows by one panel. `x`: the rows' first groups, with the next ones `stride` behind.
template <class Weight, int Rows>
[[gnu::noinline]] static void multiply_by_codes(const QuantisedGroup* x, int64_t stride, const Weight* first,
                                                int64_t unit_size, int64_t depth, float* tile, Prefetch prefetch) {
  const auto read = [&](int lines) {
    for (int line = 0; line < lines; line++) prefetch(1);
  };
  CodePanel<Weight> panel(first, unit_size);
  Floats totals[Rows][kVectorsPerPanel] = {};
  for (int64_t left = depth; left > 0; left -= kDepthOfGroup, x += stride) {
    panel.next_block(read);
    const char* codes = panel.codes();
    for (int group = 0; group < Weight::kGroups; group++) {
      asm("" : "+r"(x));  // otherwise GCC 12 loads scales before the loop and spills them
      const int8_t* quads = x->values + group * Weight::kGroup;
      PanelSums<Weight::kBits> sums[Rows];
#pragma GCC unroll 16
      for (int r = 0; r < Rows; r++)
        if constexpr (Weight::kOffset != 0)
          sums[r].begin(x[r].template start<Weight::kGroup>(group), Weight::kOffset == 128 ? 0 : 4);
      for (int k = 0; k < Weight::kGroup; k += 2 * kQuad, quads += 2 * kQuad) {
        read(Weight::kBits / 4);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
          const PanelQuad<Weight::kBits> weights(codes, i);
#pragma GCC unroll 16
          for (int r = 0; r < Rows; r++) sums[r].add(weights, quads + r * sizeof(QuantisedGroup) + i * kQuad);
        }
        codes += 2 * kQuad * kPanel * Weight::kBits / 8;
        if (k % 32 == 24)
#pragma GCC unroll 16
          for (int r = 0; r < Rows; r++) sums[r].widen();
      }
      panel.load_factors(group);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < kVectorsPerPanel; v++)
          totals[r][v] = panel.add(v, sums[r].columns(v), x[r], group, totals[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < kVectorsPerPanel; v++) store(tile + r * kTileColumns + v * kWidth, totals[r][v]);
}

}  // namespace outrider
