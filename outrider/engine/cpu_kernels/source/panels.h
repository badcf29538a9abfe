// The product in every kernel: some rows times two panels of packed weights.
//
// The rule that makes results independent of the batch: every output has ONE accumulator, to
// which products are added in ascending order of k, and no operation on it depends on the
// number of other rows or columns that are computed at the same time. So a row's bits are the
// same alone, as one of five, or in a prefill of hundreds.
//
// Packed weights, in panels of 16 output features:
//   float32   [panels][in_features][16]
//   bfloat16  [panels][in_features / 2][16][2]: pairs of k, as the dot product instructions of
//             AVX512-BF16 and AMX read them
//   small integers: see panels_quantised.h
// in_features is padded with zeros to a multiple of kDepthStep.
#pragma once

#include <type_traits>

#include "api.h"
#include "numbers.h"
#include "panels_quantised.h"

namespace outrider {

// The type of rows that are multiplied by a type of weight. Without dot product instructions
// for bfloat16, values that were rounded to bfloat16 are kept as float32.
template <class Weight>
struct ActivationOf {
  using type = float;
};
#if defined(__AVX512BF16__)
template <>
struct ActivationOf<BFloat16> {
  using type = BFloat16;
};
#endif
template <int Bits, int Group, Factors Kind>
struct ActivationOf<Codes<Bits, Group, Kind>> {
  using type = QuantisedGroup;
};
template <class Weight>
using Activation = typename ActivationOf<Weight>::type;

template <class Weight>
constexpr int64_t kDepthStep = 1;
#if defined(__AMX_BF16__)
template <>
constexpr int64_t kDepthStep<BFloat16> = 32;
#else
template <>
constexpr int64_t kDepthStep<BFloat16> = 2;
#endif
template <int Bits, int Group, Factors Kind>
constexpr int64_t kDepthStep<Codes<Bits, Group, Kind>> = kDepthOfGroup;

// Whether two panels that only one call multiplies are multiplied one after the other, in the order of memory. Weights
// were read fastest this way, with a prefetch of 4 KiB: on Zen 4 24 GB/s per thread with int8, but 16 if both panels
// were multiplied together.
template <class Weight>
constexpr bool kReadsInOrder = kIsQuantised<Weight>;
#if defined(__AVX512F__)
template <>
constexpr bool kReadsInOrder<BFloat16> = true;
#endif

template <class Weight>
static inline int64_t padded_depth(int64_t in_features) {
  return (in_features + kDepthStep<Weight> - 1) / kDepthStep<Weight> * kDepthStep<Weight>;
}

template <class Weight>
struct Matrix {
  const Weight* packed;
  const float* bias;    // [out_features] or null
  const float* scales;  // [out_features] or null
  int64_t out_features;
  int64_t in_features;
  int64_t depth;       // in_features, padded
  int64_t unit_size;   // see OutriderMatrix
  int64_t panel_size;  // in sizeof(Weight), which is 1 for quantised weights

  explicit Matrix(const OutriderMatrix& matrix)
      : packed(static_cast<const Weight*>(matrix.packed)),
        bias(matrix.bias),
        scales(matrix.scales),
        out_features(matrix.out_features),
        in_features(matrix.in_features),
        depth(padded_depth<Weight>(matrix.in_features)),
        unit_size(matrix.unit_size),
        panel_size(size_of_panel(depth)) {}

  int64_t size_of_panel(int64_t of_depth) const {
    if constexpr (kIsQuantised<Weight>) {
      const int64_t units = unit_size == 0 ? 0 : (of_depth + unit_size - 1) / unit_size;
      return of_depth / kDepthOfGroup * Weight::block_bytes(unit_size != 0) + units * kHeaderBytes;
    }
    return of_depth * kPanel;
  }
  int64_t panel_bytes() const { return panel_size * static_cast<int64_t>(sizeof(Weight)); }
};

// Where rows that a matrix multiplies are in memory, by their number.
template <class Weight>
struct RowPlaces {
  int64_t row;    // distance of rows, in activations
  int64_t depth;  // distance of groups of a row if weights are quantised; otherwise the same as `row`

  RowPlaces(int64_t num_rows, int64_t padded_depth)
      : row(kIsQuantised<Weight> ? 1 : padded_depth),
        depth(kIsQuantised<Weight> ? group_stride(num_rows) : padded_depth) {}
};

// Returns the form of the rows that is multiplied by a type of weight: their quantised form if weights are quantised.
template <class Weight, class Row>
static inline const Activation<Weight>* multiplied(const Row* rows, const QuantisedGroup* quantised) {
  if constexpr (kIsQuantised<Weight>) return quantised;
  else return rows;
}

constexpr int kTileColumns = 2 * kPanel;  // columns of the tile that one call computes

// Prefetches weights while others are multiplied. If several calls multiply the same panels, each with some rows, the
// panels are in the cache after the first call. All these calls then share the prefetch of the next panels, so that
// memory is read evenly. A few calls prefetch many lines each, to the second-level cache: with that, two cores of a
// Zen 4 read scattered pieces of 2 KiB at 27 GB/s, but to the first-level cache at 20 (16 rows took 0.82 of the time).
// A single call gained nothing by it, and many calls lost.
struct Prefetch {
  static constexpr int kFewCalls = 4;
  const char* next;
  int32_t num_calls;
  int32_t left;  // calls of `operator()` until the next one that prefetches

  Prefetch(const void* from, int64_t num_calls)
      : next(static_cast<const char*>(from)), num_calls(static_cast<int32_t>(num_calls)), left(this->num_calls) {}

  // Must be called for every line that is read from `num` panels.
  void operator()(int num) {
    if (--left > 0) return;
    left = num_calls;
    const bool is_one_of_few = num_calls > 1 && num_calls <= kFewCalls;
    for (int line = 0; line < num; line++, next += 64)
      is_one_of_few ? __builtin_prefetch(next, 0, 2) : __builtin_prefetch(next, 0, 3);
  }

  void skip(int64_t bytes_read) { next += bytes_read / num_calls; }  // for bytes whose lines a copy has prefetched
  void stop() { num_calls = left = INT32_MAX; }
};

// One panel's weights of one k (or of a pair), in registers. Their products with a row's values are added to its sums
// in kNumAdds additions, each of a vector of the panel times one value.
template <class Weight>
struct Step;

template <>
struct Step<float> {
  static constexpr int kDepth = 1, kNumAdds = 1;
  Floats at[kVectorsPerPanel];
  void load_from(const float* from) {
    for (int v = 0; v < kVectorsPerPanel; v++) at[v] = load(from + v * kWidth);
  }
  static Floats value(const float* x, int) { return broadcast(*x); }
  Floats add(int, int v, Floats value, Floats sum) const { return multiply_add(at[v], value, sum); }
};

template <>
struct Step<BFloat16> {
  static constexpr int kDepth = 2;
#if defined(__AVX512BF16__)
  static constexpr int kNumAdds = 1;
  __m512bh pairs;
  void load_from(const BFloat16* from) { pairs = (__m512bh)_mm512_loadu_si512(from); }
  static __m512bh value(const BFloat16* x, int) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  Floats add(int, int, __m512bh value, Floats sum) const { return _mm512_dpbf16_ps(sum, pairs, value); }
#else
  static constexpr int kNumAdds = 2;
  Floats at[2][kVectorsPerPanel];
  void load_from(const BFloat16* from) {
    for (int v = 0; v < kVectorsPerPanel; v++) load_pairs(from + v * kWidth * 2, at[0][v], at[1][v]);
  }
  static constexpr int place(int add) { return kHasBitsOfDotProducts ? 1 - add : add; }  // index within the pair
  static Floats value(const float* x, int add) { return broadcast(x[place(add)]); }
  Floats add(int add, int v, Floats value, Floats sum) const { return multiply_add(at[place(add)][v], value, sum); }
#endif
};

// A scope in which subnormal numbers count as zeros if multiply-adds replace dot product instructions.
template <class Weight>
struct DotProductArithmetic {
#if defined(__AVX512F__) && !defined(__AVX512BF16__)
  static constexpr unsigned kFlushToZero = sizeof(Weight) == 2 ? 0x8040 : 0;
  unsigned found = _mm_getcsr();
  DotProductArithmetic() { _mm_setcsr(found | kFlushToZero); }
  ~DotProductArithmetic() { _mm_setcsr(found); }
#else
  DotProductArithmetic() {}  // without it, compilers report an unused variable
#endif
};

// Multiplies `Rows` rows by `Panels` panels, step by step. (It is not inlined, because GCC 12 keeps the sums in memory
// within a larger function.)
template <class Weight, int Rows, int Panels>
[[gnu::noinline]] static void multiply_by_steps(const Activation<Weight>* x, int64_t stride, const Weight* panels,
                                                int64_t panel_size, int64_t depth, float* tile, Prefetch prefetch) {
  using OneStep = Step<Weight>;
  constexpr int num_vectors = Panels * kVectorsPerPanel;
  const DotProductArithmetic<Weight> arithmetic;
  Floats sums[Rows][num_vectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; v++) sums[r][v] = Floats{};
  for (int64_t k = 0; k < depth; k += OneStep::kDepth) {
    prefetch(Panels);
    OneStep weights[Panels];
#pragma GCC unroll 2
    for (int p = 0; p < Panels; p++) weights[p].load_from(panels + p * panel_size + k * kPanel);
#pragma GCC unroll 2
    for (int i = 0; i < OneStep::kNumAdds; i++)
#pragma GCC unroll 16
      for (int r = 0; r < Rows; r++) {
        const auto value = OneStep::value(x + r * stride + k, i);
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++)
          sums[r][v] = weights[v / kVectorsPerPanel].add(i, v % kVectorsPerPanel, value, sums[r][v]);
      }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; v++) store(tile + r * kTileColumns + v * kWidth, sums[r][v]);
}

}  // namespace outrider

#if defined(__AMX_BF16__)
#include "panels_amx.h"
#endif
#include "panels_quantised_lanes.h"
#if defined(__AMX_INT8__)
#include "panels_quantised_amx.h"
#endif

namespace outrider {

// The maximum number of rows of one call, for which there are enough registers.
template <class Weight>
constexpr int kMaxRows = kWidth == 16 ? 12 : 6;
#if !defined(__AVX512F__)
// Pairs need two more registers: with six rows, sums would be spilled.
template <>
constexpr int kMaxRows<BFloat16> = 5;
#elif defined(__AMX_BF16__)
template <>
constexpr int kMaxRows<BFloat16> = 32;
#elif defined(__AVX512BF16__)
// Sixteen sums keep the dot product unit busy, which starts one product per cycle and takes six cycles. With 12 rows
// there are more loads of activations, and products were 5 % slower.
template <>
constexpr int kMaxRows<BFloat16> = 8;
#endif
template <int Bits, int Group, Factors Kind>
#if defined(__AMX_INT8__)
constexpr int kMaxRows<Codes<Bits, Group, Kind>> = kRowsOfTile;
#else
constexpr int kMaxRows<Codes<Bits, Group, Kind>> = kRowsOfLanes<Bits>;
#endif

// Calls f(std::integral_constant<int, rows>()) for a number of rows up to Most.
template <int Most, class F>
static inline void with_rows(int rows, F&& f) {
  if constexpr (Most > 1) {
    if (rows < Most) return with_rows<Most - 1>(rows, f);
  }
  f(std::integral_constant<int, Most>());
}

// Does the same with a number of rows that is raised to 1 or an even number, which saves code.
template <int Most, class F>
static inline void with_raised_rows(int rows, F&& f) {
  if constexpr (Most > 1) {
    constexpr int kNext = Most > 2 ? Most - 2 : 1;
    if (rows <= kNext) return with_raised_rows<kNext>(rows, f);
  }
  f(std::integral_constant<int, Most>());
}

// Multiplies at most kMaxRows rows by the panels of quantised weights, one after the other.
template <class Weight>
static inline void multiply_quantised(int rows, const QuantisedGroup* x, int64_t stride, const Weight* panels,
                                      int num_panels, const Matrix<Weight>& matrix, float* tile, Prefetch prefetch) {
  for (int p = 0; p < num_panels; p++, panels += matrix.panel_size, tile += kPanel) {
#if defined(__AMX_INT8__)
    if (rows > kRowsOfLanes<Weight::kBits>) {
      multiply_by_code_tiles(rows, x, stride, panels, matrix.unit_size, matrix.depth, tile, prefetch);
    } else
#endif
      with_raised_rows<kRowsOfLanes<Weight::kBits>>(rows, [&](auto count) {
        multiply_by_codes<Weight, count.value>(x, stride, panels, matrix.unit_size, matrix.depth, tile, prefetch);
      });
    prefetch.skip(matrix.panel_size);
  }
}

template <class Weight, int Rows>
static inline void multiply_rows(const Activation<Weight>* x, int64_t stride, const Weight* panels, int64_t panel_size,
                                 int num_panels, int64_t depth, float* tile, Prefetch prefetch) {
  // One row leaves registers for both panels, whose independent sums keep the multipliers
  // busy. With more rows and narrow vectors, each panel is multiplied separately.
  constexpr bool kTogether = kWidth == 16 || Rows == 1;
  if constexpr (kTogether)
    if (num_panels == 2 && !(kReadsInOrder<Weight> && prefetch.num_calls == 1))
      return multiply_by_steps<Weight, Rows, 2>(x, stride, panels, panel_size, depth, tile, prefetch);
  for (int p = 0; p < num_panels; p++, panels += panel_size, prefetch.skip(panel_size * sizeof(Weight)))
    multiply_by_steps<Weight, Rows, 1>(x, stride, panels, panel_size, depth, tile + p * kPanel, prefetch);
}

// Computes tile [rows][kTileColumns] = x [rows, depth] times 1 or 2 of the matrix's panels, for at most kMaxRows rows.
// `stride`: RowPlaces::depth. x is padded with zeros, or with any finite values if the weights' padding is zeros.
template <class Weight>
static inline void multiply_tile(int rows, const Activation<Weight>* x, int64_t stride, const Weight* panels,
                                 int num_panels, const Matrix<Weight>& matrix, float* tile, Prefetch prefetch) {
  if constexpr (kIsQuantised<Weight>) {
    multiply_quantised(rows, x, stride, panels, num_panels, matrix, tile, prefetch);
#if defined(__AMX_BF16__)
  } else if constexpr (sizeof(Weight) == 2) {
    multiply_by_tiles(rows, x, stride, panels, num_panels, matrix.panel_size, matrix.depth, tile, prefetch);
#endif
  } else {
    with_rows<kMaxRows<Weight>>(rows, [&](auto count) {
      multiply_rows<Weight, count.value>(x, stride, panels, matrix.panel_size, num_panels, matrix.depth, tile,
                                         prefetch);
    });
  }
}

// Returns the number of rows, at most `most`, for the next call. Calls get nearly equal numbers
// of rows, so that the last one does not have a single row and unused registers.
static inline int64_t equal_part(int64_t rows, int64_t most) {
  const int64_t calls = (rows + most - 1) / most;
  return (rows + calls - 1) / calls;
}

}  // namespace outrider
