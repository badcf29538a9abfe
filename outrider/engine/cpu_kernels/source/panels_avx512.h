// The product of panels.h with the dot product instruction of AVX512-BF16: two k at a time,
// added to the accumulator without rounding between them.
#pragma once

#include "numbers.h"

namespace outrider {

template <int Rows, int Panels>
[[gnu::noinline]] static void multiply_by_pairs(const BFloat16* x, int64_t stride, const BFloat16* panels,
                                                int64_t panel_size, int64_t depth, float* tile, Prefetch prefetch) {
  __m512 sums[Rows][Panels];
  for (int r = 0; r < Rows; r++)
    for (int p = 0; p < Panels; p++) sums[r][p] = _mm512_setzero_ps();
  for (int64_t k = 0; k < depth; k += 2) {
    prefetch(Panels);
    __m512bh weights[Panels];
#pragma GCC unroll 2
    for (int p = 0; p < Panels; p++) weights[p] = (__m512bh)_mm512_loadu_si512(panels + p * panel_size + k * kPanel);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; r++) {
      int32_t pair;
      std::memcpy(&pair, x + r * stride + k, sizeof pair);
      const __m512bh pairs = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 2
      for (int p = 0; p < Panels; p++) sums[r][p] = _mm512_dpbf16_ps(sums[r][p], weights[p], pairs);
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int p = 0; p < Panels; p++) _mm512_storeu_ps(tile + r * kTileColumns + p * kPanel, sums[r][p]);
}

}  // namespace outrider
