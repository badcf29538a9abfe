// The frame in which every function of api.h, and every job in a team's worker, runs.
#pragma once

#include <cerrno>
#include <cstdint>
#include <new>
#include <system_error>

#include "default_arithmetic.h"

#if defined(__AMX_BF16__)
#include "panels.h"
#endif

namespace outrider {

// A scope in which products may use AMX tiles. Its end releases the thread's tiles, which every context switch would
// save and restore otherwise.
struct TileUse {
#if defined(__AMX_BF16__)
  TileUse() { forget_tile_shapes(); }
  ~TileUse() { release_tiles(); }
#else
  TileUse() {}
#endif
  TileUse(const TileUse&) = delete;
  TileUse& operator=(const TileUse&) = delete;
};

// Calls `f`. Returns 0, or the errno of an exception, since none may pass through C.
template <class F>
int32_t call(F&& f) noexcept {
  const DefaultArithmetic arithmetic;
  const TileUse tiles;
  try {
    f();
    return 0;
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  } catch (const std::system_error& error) {
    return error.code().value();
  }
}

}  // namespace outrider
