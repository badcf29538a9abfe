// Linear attention by the gated delta rule (Yang, Kautz and Hatamizadeh, 2024; arXiv 2412.06464), of ragged batches
// with draft trees, over stored states and rows.
//
// A state is computed token by token, always in the same order of operations, from the rows of the cache. So the bits
// of a row depend on the tokens on its path only: neither on the state that a step begins with, nor on the step's rows.
// A unit of work is one head of one sequence.

#include <algorithm>
#include <cmath>

#include "call.h"
#include "elementary.h"
#include "rms_norm.h"
#include "team.h"
#include "workspace.h"

namespace outrider {
namespace {

constexpr float kNormEpsilon = 1e-6f;  // of the norms of queries and keys

static Floats silu(Floats x) { return x * sigmoid(x); }

// Returns log(1 + e^x).
static float softplus(float x) {
  if (x > 20.0f) return x;
  const Floats e = broadcast(exponential(x)), one = broadcast(1.0f), sum = e + one;
  return logarithm_of_sum(sum, e < one ? e - (sum - one) : one - (sum - e))[0];
}

// Advances the columns [0, N * kWidth) of a state [num_keys, stride] by one token. Writes query * state to `out`, if
// kHasOutput.
template <int N, bool kHasOutput>
static void advance_columns(float* state, int64_t stride, int64_t num_keys, const float* key, const float* query,
                            float decay, float beta, const float* value, float* out) {
  Floats found[N]{}, delta[N], sum[N]{};
  const float* from = state;
  for (int64_t k = 0; k < num_keys; k++, from += stride)
    for (int n = 0; n < N; n++)
      found[n] = multiply_add(load(from + n * kWidth) * decay, broadcast(key[k]), found[n]);
  for (int n = 0; n < N; n++) delta[n] = (load(value + n * kWidth) - found[n]) * beta;
  for (int64_t k = 0; k < num_keys; k++, state += stride)
    for (int n = 0; n < N; n++) {
      const Floats changed = multiply_add(broadcast(key[k]), delta[n], load(state + n * kWidth) * decay);
      store(state + n * kWidth, changed);
      if constexpr (kHasOutput) sum[n] = multiply_add(changed, broadcast(query[k]), sum[n]);
    }
  if constexpr (kHasOutput)
    for (int n = 0; n < N; n++) store(out + n * kWidth, sum[n]);
}

// The arguments of outrider_delta_rule.
template <class T>
struct DeltaStep {
  const OutriderDeltaRule& rule;
  const OutriderBatch& batch;
  const OutriderStateSteps& steps;
  const T* rows;
  float* states;
  const T* gates;
  T* y;

  int64_t key_width() const { return rule.num_key_heads * rule.key_dim; }
  int64_t channels() const { return 2 * key_width() + rule.num_value_heads * rule.value_dim; }
  int64_t state_size() const { return rule.key_dim * rule.value_dim; }
  int64_t scratch_size() const { return 2 * state_size() + 2 * rule.key_dim + 3 * rule.value_dim; }
};

// One head of one sequence.
template <class T>
class HeadOfSequence {
 public:
  HeadOfSequence(const DeltaStep<T>& step, int64_t sequence, int64_t head, float* scratch)
      : step_(step), rule_(step.rule), batch_(step.batch), sequence_(sequence), head_(head), state_(scratch),
        known_(state_ + step.state_size()), query_(known_ + step.state_size()), key_(query_ + rule_.key_dim),
        value_(key_ + rule_.key_dim), out_(value_ + rule_.value_dim), normed_(out_ + rule_.value_dim) {}

  void run() {
    const int64_t first = batch_.query_start_loc[sequence_], end = batch_.query_start_loc[sequence_ + 1];
    const int64_t start = batch_.seq_lens[sequence_] - (end - first), size = step_.state_size();
    int64_t drafts = first;  // the first row that is in a tree
    while (drafts < end && depth_of(drafts) == 0) drafts++;
    const int64_t num_known = start + drafts - first, begin = step_.steps.positions[sequence_];
    const int64_t* to_store = step_.steps.stores + 2 * step_.steps.store_starts[sequence_];
    const int64_t* stores_end = step_.steps.stores + 2 * step_.steps.store_starts[sequence_ + 1];
    if (begin > 0) std::copy_n(stored(step_.steps.slots[sequence_]), size, state_);
    else std::fill_n(state_, size, 0.0f);
    for (int64_t at = begin; at < num_known; at++) {
      take_taps([&](int64_t before) { return row_at(at - before); });
      advance(at >= start);
      if (at >= start) finish(first + at - start);
      if (to_store < stores_end && to_store[0] == at + 1) {
        std::copy_n(state_, size, stored(to_store[1]));
        to_store += 2;
      }
    }
    if (drafts < end) std::copy_n(state_, size, known_);
    const int64_t* previous = nullptr;  // the path of `num_done` drafts after which `state_` is
    for (int64_t row = drafts, num_done = 0; row < end; row++) {
      const int64_t* const path = batch_.path_slots + batch_.path_starts[row];
      if (num_done >= depth_of(row) || !std::equal(previous, previous + num_done, path)) {
        std::copy_n(known_, size, state_);
        num_done = 0;
      }
      for (int64_t i = num_done; i < depth_of(row); i++) {
        take_taps([&](int64_t before) {
          return before <= i ? in_slot(path[i - before]) : row_at(num_known + i - before);
        });
        advance(i == depth_of(row) - 1);
      }
      finish(row);
      previous = path;
      num_done = depth_of(row);
    }
  }

 private:
  // The number of drafts on a row's path; 0: it is not in a tree.
  int64_t depth_of(int64_t row) const {
    return batch_.path_starts == nullptr ? 0 : batch_.path_starts[row + 1] - batch_.path_starts[row];
  }

  float* stored(int64_t slot) const {
    return step_.states + (slot * rule_.num_value_heads + head_) * step_.state_size();
  }

  const T* in_slot(int64_t slot) const { return step_.rows + slot * (step_.channels() + 2 * rule_.num_value_heads); }

  // The stored row of the token at a position that is not in a tree; null before the first token.
  const T* row_at(int64_t position) const {
    if (position < 0) return nullptr;
    const int32_t* table = batch_.block_tables + batch_.table_starts[sequence_];
    return in_slot(table[position / batch_.block_size] * batch_.block_size + position % batch_.block_size);
  }

  // Makes taps of the rows in the convolution's window. `row_before(n)`: the row n tokens before the current one.
  template <class RowBefore>
  void take_taps(RowBefore&& row_before) {
    for (int64_t i = 0; i < rule_.kernel_size; i++) taps_[i] = row_before(rule_.kernel_size - 1 - i);
  }

  // Convolves channels [first, first + num), and activates them.
  void convolve(int64_t first, int64_t num, float* to) const {
    const T* type = nullptr;
    for (int64_t c = 0; c < num; c += kWidth) {
      Floats sum{};
      for (int64_t i = 0; i < rule_.kernel_size; i++) {
        if (taps_[i] == nullptr) continue;
        const float* weights = rule_.convolution + i * step_.channels() + first + c;
        sum = multiply_add(load_wide(taps_[i] + first + c), load(weights), sum);
      }
      store(to + c, rounded_to(silu(rounded_to(sum, type)), type));
    }
  }

  void normalise(float* vector, float scale) const {
    Floats squares{};
    for (int64_t c = 0; c < rule_.key_dim; c += kWidth)
      squares = multiply_add(load(vector + c), load(vector + c), squares);
    const float factor = 1.0f / std::sqrt(sum_of_lanes(squares) + kNormEpsilon);
    for (int64_t c = 0; c < rule_.key_dim; c += kWidth) store(vector + c, load(vector + c) * factor * scale);
  }

  // Advances the state by the token of the last tap.
  void advance(bool has_output) {
    const int64_t first_key = head_ / (rule_.num_value_heads / rule_.num_key_heads) * rule_.key_dim;
    convolve(step_.key_width() + first_key, rule_.key_dim, key_);
    normalise(key_, 1.0f);
    if (has_output) {
      convolve(first_key, rule_.key_dim, query_);
      normalise(query_, 1.0f / std::sqrt(static_cast<float>(rule_.key_dim)));
    }
    convolve(2 * step_.key_width() + head_ * rule_.value_dim, rule_.value_dim, value_);
    const T* const scalars = taps_[rule_.kernel_size - 1] + step_.channels() + head_;
    const Floats weight = sigmoid(broadcast(widen(scalars[0])));
    const float beta = rounded_to(weight, static_cast<const T*>(nullptr))[0] * rule_.beta_scale;
    const float time = softplus(widen(scalars[rule_.num_value_heads]) + rule_.time_bias[head_]);
    const float decay = exponential(rule_.decay[head_] * time);
    for (int64_t c = 0; c < rule_.value_dim;) {
      const auto columns = [&](auto advance_typed, int num) {
        advance_typed(state_ + c, rule_.value_dim, rule_.key_dim, key_, query_, decay, beta, value_ + c, out_ + c);
        c += num * kWidth;
      };
      const bool is_wide = c + 4 * kWidth <= rule_.value_dim;
      if (is_wide) columns(has_output ? advance_columns<4, true> : advance_columns<4, false>, 4);
      else columns(has_output ? advance_columns<1, true> : advance_columns<1, false>, 1);
    }
  }

  // Writes a row's output: normed, then multiplied by the activated gate.
  void finish(int64_t row) const {
    const int64_t width = rule_.value_dim, at = (row * rule_.num_value_heads + head_) * width;
    for (int64_t c = 0; c < width; c += kWidth)
      store(out_ + c, rounded_to(load(out_ + c), static_cast<const T*>(nullptr)));
    rms_norm_row<T>(out_, width, rule_.norm, rule_.epsilon, normed_);
    for (int64_t c = 0; c < width; c += kWidth)
      store_rounded(step_.y + at + c, load(normed_ + c) * silu(load_wide(step_.gates + at + c)));
  }

  const DeltaStep<T>& step_;
  const OutriderDeltaRule& rule_;
  const OutriderBatch& batch_;
  const int64_t sequence_, head_;
  float *const state_, *const known_, *const query_, *const key_, *const value_, *const out_, *const normed_;
  const T* taps_[OUTRIDER_MAX_KERNEL];  // rows, or null; the current token's last
};

template <class T>
void run_delta_rule(Team& team, OutriderWorkspace& workspace, const DeltaStep<T>& step) {
  const int64_t size = (step.scratch_size() + 15) / 16 * 16, heads = step.rule.num_value_heads;  // whole cache lines
  float* const scratch = workspace.outputs.of<float>(team.size() * size);
  team.share(step.batch.num_seqs * heads, [&](int64_t unit, int member) {
    HeadOfSequence<T>(step, unit / heads, unit % heads, scratch + member * size).run();
  });
}

}  // namespace
}  // namespace outrider

using namespace outrider;

OutriderStatus outrider_delta_rule(OutriderTeam* team, OutriderWorkspace* workspace, int32_t type,
                                   const OutriderDeltaRule* rule, const OutriderBatch* batch,
                                   const OutriderStateSteps* steps, const void* rows, float* states, const void* gates,
                                   void* y) {
  return call([&] {
    const auto run = [&](auto* typed) {
      using T = std::remove_pointer_t<decltype(typed)>;
      const DeltaStep<T> step{*rule, *batch, *steps, static_cast<const T*>(rows), states, static_cast<const T*>(gates),
                              static_cast<T*>(y)};
      run_delta_rule(*reinterpret_cast<Team*>(team), *workspace, step);
    };
    if (type == OUTRIDER_BFLOAT16) run(static_cast<BFloat16*>(nullptr));
    else run(static_cast<float*>(nullptr));
  });
}
