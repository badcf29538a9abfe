// All layers of a decoder of the families in ../decoder_options.py, in one job of the team. Each
// operator of the other files is a phase. This saves about two thousand calls from Python per step.
//
// The residual stream, and what is normalised before it is added to it, are float32. The inputs
// of linear layers, keys and values are rounded to the model's type.

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "call.h"
#include "linear.h"
#include "low_rank.h"
#include "paged_attention.h"
#include "rms_norm.h"
#include "rope.h"
#include "workspace.h"

namespace outrider {
namespace {

constexpr int kPhasesOfLayer = 12;
constexpr int kLastPhases = 3;  // the norm of the last layer's output, and two phases of features
constexpr int64_t kRowsOfUnit = 8;  // in phases that process rows one by one

int64_t row_units(int64_t num_rows) { return (num_rows + kRowsOfUnit - 1) / kRowsOfUnit; }

// Calls f for each row of a unit.
template <class F>
void for_rows(int64_t unit, int64_t num_rows, F&& f) {
  for (int64_t row = unit * kRowsOfUnit; row < std::min(num_rows, (unit + 1) * kRowsOfUnit); row++) f(row);
}

// Returns whether rows are quantised before they are multiplied by the matrix.
bool is_quantised(const OutriderMatrix& matrix) { return matrix.type >= OUTRIDER_INT8; }

// Returns the matrix that decides whether a layer's input is quantised.
const OutriderMatrix& input_matrix(const OutriderLayer& layer) {
  return is_quantised(layer.value) ? layer.value : layer.qkv;
}

// Calls f with a null pointer whose type is that of the matrix's weights. Plain weights have the decoder's type.
template <class Type, class F>
void with_weight(const OutriderMatrix& matrix, F&& f) {
  if (is_quantised(matrix)) return with_codes(matrix.type, f);
  f(static_cast<Type*>(nullptr));
}

// Calls f with a null pointer whose type is that of activations, keys and values.
template <class F>
void with_type(const OutriderDecoder& decoder, F&& f) {
  if (decoder.type == OUTRIDER_BFLOAT16) return f(static_cast<BFloat16*>(nullptr));
  f(static_cast<float*>(nullptr));
}

// Type: the type of keys and values, to which activations are rounded.
template <class Type>
class DecoderStep final : public Job {
 public:
  DecoderStep(Team& team, OutriderWorkspace& workspace, const OutriderDecoder& decoder, const OutriderBatch& batch,
              void* const* key_caches, void* const* value_caches, const OutriderFeatures* features, int64_t first,
              int64_t last)
      : workspace_(workspace), decoder_(decoder), layers_(decoder.layers + first, decoder.layers + last),
        batch_(batch), key_caches_(key_caches + first, key_caches + last),
        value_caches_(value_caches + first, value_caches + last), first_(first), num_rows_(batch.num_rows),
        phases_(1 + layers_.size() * kPhasesOfLayer + kLastPhases) {
    const int64_t num_groups =
        batch.group_of == nullptr ? 1 : 1 + *std::max_element(batch.group_of, batch.group_of + decoder.num_layers);
    for (int64_t group = 0; group < num_groups; group++) groups_.push_back(batch_of_group(batch, group));
    heads_ = decoder.num_heads + 2 * decoder.num_kv_heads;
    residual_ = workspace.residual.of<float>(num_rows_ * decoder.hidden_size);
    const int64_t width = decoder.hidden_size * (batch.features == nullptr ? 1 : 2);
    normalised_ = workspace.activations.of<Row>(num_rows_ * width);
    projected_ = workspace.projected.of<Type>(num_rows_ * heads_ * decoder.head_dim);
    attended_ = workspace.attended.of<Row>(num_rows_ * decoder.num_heads * decoder.head_dim);
    gated_ = workspace.gated.of<Row>(num_rows_ * decoder.intermediate_size);
    const bool normalises_outputs = std::any_of(layers_.begin(), layers_.end(), [](const OutriderLayer& layer) {
      return layer.attention_output_norm != nullptr || layer.mlp_output_norm != nullptr;
    });
    outputs_ = workspace.outputs.of<float>(normalises_outputs ? num_rows_ * decoder.hidden_size : 0);
    const int64_t widest = std::max({width, decoder.num_heads * decoder.head_dim, decoder.intermediate_size});
    const bool has_quantised = std::any_of(layers_.begin(), layers_.end(), [](const OutriderLayer& layer) {
      return is_quantised(input_matrix(layer)) || is_quantised(layer.output) || is_quantised(layer.gate_up) ||
             is_quantised(layer.down);
    });
    quantised_ = workspace.quantised.of<QuantisedGroup>(has_quantised ? groups_in_memory(num_rows_, widest) : 0);
    if (batch.adapters != nullptr) reduced_ = workspace.reduced.of<float>(num_rows_ * (max_rank_ = max_rank()));
    if (features != nullptr) {
      features_ = *features;
      taps_.assign(features->taps, features->taps + features->num_taps);
      tapped_ = workspace.taps.of<Row>(num_rows_ * features->num_taps * decoder.hidden_size);
    }
    plan_attention(team.size());
  }

  void work(Member member) override {
    if (member.index == 0) workspace_.times.begin();
    if (first_ == 0)
      phases_[0].share(member, row_units(num_rows_), [&](int64_t unit) {
        for_rows(unit, num_rows_, [&](int64_t row) { embed(row); });
      });
    NextWeights ahead;
    for (size_t index = 0; index < layers_.size(); index++)
      run_layer(index, &phases_[1 + index * kPhasesOfLayer], member, ahead);
    add_last_outputs(phases_[phases_.size() - kLastPhases], member);
    if (!taps_.empty() && is_last(layers_.size() - 1)) {
      reduce_taps(phases_[phases_.size() - 2], phases_[phases_.size() - 1], member);
      if (member.index == 0) workspace_.times.note(OUTRIDER_LINEAR);
    }
  }

 private:
  using Row = Activation<Type>;

  // Some rows of the batch.
  struct Rows {
    int64_t num;
    const int64_t* ids;  // [num], ascending; null: all

    int64_t operator[](int64_t index) const { return ids == nullptr ? index : ids[index]; }
    int64_t index_of(int64_t row) const { return ids == nullptr ? row : std::lower_bound(ids, ids + num, row) - ids; }
  };

  // What the rows' adapters add to one product of a layer. `rows`: the product's rows.
  struct LowRanks {
    size_t layer;
    OutriderLowRank OutriderLayerAdapter::*matrix;
    Rows rows;
    int64_t first_column = 0;  // of the product among the adapter's outputs
  };

  struct PlanOfLayers {
    int64_t window;
    const int64_t* rows;
    std::unique_ptr<AttentionPlan> plan;
  };

  bool is_last(size_t index) const { return first_ + static_cast<int64_t>(index) + 1 == decoder_.num_layers; }

  // Returns the rows for which a layer computes more than keys and values. In the last layer these are the rows with
  // logits, or all rows if there is a tap after it.
  Rows rows_of(size_t index) const {
    const bool is_tapped = std::find(taps_.begin(), taps_.end(), decoder_.num_layers) != taps_.end();
    if (!is_last(index) || is_tapped || batch_.num_logits == num_rows_) return Rows{num_rows_, nullptr};
    return Rows{batch_.num_logits, batch_.logits_rows};
  }

  void plan_attention(int num_members) {
    int64_t partials = 0;
    for (size_t index = 0; index < layers_.size(); index++) {
      const OutriderAttention options = attention_options(layers_[index]);
      const Rows rows = rows_of(index);
      AttentionPlan* plan = nullptr;
      for (PlanOfLayers& made : plans_)
        if (made.window == options.sliding_window && made.rows == rows.ids) plan = made.plan.get();
      if (plan == nullptr) {
        plans_.push_back({options.sliding_window, rows.ids, std::make_unique<AttentionPlan>()});
        plan = plans_.back().plan.get();
        plan->make(options, batch_of(index), num_members, rows.ids, rows.num);
      }
      plan_of_layer_.push_back(plan);
      if (plan->is_split) partials = std::max(partials, plan->num_partials);
      query_rows_ = std::max(query_rows_, plan->query_rows);
    }
    partials_ = workspace_.partials.of<float>(partials * decoder_.num_kv_heads *
                                              PartialResult::size(query_rows_, decoder_.head_dim));
    workspace_.own.resize(std::max<size_t>(workspace_.own.size(), num_members));
    for (auto& own : workspace_.own)
      own.attention.of<char>(AttentionScratch<Type>::bytes(query_rows_, decoder_.head_dim));
  }

  // Returns the batch with the slots, paths and block tables of the layer's group.
  const OutriderBatch& batch_of(size_t index) const {
    return groups_[batch_.group_of == nullptr ? 0 : batch_.group_of[first_ + static_cast<int64_t>(index)]];
  }

  OutriderAttention attention_options(const OutriderLayer& layer) const {
    return OutriderAttention{decoder_.num_heads, decoder_.num_kv_heads, decoder_.head_dim, 0,
                             layer.sliding_window, decoder_.scaling, decoder_.attention_softcap, nullptr};
  }

  void embed(int64_t row) {
    const int64_t width = decoder_.hidden_size;
    float* to = residual_ + row * width;
    if (batch_.features != nullptr) return embed_with_feature(row, to);
    if (decoder_.embedding == nullptr) {
      unpack_row(decoder_.head, batch_.token_ids[row], to);
    } else {
      const Type* from = static_cast<const Type*>(decoder_.embedding) + batch_.token_ids[row] * width;
      for (int64_t i = 0; i < width; i++) to[i] = widen(from[i]);
    }
    if (decoder_.embedding_scale != 1.0f)
      for (int64_t i = 0; i < width; i++) to[i] *= decoder_.embedding_scale;
  }

  // Makes a row of a drafter head's first layer, instead of a normalised row.
  void embed_with_feature(int64_t row, float* residual) {
    const int64_t width = decoder_.hidden_size;
    const Type* feature = static_cast<const Type*>(batch_.features) + row * width;
    const Type* embedding = static_cast<const Type*>(decoder_.embedding) + batch_.token_ids[row] * width;
    Row* to = normalised_ + row * 2 * width;
    normalise_row(embedding, width, layers_[0].input_norm, to);
    normalise_row(feature, width, decoder_.feature_norm, to + width);
    for (int64_t i = 0; i < width; i++)
      residual[i] = decoder_.begins_normalised ? widen(to[width + i]) : widen(feature[i]);
    quantise_for(input_matrix(layers_[0]), normalised_, row, num_rows_, 2 * width);
  }

  // Copies a row of the residual stream, rounded, to the taps that are after this number of layers.
  void tap(int64_t row, int64_t num_layers) {
    const int64_t width = decoder_.hidden_size, num_taps = taps_.size();
    const float* from = residual_ + row * width;
    for (int64_t i = 0; i < num_taps; i++) {
      if (taps_[i] != num_layers) continue;
      Row* to = tapped_ + (row * num_taps + i) * width;
      const bool is_normalised = num_layers == decoder_.num_layers && features_.takes_final_norm;
      normalise_row(from, width, is_normalised ? decoder_.final_norm : nullptr, to);
    }
  }

  // Two phases: reduce the rows' taps to features, and store these in their slots.
  void reduce_taps(Phase& rows, Phase& product, Member member) {
    const int64_t hidden = decoder_.hidden_size, num_taps = taps_.size(), width = num_taps * hidden;
    Type* plane = static_cast<Type*>(features_.plane);
    const bool is_projected = features_.projection.packed != nullptr;
    rows.share(member, row_units(num_rows_), [&](int64_t unit) {
      for_rows(unit, num_rows_, [&](int64_t row) {
        tap(row, decoder_.num_layers);
        Row* taps = tapped_ + row * width;
        if (features_.tap_norms != nullptr)
          for (int64_t at = 0; at < width; at += hidden)
            rms_norm_row<Type>(taps + at, hidden, features_.tap_norms + at, features_.epsilon, taps + at);
        if (features_.norm != nullptr) rms_norm_row<Type>(taps, width, features_.norm, features_.epsilon, taps);
        if (is_projected) return;
        for (int64_t d = 0; d < width; d += kWidth)
          store_exact(plane + batch_.slots[row] * width + d, load_wide(taps + d));
      });
    });
    if (!is_projected) return;
    const Matrix<Type> projection(features_.projection);
    const StoreTo<Type> store{plane, projection.out_features};
    product.share(member, num_units(projection), [&](int64_t unit) {
      multiply_unit<Type>(unit, tapped_, num_rows_, projection, [&](const TileRow& tile) {
        store(TileRow{batch_.slots[tile.row], tile.column, tile.num, tile.values});
      });
    });
  }

  int64_t max_rank() const {
    int64_t rank = 0;
    for (int64_t row = 0; row < num_rows_; row++)
      for (size_t layer = 0; batch_.adapters[row] != nullptr && layer < layers_.size(); layer++) {
        const OutriderLayerAdapter& adapter = batch_.adapters[row][first_ + layer];
        rank = std::max({rank, adapter.qkv.rank, adapter.output.rank, adapter.gate_up.rank, adapter.down.rank});
      }
    return rank;
  }

  // Returns what the adapter of one of the product's rows adds to it, or null.
  const OutriderLowRank* low_rank(const LowRanks& added, int64_t row) const {
    if (batch_.adapters == nullptr) return nullptr;
    const OutriderLayerAdapter* adapter = batch_.adapters[added.rows[row]];
    return adapter == nullptr ? nullptr : &(adapter[first_ + added.layer].*added.matrix);
  }

  // Prepares a unit of a product's rows [num, in_features] for its matrix and for the rows' adapters.
  void prepare_unit(int64_t unit, const OutriderMatrix& matrix, const LowRanks& added, const Row* rows) {
    const int64_t width = matrix.in_features, end = std::min(added.rows.num, (unit + 1) * kRowsOfUnit);
    for_rows(unit, added.rows.num, [&](int64_t row) {
      quantise_for(matrix, rows, row, added.rows.num, width);
    });
    for (int64_t row = unit * kRowsOfUnit, next; batch_.adapters != nullptr && row < end; row = next) {
      const OutriderLowRank* part = low_rank(added, row);
      for (next = row + 1; next < end && low_rank(added, next) == part;) next++;
      if (part != nullptr)
        reduce_rows<kRowsReducedAtOnce>(*part, rows + row * width, next - row, width, reduced_ + row * max_rank_,
                                        max_rank_);
    }
  }

  // Quantises one of `rows` [num_rows, width] if it is multiplied by a quantised matrix.
  void quantise_for(const OutriderMatrix& matrix, const Row* rows, int64_t row, int64_t num_rows, int64_t width) {
    if (is_quantised(matrix)) quantise_row(rows + row * width, width, quantised_ + row, group_stride(num_rows));
  }

  // Normalises a row with one of the model's norms; only rounds it if there is no such norm.
  template <class From>
  void normalise_row(const From* from, int64_t width, const float* weight, Row* to) const {
    const Type* type = nullptr;
    if (weight != nullptr)
      return rms_norm_row<Type>(from, width, weight, decoder_.epsilon, to, decoder_.rounds_norms_once != 0);
    for (int64_t d = 0; d < width; d += kWidth) store_exact(to + d, rounded_to(load_wide(from + d), type));
  }

  // Adds to `row` of the residual stream the row `index` of the last product, normalised, if there is a norm for it.
  void add_output(int64_t index, int64_t row, const float* norm) {
    if (norm == nullptr) return;
    const int64_t width = decoder_.hidden_size;
    float *output = outputs_ + index * width, *to = residual_ + row * width;
    rms_norm_row<float>(output, width, norm, decoder_.epsilon, output);
    for (int64_t d = 0; d < width; d += kWidth)
      store(to + d, load(to + d) + load(output + d) * decoder_.residual_scale);
  }

  // A phase, if the last layer has a norm of its output. Other layers' outputs are added in the next layer's first phase.
  void add_last_outputs(Phase& phase, Member member) {
    const float* norm = layers_.back().mlp_output_norm;
    const Rows rows = rows_of(layers_.size() - 1);
    if (norm == nullptr || rows.num == 0) return;
    phase.share(member, row_units(rows.num), [&](int64_t unit) {
      for_rows(unit, rows.num, [&](int64_t index) { add_output(index, rows[index], norm); });
    });
    if (member.index == 0) workspace_.times.note(OUTRIDER_NORM);
  }

  // A phase: adds the last product's output if it has a norm, `output_norm`, and normalises rows of the residual stream
  // for the next product. `num_layers`: the layers before it, for taps; -1: no taps.
  void normalise(Phase& phase, Member member, NextWeights& ahead, const Rows& rows, const float* output_norm,
                 const float* weight, const OutriderMatrix& matrix, const LowRanks& added,
                 int64_t num_layers = -1) {
    const int64_t width = decoder_.hidden_size;
    const auto normalise_rows = [&](int64_t unit) {
      for_rows(unit, rows.num, [&](int64_t index) {
        add_output(index, rows[index], output_norm);
        tap(rows[index], num_layers);
        normalise_row(residual_ + rows[index] * width, width, weight, normalised_ + index * width);
      });
      prepare_unit(unit, matrix, added, normalised_);
    };
    phase.share(member, row_units(rows.num), normalise_rows, ahead);
  }

  // A phase: prepares rows for the next product, if its matrix is quantised or the rows have adapters.
  void prepare_rows(Phase& phase, Member member, NextWeights& ahead, const Row* rows, const OutriderMatrix& matrix,
                    const LowRanks& added) {
    if (!is_quantised(matrix) && batch_.adapters == nullptr) return;
    const auto prepare = [&](int64_t unit) { prepare_unit(unit, matrix, added, rows); };
    phase.share(member, row_units(added.rows.num), prepare, ahead);
  }

  // A phase: multiplies rows by one matrix. Waiting members prefetch `next`, the matrix of the next product (or null).
  template <class Finish>
  void multiply(Phase& phase, Member member, NextWeights& ahead, const Row* rows, const OutriderMatrix& matrix,
                const LowRanks& added, const OutriderMatrix* next, Finish&& finish) {
    const int64_t num_rows = added.rows.num;
    const auto finish_with_adapter = [&](const TileRow& tile) {
      const OutriderLowRank* part = low_rank(added, tile.row);
      if (part != nullptr && part->rank > 0)
        add_low_rank(*part, reduced_ + tile.row * max_rank_, tile.column + added.first_column, tile);
      finish(tile);
    };
    ahead = NextWeights();
    if (next != nullptr)
      with_weight<Type>(*next, [&](auto* weight) {
        ahead = NextWeights(Matrix<std::remove_pointer_t<decltype(weight)>>(*next), member);
      });
    with_weight<Type>(matrix, [&](auto* weight) {
      using Weight = std::remove_pointer_t<decltype(weight)>;
      const Matrix<Weight> typed(matrix);
      const bool prefetches_next = prefetches_next_unit(num_rows, typed);
      const int64_t last = prefetches_next ? Phase::end_of(member, num_units(typed)) - 1 : -1;
      const auto multiply_rows = [&](int64_t unit) {
        const void* const first_of_next = unit == last ? ahead.take(unit_bytes(typed)) : nullptr;
        const auto* from = multiplied<Weight>(rows, quantised_);
        multiply_unit<Weight>(unit, from, num_rows, typed, finish_with_adapter, first_of_next);
      };
      phase.share(member, num_units(typed), multiply_rows, ahead);
    });
  }

  void run_layer(size_t index, Phase* phases, Member member, NextWeights& ahead) {
    const OutriderLayer& layer = layers_[index];
    const OutriderMatrix* next_qkv = index + 1 < layers_.size() ? &layers_[index + 1].qkv : nullptr;
    const int64_t width = decoder_.hidden_size;
    const Rows all{num_rows_, nullptr}, rows = rows_of(index);
    const LowRanks qkv{index, &OutriderLayerAdapter::qkv, all},
        value{index, &OutriderLayerAdapter::qkv, all, layer.qkv.out_features};
    const LowRanks output{index, &OutriderLayerAdapter::output, rows};
    const LowRanks gate_up{index, &OutriderLayerAdapter::gate_up, rows}, down{index, &OutriderLayerAdapter::down, rows};
    const auto note = [&](OutriderPhase kind) {
      if (member.index == 0) workspace_.times.note(kind);  // only the caller: others may be late (see Job)
    };
    // Adds a product to the residual stream, or stores it if it is normalised before.
    const auto adder = [&](const float* output_norm) {
      return [this, &rows, width, output_norm](const TileRow& tile) {
        if (output_norm != nullptr) return StoreTo<float>{outputs_, width}(tile);
        if (decoder_.residual_scale != 1.0f)
          for (int c = 0; c < tile.num; c++) tile.values[c] *= decoder_.residual_scale;
        AddTo<float>{residual_, width}(TileRow{rows[tile.row], tile.column, tile.num, tile.values});
      };
    };
    if (batch_.features == nullptr || first_ + static_cast<int64_t>(index) > 0)
      normalise(phases[0], member, ahead, all, index > 0 ? layers_[index - 1].mlp_output_norm : nullptr,
                layer.input_norm, input_matrix(layer), qkv, first_ + static_cast<int64_t>(index));
    note(OUTRIDER_NORM);
    const int64_t projected_width = heads_ * decoder_.head_dim;
    const bool has_value = layer.value.packed != nullptr;
    multiply(phases[1], member, ahead, normalised_, layer.qkv, qkv, has_value ? &layer.value : &layer.output,
             StoreTo<Type>{projected_, projected_width});
    if (has_value)
      multiply(phases[11], member, ahead, normalised_, layer.value, value, &layer.output,
               StoreTo<Type>{projected_ + layer.qkv.out_features, projected_width});
    note(OUTRIDER_LINEAR);
    const auto rotate_rows = [&](int64_t unit) {
      for_rows(unit, num_rows_, [&](int64_t row) { rotate_and_write(row, layer, index); });
    };
    phases[2].share(member, row_units(num_rows_), rotate_rows, ahead);
    note(OUTRIDER_ROPE);
    if (rows.num == 0) return;
    attend(phases[3], phases[4], index, member, ahead);
    note(OUTRIDER_ATTENTION);
    prepare_rows(phases[5], member, ahead, attended_, layer.output, output);
    multiply(phases[6], member, ahead, attended_, layer.output, output, &layer.gate_up,
             adder(layer.attention_output_norm));
    note(OUTRIDER_LINEAR);
    normalise(phases[7], member, ahead, rows, layer.attention_output_norm, layer.mlp_norm, layer.gate_up,
              gate_up);
    note(OUTRIDER_NORM);
    multiply(phases[8], member, ahead, normalised_, layer.gate_up, gate_up, &layer.down,
             ActivateMultiplyTo<Type, Row, PlainGate>{gated_, decoder_.intermediate_size, decoder_.intermediate_size,
                                                      PlainGate{decoder_.is_gelu != 0}});
    prepare_rows(phases[9], member, ahead, gated_, layer.down, down);
    multiply(phases[10], member, ahead, gated_, layer.down, down, next_qkv,
             adder(layer.mlp_output_norm));
    note(OUTRIDER_LINEAR);
  }

  // Normalises query and key heads if there are norms for them, rotates them, and writes keys and values to the cache.
  void rotate_and_write(int64_t row, const OutriderLayer& layer, size_t index) {
    const int64_t head_dim = decoder_.head_dim, angle = batch_.positions[row] * (decoder_.rotary_dim / 2);
    const int64_t slot = batch_of(index).slots[row], place = panel_at(slot, 0, decoder_.num_kv_heads, head_dim);
    Type* keys = static_cast<Type*>(key_caches_[index]) + place;
    Type* values = static_cast<Type*>(value_caches_[index]) + place;
    Type* heads = projected_ + row * heads_ * head_dim;
    const auto normalise_heads = [&](int64_t first, int64_t num, const float* norm) {
      const int64_t width = decoder_.norms_all_heads ? num * head_dim : head_dim;
      Type* const end = heads + (first + num) * head_dim;
      for (Type* at = heads + first * head_dim; norm != nullptr && at < end; at += width)
        rms_norm_row<Type>(at, width, norm, decoder_.epsilon, at, decoder_.rounds_norms_once != 0);
    };
    normalise_heads(0, decoder_.num_heads, layer.query_norm);
    normalise_heads(decoder_.num_heads, decoder_.num_kv_heads, layer.key_norm);
    for (int64_t head = 0; layer.cosines != nullptr && head < decoder_.num_heads + decoder_.num_kv_heads; head++) {
      Type* from = heads + head * head_dim;
      rotate_head<Type>(from, decoder_.rotary_dim, layer.cosines + angle, layer.sines + angle, from);
    }
    for (int64_t head = 0; head < decoder_.num_kv_heads; head++) {
      const auto* key = reinterpret_cast<const char*>(heads + (decoder_.num_heads + head) * head_dim);
      const auto* value = key + decoder_.num_kv_heads * head_dim * sizeof(Type);
      copy_key(keys + head * kPanel * head_dim, head_dim, slot, key);
      copy_value(values + head * kPanel * head_dim, head_dim, slot, value);
    }
  }

  // Two phases: attend, and merge the spans' partial results if the plan is split.
  void attend(Phase& tasks, Phase& merges, size_t index, Member member, NextWeights& ahead) {
    const AttentionPlan& plan = *plan_of_layer_[index];
    const OutriderAttention options = attention_options(layers_[index]);
    const Rows rows = rows_of(index);
    const int64_t head_dim = decoder_.head_dim;
    const PagedAttention<Type> attention{options, batch_of(index), plan, projected_, heads_ * head_dim,
                                         static_cast<const Type*>(key_caches_[index]),
                                         static_cast<const Type*>(value_caches_[index]), partials_};
    const auto store_row = [&](int64_t row, int64_t head, const float* from, float factor) {
      const Type* type = nullptr;
      Row* to = attended_ + (rows.index_of(row) * decoder_.num_heads + head) * head_dim;
      for (int64_t d = 0; d < head_dim; d += kWidth)
        store_exact(to + d, rounded_to(finished_values(from + d, factor), type));
    };
    const auto run_task = [&](int64_t task) {
      auto* memory = workspace_.own[member.index].attention.template get<char>();
      AttentionScratch<Type> scratch(memory, query_rows_, head_dim);
      attention.run(task, scratch, store_row);
    };
    tasks.share(member, attention.num_tasks(), run_task, ahead);
    const auto merge_task = [&](int64_t task) { attention.finish_split(task, store_row); };
    if (plan.is_split) merges.share(member, attention.num_merges(), merge_task, ahead);
  }

  // These are copies, because a late member may read them after the call has returned. Memory
  // that they point to is used within units only.
  OutriderWorkspace& workspace_;
  const OutriderDecoder decoder_;
  const std::vector<OutriderLayer> layers_;
  const OutriderBatch batch_;
  std::vector<OutriderBatch> groups_;  // the batch of each group of layers
  const std::vector<void*> key_caches_;
  const std::vector<void*> value_caches_;

  OutriderFeatures features_{};
  std::vector<int64_t> taps_;
  const int64_t first_;  // the first layer
  const int64_t num_rows_;
  std::vector<Phase> phases_;
  std::vector<PlanOfLayers> plans_;
  std::vector<AttentionPlan*> plan_of_layer_;
  int64_t heads_ = 0;                          // query, key and value heads of a projected row
  int64_t query_rows_ = 0;
  float* residual_ = nullptr;  // [rows, hidden]
  float* outputs_ = nullptr;   // [rows, hidden], the last product, if it is normalised before it is added
  Row* normalised_ = nullptr;  // [rows, hidden]
  QuantisedGroup* quantised_ = nullptr;  // [groups][rows], the next product's input if its matrix is quantised
  Type* projected_ = nullptr;  // [rows, heads_, head_dim]
  Row* attended_ = nullptr;    // [rows, num_heads, head_dim]
  Row* gated_ = nullptr;       // [rows, intermediate]
  Row* tapped_ = nullptr;      // [rows, taps, hidden]
  float* partials_ = nullptr;
  float* reduced_ = nullptr;  // [rows, max_rank_], what adapters have made of the next product's rows
  int64_t max_rank_ = 0;      // of the adapters in the batch
};

// Stores each logit in the column of its id.
struct ScatterTo {
  float* y;
  int64_t width;
  const int64_t* columns;

  void operator()(const TileRow& tile) const {
    float* to = y + tile.row * width;
    for (int c = 0; c < tile.num; c++) to[columns[tile.column + c]] = tile.values[c];
  }
};

// Scales logits and limits them by the soft cap.
void finish_logits(const OutriderDecoder& decoder, const TileRow& tile) {
  if (decoder.logits_scale != 1.0f)
    for (int c = 0; c < tile.num; c++) tile.values[c] *= decoder.logits_scale;
  if (const float cap = decoder.logits_softcap; cap != 0.0f)
    for (int c = 0; c < tile.num; c += kWidth)
      store(tile.values + c, hyperbolic_tangent(load(tile.values + c) / cap) * cap);
}

template <class Type>
void logits_of(Team& team, OutriderWorkspace& workspace, const OutriderDecoder& decoder, const int64_t* rows,
               int64_t num, float* logits, const int64_t* columns, int64_t num_columns, Type* states) {
  workspace.times.begin();
  const int64_t width = decoder.hidden_size;
  const float* residual = workspace.residual.get<float>();
  auto* normalised = workspace.activations.of<Activation<Type>>(num * width);
  auto* quantised = workspace.quantised.of<QuantisedGroup>(is_quantised(decoder.head) ? groups_in_memory(num, width) : 0);
  team.share(row_units(num), [&](int64_t unit, int) {
    for_rows(unit, num, [&](int64_t i) {
      const float* from = residual + rows[i] * width;
      if (columns != nullptr) std::fill_n(logits + i * num_columns, num_columns, -INFINITY);
      rms_norm_row<Type>(from, width, decoder.final_norm, decoder.epsilon, normalised + i * width,
                         decoder.rounds_norms_once != 0);
      for (int64_t d = 0; states != nullptr && d < width; d += kWidth)
        store_rounded(states + i * width + d,
                      decoder.keeps_normalised ? load_wide(normalised + i * width + d) : load(from + d));
      if (is_quantised(decoder.head)) quantise_row(normalised + i * width, width, quantised + i, group_stride(num));
    });
  });
  const auto multiply = [&](const auto& store) {
    with_weight<Type>(decoder.head, [&](auto* weight) {
      using Weight = std::remove_pointer_t<decltype(weight)>;
      const Matrix<Weight> head(decoder.head);
      team.share(num_units(head), [&](int64_t unit, int) {
        multiply_unit<Weight>(unit, multiplied<Weight>(normalised, quantised), num, head, [&](const TileRow& tile) {
          finish_logits(decoder, tile);
          store(tile);
        });
      });
    });
  };
  if (columns == nullptr) {
    multiply(StoreTo<float>{logits, decoder.vocab_size});
  } else {
    multiply(ScatterTo{logits, num_columns, columns});
  }
  workspace.times.note(OUTRIDER_HEAD);
}

// Returns the bytes of a row's taps.
int64_t taps_size(const OutriderDecoder& decoder, int64_t num_taps) {
  int64_t bytes = 0;
  with_type(decoder, [&](auto* type) { bytes = sizeof(Activation<std::remove_pointer_t<decltype(type)>>); });
  return num_taps * decoder.hidden_size * bytes;
}

int64_t residual_size(const OutriderDecoder& decoder) { return decoder.hidden_size * sizeof(float); }

}  // namespace
}  // namespace outrider

using namespace outrider;

OutriderStatus outrider_decoder_layers(OutriderTeam* team, OutriderWorkspace* workspace, const OutriderDecoder* decoder,
                                       const OutriderBatch* batch, void* const* key_caches, void* const* value_caches,
                                       const OutriderFeatures* features, int64_t first, int64_t last) {
  return call([&] {
    with_type(*decoder, [&](auto* type) {
      using Type = std::remove_pointer_t<decltype(type)>;
      Team& threads = *reinterpret_cast<Team*>(team);
      threads.run(std::make_shared<DecoderStep<Type>>(threads, *workspace, *decoder, *batch, key_caches, value_caches,
                                                      features, first, last));
    });
  });
}

int64_t outrider_state_size(const OutriderDecoder* decoder, int64_t num_taps) {
  return residual_size(*decoder) + taps_size(*decoder, num_taps);
}

OutriderStatus outrider_load_states(OutriderWorkspace* workspace, const OutriderDecoder* decoder, int64_t num_rows,
                                    int64_t num_taps, const void* states) {
  return call([&] {
    const int64_t residual = num_rows * residual_size(*decoder), taps = num_rows * taps_size(*decoder, num_taps);
    std::memcpy(workspace->residual.of<char>(residual), states, residual);
    std::memcpy(workspace->taps.of<char>(taps), static_cast<const char*>(states) + residual, taps);
  });
}

void outrider_save_states(const OutriderWorkspace* workspace, const OutriderDecoder* decoder, int64_t num_rows,
                          int64_t num_taps, void* states) {
  const int64_t residual = num_rows * residual_size(*decoder), taps = num_rows * taps_size(*decoder, num_taps);
  std::memcpy(states, workspace->residual.get<char>(), residual);
  if (taps > 0) std::memcpy(static_cast<char*>(states) + residual, workspace->taps.get<char>(), taps);
}

OutriderStatus outrider_decoder_logits(OutriderTeam* team, OutriderWorkspace* workspace, const OutriderDecoder* decoder,
                                       const int64_t* rows, int64_t num_logits, float* logits, const int64_t* columns,
                                       int64_t num_columns, void* states) {
  if (num_logits == 0) return 0;
  return call([&] {
    with_type(*decoder, [&](auto* type) {
      using Type = std::remove_pointer_t<decltype(type)>;
      logits_of<Type>(*reinterpret_cast<Team*>(team), *workspace, *decoder, rows, num_logits, logits, columns,
                      num_columns, static_cast<Type*>(states));
    });
  });
}
