// Rotary position embedding (Su et al., 2021), which pairs the halves of a head.
#pragma once

#include "numbers.h"

namespace outrider {

// Rotates the first `rotary_dim` values of a head, an even number. `from` and `to` may be the same; cosines and sines
// [rotary_dim / 2] are those of the position. Results are rounded to T, then to `to`'s type.
template <class T, class From, class To>
static inline void rotate_head(const From* from, int64_t rotary_dim, const float* cosines, const float* sines, To* to) {
  const T* type = nullptr;
  const int64_t half = rotary_dim / 2;
  int64_t i = 0;
  for (; i + kWidth <= half; i += kWidth) {
    const Floats low = load_wide(from + i), high = load_wide(from + half + i);
    const Floats cosine = load(cosines + i), sine = load(sines + i);
    store_exact(to + i, rounded_to(low * cosine - high * sine, type));
    store_exact(to + half + i, rounded_to(high * cosine + low * sine, type));
  }
  for (; i < half; i++) {  // a part of a vector remains if rotary_dim is not a multiple of 2 * kWidth
    const float low = widen(from[i]), high = widen(from[half + i]);
    const Floats first = rounded_to(broadcast(low * cosines[i] - high * sines[i]), type);
    const Floats second = rounded_to(broadcast(high * cosines[i] + low * sines[i]), type);
    store_one(to + i, first[0]);
    store_one(to + half + i, second[0]);
  }
}

}  // namespace outrider
