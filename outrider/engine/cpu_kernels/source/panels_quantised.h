// Rows and weights in small integers. Rows are quantised to int8, and integers are multiplied.
//
// A row is divided into groups of 64 k, each with its own scale, which makes its largest magnitude 127. So an outlier
// reduces the precision of its group only. Weights have one scale for an output feature, or factors for each group of at
// most 64 k. Products of a weight's group are summed in int32, which is exact in any order, and groups are added in
// float32 in ascending order of k. For each group, with the sum p of its products and the sum s of its part of the row
// (`CodePanel::add`):
//   total = fma(fma(-minimum, s, scale * p), row's scale, total)
//
// Packed weights, in panels of 16 output features, whose memory is read in order:
//   panel   blocks of 64 k. Before the first block of a unit, if the matrix has units (their size is a multiple of 64
//           k): a header of 64 bytes, which is the unit's 16 scales in float16, then 16 minima in float16 or 16 zero
//           points in int8.
//   block   codes [64 / 4][16][4]. Codes of 4 bits are 0 to 15: byte i of 64 has those of bytes i (low) and 64 + i
//           (high) of 128. Codes of 8 bits are signed bytes if kHasSignedCodes; otherwise 128 is added. Then, if groups
//           have factors of their own, and padded to 64 bytes: [64 / group][16] scales and as many minima, in float16
//           or as int8 steps of the unit's.
#pragma once

#include <algorithm>

#include "api.h"
#include "numbers.h"

namespace outrider {

constexpr int64_t kDepthOfGroup = 64;  // k of a row's group and of a block, and bytes of a line of an AMX tile
constexpr int64_t kQuad = 4;           // consecutive k of one output feature
constexpr int64_t kHeaderBytes = 64;

// The dot product instruction of vectors multiplies unsigned by signed bytes; that of AMX tiles takes signed ones.
#if defined(__AMX_INT8__)
constexpr bool kHasSignedCodes = true;
#else
constexpr bool kHasSignedCodes = false;
#endif

struct QuantisedGroup {
  int8_t values[kDepthOfGroup];
  float scale;        // NaN if a value is infinite or NaN
  int32_t starts[7];  // -128 times sums of the values: of four parts of 16, two of 32, and all 64

  template <int Size>
  const int32_t& start(int part) const {
    return starts[(Size == 32 ? 4 : Size == 64 ? 6 : 0) + part];
  }
};
static_assert(sizeof(QuantisedGroup) == kDepthOfGroup + 32);

static inline int64_t groups_of(int64_t width) { return (width + kDepthOfGroup - 1) / kDepthOfGroup; }

// Quantised rows are stored as [groups][rows], so that those of one call are neighbours. Returns the distance of a row's
// groups, which is odd: with a power of two, they would share few lines of the cache.
static inline int64_t group_stride(int64_t num_rows) { return num_rows | 1; }

// Returns the number of groups in memory for `num_rows` rows. A call may read, but not use, the groups of further rows.
static inline int64_t groups_in_memory(int64_t num_rows, int64_t width) {
  return groups_of(width) * group_stride(num_rows) + kPanel;
}

enum class Factors {
  kOfFeature,  // a float32 scale for each output feature, which is applied to the finished sum
  kScales,     // w = scale * code
  kMinima,     // w = scale * code - minimum
  kZeros,      // w = scale * (code - zero), with one scale and one integer zero for each unit
};

// The form of a quantised weight. It has no members: packed weights are bytes.
template <int Bits, int Group, Factors Kind>
struct Codes {
  static constexpr int kBits = Bits;
  static constexpr int kGroup = Group;  // k with the same factors, at most kDepthOfGroup
  static constexpr Factors kKind = Kind;
  static constexpr int kGroups = kDepthOfGroup / Group;  // in a block
  static constexpr int64_t kCodeBytes = kDepthOfGroup * kPanel * Bits / 8;
  static constexpr bool kBlocksHaveFactors = Kind == Factors::kScales || Kind == Factors::kMinima;
  static constexpr int kOffset = Bits == 8 ? 128 : Kind == Factors::kScales ? 8 : 0;  // makes codes unsigned

  // Returns the bytes of a block's factors of one kind. `has_units`: whether they are steps.
  static constexpr int64_t factor_bytes(bool has_units) { return kGroups * kPanel * (has_units ? 1 : 2); }

  static constexpr int64_t block_bytes(bool has_units) {
    if (!kBlocksHaveFactors) return kCodeBytes;
    const int64_t bytes = factor_bytes(has_units) * (Kind == Factors::kMinima ? 2 : 1);
    return kCodeBytes + (bytes + 63) / 64 * 64;
  }
};

template <class Weight>
constexpr bool kIsQuantised = false;
template <int Bits, int Group, Factors Kind>
constexpr bool kIsQuantised<Codes<Bits, Group, Kind>> = true;

// Calls f with a null pointer to the form of a quantised type.
template <class F>
static inline void with_codes(int32_t type, F&& f) {
  switch (type) {
    case OUTRIDER_INT8: return f(static_cast<Codes<8, 64, Factors::kOfFeature>*>(nullptr));
    case OUTRIDER_INT8_GROUPS_16: return f(static_cast<Codes<8, 16, Factors::kScales>*>(nullptr));
    case OUTRIDER_INT8_GROUPS_32: return f(static_cast<Codes<8, 32, Factors::kScales>*>(nullptr));
    case OUTRIDER_INT8_GROUPS_32_MINIMA: return f(static_cast<Codes<8, 32, Factors::kMinima>*>(nullptr));
    case OUTRIDER_INT4_GROUPS_32: return f(static_cast<Codes<4, 32, Factors::kScales>*>(nullptr));
    case OUTRIDER_INT4_GROUPS_32_MINIMA: return f(static_cast<Codes<4, 32, Factors::kMinima>*>(nullptr));
    default: return f(static_cast<Codes<4, 64, Factors::kZeros>*>(nullptr));
  }
}

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

// Loads kWidth consecutive int8 as float32.
static inline Floats load_bytes(const void* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(from));
  return __builtin_convertvector(reinterpret_cast<Ints>(_mm512_cvtepi8_epi32(bytes)), Floats);
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from))));
#else
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Floats);
#endif
}

// Quantises x [width] to its groups, `stride` apart; the last one is padded with zeros. Magnitudes below 1e-36 count as
// zero.
template <class T>
static inline void quantise_row(const T* x, int64_t width, QuantisedGroup* to, int64_t stride) {
  for (int64_t first = 0; first < width; first += kDepthOfGroup, to += stride) {
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
    for (int part = 0; part < 4; part++) {
      Floats sums{};
      for (int v = part * kVectors / 4; v < (part + 1) * kVectors / 4; v++) {
        // Adding 1.5 * 2^23 leaves the nearest integer (ties to even) in the low bits of the mantissa.
        const Floats shifted = values[v] * steps + 12582912.0f;
        const Ints whole = is_finite ? reinterpret_cast<Ints>(shifted) - 0x4b400000 : Ints{};
        store_bytes(to->values + v * kWidth, whole);
        sums += __builtin_convertvector(whole, Floats);
      }
      to->starts[part] = static_cast<int32_t>(-128.0f * sum_of_lanes(sums));
    }
    to->starts[4] = to->starts[0] + to->starts[1];
    to->starts[5] = to->starts[2] + to->starts[3];
    to->starts[6] = to->starts[4] + to->starts[5];
    to->scale = is_finite ? magnitude / 127.0f : __builtin_nanf("");
  }
}

// A panel of quantised weights, of which one block at a time is read.
template <class Weight>
class CodePanel {
 public:
  // `unit_size`: k of a unit, or 0 if there are none.
  CodePanel(const Weight* panel, int64_t unit_size)
      : next_(reinterpret_cast<const char*>(panel)), unit_size_(unit_size), has_units_(unit_size > 0) {}

  // Goes to the next block, the first time to the first. Calls read(n) before it reads n lines of 64 bytes.
  template <class Read>
  void next_block(Read&& read) {
    if (has_units_ && left_of_unit_ == 0) {
      read(1);
      load_header(next_);
      next_ += kHeaderBytes;
      left_of_unit_ = unit_size_;
    }
    left_of_unit_ -= kDepthOfGroup;
    block_ = next_;
    next_ += Weight::block_bytes(has_units_);
    read(static_cast<int>(Weight::block_bytes(has_units_) - Weight::kCodeBytes) / 64);
  }

  const char* codes() const { return block_; }

  // Loads the factors of one of the block's groups. A step times its unit is exact.
  void load_factors(int group) {
    if constexpr (Weight::kBlocksHaveFactors) {
      const char* const from = block_ + Weight::kCodeBytes;
      const char* const minima = from + Weight::factor_bytes(has_units_);
      for (int v = 0; v < kVectorsPerPanel; v++) {
        const int64_t at = group * kPanel + v * kWidth;
        if (has_units_) {
          scale_[v] = load_bytes(from + at) * unit_scale_[v];
          if constexpr (kHasMinima) minimum_[v] = load_bytes(minima + at) * unit_minimum_[v];
        } else {
          scale_[v] = load_halves(from + at * 2);
          if constexpr (kHasMinima) minimum_[v] = load_halves(minima + at * 2) * kOfStarts;
        }
      }
    }
  }

  // Adds the products of the group whose factors are loaded, for kWidth columns of a row, to those of earlier groups.
  // `x`, `part`: what they were multiplied with. Sums of products and of zeros are exact; then each operation rounds.
  Floats add(int v, Ints products, const QuantisedGroup& x, int part, Floats before) const {
    const auto start = [&] { return __builtin_convertvector(Ints{} + x.template start<Weight::kGroup>(part), Floats); };
    Floats total = __builtin_convertvector(products, Floats);
    if constexpr (Weight::kKind == Factors::kZeros) total = multiply_add(start(), minimum_[v], total);
    if constexpr (Weight::kKind != Factors::kOfFeature) total *= scale_[v];
    if constexpr (kHasMinima) total = multiply_add(start(), minimum_[v], total);
    return multiply_add(total, broadcast(x.scale), before);
  }

  // Returns the weight of a code in the group whose factors are loaded, without the scale of an output feature.
  float weight_of(int code, int v, int lane) const {
    float weight = static_cast<float>(code);
    if constexpr (Weight::kKind == Factors::kZeros) weight -= minimum_[v][lane] / kOfStarts;
    if constexpr (Weight::kKind != Factors::kOfFeature) weight *= scale_[v][lane];
    if constexpr (kHasMinima) weight -= minimum_[v][lane] / kOfStarts;
    return weight;
  }

 private:
  static constexpr bool kHasMinima = Weight::kKind == Factors::kMinima;
  static constexpr float kOfStarts = 1.0f / 128;  // of minima and zeros, because starts are -128 times sums

  void load_header(const char* from) {
    const char* const rest = from + kPanel * 2;
    for (int v = 0; v < kVectorsPerPanel; v++) {
      unit_scale_[v] = scale_[v] = load_halves(from + v * kWidth * 2);
      if constexpr (kHasMinima) unit_minimum_[v] = load_halves(rest + v * kWidth * 2) * kOfStarts;
      if constexpr (Weight::kKind == Factors::kZeros) minimum_[v] = load_bytes(rest + v * kWidth) * kOfStarts;
    }
  }

  const char* block_ = nullptr;
  const char* next_;
  const int64_t unit_size_;
  int64_t left_of_unit_ = 0;
  const bool has_units_;
  Floats unit_scale_[kVectorsPerPanel], unit_minimum_[kVectorsPerPanel];
  Floats scale_[kVectorsPerPanel], minimum_[kVectorsPerPanel];  // a minimum or zero times kOfStarts
};

}  // namespace outrider
