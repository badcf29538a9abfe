#include "race.h"

#include "call.h"
#include "sampler_api.h"

namespace outrider {

namespace {

// Returns a little less than a score, because float32 logarithms are not exactly monotone.
float with_slack(float score) { return score - (1e-5f + 1e-6f * std::min(std::fabs(score), 1e30f)); }

// Returns the best score of the blocks' winners, whose arrivals are known: the first score to beat.
float best_of_block_winners(const LogitRow& row, const BlockArrivals& arrivals, const Limit& limit) {
  float best = -kInfinity;
  for (int64_t b = 0; b < row.num_blocks; b++) {
    const int64_t id = b * kBlock + arrivals.winner_offsets[b];
    if (id >= row.num_ids) continue;
    const float value = row.value(id);
    if (limit.keeps(value, id)) best = std::max(best, value - arrivals.log_first[b]);
  }
  return best;
}

// Updates best_score and best_id if a token of the block has a better score.
void look_into_block(const LogitRow& row, const RaceKey& key, const BlockArrivals& arrivals, const Limit& limit,
                     int64_t b, float& best_score, int64_t& best_id) {
  alignas(64) float times[kBlock], scores[kBlock];
  draw_arrivals(key, b, arrivals.first[b], arrivals.winner_offsets[b], times);
  const float* const logits = row.block(b);
  Floats largest = broadcast(-kInfinity);
  for (int64_t i = 0; i < kBlock; i += kWidth) {
    const Floats values = load(logits + i) / row.temperature;
    Floats score = values - logarithm(load(times + i));
    score = limit.keeps(values, b * kBlock + i) ? score : broadcast(-kInfinity);
    store(scores + i, score);
    largest = larger(largest, score);
  }
  if (!is_any(largest > best_score)) return;
  best_score = largest_of_lanes(largest);
  best_id = b * kBlock + (std::find(scores, scores + kBlock, best_score) - scores);
}

}  // namespace

int64_t run_race(const LogitRow& row, const RaceKey& key, const BlockArrivals& arrivals, const Limit& limit) {
  float to_beat = with_slack(best_of_block_winners(row, arrivals, limit));
  float best_score = -kInfinity;
  int64_t best_id = 0;
  for (int64_t b = 0; b < row.num_blocks; b++) {  // in ascending order: among equal scores the lowest id wins
    if (row.maxima[b] - arrivals.log_first[b] >= to_beat && row.maxima[b] >= limit.value) {
      look_into_block(row, key, arrivals, limit, b, best_score, best_id);
      to_beat = std::max(to_beat, with_slack(best_score));
    }
  }
  return best_id;
}

}  // namespace outrider

using namespace outrider;

OutriderStatus outrider_arrivals(uint64_t seed, uint32_t sample, uint32_t position, int64_t num_ids, float* arrivals) {
  return call([&] {
    const RaceKey key{seed, sample, position};
    for (int64_t start = 0; start < num_ids; start += kWidth * kBlock) {
      float first[kWidth], log_first[kWidth];
      uint8_t winner_offsets[kWidth];
      draw_first_arrivals(key, start / kBlock, {first, log_first, winner_offsets});
      for (int64_t b = 0; b < kWidth && start + b * kBlock < num_ids; b++) {
        float times[kBlock];
        draw_arrivals(key, start / kBlock + b, first[b], winner_offsets[b], times);
        std::copy(times, times + std::min(kBlock, num_ids - start - b * kBlock), arrivals + start + b * kBlock);
      }
    }
  });
}

OutriderStatus outrider_logarithms(const float* values, int64_t num, float* logarithms) {
  return call([&] {
    for (int64_t i = 0; i < num; i++) logarithms[i] = logarithm(broadcast(values[i]))[0];
  });
}
