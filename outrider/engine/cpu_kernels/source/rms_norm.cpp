#include "rms_norm.h"

#include <algorithm>

#include "api.h"
#include "call.h"
#include "team.h"

using namespace outrider;

namespace {

template <class T>
void rms_norm(Team& team, const T* x, int64_t num_rows, int64_t width, const float* weight, float epsilon,
              bool rounds_once, T* y) {
  constexpr int64_t kElements = 16384;  // with fewer, waking other members is not worthwhile
  const int64_t at_once = std::max<int64_t>(1, kElements / width);
  team.share((num_rows + at_once - 1) / at_once, [&](int64_t unit, int) {
    for (int64_t row = unit * at_once; row < std::min(num_rows, (unit + 1) * at_once); row++)
      rms_norm_row<T>(x + row * width, width, weight, epsilon, y + row * width, rounds_once);
  });
}

}  // namespace

OutriderStatus outrider_rms_norm(OutriderTeam* team, int32_t type, const void* x, int64_t num_rows, int64_t width,
                                 const float* weight, float epsilon, int32_t rounds_once, void* y) {
  return call([&] {
    Team& threads = *reinterpret_cast<Team*>(team);
    if (type == OUTRIDER_BFLOAT16) {
      rms_norm(threads, static_cast<const BFloat16*>(x), num_rows, width, weight, epsilon, rounds_once != 0,
               static_cast<BFloat16*>(y));
    } else {
      rms_norm(threads, static_cast<const float*>(x), num_rows, width, weight, epsilon, rounds_once != 0,
               static_cast<float*>(y));
    }
  });
}
