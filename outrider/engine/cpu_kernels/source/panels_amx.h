// The product of panels.h on AMX tiles: 16 rows times 16 columns, 32 k at a time.
//
// A row's tile depends on the other rows, but its products do not: a tile adds them for each
// of its rows separately, in ascending order of k.
#pragma once

#include "numbers.h"

namespace outrider {

// The operand of _tile_loadconfig: the shapes of eight tiles.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_of_row[16] = {};
  uint8_t rows[16] = {};
};

// The arguments of the last `shape_tiles` in this thread, for which the processor keeps the
// shapes. It is `inline`, not `static`: all files of the library must share one variable,
// since each of them may change the shapes.
inline thread_local int shaped_tiles = -1;

// Must be called in a thread that may have run other code with tiles, such as torch's.
static inline void forget_tile_shapes() { shaped_tiles = -1; }

// Must be called when a thread has computed its products.
static inline void release_tiles() {
  if (shaped_tiles == -1) return;
  shaped_tiles = -1;
  _tile_release();
}

// Shapes the tiles. 0, 1: sums of the first 16 rows for two panels; 2, 3: of the second rows, if any. 4, 5: first
// and second rows of x. 6, 7: weights of two panels, `lines` pairs of k.
static inline void shape_tiles(int first_rows, int second_rows, int lines = 16) {
  asm volatile("" : : : "memory");  // GCC 12 does not know that tiles read memory, so stores must be ordered before
  if (second_rows < 1) second_rows = 1;
  const int key = (first_rows * 32 + second_rows) * 32 + lines;
  if (key == shaped_tiles) return;
  shaped_tiles = key;
  TileShapes shapes;
  for (int tile = 0; tile < 8; tile++) {
    shapes.bytes_of_row[tile] = 64;
    shapes.rows[tile] = 16;
  }
  shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = static_cast<uint8_t>(first_rows);
  shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = static_cast<uint8_t>(second_rows);
  shapes.rows[6] = shapes.rows[7] = static_cast<uint8_t>(lines);
  shapes.bytes_of_row[4] = shapes.bytes_of_row[5] = static_cast<uint16_t>(4 * lines);
  asm volatile("" : : "r"(&shapes) : "memory");  // GCC 12 assumes that only the first bytes are read
  _tile_loadconfig(&shapes);
}

// Adds x [rows, depth at `stride`] times one or two panels at `from` to tiles 0 to 3, which must be shaped for these
// rows and for steps of 2 * `lines` of depth. Calls prefetch(panel, k) for each line of weights.
template <class LinePrefetch>
static inline void add_tiles(int rows, const BFloat16* x, int64_t stride, const BFloat16* const* from, int num,
                             int64_t depth, int lines, LinePrefetch&& prefetch) {
  const int64_t x_bytes = stride * 2;
  for (int64_t k = 0; k < depth; k += 2 * lines) {
    for (int p = 0; p < num; p++)
      for (int line = 0; line < lines; line++) prefetch(p, k + 2 * line);
    _tile_loadd(6, (from[0] + k * kPanel), (64));
    _tile_loadd(4, (x + k), (x_bytes));
    _tile_dpbf16ps(0, 4, 6);
    if (num == 2) {
      _tile_loadd(7, (from[1] + k * kPanel), (64));
      _tile_dpbf16ps(1, 4, 7);
    }
    if (rows > 16) {
      _tile_loadd(5, (x + 16 * stride + k), (x_bytes));
      _tile_dpbf16ps(2, 5, 6);
      if (num == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
}

static inline void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

static inline void store_tiles(int rows, int num, float* to, int64_t stride) {
  const int64_t bytes = stride * 4;
  _tile_stored(0, (to), (bytes));
  if (num == 2) _tile_stored(1, (to + kPanel), (bytes));
  if (rows > 16) {
    _tile_stored(2, (to + 16 * stride), (bytes));
    if (num == 2) _tile_stored(3, (to + 16 * stride + kPanel), (bytes));
  }
}

static inline void multiply_by_tiles(int rows, const BFloat16* x, int64_t stride, const BFloat16* panels,
                                     int num_panels, int64_t panel_size, int64_t depth, float* tile,
                                     Prefetch prefetch) {
  const BFloat16* const from[2] = {panels, panels + panel_size};
  shape_tiles(rows < 16 ? rows : 16, rows - 16);
  if (prefetch.num_calls == 1) {  // one panel after the other, in the order of memory
    for (int p = 0; p < num_panels; p++) {
      zero_tiles();
      add_tiles(rows, x, stride, from + p, 1, depth, 16, [&](int, int64_t) { prefetch(1); });
      store_tiles(rows, 1, tile + p * kPanel, kTileColumns);
    }
    return;
  }
  zero_tiles();
  add_tiles(rows, x, stride, from, num_panels, depth, 16, [&](int, int64_t) { prefetch(1); });
  store_tiles(rows, num_panels, tile, kTileColumns);
}

}  // namespace outrider
