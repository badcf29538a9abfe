// The product of panels_quantised.h on AMX tiles: 16 rows times 16 columns, a group of k at a time.
#pragma once

#include "panels_amx.h"
#include "panels_quantised.h"

namespace outrider {

constexpr int kRowsOfTile = 16;

// Returns a block's codes as signed bytes [64 / 4][16][4]: where they are, or expanded to `room`.
template <class Weight>
static inline const int8_t* bytes_of_block(const char* codes, int8_t* room) {
  if constexpr (Weight::kBits == 8) return reinterpret_cast<const int8_t*>(codes);
  for (int64_t line = 0; line < Weight::kCodeBytes; line += 64) {
    typedef int8_t Bytes __attribute__((vector_size(64)));
    const Words pairs = reinterpret_cast<Words>(_mm512_loadu_si512(codes + line));
    for (int i = 0; i < 2; i++) {
      const Bytes bytes = reinterpret_cast<Bytes>(pairs >> 4 * i & 0x0f0f0f0f) - static_cast<int8_t>(Weight::kOffset);
      std::memcpy(room + 2 * line + 64 * i, &bytes, sizeof bytes);
    }
  }
  return room;
}

// Multiplies 5 to 16 rows by one panel, as multiply_by_codes does. Groups of further rows are read, but not used. Sums
// of the groups stay in registers.
template <class Weight>
[[gnu::noinline]] static void multiply_by_code_tiles(int rows, const QuantisedGroup* x, int64_t stride,
                                                     const Weight* first, int64_t unit_size, int64_t depth, float* tile,
                                                     Prefetch prefetch) {
  CodePanel<Weight> panel(first, unit_size);
  alignas(64) int32_t products[2][kRowsOfTile * kPanel] = {};
  alignas(64) int8_t room[kDepthOfGroup * kPanel];
  Floats totals[kRowsOfTile] = {};
  shape_tiles(rows, rows, Weight::kGroup / kQuad);
  bool is_odd = false;
  for (int64_t left = depth; left > 0; left -= kDepthOfGroup, x += stride) {
    panel.next_block([&](int lines) {
      for (int line = 0; line < lines; line++) prefetch(1);
    });
    for (int64_t line = 0; line < Weight::kCodeBytes; line += 64) prefetch(1);
    const int8_t* codes = bytes_of_block<Weight>(panel.codes(), room);
    for (int group = 0; group < Weight::kGroups; group++, codes += Weight::kGroup * kPanel, is_odd = !is_odd) {
      const int8_t* const values = x->values + group * Weight::kGroup;
      int32_t* const to = products[is_odd];
      asm volatile("" : : : "memory");  // GCC 12 does not know that tiles read and write memory
      // Tiles alternate, so that a group need not wait until the one before is stored.
      if (is_odd) {
        _tile_zero(1);
        _tile_loadd(7, (codes), (64));
        _tile_loadd(5, (values), (sizeof(QuantisedGroup)));
        _tile_dpbssd(1, 5, 7);
        _tile_stored(1, (to), (64));
      } else {
        _tile_zero(0);
        _tile_loadd(6, (codes), (64));
        _tile_loadd(4, (values), (sizeof(QuantisedGroup)));
        _tile_dpbssd(0, 4, 6);
        _tile_stored(0, (to), (64));
      }
      asm volatile("" : : : "memory");
      panel.load_factors(group);
#pragma GCC unroll 16
      for (int r = 0; r < kRowsOfTile; r++) {
        Ints some;
        std::memcpy(&some, to + r * kPanel, sizeof some);
        totals[r] = panel.add(0, some, x[r], group, totals[r]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRowsOfTile; r++)
    if (r < rows) store(tile + r * kTileColumns, totals[r]);
}

}  // namespace outrider
