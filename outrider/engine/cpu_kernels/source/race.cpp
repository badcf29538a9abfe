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

// The ids of kWidth logits, and the arrivals of the blocks in which they are.
struct SomeIds {
  Words ids;
  Floats first, log_first;
  Ints are_winners;  // of their blocks

  SomeIds(const int32_t* from, const BlockArrivals& arrivals) {
    for (int i = 0; i < kWidth; i++) {
      const int32_t block = from[i] / kBlock;
      ids[i] = static_cast<uint32_t>(from[i]);
      first[i] = arrivals.first[block];
      log_first[i] = arrivals.log_first[block];
      are_winners[i] = -static_cast<int32_t>(arrivals.winner_offsets[block] == from[i] % kBlock);
    }
  }

  // Computes the ids' arrivals, as `draw_arrivals` does for a block.
  Floats draw(const RaceKey& key) const {
    const PhiloxWords drawn =
        philox4x32(ids / static_cast<uint32_t>(kGroup), key.position, key.sample, kTokenPurpose, key.seed);
    const Ints at = reinterpret_cast<Ints>(ids % static_cast<uint32_t>(kGroup));
    const Words words = at < 2 ? (at == 0 ? drawn.w0 : drawn.w1) : (at == 2 ? drawn.w2 : drawn.w3);
    return are_winners ? first : first + unit_exponential(words);
  }
};

}  // namespace

int64_t run_race_of_ids(const LogitRow& row, const int32_t* ids, const RaceKey& key, const BlockArrivals& arrivals,
                        const Limit& limit, float* bounds) {
  const auto values_at = [&](int64_t place) {
    const Floats values = load(row.block(place / kBlock) + place % kBlock) / row.temperature;
    return limit.keeps(values, place) ? values : broadcast(-kInfinity);
  };
  const auto scores_at = [&](int64_t place) {
    return values_at(place) - logarithm(SomeIds(ids + place, arrivals).draw(key));
  };
  // No token arrives before the first one of its block.
  const int64_t end = row.num_blocks * kBlock;
  int64_t best_place = 0;
  float best_bound = -kInfinity;
  for (int64_t place = 0; place < end; place += kWidth) {
    const Floats bound = values_at(place) - SomeIds(ids + place, arrivals).log_first;
    store(bounds + place, bound);
    if (!is_any(bound > best_bound)) continue;
    best_bound = largest_of_lanes(bound);
    best_place = place;
  }
  float to_beat = with_slack(largest_of_lanes(scores_at(best_place)));
  float best_score = -kInfinity;
  int64_t best = 0;
  for (int64_t place = 0; place < end; place += kWidth) {  // in ascending order: among equal scores the lowest id wins
    if (!is_any(load(bounds + place) >= to_beat)) continue;
    float scores[kWidth];
    store(scores, scores_at(place));
    const auto largest = std::max_element(scores, scores + kWidth);
    if (*largest <= best_score) continue;
    best_score = *largest;
    best = place + (largest - scores);
    to_beat = std::max(to_beat, with_slack(best_score));
  }
  return best;
}

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
