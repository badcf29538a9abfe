// The products of attention: a few rows times panels of the paged cache (kv_panels.h).
//
// As in panels.h, every output has one float32 accumulator, to which products are added in
// ascending order of k, whichever other rows and columns are computed at the same time.
#pragma once

#include <type_traits>

#include "attention_plan.h"
#include "kv_panels.h"
#include "panels.h"

namespace outrider {

constexpr int kPanelsOfSpan = kSpan / kPanel;
constexpr int kMaxPanelsTogether = 4;
constexpr int kPanelsAhead = 8;

// Limits of the rows, and of rows times panels, whose sums stay in registers. Few rows are multiplied with several
// panels at once: with one panel, multiply-adds would wait for the sums of earlier ones.
#if defined(__AVX512F__)
constexpr int kMaxSums = 24;
constexpr int kMaxRowsTogether = 6;
#else
constexpr int kMaxSums = 5;
constexpr int kMaxRowsTogether = 5;
#endif

// The maximum number of rows of one call.
template <class KV>
constexpr int kRowsOfCall = kMaxRowsTogether;
#if defined(__AMX_BF16__)
template <>
constexpr int kRowsOfCall<BFloat16> = 32;
#endif

template <int Rows, int Panels>
using Sums = Floats[Rows][Panels][kVectorsPerPanel];

// Adds x [Rows, depth at `stride`] times `Panels` panels of `depth` inputs at `from` to the sums. Prefetches the panels
// at `ahead`, which are multiplied kPanelsAhead later, into the second-level cache (see Prefetch): processors do not
// predict the address of a head's next panel.
template <class KV, int Rows, int Panels>
[[gnu::always_inline]] static inline void add_products(const Activation<KV>* x, int64_t stride,
                                                       const KV* const* from, const KV* const* ahead, int64_t depth,
                                                       Sums<Rows, Panels>& sums) {
  for (int64_t k = 0; k < depth; k += Step<KV>::kDepth) {
#pragma GCC unroll 4
    for (int p = 0; p < Panels; p++) {
      __builtin_prefetch(ahead[p] + k * kPanel, 0, 2);
      Step<KV> step;
      step.load_from(from[p] + k * kPanel);
#pragma GCC unroll 2
      for (int i = 0; i < Step<KV>::kNumAdds; i++)
#pragma GCC unroll 6
        for (int r = 0; r < Rows; r++) {
          const auto value = Step<KV>::value(x + r * stride + k, i);
          for (int v = 0; v < kVectorsPerPanel; v++) sums[r][p][v] = step.add(i, v, value, sums[r][p][v]);
        }
    }
  }
}

template <int Rows, int Panels>
[[gnu::always_inline]] static inline void store_sums(const Sums<Rows, Panels>& sums, float* to, int64_t stride) {
  for (int r = 0; r < Rows; r++)
    for (int p = 0; p < Panels; p++)
      for (int v = 0; v < kVectorsPerPanel; v++) store(to + r * stride + p * kPanel + v * kWidth, sums[r][p][v]);
}

template <class KV, int Rows, int Panels>
static inline void multiply_some_keys(const Activation<KV>* x, int64_t depth, const KV* const* keys, float* to) {
  Sums<Rows, Panels> sums = {};
  add_products<KV, Rows, Panels>(x, depth, keys, keys + kPanelsAhead, depth, sums);
  store_sums<Rows, Panels>(sums, to, kSpan);
}

template <class KV, int Rows, int Panels>
static inline void multiply_some_values(const Activation<KV>* weights, const KV* const* values, int num, int64_t column,
                                        float* to, int64_t stride) {
  Sums<Rows, Panels> sums = {};
  for (int i = 0; i < num; i++) {
    const KV *from[Panels], *ahead[Panels];
    for (int p = 0; p < Panels; p++) {
      from[p] = values[i] + (column + p * kPanel) * kPanel;
      ahead[p] = values[i + kPanelsAhead] + (column + p * kPanel) * kPanel;
    }
    add_products<KV, Rows, Panels>(weights + i * kPanel, kSpan, from, ahead, kPanel, sums);
  }
  store_sums<Rows, Panels>(sums, to, stride);
}

// Calls f with `count`, 1 to Most, as a compile-time constant.
template <int Most, class F>
static inline void with_constant(int count, F&& f) {
  if constexpr (Most > 1)
    if (count < Most) return with_constant<Most - 1>(count, f);
  f(std::integral_constant<int, Most>{});
}

// Calls f(index, count) for `num` panels, 4, 2 or 1 at a time, as registers allow. `count` is a compile-time constant.
template <int Rows, class F>
static inline void for_panels(int64_t num, F&& f) {
  int64_t index = 0;
  const auto take = [&]<int Count>() {
    if constexpr (Count == 1 || Rows * Count <= kMaxSums)
      for (; index + Count <= num; index += Count) f(index, std::integral_constant<int, Count>{});
  };
  take.template operator()<kMaxPanelsTogether>();
  take.template operator()<2>();
  take.template operator()<1>();
}

}  // namespace outrider

#if defined(__AMX_BF16__)
#include "attention_amx.h"
#endif

namespace outrider {

// Computes to [rows, num * 16 at kSpan] = x [rows, depth] times `num` panels of keys, for at most kRowsOfCall rows.
// `keys` has kPanelsAhead more pointers, to the panels that are needed next.
template <class KV>
static inline void multiply_keys(int rows, const Activation<KV>* x, int64_t depth, const KV* const* keys, int num,
                                 float* to) {
  const DotProductArithmetic<KV> arithmetic;
#if defined(__AMX_BF16__)
  if constexpr (sizeof(KV) == 2) return multiply_keys_by_tiles(rows, x, depth, keys, num, to);
  else
#endif
    with_constant<kMaxRowsTogether>(rows, [&](auto count) {
      for_panels<count.value>(num, [&](int64_t index, auto panels) {
        multiply_some_keys<KV, count.value, panels.value>(x, depth, keys + index, to + index * kPanel);
      });
    });
}

// Computes to [rows, head_dim] = weights [rows, num * 16 at kSpan] times `num` panels of values, for at most
// kRowsOfCall rows. `values` has kPanelsAhead more pointers, too.
template <class KV>
static inline void multiply_values(int rows, const Activation<KV>* weights, const KV* const* values, int num,
                                   int64_t head_dim, float* to) {
  const DotProductArithmetic<KV> arithmetic;
#if defined(__AMX_BF16__)
  if constexpr (sizeof(KV) == 2) return multiply_values_by_tiles(rows, weights, values, num, head_dim, to);
  else
#endif
    with_constant<kMaxRowsTogether>(rows, [&](auto count) {
      for_panels<count.value>(head_dim / kPanel, [&](int64_t index, auto panels) {
        multiply_some_values<KV, count.value, panels.value>(weights, values, num, index * kPanel, to + index * kPanel,
                                                            head_dim);
      });
    });
}

}  // namespace outrider
