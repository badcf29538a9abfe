// The largest of a row.
#pragma once

#include <cstdint>

namespace outrider {

// The place of the largest, the lowest among equals; of the first NaN where there is one. 0
// where all are -infinity.
int64_t first_of_largest(const float* logits, int64_t num_ids);

// The place of the first NaN; num_ids where there is none.
int64_t first_nan(const float* logits, int64_t num_ids);

}  // namespace outrider
