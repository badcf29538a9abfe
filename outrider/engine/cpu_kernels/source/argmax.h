// The argmax of a row of logits.
#pragma once

#include <cstdint>

namespace outrider {

// Returns the id of the largest value, the lowest id among equals; the first NaN's id if there
// is a NaN, and 0 if all values are -infinity.
int64_t first_argmax(const float* logits, int64_t num_ids);

// Returns the id of the first NaN; num_ids if there is none.
int64_t first_nan(const float* logits, int64_t num_ids);

}  // namespace outrider
