// Layers with a mixture of experts, in one job of the team: rows are sorted by expert, each expert multiplies its rows,
// and each row adds the results of its slots in their order.
//
// A product's rows have the same bits whatever their number (panels.h), and the sum of a row's slots has one order, so
// that a row's bits depend neither on the other rows nor on the number of threads. If experts are divided among ranks,
// another process makes the sums.

#include <cmath>
#include <memory>
#include <vector>

#include "call.h"
#include "linear.h"
#include "workspace.h"

namespace outrider {
namespace {

constexpr int64_t kEntriesOfUnit = 8;  // in phases that process rows one by one

// The activation of experts.
struct ExpertGate {
  const OutriderExperts& experts;

  Floats operator()(Floats gate, Floats up) const {
    if (experts.activation != 2) return PlainGate{experts.activation == 1}(gate, up);
    const Floats most = broadcast(experts.limit == 0.0f ? INFINITY : experts.limit), least = -most;
    gate = gate > most ? most : gate;
    up = up > most ? most : up < least ? least : up;
    return gate * sigmoid(gate * experts.alpha) * (up + experts.shift);
  }
};

// Weight: the type of the experts' weights. T: the type of x and y and, unless weights are quantised, of weights.
template <class Weight, class T>
class ExpertsJob final : public Job {
 public:
  ExpertsJob(OutriderWorkspace& workspace, const OutriderExperts& experts, const T* x, int64_t num_rows,
             const int64_t* expert_ids, const float* weights, int64_t num_slots, bool is_summed, void* y)
      : experts_(experts), x_(x), num_rows_(num_rows), expert_ids_(expert_ids), weights_(weights),
        num_slots_(num_slots), is_summed_(is_summed), y_(static_cast<T*>(y)) {
    up_units_ = num_units(Matrix<Weight>(experts.gate_up[0]));
    down_units_ = num_units(Matrix<Weight>(experts.down[0]));
    sort_by_expert();
    const int64_t num = entries_.size(), hidden = experts.hidden_size;
    inputs_ = workspace.activations.of<Row>(kIsQuantised<Weight> ? 0 : num * depth_of(hidden));
    gated_ = workspace.gated.of<Row>(num * depth_of(experts.intermediate_size));
    quantised_ = workspace.quantised.of<QuantisedGroup>(kIsQuantised<Weight> ? num_groups_ : 0);
    outputs_ = is_summed ? workspace.outputs.of<float>(num_rows * num_slots * hidden) : static_cast<float*>(y);
  }

  void work(Member member) override {
    const int64_t hidden = experts_.hidden_size, intermediate = experts_.intermediate_size;
    const auto for_entries = [&](Phase& phase, auto&& f) {
      const int64_t num = entries_.size();
      phase.share(member, (num + kEntriesOfUnit - 1) / kEntriesOfUnit, [&](int64_t unit) {
        for (int64_t i = unit * kEntriesOfUnit; i < std::min(num, (unit + 1) * kEntriesOfUnit); i++) f(i);
      });
    };
    for_entries(phases_[0], [&](int64_t i) {
      const T* row = x_ + entries_[i].place / num_slots_ * hidden;
      if constexpr (kIsQuantised<Weight>) {
        quantise(i, row, hidden);
      } else {
        convert_row(row, hidden, depth_of(hidden), inputs_ + i * depth_of(hidden));
        std::fill(gated_ + i * depth_of(intermediate) + intermediate, gated_ + (i + 1) * depth_of(intermediate), Row{});
      }
    });
    const ExpertGate gate{experts_};
    multiply(phases_[1], member, up_units_, experts_.gate_up, inputs_, hidden, [&](const Group& group) {
      const int64_t stride = depth_of(intermediate);
      return ActivateMultiplyTo<T, Row, ExpertGate>{gated_ + group.first * stride, intermediate, stride, gate};
    });
    if constexpr (kIsQuantised<Weight>)
      for_entries(phases_[2], [&](int64_t i) { quantise(i, gated_ + i * depth_of(intermediate), intermediate); });
    multiply(phases_[3], member, down_units_, experts_.down, gated_, intermediate, [&](const Group& group) {
      return [this, &group, hidden](const TileRow& tile) {
        const int64_t place = entries_[group.first + tile.row].place;
        for (int c = 0; c < tile.num; c++) tile.values[c] *= weights_[place];
        StoreTo<float>{outputs_, hidden}(TileRow{place, tile.column, tile.num, tile.values});
      };
    });
    if (is_summed_) phases_[4].share(member, num_rows_, [&](int64_t row) { add_slots(row); });
  }

 private:
  // Rows that are multiplied by plain weights, or are quantised before they are.
  using Row = std::conditional_t<kIsQuantised<Weight>, T, Activation<Weight>>;

  // A slot of a row.
  struct Entry {
    int64_t place;  // row * num_slots + slot
    int64_t group;  // index in groups_
  };

  // The entries of one expert, which are consecutive.
  struct Group {
    int64_t expert;
    int64_t first;
    int64_t num;
    int64_t first_quantised;  // where its rows' quantised groups begin
  };

  static int64_t depth_of(int64_t width) { return kIsQuantised<Weight> ? width : padded_depth<Weight>(width); }

  bool has_expert(int64_t place) const {
    return expert_ids_[place] >= 0 && expert_ids_[place] < experts_.num_experts;
  }

  void sort_by_expert() {
    const int64_t num_places = num_rows_ * num_slots_;
    std::vector<int64_t> ends(experts_.num_experts), group_of(experts_.num_experts);
    for (int64_t place = 0; place < num_places; place++)
      if (has_expert(place)) ends[expert_ids_[place]]++;
    int64_t first = 0;
    for (int64_t expert = 0; expert < experts_.num_experts; expert++) {
      const int64_t num = ends[expert];
      ends[expert] = first;
      if (num == 0) continue;
      group_of[expert] = groups_.size();
      groups_.push_back(Group{expert, first, num, num_groups_});
      num_groups_ += groups_in_memory(num, std::max(experts_.hidden_size, experts_.intermediate_size));
      first += num;
    }
    entries_.resize(first);
    for (int64_t place = 0; place < num_places; place++)
      if (has_expert(place)) entries_[ends[expert_ids_[place]]++] = Entry{place, group_of[expert_ids_[place]]};
  }

  template <class From>
  void quantise(int64_t entry, const From* row, int64_t width) {
    const Group& group = groups_[entries_[entry].group];
    quantise_row(row, width, quantised_ + group.first_quantised + entry - group.first, group_stride(group.num));
  }

  // A phase: multiplies the rows of each expert by its matrix of `num` units. `finisher(group)` returns what finishes a
  // tile's row.
  template <class Finisher>
  void multiply(Phase& phase, Member member, int64_t num, const OutriderMatrix* matrices, const Row* rows,
                int64_t width, Finisher&& finisher) {
    phase.share(member, num * static_cast<int64_t>(groups_.size()), [&](int64_t unit) {
      const Group& group = groups_[unit / num];
      const Matrix<Weight> matrix(matrices[group.expert]);
      const auto* from = multiplied<Weight>(rows + group.first * depth_of(width), quantised_ + group.first_quantised);
      multiply_unit<Weight>(unit % num, from, group.num, matrix, finisher(group));
    });
  }

  void add_slots(int64_t row) const {
    const int64_t hidden = experts_.hidden_size;
    const float* const outputs = outputs_ + row * num_slots_ * hidden;
    const auto sum_of = [&](auto sum, int64_t column, auto&& load_from) {
      for (int64_t slot = 0; slot < num_slots_; slot++)
        if (has_expert(row * num_slots_ + slot)) sum += load_from(outputs + slot * hidden + column);
      return sum;
    };
    T* to = y_ + row * hidden;
    int64_t c = 0;
    for (; c + kWidth <= hidden; c += kWidth)
      store_rounded(to + c, sum_of(Floats{}, c, [](const float* from) { return load(from); }));
    for (; c < hidden; c++) store_one(to + c, sum_of(0.0f, c, [](const float* from) { return *from; }));
  }

  const OutriderExperts experts_;
  const T* const x_;
  const int64_t num_rows_;
  const int64_t* const expert_ids_;
  const float* const weights_;
  const int64_t num_slots_;
  const bool is_summed_;
  T* const y_;  // unless sums are not made
  int64_t up_units_;
  int64_t down_units_;
  std::vector<Entry> entries_;  // sorted by expert, and by place within one
  std::vector<Group> groups_;
  int64_t num_groups_ = 0;  // of quantised rows
  Row* inputs_;             // [entries, depth]
  Row* gated_;              // [entries, depth]
  QuantisedGroup* quantised_;
  float* outputs_;  // [rows, slots, hidden]
  Phase phases_[5];
};

template <class Weight, class T>
void run_experts(Team& team, OutriderWorkspace& workspace, const OutriderExperts& experts, const void* x,
                 int64_t num_rows, const int64_t* expert_ids, const float* weights, int64_t num_slots, bool is_summed,
                 void* y) {
  team.run(std::make_shared<ExpertsJob<Weight, T>>(workspace, experts, static_cast<const T*>(x), num_rows, expert_ids,
                                                   weights, num_slots, is_summed, y));
}

}  // namespace
}  // namespace outrider

using namespace outrider;

OutriderStatus outrider_experts(OutriderTeam* team, OutriderWorkspace* workspace, int32_t activation_type,
                                const OutriderExperts* experts, const void* x, int64_t num_rows,
                                const int64_t* expert_ids, const float* weights, int64_t num_slots,
                                int32_t is_summed, void* y) {
  return call([&] {
    const auto run = [&](auto run_typed) {
      run_typed(*reinterpret_cast<Team*>(team), *workspace, *experts, x, num_rows, expert_ids, weights, num_slots,
                is_summed != 0, y);
    };
    with_weights(experts->gate_up[0].type, [&](auto* weight) {
      using Weight = std::remove_pointer_t<decltype(weight)>;
      if constexpr (!kIsQuantised<Weight>) return run(run_experts<Weight, Weight>);
      else if (activation_type == OUTRIDER_BFLOAT16) return run(run_experts<Weight, BFloat16>);
      else return run(run_experts<Weight, float>);
    });
  });
}
