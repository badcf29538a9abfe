// SIMULATED mistake: the product of panels.h with two sums for an output, added at the end,
// once four rows or more (or as many as there are registers for) are computed together. What a kernel does that picks its order by
// the size of the batch; the checks of batch invariance must catch it.
#pragma once

#include <algorithm>

#include "panels.h"

namespace outrider {

template <class Weight, PanelsIn In>
static inline void multiply_tile_by_size(int rows, const Activation<Weight>* x, int64_t stride, const Weight* panels,
                                         int num_panels, int64_t depth, float* tile) {
  const int64_t first = depth / 2 / kDepthStep<Weight> * kDepthStep<Weight>;
  if (rows < std::min(4, MostRows<Weight>::value) || first == 0) return multiply_tile<Weight, In>(rows, x, stride, panels, num_panels, depth, tile);
  const int64_t panel_size = depth * kPanel;
  float other[MostRows<Weight>::value * kTileColumns];
  for (int p = 0; p < num_panels; p++) {
    const Weight* panel = panels + p * panel_size;
    multiply_tile<Weight, In>(rows, x, stride, panel, 1, first, tile + p * kPanel);
    multiply_tile<Weight, In>(rows, x + activations_before<Weight>(first), stride, panel + first * kPanel, 1, depth - first, other);
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < kPanel; c++) tile[r * kTileColumns + p * kPanel + c] += other[r * kTileColumns + c];
  }
}

}  // namespace outrider

#define multiply_tile multiply_tile_by_size
