#include "penalties.h"

#include <limits>

namespace outrider {

namespace {

constexpr float kOut = -std::numeric_limits<float>::infinity();

bool bans_stops(const OutriderSampling& sampling, const Assumed& assumed) {
  return sampling.num_stop_ids > 0 && sampling.num_generated + assumed.num < sampling.min_tokens;
}

float penalised(const OutriderSampling& sampling, float logit, float count) {
  if (sampling.repetition_penalty != 1.0f)
    logit = logit > 0.0f ? logit / sampling.repetition_penalty : logit * sampling.repetition_penalty;
  logit = logit - sampling.frequency_penalty * count;
  return logit - sampling.presence_penalty * (count > 0.0f ? 1.0f : 0.0f);
}

float committed_count(const OutriderSampling& sampling, int64_t id) {
  const int64_t* const end = sampling.counted_ids + sampling.num_counted;
  const int64_t* const found = std::find(sampling.counted_ids, end, id);
  return found == end ? 0.0f : sampling.counts[found - sampling.counted_ids];
}

// Applies penalties. `before` has room for one value per assumed token.
void penalise(const OutriderSampling& sampling, const Assumed& assumed, const LogitsOfIds& row, float* before) {
  for (int64_t i = 0; i < assumed.num; i++)
    if (const float* logit = row.find(assumed.ids[i])) before[i] = *logit;
  for (int64_t i = 0; i < sampling.num_counted; i++)
    if (float* logit = row.find(sampling.counted_ids[i])) *logit = penalised(sampling, *logit, sampling.counts[i]);
  // Counts of assumed tokens are larger than in the table. There are few of them, so they are computed again.
  for (int64_t i = 0; i < assumed.num; i++) {
    float* const logit = row.find(assumed.ids[i]);
    if (logit == nullptr) continue;
    const auto times = std::count(assumed.ids, assumed.ids + assumed.num, assumed.ids[i]);
    const float count = committed_count(sampling, assumed.ids[i]) + static_cast<float>(times);
    *logit = penalised(sampling, before[i], count);
  }
}

void apply_mask(const uint32_t* mask, const LogitsOfIds& row) {
  for (int64_t begin = 0; begin < row.vocab_size; begin += 32) {
    const uint32_t word = mask[begin / 32];
    if (word == ~uint32_t{0}) continue;
    const int64_t num = std::min<int64_t>(32, row.vocab_size - begin);
    for (int64_t i = 0; i < num; i++) {
      float* const logit = row.find(begin + i);
      if (logit != nullptr) *logit = word >> i & 1 ? *logit : kOut;
    }
  }
}

}  // namespace

bool changes_row(const OutriderSampling& sampling, const uint32_t* mask, const Assumed& assumed) {
  return mask != nullptr || sampling.num_biases > 0 || sampling.has_penalties || bans_stops(sampling, assumed);
}

void edit_row(const OutriderSampling& sampling, const Holes& holes, const uint32_t* mask, const Assumed& assumed,
              const LogitsOfIds& row, float* scratch) {
  for (int64_t i = 0; i < holes.num; i++) row.logits[holes.places[i]] = kOut;
  if (mask != nullptr) apply_mask(mask, row);
  if (bans_stops(sampling, assumed))
    for (int64_t i = 0; i < sampling.num_stop_ids; i++)
      if (float* logit = row.find(sampling.stop_ids[i])) *logit = kOut;
  for (int64_t i = 0; i < sampling.num_biases; i++)
    if (float* logit = row.find(sampling.bias_ids[i])) *logit += sampling.biases[i];
  if (sampling.has_penalties) penalise(sampling, assumed, row, scratch);
}

}  // namespace outrider
