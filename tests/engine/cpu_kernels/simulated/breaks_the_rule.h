// SIMULATED mistake: the product of panels.h, and the values of attention, with two sums for an
// output, which are added at the end if four rows or more (or as many as registers allow) are
// computed together. A kernel that chooses its order by the size of the batch would do this; the
// checks of batch invariance must detect it.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_products.h"
#include "panels.h"

namespace outrider {

template <class Weight>
static inline void multiply_tile_by_size(int rows, const Activation<Weight>* x, int64_t stride, const Weight* panels,
                                         int num_panels, const Matrix<Weight>& matrix, float* tile, Prefetch prefetch) {
  Matrix<Weight> first = matrix, rest = matrix;
  const int64_t step = std::max(kDepthStep<Weight>, matrix.unit_size);
  first.depth = matrix.depth / 2 / step * step;
  rest.depth -= first.depth;
  if (rows < std::min(4, kMaxRows<Weight>) || first.depth == 0)
    return multiply_tile<Weight>(rows, x, stride, panels, num_panels, matrix, tile, prefetch);
  float other[kMaxRows<Weight> * kTileColumns];
  for (int p = 0; p < num_panels; p++) {
    const Weight* panel = panels + p * matrix.panel_size;
    multiply_tile<Weight>(rows, x, stride, panel, 1, first, tile + p * kPanel, prefetch);
    const Activation<Weight>* behind = x + (kIsQuantised<Weight> ? first.depth / kDepthOfGroup * stride : first.depth);
    multiply_tile<Weight>(rows, behind, stride, panel + matrix.size_of_panel(first.depth), 1, rest, other, prefetch);
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < kPanel; c++) tile[r * kTileColumns + p * kPanel + c] += other[r * kTileColumns + c];
  }
}

template <class KV>
static inline void multiply_values_by_size(int rows, const Activation<KV>* weights, const KV* const* values, int num,
                                           int64_t head_dim, float* to) {
  if (rows < 4 || num < 2) return multiply_values<KV>(rows, weights, values, num, head_dim, to);
  const int first = num / 2;
  std::vector<float> other(rows * head_dim);
  multiply_values<KV>(rows, weights, values, first, head_dim, to);
  multiply_values<KV>(rows, weights + first * kPanel, values + first, num - first, head_dim, other.data());
  for (size_t i = 0; i < other.size(); i++) to[i] += other[i];
}

}  // namespace outrider

#define multiply_values multiply_values_by_size
#define multiply_tile multiply_tile_by_size
