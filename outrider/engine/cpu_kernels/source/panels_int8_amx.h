// The product of panels_int8.h on AMX tiles: 16 rows times 16 columns, a group of k at a time.
#pragma once

#include "panels_amx.h"

namespace outrider {

constexpr int kByteRows = 32;

static inline void multiply_by_byte_tiles(int rows, const QuantisedGroup* x, int64_t stride, const int8_t* panels,
                                          int num_panels, int64_t depth, float* tile, Prefetch prefetch) {
  const int first_rows = rows < 16 ? rows : 16, second_rows = rows - first_rows;
  const int64_t panel_size = depth * kPanel, x_bytes = stride * static_cast<int64_t>(sizeof(QuantisedGroup));
  const bool has_two_panels = num_panels == 2;
  constexpr int64_t sums_bytes = kTileColumns * 4;  // size of a row of sums
  alignas(64) int32_t sums[32 * kTileColumns];
  shape_tiles(first_rows, second_rows);
  for (int64_t first = 0; first < depth; first += kDepthOfGroup, x++) {
    const int8_t* weights = panels + first * kPanel;
    for (int line = 0; line < 16 * num_panels; line++) prefetch(1);
    _tile_zero(0);
    _tile_loadd(6, (weights), (64));
    _tile_loadd(4, (x->values), (x_bytes));
    _tile_dpbsud(0, 4, 6);
    _tile_stored(0, (sums), (sums_bytes));
    if (has_two_panels) {
      _tile_zero(1);
      _tile_loadd(7, (weights + panel_size), (64));
      _tile_dpbsud(1, 4, 7);
      _tile_stored(1, (sums + kPanel), (sums_bytes));
    }
    if (second_rows > 0) {
      _tile_zero(2);
      _tile_loadd(5, (x[16 * stride].values), (x_bytes));
      _tile_dpbsud(2, 5, 6);
      _tile_stored(2, (sums + 16 * kTileColumns), (sums_bytes));
      if (has_two_panels) {
        _tile_zero(3);
        _tile_dpbsud(3, 5, 7);
        _tile_stored(3, (sums + 16 * kTileColumns + kPanel), (sums_bytes));
      }
    }
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < num_panels * kPanel; c += kWidth) {
        const int at = r * kTileColumns + c;
        Ints some;
        std::memcpy(&some, sums + at, sizeof some);
        const Floats before = first == 0 ? Floats{} : load(tile + at);
        store(tile + at, add_group(some + x[r * stride].start, x[r * stride].scale, before));
      }
  }
}

}  // namespace outrider
