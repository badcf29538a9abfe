// Steps 1 to 4 of the contract's SamplingParams, on a copy of the row; ../../sampler/penalties.py
// does the same, to the bit.
#pragma once

#include <algorithm>

#include "sampler_api.h"

namespace outrider {

struct Holes {  // unknown ids below the first of the padding, rising
  const int64_t* ids;
  int64_t num;

  bool contain(int64_t id) const { return std::binary_search(ids, ids + num, id); }
};

// Tokens that count as generated besides the committed ones.
struct Assumed {
  const int64_t* ids;
  int64_t num;
};

// Whether `edit_row` would change anything but holes. `mask` as in OutriderSampleRows, of one row.
bool changes_row(const OutriderSampling& sampling, const uint32_t* mask, const Assumed& assumed);

// On `logits` [vocab_size], in place. `scratch` has room for a value of each assumed token: a
// thread of a team must not run out of memory.
void edit_row(const OutriderSampling& sampling, const Holes& holes, const uint32_t* mask, const Assumed& assumed,
              int64_t vocab_size, float* logits, float* scratch);

}  // namespace outrider
