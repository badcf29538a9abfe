// A row of logits, cut in blocks of 64 ids with the largest of each.
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

// The largest of 64 values lane by lane; lanes of `is_nan` are set where one is no number.
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

// The last block of a row, filled up with -infinity.
static inline void fill_tail(const float* logits, int64_t num_ids, float* tail) {
  const int64_t start = num_ids / kBlock * kBlock;
  std::fill(tail, tail + kBlock, -kInfinity);
  std::copy(logits + start, logits + num_ids, tail);
}

// One row for blockwise work. Every value is divided by the temperature where it comes out,
// so that everything downstream sees the distribution after step 5 of the contract. Each
// value depends on its own logit and the temperature alone.
struct LogitRow {
  const float* logits;   // [num_ids]
  const float* tail;     // [64] the last block filled up with -infinity, unless it is whole
  const float* maxima;   // [num_blocks] each block's largest value
  int64_t num_ids;
  int64_t num_blocks;
  float temperature;
  float largest;

  float value(int64_t id) const { return logits[id] / temperature; }

  // 64 logits, before the temperature.
  const float* block(int64_t b) const { return (b + 1) * kBlock <= num_ids ? logits + b * kBlock : tail; }
};

// The last token that is kept in the order of falling value and among equals of rising id.
struct Limit {
  float value;
  int64_t last_id;

  bool keeps(float other, int64_t id) const { return other > value || (other == value && id <= last_id); }

  // Lanes of `values`, which belong to ids from `first_id` on.
  Ints keeps(Floats values, int64_t first_id) const {
    const int64_t last_lane = std::clamp<int64_t>(last_id - first_id, -1, kWidth);
    const Ints is_low = reinterpret_cast<Ints>(lane_indices()) <= static_cast<int32_t>(last_lane);
    return (values > value) | ((values == value) & is_low);
  }
};

constexpr Limit kNoLimit{-kInfinity, std::numeric_limits<int64_t>::max()};

}  // namespace outrider
