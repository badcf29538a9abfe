// A row of logits in blocks of 64 ids, with the largest value of each block.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "arrivals.h"

namespace outrider {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

static inline bool is_any(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(mask)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(mask)) != 0;
#else
  int32_t any = 0;
  for (int i = 0; i < kWidth; i++) any |= mask[i];
  return any != 0;
#endif
}

// Returns the lane-wise largest of 64 values, and sets the lanes of `is_nan` that have a NaN.
static inline Floats largest_of_block(const float* values, Ints& is_nan) {
  Floats largest = load(values);
  is_nan |= largest != largest;
  for (int64_t i = kWidth; i < kBlock; i += kWidth) {
    const Floats next = load(values + i);
    largest = larger(largest, next);
    is_nan |= next != next;
  }
  return largest;
}

// Copies the last block of a row, padded with -infinity.
static inline void fill_tail(const float* logits, int64_t num_ids, float* tail) {
  const int64_t start = num_ids / kBlock * kBlock;
  std::fill(tail, tail + kBlock, -kInfinity);
  std::copy(logits + start, logits + num_ids, tail);
}

// One row, for access by blocks. Values are logits divided by the temperature when they are
// read, so that all later steps use the distribution after step 5 of the contract. A value
// depends only on its own logit and the temperature.
struct LogitRow {
  const float* logits;   // [num_ids]
  const float* tail;     // [64], the last block padded with -infinity, unless it is complete
  const float* maxima;   // [num_blocks], each block's largest value
  int64_t num_ids;
  int64_t num_blocks;
  float temperature;
  float largest;

  float value(int64_t id) const { return logits[id] / temperature; }

  // Returns a block's 64 logits, not yet divided by the temperature.
  const float* block(int64_t b) const { return (b + 1) * kBlock <= num_ids ? logits + b * kBlock : tail; }
};

// The last token that is kept, in the order of descending value and ascending id among equals.
struct Limit {
  float value;
  int64_t last_id;

  bool keeps(float other, int64_t id) const { return other > value || (other == value && id <= last_id); }

  // Returns which lanes of `values`, which belong to ids from `first_id` on, are kept.
  Ints keeps(Floats values, int64_t first_id) const {
    const int64_t last_lane = std::clamp<int64_t>(last_id - first_id, -1, kWidth);
    const Ints is_low = reinterpret_cast<Ints>(lane_indices()) <= static_cast<int32_t>(last_lane);
    return (values > value) | ((values == value) & is_low);
  }
};

constexpr Limit kNoLimit{-kInfinity, std::numeric_limits<int64_t>::max()};

}  // namespace outrider
