// Decisions of single rows, for other kernels.
#pragma once

#include <vector>

#include "arrivals.h"
#include "penalties.h"
#include "team.h"
#include "workspace.h"

namespace outrider {

// One thread's scratch memory for one row. A sampler allocates it before a team begins, because
// threads of a team must not allocate memory.
struct SamplerScratch {
  Buffer edited;            // [width] float: a row that steps 1 to 4 change
  Buffer assumed;           // [maximum number of assumed tokens] float: their logits before penalties
  Buffer selected;          // [num_blocks * 64] float: values that top_k selects from
  Buffer bounds;            // the same, of scores in a row that has the logits of some ids only
  Buffer maxima;            // [num_blocks] float
  Buffer first, log_first;  // [blocks of the vocabulary, rounded up to vectors] float
  Buffer winner_offsets;    // the same, uint8_t
  float tail[kBlock];

  BlockArrivals arrivals() const { return {first.get<float>(), log_first.get<float>(), winner_offsets.get<uint8_t>()}; }
};

}  // namespace outrider

struct OutriderSampler {
  outrider::Team& team;
  int64_t vocab_size;
  int64_t width;                // of a row of logits
  int64_t num_ids;              // logits from this place on are of padding
  std::vector<int64_t> holes;   // places
  std::vector<int32_t> ids;     // [num_blocks * 64], ascending, if a row has the logits of some ids only
  std::vector<int32_t> places;  // [vocab_size], see LogitsOfIds; empty if a row has all logits
  std::vector<int64_t> columns;  // [width], the place of each of the target ids as they were given, if not ascending
  std::vector<outrider::SamplerScratch> scratch;  // by thread
  outrider::Buffer decisions;                     // [number of rows of the largest step so far]

  int64_t num_blocks() const { return (num_ids + outrider::kBlock - 1) / outrider::kBlock; }
};

namespace outrider {

// One row of a step.
struct Decision {
  const OutriderSampling& sampling;
  const uint32_t* mask;  // null: all tokens can be drawn
  Assumed assumed;
  int64_t position;
};

// Decides a row [width], which is modified: writes the ids of the winner and of num_races - 1 runners-up, each the winner
// of the race without those before it.
void decide_in_place(const OutriderSampler& sampler, const Decision& decision, float* logits, int64_t num_races,
                     SamplerScratch& scratch, int64_t* ids);

}  // namespace outrider
