// What every function of api.h, and every job of a team's worker, runs in.
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

// While products may use AMX tiles: at its end the thread's are released, or every switch to another thread would
// save and restore them.
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

// Does `f`. Returns 0, or the errno of what it threw: nothing may be thrown through C.
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
