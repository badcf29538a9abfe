#include <memory>
#include <new>
#include <vector>

#include "argmax.h"
#include "filters.h"
#include "penalties.h"
#include "race.h"
#include "sampler_api.h"
#include "team.h"

using namespace outrider;

namespace {

// What one thread needs for one row.
struct Scratch {
  std::vector<float> edited;            // [vocab_size] a row that steps 1 to 4 change
  std::vector<float> selected;          // [num_blocks * 64] values that top_k chooses from
  std::vector<float> maxima;            // [num_blocks]
  std::vector<float> first, log_first;  // [num_blocks, rounded up to vectors]
  std::vector<uint8_t> winner_offsets;  // likewise
  float tail[kBlock];
};

}  // namespace

struct OutriderSampler {
  Team* team;  // null: the caller's thread alone
  int64_t vocab_size;
  int64_t num_ids;
  std::vector<int64_t> holes;
  std::vector<Scratch> scratch;  // one for each thread

  int64_t num_blocks() const { return (num_ids + kBlock - 1) / kBlock; }
};

namespace {

// One row of a step.
struct Decision {
  const OutriderSampling& sampling;
  const float* logits;
  Assumed assumed;
  int64_t position;
};

// Steps 5 to 7 for a row that is not greedy.
int64_t draw(const OutriderSampling& sampling, const LogitRow& row, const RaceKey& key, Scratch& scratch) {
  const BlockArrivals arrivals{scratch.first.data(), scratch.log_first.data(), scratch.winner_offsets.data()};
  for (int64_t b = 0; b < row.num_blocks; b += kWidth)
    draw_first_arrivals(key, b, {arrivals.first + b, arrivals.log_first + b, arrivals.winner_offsets + b});
  const Limit kept = first_limit(row, sampling, scratch.selected.data());
  TopP top_p(row, sampling, kept);
  // Where top_p leaves out the winner, everything from it on is out as well, and the race is
  // run again among the tokens before it. The first token is always kept: this ends.
  for (Limit limit = kept;;) {
    const int64_t winner = run_race(row, key, arrivals, limit);
    if (sampling.top_p >= 1.0) return winner;
    limit = {row.value(winner), winner - 1};
    if (top_p.keeps_after(limit)) return winner;
  }
}

int64_t decide(const OutriderSampler& sampler, const Decision& decision, Scratch& scratch) {
  const OutriderSampling& sampling = decision.sampling;
  const Holes holes{sampler.holes.data(), static_cast<int64_t>(sampler.holes.size())};
  const float* logits = decision.logits;
  if (changes_row(sampling, holes, decision.assumed)) {
    std::copy(logits, logits + sampler.vocab_size, scratch.edited.data());
    edit_row(sampling, holes, decision.assumed, sampler.vocab_size, scratch.edited.data());
    logits = scratch.edited.data();
  }
  if (sampling.is_greedy) return first_of_largest(logits, sampler.num_ids);

  LogitRow row{logits, scratch.tail, scratch.maxima.data(), sampler.num_ids, sampler.num_blocks(),
               sampling.temperature, -kInfinity};
  fill_tail(logits, sampler.num_ids, scratch.tail);
  Ints is_nan{};
  for (int64_t b = 0; b < row.num_blocks; b++) {
    // Rounded division is monotone: the largest of quotients is the quotient of the largest.
    scratch.maxima[b] = largest_of_lanes(largest_of_block(row.block(b), is_nan)) / sampling.temperature;
    row.largest = std::max(row.largest, scratch.maxima[b]);
  }
  if (is_any(is_nan)) return first_nan(logits, sampler.num_ids);
  if (row.largest == -kInfinity) return 0;  // everything is out, and all alike
  const RaceKey key{sampling.seed, sampling.sample, static_cast<uint32_t>(decision.position)};
  return draw(sampling, row, key, scratch);
}

}  // namespace

OutriderSampler* outrider_sampler_create(OutriderTeam* team, int64_t vocab_size, int64_t num_ids, const int64_t* holes,
                                         int64_t num_holes) {
  try {
    std::unique_ptr<OutriderSampler> sampler(
        new OutriderSampler{reinterpret_cast<Team*>(team), vocab_size, num_ids, {holes, holes + num_holes}, {}});
    const auto width = static_cast<size_t>(vocab_size), num_blocks = static_cast<size_t>(sampler->num_blocks());
    const size_t padded = (num_blocks + kWidth - 1) / kWidth * kWidth;
    sampler->scratch.resize(sampler->team == nullptr ? 1 : sampler->team->size());
    for (Scratch& scratch : sampler->scratch) {
      scratch.edited.resize(width);
      scratch.selected.resize(num_blocks * kBlock);
      scratch.maxima.resize(num_blocks);
      scratch.first.resize(padded);
      scratch.log_first.resize(padded);
      scratch.winner_offsets.resize(padded);
    }
    return sampler.release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void outrider_sampler_free(OutriderSampler* sampler) { delete sampler; }

void outrider_sample(OutriderSampler* sampler, const float* logits, int64_t row_stride,
                     const OutriderSampleRows* sequences, int64_t num_sequences, const int64_t* assumed_ids,
                     int64_t* token_ids) {
  std::vector<Decision> decisions;
  for (const OutriderSampleRows* rows = sequences; rows != sequences + num_sequences; rows++) {
    for (int64_t j = 0; j < rows->num_rows; j++) {
      const float* const row = logits + static_cast<int64_t>(decisions.size()) * row_stride;
      const Assumed assumed{assumed_ids + rows->assumed_start, rows->num_assumed + j};
      decisions.push_back({*rows->sampling, row, assumed, rows->position + j});
    }
  }
  const auto decide_row = [&](int64_t row, int thread) {
    token_ids[row] = decide(*sampler, decisions[row], sampler->scratch[thread]);
  };
  const auto num_rows = static_cast<int64_t>(decisions.size());
  if (sampler->team != nullptr) return sampler->team->share(num_rows, decide_row);
  for (int64_t row = 0; row < num_rows; row++) decide_row(row, 0);
}
