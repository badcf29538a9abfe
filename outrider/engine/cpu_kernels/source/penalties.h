// Steps 1 to 4 of the contract's SamplingParams, on a copy of the row; ../../sampler/penalties.py
// does the same, to the bit.
#pragma once

#include "sampler_api.h"

namespace outrider {

struct Holes {  // unknown ids below the first of the padding
  const int64_t* ids;
  int64_t num;
};

// Tokens that count as generated besides the committed ones.
struct Assumed {
  const int64_t* ids;
  int64_t num;
};

// Whether `edit_row` would change anything.
bool changes_row(const OutriderSampling& sampling, const Holes& holes, const Assumed& assumed);

// On `logits` [vocab_size], in place.
void edit_row(const OutriderSampling& sampling, const Holes& holes, const Assumed& assumed, int64_t vocab_size,
              float* logits);

}  // namespace outrider
