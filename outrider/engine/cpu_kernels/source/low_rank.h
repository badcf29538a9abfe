// The part of an adapter (LoRA) in a product: y += up (down x), in float32, for one row at a time.
//
// Each component of down x and each output has its own sum in one fixed order, so that a row's bits do not depend on
// the other rows, nor on the adapters of these.
#pragma once

#include <type_traits>

#include "api.h"
#include "linear.h"
#include "numbers.h"

namespace outrider {

// Computes `Num` components of down x for `Rows` rows x [Rows, width], whose weights are [Num, width].
template <int Rows, int Num, class Row>
static inline void reduce_components(const float* weights, const Row* x, int64_t width, float* reduced,
                                     int64_t stride) {
  Floats sums[Rows][Num][2] = {};  // of even and odd vectors
  for (int64_t i = 0; i < width; i += 2 * kWidth) {
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
      Floats values[Num];
#pragma GCC unroll 2
      for (int n = 0; n < Num; n++) values[n] = load(weights + n * width + i + part * kWidth);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; r++) {
        const Floats activation = load_wide(x + r * width + i + part * kWidth);
#pragma GCC unroll 2
        for (int n = 0; n < Num; n++) sums[r][n][part] = multiply_add(values[n], activation, sums[r][n][part]);
      }
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int n = 0; n < Num; n++) reduced[r * stride + n] = sum_of_lanes(sums[r][n][0] + sums[r][n][1]);
}

// Computes down x for rows x [num_rows, width] to `reduced` [num_rows, rank at `stride`]. width: a multiple of 32.
template <int Rows, class Row>
static inline void reduce_rows(const OutriderLowRank& low_rank, const Row* x, int64_t num_rows, int64_t width,
                               float* reduced, int64_t stride) {
  int64_t row = 0;
  for (; row + Rows <= num_rows; row += Rows) {
    int64_t component = 0;
    const auto reduce = [&](auto num) {
      for (; component + num() <= low_rank.rank; component += num())
        reduce_components<Rows, num()>(low_rank.down + component * width, x + row * width, width,
                                       reduced + row * stride + component, stride);
    };
    reduce(std::integral_constant<int, 2>{});
    reduce(std::integral_constant<int, 1>{});
  }
  if constexpr (Rows > 1)
    reduce_rows<Rows / 2>(low_rank, x + row * width, num_rows - row, width, reduced + row * stride, stride);
}

constexpr int kRowsReducedAtOnce = kWidth == 16 ? 4 : 2;  // as many as there are registers for

// Adds up (down x) to the values of a tile's row, which are the adapter's outputs from `first` on.
static inline void add_low_rank(const OutriderLowRank& low_rank, const float* reduced, int64_t first,
                                const TileRow& tile) {
  for (int64_t column = 0; column < tile.num; column += kPanel) {
    const int64_t panel = (first + column) / kPanel;
    const float* weights = low_rank.up + int64_t{low_rank.starts[panel]} * kPanel;
    const float* from = reduced + low_rank.firsts[panel];
    const int32_t num = low_rank.starts[panel + 1] - low_rank.starts[panel];
    if (num == 0) continue;
    Floats sums[2][kVectorsPerPanel] = {};  // of even and odd components
    const auto add = [&](int32_t i, Floats* to) {
      for (int v = 0; v < kVectorsPerPanel; v++)
        to[v] = multiply_add(load(weights + i * kPanel + v * kWidth), broadcast(from[i]), to[v]);
    };
    for (int32_t i = 0; i + 1 < num; i += 2) add(i, sums[0]), add(i + 1, sums[1]);
    if (num % 2 != 0) add(num - 1, sums[0]);
    float* values = tile.values + column;
    for (int v = 0; v < kVectorsPerPanel; v++)
      store(values + v * kWidth, load(values + v * kWidth) + (sums[0][v] + sums[1][v]));
  }
}

}  // namespace outrider
