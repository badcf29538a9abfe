// The sampler's part of the C interface; the manners are those of api.h.
#pragma once

#include "api.h"

struct OutriderSampler;  // one vocabulary, and scratch for each thread of a team

// ---- sampler.cpp: steps 1 to 7 of the contract's SamplingParams

// Ids from num_ids on take no part, nor do `holes`, which are below it and rise. The team must
// outlive the sampler.
OUTRIDER_API OutriderSampler* outrider_sampler_create(OutriderTeam* team, int64_t vocab_size, int64_t num_ids,
                                                      const int64_t* holes, int64_t num_holes);
OUTRIDER_API void outrider_sampler_free(OutriderSampler* sampler);

// One sample's parameters, and its counts as far as tokens are committed. Tables belong to the
// caller; those of ids hold each id once, all of them in [0, vocab_size).
struct OutriderSampling {
  uint64_t seed;
  double top_p;                 // 1: off
  int64_t top_k;                // 0: off
  int64_t num_generated;        // committed
  int64_t min_tokens;           // stop_ids cannot be drawn before
  const int64_t* stop_ids;      // [num_stop_ids]
  int64_t num_stop_ids;
  const int64_t* bias_ids;      // [num_biases]
  const float* biases;          // [num_biases]
  int64_t num_biases;
  const int64_t* counted_ids;   // [num_counted] of prompt and generated tokens
  const float* counts;          // [num_counted] how often each was generated
  int64_t num_counted;
  uint32_t sample;
  float temperature;            // above 0; not looked at where is_greedy
  float log_min_p;              // -infinity: off
  float repetition_penalty;     // 1: off
  float frequency_penalty;
  float presence_penalty;
  int32_t has_penalties;        // 0: neither the three above nor the counts are looked at
  int32_t is_greedy;
};

// A sequence's share of a step: num_rows consecutive rows of logits. Row j decides position
// + j, and num_assumed + j ids from assumed_ids[assumed_start] on count as generated too;
// which they are matters only to penalties, otherwise they need not be there. Of the tokens only
// those can be drawn whose bit in row j of `masks` is set, from the lowest of each word on.
struct OutriderSampleRows {
  const OutriderSampling* sampling;
  const uint32_t* masks;  // [num_rows, num_mask_words], or null: all can be drawn
  int64_t num_mask_words;  // at least one for each 32 of vocab_size
  int64_t assumed_start;
  int64_t num_assumed;
  int64_t num_rows;
  int64_t position;
};

// Decides every row of `logits` [rows of all sequences, vocab_size], which it leaves as it is.
OUTRIDER_API OutriderStatus outrider_sample(OutriderSampler* sampler, const float* logits, int64_t row_stride,
                                            const OutriderSampleRows* sequences, int64_t num_sequences,
                                            const int64_t* assumed_ids, int64_t* token_ids);

// ---- What decisions are made of, for whoever compares implementations bit by bit.

// All arrivals of one decision.
OUTRIDER_API OutriderStatus outrider_arrivals(uint64_t seed, uint32_t sample, uint32_t position, int64_t num_ids,
                                              float* arrivals);

// log of each value, which must be positive and normal.
OUTRIDER_API OutriderStatus outrider_logarithms(const float* values, int64_t num, float* logarithms);

// What values weigh beside the largest of their row in top_p's sums.
OUTRIDER_API OutriderStatus outrider_masses(const float* values, int64_t num, float largest, int64_t* masses);
