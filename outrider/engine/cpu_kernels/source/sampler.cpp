#include <memory>
#include <numeric>

#include "argmax.h"
#include "call.h"
#include "filters.h"
#include "race.h"
#include "sampler.h"
#include "sampler_api.h"

namespace outrider {
namespace {

void draw_arrivals_of_blocks(const OutriderSampler& sampler, const RaceKey& key, SamplerScratch& scratch) {
  const BlockArrivals arrivals = scratch.arrivals();
  const int64_t num_ids = sampler.ids.empty() ? sampler.num_ids : sampler.ids[sampler.num_ids - 1] + 1;
  for (int64_t b = 0; b * kBlock < num_ids; b += kWidth)
    draw_first_arrivals(key, b, {arrivals.first + b, arrivals.log_first + b, arrivals.winner_offsets + b});
}

// Applies steps 5 to 7 to an edited row. Returns the place of the token; 0 if all tokens are banned. `arrivals`: of the
// blocks, unless the row is greedy.
int64_t pick(const OutriderSampler& sampler, const OutriderSampling& sampling, const float* logits, const RaceKey& key,
             SamplerScratch& scratch) {
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
  if (row.largest == -kInfinity) return 0;
  const BlockArrivals arrivals = scratch.arrivals();
  const Limit kept = first_limit(row, sampling, scratch.selected.get<float>());
  TopP top_p(row, sampling, kept);
  // If top_p removes the winner, it also removes all tokens after it in the order, and the race
  // runs again among the tokens before it. This ends, because the first token is always kept.
  for (Limit limit = kept;;) {
    const int64_t winner = sampler.ids.empty() ? run_race(row, key, arrivals, limit)
                                               : run_race_of_ids(row, sampler.ids.data(), key, arrivals, limit,
                                                                 scratch.bounds.get<float>());
    if (sampling.top_p >= 1.0) return winner;
    limit = {row.value(winner), winner - 1};
    if (top_p.keeps_after(limit)) return winner;
  }
}

Holes holes_of(const OutriderSampler& sampler) {
  return {sampler.holes.data(), static_cast<int64_t>(sampler.holes.size())};
}

// Returns the id of a row's logit; 0 if the logit shows that no token is left.
int64_t id_at(const OutriderSampler& sampler, const float* logits, int64_t place) {
  if (logits[place] == -kInfinity) return 0;
  return sampler.ids.empty() ? place : sampler.ids[place];
}

// Decides a row that must not be modified. Returns the token's id.
int64_t decide(const OutriderSampler& sampler, const Decision& decision, const float* logits,
               SamplerScratch& scratch) {
  const OutriderSampling& sampling = decision.sampling;
  const bool changes = changes_row(sampling, decision.mask, decision.assumed);
  if (sampling.is_greedy && !changes) {
    // Holes alone need no copy of the row: banning them has no effect if the winner is another id.
    const int64_t place = first_argmax(logits, sampler.num_ids);
    if (sampler.num_ids > 0 && !holes_of(sampler).contain(place)) return id_at(sampler, logits, place);
  }
  if (changes || !sampler.holes.empty() || sampler.num_ids == 0) {
    int64_t id;
    float* const edited = scratch.edited.get<float>();
    std::copy(logits, logits + sampler.width, edited);
    decide_in_place(sampler, decision, edited, 1, scratch, &id);
    return id;
  }
  const RaceKey key{sampling.seed, sampling.sample, static_cast<uint32_t>(decision.position)};
  draw_arrivals_of_blocks(sampler, key, scratch);
  return id_at(sampler, logits, pick(sampler, sampling, logits, key, scratch));
}

// Makes the sampler one of rows that have only the logits of `target_ids`.
void reduce(OutriderSampler& sampler, const int64_t* target_ids, int64_t num) {
  std::vector<int64_t> order(num);
  std::iota(order.begin(), order.end(), 0);
  if (!std::is_sorted(target_ids, target_ids + num)) {
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return target_ids[a] < target_ids[b]; });
    sampler.columns.resize(num);
    for (int64_t place = 0; place < num; place++) sampler.columns[order[place]] = place;
  }
  sampler.places.assign(sampler.vocab_size, -1);
  const int64_t padding = sampler.num_ids;
  sampler.width = num;
  for (int64_t place = 0; place < num; place++) {
    const int64_t id = target_ids[order[place]];
    sampler.places[id] = static_cast<int32_t>(place);
    if (id < padding) sampler.ids.push_back(static_cast<int32_t>(id));
  }
  sampler.num_ids = static_cast<int64_t>(sampler.ids.size());
  sampler.ids.resize(sampler.num_blocks() * kBlock);
  std::vector<int64_t> holes;
  for (const int64_t id : sampler.holes)
    if (sampler.places[id] >= 0) holes.push_back(sampler.places[id]);
  sampler.holes = std::move(holes);
}

}  // namespace

void decide_in_place(const OutriderSampler& sampler, const Decision& decision, float* logits, int64_t num_races,
                     SamplerScratch& scratch, int64_t* ids) {
  if (sampler.num_ids == 0) return static_cast<void>(std::fill_n(ids, num_races, 0));
  const OutriderSampling& sampling = decision.sampling;
  const int32_t* const places = sampler.places.empty() ? nullptr : sampler.places.data();
  edit_row(sampling, holes_of(sampler), decision.mask, decision.assumed,
           LogitsOfIds{logits, sampler.vocab_size, places}, scratch.assumed.get<float>());
  const RaceKey key{sampling.seed, sampling.sample, static_cast<uint32_t>(decision.position)};
  if (!sampling.is_greedy) draw_arrivals_of_blocks(sampler, key, scratch);
  for (int64_t race = 0; race < num_races; race++) {
    const int64_t place = pick(sampler, sampling, logits, key, scratch);
    ids[race] = id_at(sampler, logits, place);
    logits[place] = -kInfinity;
  }
}

}  // namespace outrider

using namespace outrider;

OutriderSampler* outrider_sampler_create(OutriderTeam* team, int64_t vocab_size, int64_t num_ids, const int64_t* holes,
                                         int64_t num_holes, const int64_t* target_ids, int64_t num_target_ids) {
  std::unique_ptr<OutriderSampler> sampler;
  const int32_t status = call([&] {
    Team& threads = *reinterpret_cast<Team*>(team);
    sampler.reset(new OutriderSampler{threads, vocab_size, vocab_size, num_ids, {holes, holes + num_holes}, {}, {}, {}, {}, {}});
    const int64_t all_blocks = sampler->num_blocks(), padded = (all_blocks + kWidth - 1) / kWidth * kWidth;
    if (target_ids != nullptr) reduce(*sampler, target_ids, num_target_ids);
    const int64_t num_blocks = sampler->num_blocks();
    sampler->scratch.resize(threads.size());
    for (SamplerScratch& scratch : sampler->scratch) {
      scratch.edited.of<float>(sampler->width);
      scratch.selected.of<float>(num_blocks * kBlock);
      if (target_ids != nullptr) scratch.bounds.of<float>(num_blocks * kBlock);
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
    for (SamplerScratch& scratch : sampler->scratch) scratch.assumed.of<float>(most_assumed);
    Decision* const decisions = sampler->decisions.of<Decision>(num_rows);
    int64_t row = 0;
    for (const OutriderSampleRows* rows = sequences; rows != sequences + num_sequences; rows++) {
      for (int64_t j = 0; j < rows->num_rows; j++, row++) {
        const Assumed assumed{assumed_ids + rows->assumed_start, rows->num_assumed + j};
        const uint32_t* const mask = rows->masks == nullptr ? nullptr : rows->masks + j * rows->num_mask_words;
        new (decisions + row) Decision{*rows->sampling, mask, assumed, rows->position + j};
      }
    }
    sampler->team.share(num_rows, [&](int64_t index, int thread) {
      token_ids[index] = decide(*sampler, decisions[index], logits + index * row_stride, sampler->scratch[thread]);
    });
  });
}
