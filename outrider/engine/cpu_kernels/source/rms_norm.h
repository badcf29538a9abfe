// Root mean square normalisation of one row (Zhang and Sennrich, 2019).
#pragma once

#include <cmath>

#include "numbers.h"

namespace outrider {

// Computes to [width] = x / sqrt(mean(x^2) + epsilon) * weight. It rounds to T before and after multiplying by the
// weight, as Llama does, or only after it, as Gemma does.
template <class T, class From, class To>
static inline void rms_norm_row(const From* x, int64_t width, const float* weight, float epsilon, To* to,
                                bool rounds_once = false) {
  const T* type = nullptr;
  Floats squares{};
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) {
    const Floats value = load_wide(x + i);
    squares = multiply_add(value, value, squares);
  }
  float sum = sum_of_lanes(squares);
  for (int64_t j = i; j < width; j++) sum += widen(x[j]) * widen(x[j]);
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(width) + epsilon);
  for (i = 0; i + kWidth <= width; i += kWidth) {
    const Floats value = load_wide(x + i) * factor;
    const Floats scaled = rounded_to((rounds_once ? value : rounded_to(value, type)) * load(weight + i), type);
    store_exact(to + i, scaled);
  }
  for (; i < width; i++) {
    const Floats value = broadcast(widen(x[i]) * factor);
    const Floats scaled = rounded_to((rounds_once ? value : rounded_to(value, type)) * weight[i], type);
    store_one(to + i, scaled[0]);
  }
}

}  // namespace outrider
