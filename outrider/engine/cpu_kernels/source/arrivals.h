// Arrival times: the race that decides a position, determined by (seed, sample, position).
// ../../sampler/arrivals.py explains them and computes the same bits.
#pragma once

#include "elementary.h"
#include "philox.h"

namespace outrider {

constexpr int64_t kBlock = 64;  // ids in a block
constexpr int64_t kGroup = 4;   // ids that share one counter of purpose 1

constexpr uint32_t kBlockPurpose = 0;
constexpr uint32_t kTokenPurpose = 1;

// The key that fully determines the arrivals of one decision.
struct RaceKey {
  uint64_t seed;
  uint32_t sample;
  uint32_t position;
};

// The first arrival in each block, for one decision.
struct BlockArrivals {
  float* first;             // e_b
  float* log_first;         // log e_b
  uint8_t* winner_offsets;  // i_b - 64 b
};

// Returns the Exp(1) variable of each word: -log1p(-u). u is capped below 1: without the cap
// 128 of the 2^32 words would give infinity. Small values, which win races, keep full
// relative precision.
static inline Floats unit_exponential(Words words) {
  const Floats largest = broadcast(0x1.fffffep-1f);
  Floats u = (__builtin_convertvector(words, Floats) + 0.5f) * 0x1p-32f;
  u = u < largest ? u : largest;
  const Floats rounded = 1.0f - u;
  return -logarithm_of_sum(rounded, (1.0f - rounded) - u);
}

static inline Words lane_indices() {
  Words lanes;
  for (int i = 0; i < kWidth; i++) lanes[i] = static_cast<uint32_t>(i);
  return lanes;
}

// Draws the first arrivals of kWidth blocks from `first_block` on, to the beginning of the arrays.
static inline void draw_first_arrivals(const RaceKey& key, int64_t first_block, const BlockArrivals& arrivals) {
  const Words counters = lane_indices() + static_cast<uint32_t>(first_block);
  const PhiloxWords words = philox4x32(counters, key.position, key.sample, kBlockPurpose, key.seed);
  const Floats first = unit_exponential(words.w0) * (1.0f / kBlock);
  store(arrivals.first, first);
  store(arrivals.log_first, logarithm(first));
  for (int i = 0; i < kWidth; i++) arrivals.winner_offsets[i] = static_cast<uint8_t>(words.w1[i] % kBlock);
}

// Computes the arrivals of a block's 64 ids.
static inline void draw_arrivals(const RaceKey& key, int64_t block, float first, int64_t winner_offset,
                                 float* arrivals) {
  uint32_t words[kBlock];
  for (int64_t g = 0; g < kBlock / kGroup; g += kWidth) {
    const Words counters = lane_indices() + static_cast<uint32_t>(block * (kBlock / kGroup) + g);
    const PhiloxWords drawn = philox4x32(counters, key.position, key.sample, kTokenPurpose, key.seed);
    for (int i = 0; i < kWidth; i++) {
      uint32_t* const group = words + (g + i) * kGroup;
      group[0] = drawn.w0[i];
      group[1] = drawn.w1[i];
      group[2] = drawn.w2[i];
      group[3] = drawn.w3[i];
    }
  }
  for (int64_t i = 0; i < kBlock; i += kWidth) {
    store(arrivals + i, first + unit_exponential(*reinterpret_cast<const WordsInMemory*>(words + i)));
  }
  arrivals[winner_offset] = first;
}

}  // namespace outrider
