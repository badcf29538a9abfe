#include <memory>
#include <vector>

#include "argmax.h"
#include "call.h"
#include "filters.h"
#include "penalties.h"
#include "race.h"
#include "sampler_api.h"
#include "team.h"
#include "workspace.h"

using namespace outrider;

namespace {

// One thread's scratch memory for one row. A sampler allocates it before a team begins, because
// threads of a team must not allocate memory.
struct Scratch {
  Buffer edited;            // [vocab_size] float: a row that steps 1 to 4 change
  Buffer assumed;           // [maximum number of assumed tokens] float: their logits before penalties
  Buffer selected;          // [num_blocks * 64] float: values that top_k selects from
  Buffer maxima;            // [num_blocks] float
  Buffer first, log_first;  // [num_blocks, rounded up to vectors] float
  Buffer winner_offsets;    // the same, uint8_t
  float tail[kBlock];

  BlockArrivals arrivals() const { return {first.get<float>(), log_first.get<float>(), winner_offsets.get<uint8_t>()}; }
};

// One row of a step.
struct Decision {
  const OutriderSampling& sampling;
  const float* logits;
  const uint32_t* mask;  // null: all tokens can be drawn
  Assumed assumed;
  int64_t position;
};

}  // namespace

struct OutriderSampler {
  Team& team;
  int64_t vocab_size;
  int64_t num_ids;
  std::vector<int64_t> holes;
  std::vector<Scratch> scratch;  // by thread
  Buffer decisions;              // [number of rows of the largest step so far]

  int64_t num_blocks() const { return (num_ids + kBlock - 1) / kBlock; }
};

namespace {

// Applies steps 5 to 7 to a row that is not greedy.
int64_t draw(const OutriderSampling& sampling, const LogitRow& row, const RaceKey& key, Scratch& scratch) {
  const BlockArrivals arrivals = scratch.arrivals();
  for (int64_t b = 0; b < row.num_blocks; b += kWidth)
    draw_first_arrivals(key, b, {arrivals.first + b, arrivals.log_first + b, arrivals.winner_offsets + b});
  const Limit kept = first_limit(row, sampling, scratch.selected.get<float>());
  TopP top_p(row, sampling, kept);
  // If top_p removes the winner, it also removes all tokens after it in the order, and the race
  // runs again among the tokens before it. This ends, because the first token is always kept.
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
  const bool changes = changes_row(sampling, decision.mask, decision.assumed);
  if (sampling.is_greedy && !changes) {
    // Holes alone need no copy of the row: banning them has no effect if the winner is another id.
    const int64_t id = first_argmax(logits, sampler.num_ids);
    if (!holes.contain(id)) return id;
  }
  if (changes || holes.num > 0) {
    float* const edited = scratch.edited.get<float>();
    std::copy(logits, logits + sampler.vocab_size, edited);
    edit_row(sampling, holes, decision.mask, decision.assumed, sampler.vocab_size, edited,
             scratch.assumed.get<float>());
    logits = edited;
  }
  if (sampling.is_greedy) return first_argmax(logits, sampler.num_ids);

  float* const maxima = scratch.maxima.get<float>();
  LogitRow row{logits, scratch.tail, maxima, sampler.num_ids, sampler.num_blocks(), sampling.temperature, -kInfinity};
  fill_tail(logits, sampler.num_ids, scratch.tail);
  Ints is_nan{};
  for (int64_t b = 0; b < row.num_blocks; b++) {
    // Rounded division is monotone, so the largest quotient is the quotient of the largest.
    maxima[b] = largest_of_lanes(largest_of_block(row.block(b), is_nan)) / sampling.temperature;
    row.largest = std::max(row.largest, maxima[b]);
  }
  if (is_any(is_nan)) return first_nan(logits, sampler.num_ids);
  if (row.largest == -kInfinity) return 0;  // all tokens are banned
  const RaceKey key{sampling.seed, sampling.sample, static_cast<uint32_t>(decision.position)};
  return draw(sampling, row, key, scratch);
}

}  // namespace

OutriderSampler* outrider_sampler_create(OutriderTeam* team, int64_t vocab_size, int64_t num_ids, const int64_t* holes,
                                         int64_t num_holes) {
  std::unique_ptr<OutriderSampler> sampler;
  const int32_t status = call([&] {
    Team& threads = *reinterpret_cast<Team*>(team);
    sampler.reset(new OutriderSampler{threads, vocab_size, num_ids, {holes, holes + num_holes}, {}, {}});
    const int64_t num_blocks = sampler->num_blocks(), padded = (num_blocks + kWidth - 1) / kWidth * kWidth;
    sampler->scratch.resize(threads.size());
    for (Scratch& scratch : sampler->scratch) {
      scratch.edited.of<float>(vocab_size);
      scratch.selected.of<float>(num_blocks * kBlock);
      scratch.maxima.of<float>(num_blocks);
      scratch.first.of<float>(padded);
      scratch.log_first.of<float>(padded);
      scratch.winner_offsets.of<uint8_t>(padded);
    }
  });
  return status == 0 ? sampler.release() : nullptr;
}

void outrider_sampler_free(OutriderSampler* sampler) { delete sampler; }

OutriderStatus outrider_sample(OutriderSampler* sampler, const float* logits, int64_t row_stride,
                               const OutriderSampleRows* sequences, int64_t num_sequences, const int64_t* assumed_ids,
                               int64_t* token_ids) {
  return call([&] {
    int64_t num_rows = 0, most_assumed = 0;
    for (const OutriderSampleRows* rows = sequences; rows != sequences + num_sequences; rows++) {
      num_rows += rows->num_rows;
      most_assumed = std::max(most_assumed, rows->num_assumed + rows->num_rows - 1);
    }
    for (Scratch& scratch : sampler->scratch) scratch.assumed.of<float>(most_assumed);
    Decision* const decisions = sampler->decisions.of<Decision>(num_rows);
    int64_t row = 0;
    for (const OutriderSampleRows* rows = sequences; rows != sequences + num_sequences; rows++) {
      for (int64_t j = 0; j < rows->num_rows; j++, row++) {
        const Assumed assumed{assumed_ids + rows->assumed_start, rows->num_assumed + j};
        const uint32_t* const mask = rows->masks == nullptr ? nullptr : rows->masks + j * rows->num_mask_words;
        new (decisions + row) Decision{*rows->sampling, logits + row * row_stride, mask, assumed, rows->position + j};
      }
    }
    sampler->team.share(num_rows, [&](int64_t index, int thread) {
      token_ids[index] = decide(*sampler, decisions[index], sampler->scratch[thread]);
    });
  });
}
