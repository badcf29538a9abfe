// The sampler's part of the C interface, with the same conventions as api.h.
#pragma once

#include "api.h"

struct OutriderSampler;  // one vocabulary, and scratch memory for each thread of a team

// ---- sampler.cpp: steps 1 to 7 of the contract's SamplingParams

// Ids from num_ids on are never drawn, nor are `holes`, which are ascending and below num_ids.
// `target_ids` [num_target_ids]: different ids in any order, as of a drafter head. A row then has the logits of these ids
// only, by ascending id, and a decision is that for a row with -infinity for all other ids. Null: rows have all logits.
// The team must outlive the sampler.
OUTRIDER_API OutriderSampler* outrider_sampler_create(OutriderTeam* team, int64_t vocab_size, int64_t num_ids,
                                                      const int64_t* holes, int64_t num_holes,
                                                      const int64_t* target_ids, int64_t num_target_ids);
OUTRIDER_API void outrider_sampler_free(OutriderSampler* sampler);

// One sample's parameters, and the counts of its committed tokens. Arrays belong to the caller;
// each id occurs once in an array of ids, and is in [0, vocab_size).
struct OutriderSampling {
  uint64_t seed;
  double top_p;                 // 1: off
  int64_t top_k;                // 0: off
  int64_t num_generated;        // committed tokens
  int64_t min_tokens;           // stop_ids are banned until this many tokens are generated
  const int64_t* stop_ids;      // [num_stop_ids]
  int64_t num_stop_ids;
  const int64_t* bias_ids;      // [num_biases]
  const float* biases;          // [num_biases]
  int64_t num_biases;
  const int64_t* counted_ids;   // [num_counted], tokens of the prompt and generated ones
  const float* counts;          // [num_counted], how often each was generated
  int64_t num_counted;
  uint32_t sample;
  float temperature;            // above 0; ignored if is_greedy
  float log_min_p;              // -infinity: off
  float repetition_penalty;     // 1: off
  float frequency_penalty;
  float presence_penalty;
  int32_t has_penalties;        // 0: the three penalties above and the counts are ignored
  int32_t is_greedy;
};

// A sequence's share of a step: num_rows consecutive rows of logits. Row j decides the token at
// position + j, and num_assumed + j ids from assumed_ids[assumed_start] on count as generated,
// too. Only penalties read these ids, so they may be missing if there are none. A token can be
// drawn only if its bit in row j of `masks` is set, the lowest bit of a word first.
struct OutriderSampleRows {
  const OutriderSampling* sampling;
  const uint32_t* masks;  // [num_rows, num_mask_words]; null: all tokens can be drawn
  int64_t num_mask_words;  // at least one for every 32 ids of the vocabulary
  int64_t assumed_start;
  int64_t num_assumed;
  int64_t num_rows;
  int64_t position;
};

// Decides every row of `logits` [rows of all sequences, vocab_size or num_target_ids], which are not changed.
OUTRIDER_API OutriderStatus outrider_sample(OutriderSampler* sampler, const float* logits, int64_t row_stride,
                                            const OutriderSampleRows* sequences, int64_t num_sequences,
                                            const int64_t* assumed_ids, int64_t* token_ids);

// ---- draft.cpp: drafts several tokens of several paths with a drafter head, in one call

// A path after which the head drafts: first the token at `position`, then those after it.
struct OutriderPath {
  const OutriderSampling* sampling;
  const uint32_t* mask;         // of the first token, one row as in OutriderSampleRows; null: all tokens can be drawn
  const int64_t* assumed_ids;   // [num_assumed], tokens that count as generated, too
  int64_t num_assumed;
  int64_t position;
  int64_t num_races;            // 1: the winner; n: also n - 1 runners-up, the winners without those before them
  int64_t max_tokens;           // at least 1
  double reach;                 // the product of the path's confidences; 1 if it has no token
  double min_reach;             // the draft ends when this product is below `min_reach`, or with a stop token
  const int32_t* block_table;   // covers max_tokens - 1 rows after the batch's; not read if max_tokens is 1
};

// What was drafted: for each path, up to max_tokens tokens.
struct OutriderDrafts {
  int64_t max_tokens;           // of any path
  int64_t max_races;            // of any path
  int64_t* num_tokens;          // [num_paths]
  int64_t* token_ids;           // [num_paths, max_tokens, max_races]
  double* confidences;          // [num_paths, max_tokens], the head's largest probability at the path's temperature
  void* states;                 // [num_paths, max_tokens, hidden] of the decoder's type, from which each was decided
  float* logits;                // [num_paths, decoder->vocab_size], of the first tokens, by ascending id; or null
};

// Computes the forward of `batch` and decides a token after each of its logits rows, to which `paths` belong in order.
// Then feeds these tokens with the head's own states, decides the next ones, and so on. Tokens are those of one call for
// each token. `sampler` has the head's target ids.
OUTRIDER_API OutriderStatus outrider_draft(OutriderTeam* team, OutriderWorkspace* workspace,
                                           const OutriderDecoder* decoder, const OutriderBatch* batch,
                                           void* const* key_caches, void* const* value_caches,
                                           OutriderSampler* sampler, const OutriderPath* paths,
                                           const OutriderDrafts* drafts);

// ---- The steps of a decision, for tests that compare implementations bit by bit

// Computes all arrivals of one decision.
OUTRIDER_API OutriderStatus outrider_arrivals(uint64_t seed, uint32_t sample, uint32_t position, int64_t num_ids,
                                              float* arrivals);

// Computes the log of each value, which must be positive and normal.
OUTRIDER_API OutriderStatus outrider_logarithms(const float* values, int64_t num, float* logarithms);

// Computes each value's mass in top_p's sums: e^(value - largest) in steps of 2^-44.
OUTRIDER_API OutriderStatus outrider_masses(const float* values, int64_t num, float largest, int64_t* masses);
