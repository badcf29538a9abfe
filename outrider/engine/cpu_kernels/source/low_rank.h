// The part of an adapter (LoRA) in a product: y += up (down x), in float32, for one row at a time.
//
// Each component of down x and each output has its own sum in one fixed order, so that a row's bits do not depend on
// the other rows, nor on the adapters of these.
#pragma once

#include "api.h"
#include "linear.h"
#include "numbers.h"

namespace outrider {

// Computes down x for a row x [width], a multiple of 32, to `reduced` [rank].
template <class Row>
static inline void reduce_row(const OutriderLowRank& low_rank, const Row* x, int64_t width, float* reduced) {
  for (int64_t component = 0; component < low_rank.rank; component++) {
    const float* weights = low_rank.down + component * width;
    Floats even{}, odd{};
    for (int64_t i = 0; i < width; i += 2 * kWidth) {
      even = multiply_add(load(weights + i), load_wide(x + i), even);
      odd = multiply_add(load(weights + i + kWidth), load_wide(x + i + kWidth), odd);
    }
    reduced[component] = sum_of_lanes(even + odd);
  }
}

// Adds up (down x) to the values of a tile's row.
static inline void add_low_rank(const OutriderLowRank& low_rank, const float* reduced, const TileRow& tile) {
  for (int64_t column = 0; column < tile.num; column += kPanel) {
    const int64_t panel = (tile.column + column) / kPanel;
    const float* weights = low_rank.up + int64_t{low_rank.starts[panel]} * kPanel;
    const float* from = reduced + low_rank.firsts[panel];
    const int32_t num = low_rank.starts[panel + 1] - low_rank.starts[panel];
    if (num == 0) continue;
    Floats sums[kVectorsPerPanel] = {};
    for (int32_t i = 0; i < num; i++)
      for (int v = 0; v < kVectorsPerPanel; v++)
        sums[v] = multiply_add(load(weights + i * kPanel + v * kWidth), broadcast(from[i]), sums[v]);
    float* values = tile.values + column;
    for (int v = 0; v < kVectorsPerPanel; v++) store(values + v * kWidth, load(values + v * kWidth) + sums[v]);
  }
}

}  // namespace outrider
