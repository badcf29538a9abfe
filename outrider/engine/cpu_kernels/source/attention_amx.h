// The products of attention_products.h on two by two AMX tiles: 32 rows times 32 columns.
#pragma once

namespace outrider {

static inline void multiply_keys_by_tiles(int rows, const BFloat16* x, int64_t depth, const BFloat16* const* keys,
                                          int num, float* to) {
  constexpr int kLines = 16;
  shape_tiles(rows < 16 ? rows : 16, rows - 16, kLines);
  for (int index = 0; index < num; index += 2) {
    const int together = num - index < 2 ? 1 : 2;
    zero_tiles();
    const auto prefetch = [&](int p, int64_t k) { __builtin_prefetch(keys[index + kPanelsAhead + p] + k * kPanel, 0, 2); };
    add_tiles(rows, x, depth, keys + index, together, depth, kLines, prefetch);
    store_tiles(rows, together, to + index * kPanel, kSpan);
  }
}

// A step is one panel of 16 keys, because panels are not contiguous.
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
      const auto prefetch = [&](int p, int64_t k) { __builtin_prefetch(next + (p * kPanel + k) * kPanel, 0, 2); };
      add_tiles(rows, weights + i * kPanel, kSpan, from, together, kPanel, kLines, prefetch);
    }
    store_tiles(rows, together, to + column, head_dim);
  }
}

}  // namespace outrider
