// The layout of keys and values in the paged cache: sixteen slots of one KV head are a panel,
// like a panel of packed weights (panels.h), so that attention multiplies them in place.
//
// A layer's keys, and likewise its values: [panels][kv heads][16 * head_dim]; panel = slot / 16.
//   keys    the panel of a matrix of head_dim inputs and 16 outputs:
//           float32 [head_dim][16 keys], bfloat16 [head_dim / 2][16 keys][2]
//   values  head_dim / 16 consecutive panels of 16 inputs and 16 outputs:
//           float32 [16 keys][16], bfloat16 [8 pairs of keys][16][2]
// The content of a slot that was not written yet, or was freed, is undefined.
#pragma once

#include <cstring>
#include <type_traits>

#include "numbers.h"

namespace outrider {

// The consecutive inputs of one output: a float, or a pair of bfloat16.
template <class KV>
constexpr int kPerWord = 4 / sizeof(KV);

// Returns the index of input k and output n in a panel.
template <class KV>
constexpr int64_t place_in_panel(int64_t k, int64_t n) {
  return (k / kPerWord<KV> * kPanel + n) * kPerWord<KV> + k % kPerWord<KV>;
}

// Returns the offset of a slot's panel in a layer, in elements.
static inline int64_t panel_at(int64_t slot, int64_t head, int64_t num_kv_heads, int64_t head_dim) {
  return (slot / kPanel * num_kv_heads + head) * kPanel * head_dim;
}

// Copies bytes between a slot's row and its panel; to the panel if the row is const.
template <class KV, class Row>
static inline void copy_numbers(KV* in_panel, Row* in_row, size_t num) {
  if constexpr (std::is_const_v<Row>) std::memcpy(in_panel, in_row, num * sizeof(KV));
  else std::memcpy(in_row, in_panel, num * sizeof(KV));
}

// Copies the key of one slot between its panel and `row` [head_dim], at any address. Other slots of the panel are not
// accessed, since other threads may write them.
template <class KV, class Row>
static inline void copy_key(KV* panel, int64_t head_dim, int64_t slot, Row* row) {
  for (int64_t d = 0; d < head_dim; d += kPerWord<KV>)
    copy_numbers(panel + place_in_panel<KV>(d, slot % kPanel), row + d * sizeof(KV), kPerWord<KV>);
}

// Copies the value of one slot, like copy_key.
template <class KV, class Row>
static inline void copy_value(KV* panel, int64_t head_dim, int64_t slot, Row* row) {
  for (int64_t column = 0; column < head_dim; column += kPanel)
    for (int64_t n = 0; n < kPanel; n++)
      copy_numbers(panel + column * kPanel + place_in_panel<KV>(slot % kPanel, n), row + (column + n) * sizeof(KV), 1);
}

// Copies the values of a panel [head_dim / 16 panels of 16 slots] to `to`, as keys [head_dim inputs, 16 slots].
template <class KV>
static inline void transpose_values(const KV* panel, int64_t head_dim, KV* to) {
  for (int64_t column = 0; column < head_dim; column += kPanel, panel += kPanel * kPanel, to += kPanel * kPanel)
    for (int64_t slot = 0; slot < kPanel; slot++)
      for (int64_t n = 0; n < kPanel; n++) to[place_in_panel<KV>(n, slot)] = panel[place_in_panel<KV>(slot, n)];
}

// Copies the first `num` values of a panel to `to` [16 * head_dim], and zeros for the others: their weights are 0, but
// undefined content may be infinite or NaN.
template <class KV>
static inline void copy_values(const KV* panel, int64_t head_dim, int num, KV* to) {
  constexpr int64_t line = kPanel * kPerWord<KV>;
  for (int64_t column = 0; column < head_dim; column += kPanel, panel += kPanel * kPanel, to += kPanel * kPanel) {
    const int64_t whole = num / kPerWord<KV> * line;
    std::memcpy(to, panel, whole * sizeof(KV));
    std::memset(static_cast<void*>(to + whole), 0, (kPanel * kPanel - whole) * sizeof(KV));
    if (num % kPerWord<KV> != 0)
      for (int n = 0; n < kPanel; n++) to[whole + n * kPerWord<KV>] = panel[whole + n * kPerWord<KV>];
  }
}

}  // namespace outrider
