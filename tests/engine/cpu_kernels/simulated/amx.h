// SIMULATED AMX tiles with products of bfloat16 and of bytes, on top of the simulated AVX512-BF16.
//
// Errors that a processor would report end the process with the reason: a tile without a
// shape, shapes that do not fit each other, an invalid configuration.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "avx512_bf16.h"

namespace simulated {

constexpr int kTiles = 8;
constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // maximum size of a row

// The operand of LDTILECFG.
struct TileConfiguration {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t bytes_of_row[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfiguration) == 64);

struct Tile {
  int rows = 0;
  int bytes = 0;  // of a row
  uint8_t at[kTileRows][kTileBytes] = {};
};

// The state of one thread, shared by all files of a library, as a processor has one.
struct Tiles {
  bool is_configured = false;
  Tile tiles[kTiles];
};
inline thread_local Tiles tiles;

inline std::atomic<int> num_threads_with_tiles{0};

inline void require(bool is_right, const char* what) {
  if (is_right) return;
  std::fprintf(stderr, "simulated AMX: %s\n", what);
  std::abort();
}

inline void loadconfig(const void* from) {
  TileConfiguration configuration;
  std::memcpy(&configuration, from, sizeof configuration);
  require(configuration.palette == 1, "a palette that there is not");
  require(configuration.start_row == 0, "a start row");
  for (const uint8_t byte : configuration.reserved) require(byte == 0, "a reserved byte that is not 0");
  for (int tile = 0; tile < 16; tile++) {
    const int rows = configuration.rows[tile], bytes = configuration.bytes_of_row[tile];
    require(rows <= kTileRows && bytes <= kTileBytes, "a tile that is too large");
    require((rows == 0) == (bytes == 0), "rows without columns, or columns without rows");
    require(tile < kTiles || rows == 0, "a tile that there is not");
  }
  if (!tiles.is_configured) num_threads_with_tiles++;
  tiles = Tiles{};
  tiles.is_configured = true;
  for (int tile = 0; tile < kTiles; tile++) {
    tiles.tiles[tile].rows = configuration.rows[tile];
    tiles.tiles[tile].bytes = configuration.bytes_of_row[tile];
  }
}

inline Tile& shaped_tile(int tile) {
  require(tiles.is_configured, "tiles without a configuration");
  require(tile >= 0 && tile < kTiles && tiles.tiles[tile].rows > 0, "a tile without a shape");
  return tiles.tiles[tile];
}

inline void zero(int tile) { std::memset(shaped_tile(tile).at, 0, sizeof Tile::at); }

inline void loadd(int tile, const void* from, int64_t stride) {
  Tile& to = shaped_tile(tile);
  std::memset(to.at, 0, sizeof to.at);
  for (int row = 0; row < to.rows; row++)
    std::memcpy(to.at[row], static_cast<const char*>(from) + row * stride, to.bytes);
}

inline void stored(int tile, void* to, int64_t stride) {
  const Tile& from = shaped_tile(tile);
  for (int row = 0; row < from.rows; row++)
    std::memcpy(static_cast<char*>(to) + row * stride, from.at[row], from.bytes);
}

// TDPBF16PS: the even and the odd products of a row are summed separately, and both sums are added.
inline void dpbf16ps(int to, int left, int right) {
  Tile &sums = shaped_tile(to), &a = shaped_tile(left), &b = shaped_tile(right);
  require(to != left && to != right && left != right, "a tile that is two operands");
  require(a.bytes % 4 == 0 && b.bytes % 4 == 0 && sums.bytes % 4 == 0, "half a pair");
  require(sums.rows == a.rows && sums.bytes == b.bytes && a.bytes / 4 == b.rows, "shapes that do not fit");
  for (int row = 0; row < sums.rows; row++) {
    uint16_t x[kTileBytes / 2];
    float sum[kTileBytes / 4];
    std::memcpy(x, a.at[row], sizeof x);
    std::memcpy(sum, sums.at[row], sizeof sum);
    float even[kTileBytes / 4] = {}, odd[kTileBytes / 4] = {};
    for (int k = 0; k < a.bytes / 4; k++) {
      uint16_t w[kTileBytes / 2];
      std::memcpy(w, b.at[k], sizeof w);
      for (int n = 0; n < sums.bytes / 4; n++) {
        even[n] = multiply_add(x[2 * k], w[2 * n], even[n]);
        odd[n] = multiply_add(x[2 * k + 1], w[2 * n + 1], odd[n]);
      }
    }
    for (int n = 0; n < sums.bytes / 4; n++) sum[n] = flushed(flushed(sum[n]) + flushed(even[n] + odd[n]));
    std::memcpy(sums.at[row], sum, sums.bytes);
  }
}

// TDPBSSD: signed bytes of the left tile times those of the right one, four for each sum, which wraps around.
inline void dpbssd(int to, int left, int right) {
  Tile &sums = shaped_tile(to), &a = shaped_tile(left), &b = shaped_tile(right);
  require(to != left && to != right && left != right, "a tile that is two operands");
  require(a.bytes % 4 == 0 && b.bytes % 4 == 0 && sums.bytes % 4 == 0, "a part of four bytes");
  require(sums.rows == a.rows && sums.bytes == b.bytes && a.bytes / 4 == b.rows, "shapes that do not fit");
  for (int row = 0; row < sums.rows; row++) {
    uint32_t sum[kTileBytes / 4];
    std::memcpy(sum, sums.at[row], sizeof sum);
    for (int k = 0; k < a.bytes / 4; k++)
      for (int n = 0; n < sums.bytes / 4; n++)
        for (int i = 4 * n; i < 4 * n + 4; i++)
          sum[n] += static_cast<uint32_t>(static_cast<int8_t>(a.at[row][4 * k + i % 4]) * static_cast<int8_t>(b.at[k][i]));
    std::memcpy(sums.at[row], sum, sums.bytes);
  }
}

}  // namespace simulated

// Does what other code in the process may do between two calls: oneDNN releases its tiles like this.
extern "C" __attribute__((visibility("default"), used)) inline void outrider_simulated_tile_release() {
  if (simulated::tiles.is_configured) simulated::num_threads_with_tiles--;
  simulated::tiles = simulated::Tiles{};
}

// Returns the number of threads with tiles, which the system would save and restore at each context switch.
extern "C" __attribute__((visibility("default"), used)) inline int outrider_simulated_threads_with_tiles() {
  return simulated::num_threads_with_tiles;
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_release
#define _tile_release outrider_simulated_tile_release
#define _tile_loadconfig simulated::loadconfig
#define _tile_loadd simulated::loadd
#define _tile_stored simulated::stored
#define _tile_zero simulated::zero
#define _tile_dpbf16ps simulated::dpbf16ps
#define _tile_dpbssd simulated::dpbssd

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
