// The product of panels.h for int8 weights: rows are quantised, too, and integers are multiplied.
//
// A row is divided into groups of 64 k, each with its own scale, which makes its largest magnitude 127. So an outlier
// reduces the precision of its group only. Products of a group are summed in int32, which is exact in any order, and
// groups are added in float32 in ascending order of k.
//
// Weights are packed as [panels][in_features / 4][16][4] unsigned bytes, weight + 128, because the dot product
// instruction multiplies unsigned by signed bytes. The added 128 contribute 128 times the sum of a row's group,
// whatever the weights are, so sums start with the negative of that.
#pragma once

#include <algorithm>

#include "numbers.h"

namespace outrider {

constexpr int64_t kDepthOfGroup = 64;  // k, and bytes of a line of an AMX tile
constexpr int64_t kQuad = 4;           // consecutive k of one output feature
constexpr int kWeightOffset = 128;

struct QuantisedGroup {
  int8_t values[kDepthOfGroup];
  float scale;    // NaN if a value is infinite or NaN
  int32_t start;  // initial value of its sums
};
static_assert(sizeof(QuantisedGroup) == kDepthOfGroup + 8);

static inline int64_t groups_of(int64_t width) { return (width + kDepthOfGroup - 1) / kDepthOfGroup; }

static inline void store_bytes(int8_t* to, Ints values) {
#if defined(__AVX2__) && !defined(__AVX512F__)  // GCC would convert them one by one
  const __m256i wide = reinterpret_cast<__m256i>(values);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(words, words));
#else
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  const Bytes bytes = __builtin_convertvector(values, Bytes);
  std::memcpy(to, &bytes, sizeof bytes);
#endif
}

// Quantises x [width] to its groups; the last one is padded with zeros. Magnitudes below 1e-36 count as zero.
template <class T>
static inline void quantise_row(const T* x, int64_t width, QuantisedGroup* to) {
  for (int64_t first = 0; first < width; first += kDepthOfGroup, to++) {
    constexpr int kVectors = kDepthOfGroup / kWidth;
    const bool is_whole = width - first >= kDepthOfGroup;
    float tail[kDepthOfGroup];
    for (int64_t k = 0; !is_whole && k < kDepthOfGroup; k++) tail[k] = first + k < width ? widen(x[first + k]) : 0.0f;
    Floats values[kVectors];
    Words largest{};  // magnitudes are compared as bits, by which NaN is above infinity
    for (int v = 0; v < kVectors; v++) {
      values[v] = is_whole ? load_wide(x + first + v * kWidth) : load(tail + v * kWidth);
      const Words magnitude = reinterpret_cast<Words>(values[v]) & 0x7fffffff;
      largest = magnitude > largest ? magnitude : largest;
    }
    uint32_t bits = 0;
    for (int lane = 0; lane < kWidth; lane++) bits = std::max(bits, largest[lane]);
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    const bool is_finite = bits < 0x7f800000;
    const float steps = is_finite && magnitude > 1e-36f ? 127.0f / magnitude : 0.0f;
    Ints sums{};
    for (int v = 0; v < kVectors; v++) {
      // Adding 1.5 * 2^23 leaves the nearest integer (ties to even) in the low bits of the mantissa.
      const Floats shifted = values[v] * steps + 12582912.0f;
      const Ints whole = is_finite ? reinterpret_cast<Ints>(shifted) - 0x4b400000 : Ints{};
      store_bytes(to->values + v * kWidth, whole);
      sums += whole;
    }
    int32_t sum = 0;
    for (int lane = 0; lane < kWidth; lane++) sum += sums[lane];
    to->scale = is_finite ? magnitude / 127.0f : __builtin_nanf("");
    to->start = -kWeightOffset * sum;
  }
}

// Scales one group's sums, for kWidth columns of a row, and adds them to the sums of earlier groups.
static inline Floats add_group(Ints sums, float scale, Floats before) {
  return multiply_add(__builtin_convertvector(sums, Floats), broadcast(scale), before);
}

}  // namespace outrider
