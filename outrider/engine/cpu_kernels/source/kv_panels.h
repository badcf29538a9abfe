// How keys and values lie in the paged cache: sixteen slots of one KV head are a panel, in the
// form of packed weights (panels.h), so that attention multiplies with them where they lie.
//
// A layer's keys, and likewise its values: [panels][kv heads][16 * head_dim], panel slot / 16.
//   keys    the panel of a matrix of head_dim inputs and 16 outputs:
//           float32 [head_dim][16 keys], bfloat16 [head_dim / 2][16 keys][2]
//   values  head_dim / 16 panels of 16 inputs and 16 outputs, one after the other:
//           float32 [16 keys][16], bfloat16 [8 pairs of keys][16][2]
// A slot that nobody has written since the cache was made, or whose owner is gone, may hold anything.
#pragma once

#include <cstring>

#include "numbers.h"

namespace outrider {

// What lies together for one output: a float, or a pair of bfloat16.
template <class KV>
constexpr int kPerWord = 4 / sizeof(KV);

// Of input k and output n in a panel.
template <class KV>
constexpr int64_t place_in_panel(int64_t k, int64_t n) {
  return (k / kPerWord<KV> * kPanel + n) * kPerWord<KV> + k % kPerWord<KV>;
}

// Of a slot's panel in a layer, in elements.
static inline int64_t panel_at(int64_t slot, int64_t head, int64_t num_kv_heads, int64_t head_dim) {
  return (slot / kPanel * num_kv_heads + head) * kPanel * head_dim;
}

// The key of one slot, [head_dim] at `row`, which may have any address. Other slots of the panel are not touched:
// other threads may write them.
template <class KV>
static inline void write_key(const void* row, int64_t head_dim, int64_t slot, KV* panel) {
  const char* from = static_cast<const char*>(row);
  char* to = reinterpret_cast<char*>(panel) + slot % kPanel * 4;
  for (int64_t word = 0; word < head_dim / kPerWord<KV>; word++) std::memcpy(to + word * kPanel * 4, from + word * 4, 4);
}

template <class KV>
static inline void read_key(const KV* panel, int64_t head_dim, int64_t slot, void* row) {
  const char* from = reinterpret_cast<const char*>(panel) + slot % kPanel * 4;
  char* to = static_cast<char*>(row);
  for (int64_t word = 0; word < head_dim / kPerWord<KV>; word++) std::memcpy(to + word * 4, from + word * kPanel * 4, 4);
}

// The same of a value.
template <class KV>
static inline void write_value(const void* row, int64_t head_dim, int64_t slot, KV* panel) {
  const char* from = static_cast<const char*>(row);
  for (int64_t column = 0; column < head_dim; column += kPanel) {
    KV* to = panel + column * kPanel + place_in_panel<KV>(slot % kPanel, 0);
    for (int n = 0; n < kPanel; n++) std::memcpy(to + n * kPerWord<KV>, from + (column + n) * sizeof(KV), sizeof(KV));
  }
}

template <class KV>
static inline void read_value(const KV* panel, int64_t head_dim, int64_t slot, void* row) {
  char* to = static_cast<char*>(row);
  for (int64_t column = 0; column < head_dim; column += kPanel) {
    const KV* from = panel + column * kPanel + place_in_panel<KV>(slot % kPanel, 0);
    for (int n = 0; n < kPanel; n++) std::memcpy(to + (column + n) * sizeof(KV), from + n * kPerWord<KV>, sizeof(KV));
  }
}

// to [16 * head_dim] = the first `num` values of a panel, and zeros for the others: their weights are zeros, which a
// product with what they hold would not leave so.
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
