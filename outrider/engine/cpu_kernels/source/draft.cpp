// The loop of a drafter head: forward, decision, and the next forward of what was decided (ADR 19).

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "call.h"
#include "logit_row.h"
#include "sampler.h"
#include "sampler_api.h"

namespace outrider {
namespace {

void check(OutriderStatus status) {
  if (status != 0) throw std::bad_alloc();  // the only failure of a step
}

// Returns the largest probability of a row at a temperature; 0 if there is none.
double confidence_of(const float* logits, int64_t num, float temperature) {
  float tail[kBlock];
  fill_tail(logits, num, tail);
  const LogitRow row{logits, tail, nullptr, num, (num + kBlock - 1) / kBlock, temperature, 0.0f};
  Ints is_nan{};
  Floats largest = broadcast(-kInfinity), sum{};
  for (int64_t b = 0; b < row.num_blocks; b++) largest = larger(largest, largest_of_block(row.block(b), is_nan));
  const float most = largest_of_lanes(largest);
  if (is_any(is_nan) || std::isinf(most)) return 0.0;
  for (int64_t b = 0; b < row.num_blocks; b++)
    for (int64_t i = 0; i < kBlock; i += kWidth) sum += exponential((load(row.block(b) + i) - most) / temperature);
  return 1.0 / static_cast<double>(sum_of_lanes(sum));
}

class Drafting {
 public:
  Drafting(OutriderTeam* team, OutriderWorkspace* workspace, const OutriderDecoder& decoder, const OutriderBatch& batch,
           void* const* key_caches, void* const* value_caches, OutriderSampler& sampler, const OutriderPath* paths,
           const OutriderDrafts& drafts)
      : team_(team), workspace_(workspace), decoder_(decoder), batch_(batch), key_caches_(key_caches),
        value_caches_(value_caches), sampler_(sampler), paths_(paths), drafts_(drafts),
        state_bytes_(decoder.hidden_size * (decoder.type == OUTRIDER_BFLOAT16 ? 2 : 4)) {
    const int64_t num = batch.num_logits;
    logits_ = workspace->logits.of<float>(num * sampler.width);
    states_ = workspace->states.of<char>(num * state_bytes_);
    int64_t most_assumed = 0;
    for (int64_t path = 0; path < num; path++) {
      going_.push_back({path, batch.positions[batch.logits_rows[path]], paths[path].reach});
      assumed_.emplace_back(paths[path].assumed_ids, paths[path].assumed_ids + paths[path].num_assumed);
      most_assumed = std::max(most_assumed, paths[path].num_assumed + paths[path].max_tokens);
    }
    for (SamplerScratch& scratch : sampler.scratch) scratch.assumed.of<float>(most_assumed);
  }

  void run() {
    OutriderBatch batch = batch_;
    for (int64_t token = 0;; token++) {
      check(outrider_decoder_layers(team_, workspace_, &decoder_, &batch, key_caches_, value_caches_, nullptr, 0,
                                    decoder_.num_layers));
      if (batch.num_logits == 0) return;
      const int64_t* const columns = sampler_.columns.empty() ? nullptr : sampler_.columns.data();
      check(outrider_decoder_logits(team_, workspace_, &decoder_, batch.logits_rows, batch.num_logits, logits_, columns,
                                    sampler_.width, states_));
      if (token == 0 && drafts_.logits != nullptr)
        std::copy(logits_, logits_ + batch.num_logits * sampler_.width, drafts_.logits);
      sampler_.team.share(batch.num_logits, [&](int64_t row, int thread) {
        decide(token, row, sampler_.scratch[thread]);
      });
      keep_those_that_go_on(token);
      if (going_.empty()) return;
      batch = next_batch();
    }
  }

 private:
  // A path that is not complete.
  struct Going {
    int64_t path;
    int64_t row_position;  // of the row that decides its next token
    double reach;          // product of confidences, also of the tokens before this call
  };

  int64_t place(int64_t path, int64_t token) const { return path * drafts_.max_tokens + token; }

  void decide(int64_t token, int64_t row, SamplerScratch& scratch) {
    Going& going = going_[row];
    const OutriderPath& path = paths_[going.path];
    const OutriderSampling& sampling = *path.sampling;
    const std::vector<int64_t>& assumed = assumed_[going.path];
    float* const logits = logits_ + row * sampler_.width;
    const int64_t at = place(going.path, token);
    drafts_.confidences[at] = confidence_of(logits, sampler_.width, sampling.is_greedy ? 1.0f : sampling.temperature);
    going.reach *= drafts_.confidences[at];
    const Decision decision{sampling, token == 0 ? path.mask : nullptr,
                            Assumed{assumed.data(), static_cast<int64_t>(assumed.size())}, path.position + token};
    decide_in_place(sampler_, decision, logits, path.num_races, scratch, drafts_.token_ids + at * drafts_.max_races);
    std::memcpy(static_cast<char*>(drafts_.states) + at * state_bytes_, states_ + row * state_bytes_, state_bytes_);
    drafts_.num_tokens[going.path] = token + 1;
  }

  // Drops complete paths, and gathers the states of the others.
  void keep_those_that_go_on(int64_t token) {
    size_t num = 0;
    for (size_t row = 0; row < going_.size(); row++) {
      const Going& going = going_[row];
      const OutriderPath& path = paths_[going.path];
      const int64_t id = drafts_.token_ids[place(going.path, token) * drafts_.max_races];
      const int64_t *stops = path.sampling->stop_ids, *const end = stops + path.sampling->num_stop_ids;
      if (token + 1 == path.max_tokens || going.reach < path.min_reach || std::find(stops, end, id) != end) continue;
      assumed_[going.path].push_back(id);
      std::memmove(states_ + num * state_bytes_, states_ + row * state_bytes_, state_bytes_);
      going_[num++] = going;
    }
    going_.resize(num);
  }

  // Returns the batch of one row for each path: the token decided last, with the head's own state.
  OutriderBatch next_batch() {
    const int64_t num = static_cast<int64_t>(going_.size()), size = batch_.block_size;
    for (auto* values : {&token_ids_, &positions_, &slots_, &rows_}) values->clear();
    starts_.assign(1, 0);
    table_starts_.assign(1, 0);
    lengths_.clear();
    tables_.clear();
    for (Going& going : going_) {
      const int64_t position = ++going.row_position;
      const int32_t* const table = paths_[going.path].block_table;
      token_ids_.push_back(assumed_[going.path].back());
      positions_.push_back(position);
      slots_.push_back(table[position / size] * size + position % size);
      rows_.push_back(static_cast<int64_t>(rows_.size()));
      starts_.push_back(static_cast<int32_t>(rows_.size()));
      lengths_.push_back(static_cast<int32_t>(position + 1));
      tables_.insert(tables_.end(), table, table + position / size + 1);
      table_starts_.push_back(static_cast<int32_t>(tables_.size()));
    }
    return {num, num, num, size, token_ids_.data(), positions_.data(), slots_.data(), starts_.data(), lengths_.data(),
            table_starts_.data(), tables_.data(), rows_.data(), nullptr, nullptr, states_, nullptr, nullptr};
  }

  OutriderTeam* const team_;
  OutriderWorkspace* const workspace_;
  const OutriderDecoder& decoder_;
  const OutriderBatch& batch_;
  void* const* const key_caches_;
  void* const* const value_caches_;
  OutriderSampler& sampler_;
  const OutriderPath* const paths_;
  const OutriderDrafts& drafts_;
  const int64_t state_bytes_;
  float* logits_;                             // [rows, width]
  char* states_;                              // [rows, hidden], of the rows that decide, then features of the next ones
  std::vector<Going> going_;                  // by row of the forward
  std::vector<std::vector<int64_t>> assumed_;  // by path
  std::vector<int64_t> token_ids_, positions_, slots_, rows_;
  std::vector<int32_t> starts_, lengths_, table_starts_, tables_;
};

}  // namespace
}  // namespace outrider

OutriderStatus outrider_draft(OutriderTeam* team, OutriderWorkspace* workspace, const OutriderDecoder* decoder,
                              const OutriderBatch* batch, void* const* key_caches, void* const* value_caches,
                              OutriderSampler* sampler, const OutriderPath* paths, const OutriderDrafts* drafts) {
  using namespace outrider;
  return call([&] {
    Drafting(team, workspace, *decoder, *batch, key_caches, value_caches, *sampler, paths, *drafts).run();
  });
}
