// Linear attention by the gated delta rule (Yang, Kautz and Hatamizadeh, 2024; arXiv 2412.06464), of ragged batches with
// draft trees, over stored states and rows.
//
// A state is computed token by token, always in the same order of operations, from the rows of the cache. So the bits of
// a row depend on the tokens on its path only: neither on the state that a step begins with, nor on the step's rows. A
// unit of work is one head of one sequence.

#include <cmath>
#include <vector>

#include "call.h"
#include "elementary.h"
#include "rms_norm.h"
#include "team.h"
#include "workspace.h"

namespace outrider {
namespace {

constexpr float kNormEpsilon = 1e-6f;  // of the norms of queries and keys

static int64_t padded(int64_t width) { return (width + kWidth - 1) / kWidth * kWidth; }

// Loads up to kWidth values; the other lanes are 0.
template <class T>
static Floats load_up_to(const T* from, int64_t num) {
  if (num >= kWidth) return load_wide(from);
  T part[kWidth]{};
  std::memcpy(part, from, num * sizeof(T));
  return load_wide(part);
}

template <class T>
static void store_up_to(T* to, Floats value, int64_t num) {
  if (num >= kWidth) return store_rounded(to, value);
  for (int64_t i = 0; i < num; i++) store_one(to + i, value[i]);
}

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

template <class T>
class DeltaStep {
 public:
  DeltaStep(const OutriderDeltaRule& rule, const OutriderBatch& batch, const OutriderStateSteps& steps, const T* rows,
            float* states, const T* gates, T* y)
      : rule_(rule), batch_(batch), steps_(steps), rows_(rows), states_(states), gates_(gates), y_(y),
        channels_(2 * rule.num_key_heads * rule.key_dim + rule.num_value_heads * rule.value_dim),
        row_width_(channels_ + 2 * rule.num_value_heads), stride_(padded(rule.value_dim)) {}

  // Floats of scratch memory for one member of the team.
  int64_t scratch_size() const { return 2 * rule_.key_dim * stride_ + 2 * padded(rule_.key_dim) + 3 * stride_; }

  void run(int64_t sequence, int64_t head, float* scratch) {
    Head own{*this, sequence, head};
    own.state = scratch;
    own.known = own.state + rule_.key_dim * stride_;
    own.query = own.known + rule_.key_dim * stride_;
    own.key = own.query + padded(rule_.key_dim);
    own.value = own.key + padded(rule_.key_dim);
    own.out = own.value + stride_;
    own.normed = own.out + stride_;
    own.run();
  }

 private:
  struct Head {
    DeltaStep& step;
    int64_t sequence, head;
    float *state, *known, *query, *key, *value, *out, *normed;  // scratch memory
    const T* taps[OUTRIDER_MAX_KERNEL];                         // rows of the tokens in the convolution's window

    void run() {
      const OutriderBatch& batch = step.batch_;
      const int64_t first = batch.query_start_loc[sequence], end = batch.query_start_loc[sequence + 1];
      const int64_t start = batch.seq_lens[sequence] - (end - first);
      int64_t drafts = first;  // the first row that is in a tree
      while (drafts < end && path_end(drafts) == path_begin(drafts)) drafts++;
      const int64_t num_known = start + drafts - first, begin = step.steps_.positions[sequence];
      const int64_t* store = step.steps_.stores + 2 * step.steps_.store_starts[sequence];
      const int64_t* stores_end = step.steps_.stores + 2 * step.steps_.store_starts[sequence + 1];
      load_state(begin);
      for (int64_t at = begin; at < num_known; at++) {
        take_taps([&](int64_t before) { return at < before ? nullptr : row_at(at - before); });
        advance(at >= start);
        if (at >= start) finish(first + at - start);
        if (store < stores_end && store[0] == at + 1) {
          copy_state(state, step.stride_, step.stored(store[1], head), step.rule_.value_dim);
          store += 2;
        }
      }
      if (drafts == end) return;
      copy_state(state, step.stride_, known, step.stride_);
      for (int64_t row = drafts; row < end; row++) {
        const int64_t* path = path_begin(row);
        const int64_t depth = path_end(row) - path;
        int64_t next = row > drafts && follows(row) ? depth - 1 : 0;
        if (next == 0) copy_state(known, step.stride_, state, step.stride_);
        for (; next < depth; next++) {
          take_taps([&](int64_t before) {
            if (before <= next) return step.row(path[next - before]);
            const int64_t at = num_known + next - before;
            return at < 0 ? nullptr : row_at(at);
          });
          advance(next == depth - 1);
        }
        finish(row);
      }
    }

    const int64_t* path_begin(int64_t row) const {
      const OutriderBatch& batch = step.batch_;
      return batch.path_starts == nullptr ? nullptr : batch.path_slots + batch.path_starts[row];
    }
    const int64_t* path_end(int64_t row) const {
      return step.batch_.path_starts == nullptr ? nullptr : path_begin(row + 1);
    }

    // Whether the row's path is that of the row before, and itself.
    bool follows(int64_t row) const {
      const int64_t depth = path_end(row) - path_begin(row);
      return path_end(row - 1) - path_begin(row - 1) == depth - 1 &&
             std::equal(path_begin(row - 1), path_end(row - 1), path_begin(row));
    }

    // The stored row of the token at a position that is not in a tree.
    const T* row_at(int64_t position) const {
      const OutriderBatch& batch = step.batch_;
      const int32_t* table = batch.block_tables + batch.table_starts[sequence];
      return step.row(table[position / batch.block_size] * batch.block_size + position % batch.block_size);
    }

    // `row_before(n)`: the row n tokens before the current one; null: there is none.
    template <class RowBefore>
    void take_taps(RowBefore&& row_before) {
      const int64_t size = step.rule_.kernel_size;
      for (int64_t i = 0; i < size; i++) taps[i] = row_before(size - 1 - i);
    }

    // Convolves channels [first, first + num), and activates them.
    void convolve(int64_t first, int64_t num, float* to) const {
      const T* type = nullptr;
      for (int64_t c = 0; c < num; c += kWidth) {
        Floats sum{};
        for (int64_t i = 0; i < step.rule_.kernel_size; i++) {
          if (taps[i] == nullptr) continue;
          const float* weights = step.rule_.convolution + i * step.channels_ + first + c;
          sum = multiply_add(load_up_to(taps[i] + first + c, num - c), load_up_to(weights, num - c), sum);
        }
        store(to + c, rounded_to(silu(rounded_to(sum, type)), type));
      }
    }

    void normalise(float* vector, float scale) const {
      const int64_t width = padded(step.rule_.key_dim);
      Floats squares{};
      for (int64_t c = 0; c < width; c += kWidth) squares = multiply_add(load(vector + c), load(vector + c), squares);
      const float factor = 1.0f / std::sqrt(sum_of_lanes(squares) + kNormEpsilon);
      for (int64_t c = 0; c < width; c += kWidth) store(vector + c, load(vector + c) * factor * scale);
    }

    // Advances the state by the token of the last tap.
    void advance(bool has_output) {
      const OutriderDeltaRule& rule = step.rule_;
      const int64_t key_head = head / (rule.num_value_heads / rule.num_key_heads);
      const int64_t key_width = rule.num_key_heads * rule.key_dim;
      convolve(key_width + key_head * rule.key_dim, rule.key_dim, key);
      normalise(key, 1.0f);
      if (has_output) {
        convolve(key_head * rule.key_dim, rule.key_dim, query);
        normalise(query, 1.0f / std::sqrt(static_cast<float>(rule.key_dim)));
      }
      convolve(2 * key_width + head * rule.value_dim, rule.value_dim, value);
      const T* type = nullptr;
      const T* scalars = taps[rule.kernel_size - 1] + step.channels_ + head;
      const float beta = rounded_to(sigmoid(broadcast(widen(scalars[0]))), type)[0] * rule.beta_scale;
      const float time = softplus(widen(scalars[rule.num_value_heads]) + rule.time_bias[head]);
      const float decay = exponential(rule.decay[head] * time);
      for (int64_t c = 0; c < step.stride_;) {
        const auto columns = [&](auto advance_typed, int num) {
          advance_typed(state + c, step.stride_, rule.key_dim, key, query, decay, beta, value + c, out + c);
          c += num * kWidth;
        };
        const bool is_wide = c + 4 * kWidth <= step.stride_;
        if (is_wide && has_output) columns(advance_columns<4, true>, 4);
        else if (is_wide) columns(advance_columns<4, false>, 4);
        else if (has_output) columns(advance_columns<1, true>, 1);
        else columns(advance_columns<1, false>, 1);
      }
    }

    // Writes the row's output: normalised, then multiplied by the activated gate.
    void finish(int64_t row) const {
      const T* type = nullptr;
      const int64_t width = step.rule_.value_dim, at = (row * step.rule_.num_value_heads + head) * width;
      for (int64_t c = 0; c < width; c += kWidth) store(out + c, rounded_to(load(out + c), type));
      rms_norm_row<T>(out, width, step.rule_.norm, step.rule_.epsilon, normed);
      for (int64_t c = 0; c < width; c += kWidth) {
        const Floats gate = silu(load_up_to(step.gates_ + at + c, width - c));
        store_up_to(step.y_ + at + c, load(normed + c) * gate, width - c);
      }
    }

    void load_state(int64_t position) {
      if (position > 0)
        return copy_state(step.stored(step.steps_.slots[sequence], head), step.rule_.value_dim, state, step.stride_);
      std::fill(state, state + step.rule_.key_dim * step.stride_, 0.0f);
    }

    // Copies a state whose rows have these distances. The padding of a longer row becomes 0.
    void copy_state(const float* from, int64_t from_stride, float* to, int64_t to_stride) const {
      const int64_t width = std::min(from_stride, to_stride);
      for (int64_t k = 0; k < step.rule_.key_dim; k++, from += from_stride, to += to_stride) {
        std::memcpy(to, from, width * sizeof(float));
        std::fill(to + width, to + to_stride, 0.0f);
      }
    }
  };

  const T* row(int64_t slot) const { return rows_ + slot * row_width_; }

  float* stored(int64_t slot, int64_t head) const {
    return states_ + (slot * rule_.num_value_heads + head) * rule_.key_dim * rule_.value_dim;
  }

  const OutriderDeltaRule& rule_;
  const OutriderBatch& batch_;
  const OutriderStateSteps& steps_;
  const T* const rows_;
  float* const states_;
  const T* const gates_;
  T* const y_;
  const int64_t channels_;
  const int64_t row_width_;
  const int64_t stride_;  // of a row of a state in scratch memory
};

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
      Team& threads = *reinterpret_cast<Team*>(team);
      DeltaStep<T> step(*rule, *batch, *steps, static_cast<const T*>(rows), states, static_cast<const T*>(gates),
                        static_cast<T*>(y));
      const int64_t size = (step.scratch_size() + 15) / 16 * 16;  // whole cache lines
      float* const scratch = workspace->outputs.of<float>(threads.size() * size);
      threads.share(batch->num_seqs * rule->num_value_heads, [&](int64_t unit, int member) {
        step.run(unit / rule->num_value_heads, unit % rule->num_value_heads, scratch + member * size);
      });
    };
    if (type == OUTRIDER_BFLOAT16) run(static_cast<BFloat16*>(nullptr));
    else run(static_cast<float*>(nullptr));
  });
}
