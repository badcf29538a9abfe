// Steps 1 to 4 of the contract's SamplingParams, on a copy of the row. ../../sampler/edits.py
// computes the same bits.
#pragma once

#include <algorithm>

#include "sampler_api.h"

namespace outrider {

struct Holes {  // unknown ids below the padding, ascending
  const int64_t* ids;
  int64_t num;

  bool contain(int64_t id) const { return std::binary_search(ids, ids + num, id); }
};

// Tokens that count as generated in addition to the committed ones.
struct Assumed {
  const int64_t* ids;
  int64_t num;
};

// Returns whether `edit_row` would change anything except holes. `mask`: one row's, as in OutriderSampleRows.
bool changes_row(const OutriderSampling& sampling, const uint32_t* mask, const Assumed& assumed);

// Edits `logits` [vocab_size] in place. `scratch` has room for one value per assumed token; it is
// passed because a thread of a team must not allocate memory.
void edit_row(const OutriderSampling& sampling, const Holes& holes, const uint32_t* mask, const Assumed& assumed,
              int64_t vocab_size, float* logits, float* scratch);

}  // namespace outrider
