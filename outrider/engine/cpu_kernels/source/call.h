// What every function of api.h runs in.
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

// Does `f`. Returns 0, or the errno of what it threw: nothing may be thrown through C.
template <class F>
int32_t call(F&& f) noexcept {
  const DefaultArithmetic arithmetic;
#if defined(__AMX_BF16__)
  forget_tile_shapes();
#endif
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
