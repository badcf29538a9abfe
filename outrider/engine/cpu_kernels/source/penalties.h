// Steps 1 to 4 of the contract's SamplingParams, on a copy of the row. ../../sampler/edits.py
// computes the same bits.
#pragma once

#include <algorithm>

#include "sampler_api.h"

namespace outrider {

// A row of logits: of the whole vocabulary or, for a drafter head, of some of its ids.
struct LogitsOfIds {
  float* logits;
  int64_t vocab_size;
  const int32_t* places;  // [vocab_size], each id's place among the logits, or -1; null: each id is its own place

  // Returns the logit of an id of the vocabulary, or null.
  float* find(int64_t id) const {
    if (id < 0 || id >= vocab_size) return nullptr;
    if (places == nullptr) return logits + id;
    return places[id] < 0 ? nullptr : logits + places[id];
  }
};

struct Holes {  // places of unknown ids before the padding, ascending
  const int64_t* places;
  int64_t num;

  bool contain(int64_t place) const { return std::binary_search(places, places + num, place); }
};

// Tokens that count as generated in addition to the committed ones.
struct Assumed {
  const int64_t* ids;
  int64_t num;
};

// Returns whether `edit_row` would change anything except holes. `mask`: one row's, as in OutriderSampleRows.
bool changes_row(const OutriderSampling& sampling, const uint32_t* mask, const Assumed& assumed);

// Edits a row in place. `scratch` has room for one value per assumed token; it is passed because a thread of a team
// must not allocate memory.
void edit_row(const OutriderSampling& sampling, const Holes& holes, const uint32_t* mask, const Assumed& assumed,
              const LogitsOfIds& row, float* scratch);

}  // namespace outrider
