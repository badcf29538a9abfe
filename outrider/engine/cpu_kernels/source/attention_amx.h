// The products of attention_products.h on AMX tiles, two by two: 32 rows times 32 columns.
#pragma once

namespace outrider {

// Adds x [rows, depth at `stride`] times one or two panels at `from` to tiles 0 … 3, which are shaped for these rows and
// for steps of 2 * `lines` of depth. Prefetches what lies at `ahead`.
static inline void add_tiles(int rows, const BFloat16* x, int64_t stride, const BFloat16* const* from,
                             const BFloat16* const* ahead, int num, int64_t depth, int lines) {
  const int64_t x_bytes = stride * 2;
  for (int64_t k = 0; k < depth; k += 2 * lines) {
    for (int p = 0; p < num; p++)
      for (int line = 0; line < lines; line++) __builtin_prefetch(ahead[p] + (k + 2 * line) * kPanel, 0, 3);
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

static inline void multiply_keys_by_tiles(int rows, const BFloat16* x, int64_t depth, const BFloat16* const* keys,
                                          int num, float* to) {
  constexpr int kLines = 16;
  shape_tiles(rows < 16 ? rows : 16, rows - 16, kLines);
  for (int index = 0; index < num; index += 2) {
    const int together = num - index < 2 ? 1 : 2;
    zero_tiles();
    add_tiles(rows, x, depth, keys + index, keys + index + kPanelsAhead, together, depth, kLines);
    store_tiles(rows, together, to + index * kPanel, kSpan);
  }
}

// A step is one panel of 16 keys: those of two do not lie together.
static inline void multiply_values_by_tiles(int rows, const BFloat16* weights, const BFloat16* const* values, int num,
                                            int64_t head_dim, float* to) {
  constexpr int kLines = kPanel / 2;
  shape_tiles(rows < 16 ? rows : 16, rows - 16, kLines);
  for (int64_t column = 0; column < head_dim; column += 2 * kPanel) {
    const int together = head_dim - column < 2 * kPanel ? 1 : 2;
    zero_tiles();
    for (int i = 0; i < num; i++) {
      const BFloat16* const from[2] = {values[i] + column * kPanel, values[i] + (column + kPanel) * kPanel};
      const BFloat16* const next = values[i + kPanelsAhead] + column * kPanel;
      const BFloat16* const ahead[2] = {next, next + kPanel * kPanel};
      add_tiles(rows, weights + i * kPanel, kSpan, from, ahead, together, kPanel, kLines);
    }
    store_tiles(rows, together, to + column, head_dim);
  }
}

}  // namespace outrider
