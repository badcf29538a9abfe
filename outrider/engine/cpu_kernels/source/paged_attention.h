// Attention of a step's rows over the paged cache, in tasks that members of a team share.
//
// The keys of a sequence are processed in spans of kSpan keys at absolute positions. Within a
// span a row's weights are a plain softmax, rounded to the type of the values; spans are merged
// in ascending order (online softmax, Milakov and Gimelshein, 2018). The start of a span and
// the order of its products depend on positions only. So a row's output has the same bits
// whichever rows are computed at the same time, and whether or not members share its spans
// (as in flash-decoding, Dao et al., 2023).
//
// The query rows of one KV head, for some rows of one sequence, share one read of its keys.
// Sixteen keys at consecutive positions are multiplied in place if they fill a panel of the
// cache (kv_panels.h) in that order. Otherwise they are gathered first: blocks may not consist
// of whole panels, and the last keys of a row in a tree of drafts are not in the slots of their
// positions. Rows that continue the path of the row before them share a read, too; other rows
// of a tree read their keys separately, in the order of positions. In latent attention the
// keys' latents are always gathered, from the values: the two products need different layouts.
#pragma once

#include <algorithm>
#include <type_traits>

#include "api.h"
#include "attention_plan.h"
#include "attention_products.h"
#include "kv_panels.h"
#include "panels.h"
#include "team.h"
#include "workspace.h"

namespace outrider {

constexpr float kMaskedScore = -1e30f;  // the score of a masked key, and the largest score of a row that sees none

// Scratch memory of one member for one task.
template <class KV>
struct AttentionScratch {
  Activation<KV>* query;    // [query_rows, depth]
  float* scores;            // [kRowsOfCall, kSpan]
  Activation<KV>* weights;  // [kRowsOfCall, kSpan]
  KV* keys;                 // [kPanelsOfSpan][depth * 16], gathered keys
  KV* values;               // [kPanelsOfSpan][head_dim * 16], more than latent attention needs
  float* running;           // two partial results, see PartialResult

  static int64_t bytes(int64_t query_rows, int64_t head_dim) {
    return AttentionScratch(nullptr, query_rows, head_dim).size_;
  }
  AttentionScratch(char* at, int64_t query_rows, int64_t head_dim) {
    const int64_t depth = padded_depth<KV>(head_dim);
    const auto take = [&](auto*& part, int64_t count) {
      part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(at + size_);
      size_ += (count * static_cast<int64_t>(sizeof *part) + 63) / 64 * 64;
    };
    take(query, query_rows * depth);
    take(scores, kRowsOfCall<KV> * kSpan);
    take(weights, kRowsOfCall<KV> * kSpan);
    take(keys, kPanelsOfSpan * depth * kPanel);
    take(values, kPanelsOfSpan * head_dim * kPanel);
    take(running, 2 * query_rows * (head_dim + 2));
  }

 private:
  int64_t size_ = 0;
};

// The result of some spans for `num` query rows: largest scores, sums of weights, and weighted
// values, one array after the other.
struct PartialResult {
  float* largest;   // [num]
  float* sums;      // [num]
  float* values;    // [num, value_dim]; room for head_dim

  static int64_t size(int64_t num, int64_t head_dim) { return num * (head_dim + 2); }
  PartialResult(float* at, int64_t num) : largest(at), sums(at + num), values(at + 2 * num) {}
};

// Adds the result of the next span, `later`, to `earlier`.
static inline void merge(const PartialResult& earlier, const PartialResult& later, int64_t num, int64_t width) {
  for (int64_t r = 0; r < num; r++) {
    const float largest = std::max(earlier.largest[r], later.largest[r]);
    const float keep = exponential(earlier.largest[r] - largest), add = exponential(later.largest[r] - largest);
    earlier.largest[r] = largest;
    earlier.sums[r] = earlier.sums[r] * keep + later.sums[r] * add;
    float* to = earlier.values + r * width;
    const float* from = later.values + r * width;
    for (int64_t d = 0; d < width; d += kWidth) store(to + d, load(to + d) * keep + load(from + d) * add);
  }
}

// Returns a finished row's values. The sign of a zero depends on other rows: keys that are
// computed for these rows, but that this row does not see, are added with weight 0, which
// turns -0 into +0. Adding 0 always gives +0.
static inline Floats finished_values(const float* values, float factor) { return load(values) * factor + 0.0f; }

// One layer's attention. `Latent`: whether it is latent attention (see api.h).
template <class KV, bool Latent = false>
struct PagedAttention {
  const OutriderAttention& options;
  const OutriderBatch& batch;
  const AttentionPlan& plan;
  const KV* query;  // rotated rows at distances of query_stride
  int64_t query_stride;
  const KV* key_cache;
  const KV* value_cache;
  float* partials;  // [num_partials, num_kv_heads] results of query_rows rows, if the plan is split

  // The widths of keys and values in the cache.
  int64_t key_width() const { return Latent ? options.head_dim - options.latent_dim : options.head_dim; }
  int64_t value_width() const { return Latent ? options.latent_dim : options.head_dim; }
  int64_t group() const { return options.num_heads / options.num_kv_heads; }

  PartialResult partial(int64_t index, int64_t head, int64_t num) const {
    const int64_t size = PartialResult::size(plan.query_rows, options.head_dim);
    return PartialResult(partials + (index * options.num_kv_heads + head) * size, num);
  }

  int64_t num_tasks() const {
    return static_cast<int64_t>(plan.is_split ? plan.spans.size() : plan.tiles.size()) * options.num_kv_heads;
  }

  // Runs one task. Calls `store_row(row, head, values, factor)` for finished rows, which must apply `finished_values`.
  // Rows of a split plan are finished by the tasks of `finish_split`, after all tasks of `run`.
  template <class Store>
  void run(int64_t task, AttentionScratch<KV>& scratch, Store&& store_row) const {
    const int64_t index = task / options.num_kv_heads, head = task % options.num_kv_heads;
    if (plan.is_split) {
      const auto [tile_index, span] = plan.spans[index];
      const AttentionTile& tile = plan.tiles[tile_index];
      load_queries(tile, head, scratch);
      const PartialResult result = partial(tile.partial + span - tile.first_span, head, tile.num_rows * group());
      compute_span(tile, head, span, scratch, result, span, head_after(head));
      return;
    }
    const AttentionTile& tile = plan.tiles[index];
    const int64_t num = tile.num_rows * group();
    const PartialResult running(scratch.running, num);
    const PartialResult next(scratch.running + PartialResult::size(num, options.head_dim), num);
    load_queries(tile, head, scratch);
    for (int64_t span = tile.first_span; span < tile.last_span; span++) {
      const bool is_last = span + 1 == tile.last_span;
      compute_span(tile, head, span, scratch, span == tile.first_span ? running : next,
                   is_last ? tile.first_span : span + 1, is_last ? head_after(head) : head);
      if (span > tile.first_span) merge(running, next, num, value_width());
    }
    store_tile(tile, head, running, store_row);
  }

  // Returns the number of tasks of `finish_split`: in a split plan one for each tile and KV head, merging its spans.
  int64_t num_merges() const { return static_cast<int64_t>(plan.tiles.size()) * options.num_kv_heads; }

  template <class Store>
  void finish_split(int64_t task, Store&& store_row) const {
    const AttentionTile& tile = plan.tiles[task / options.num_kv_heads];
    const int64_t head = task % options.num_kv_heads, num = tile.num_rows * group();
    const PartialResult running = partial(tile.partial, head, num);
    for (int64_t i = 1; i < tile.last_span - tile.first_span; i++)
      merge(running, partial(tile.partial + i, head, num), num, value_width());
    store_tile(tile, head, running, store_row);
  }

 private:
  template <class Store>
  void store_tile(const AttentionTile& tile, int64_t head, const PartialResult& result, Store&& store_row) const {
    for (int64_t r = 0; r < tile.num_rows * group(); r++) {
      const int64_t query_head = head * group() + r % group();
      store_row(tile.row + r / group(), query_head, result.values + r * value_width(),
                factor(result.largest[r], result.sums[r], query_head));
    }
  }

  // Returns the factor of a finished row's values: 1 / (the sum of its weights and the weight of the head's sink).
  float factor(float largest, float sum, int64_t query_head) const {
    if (options.sinks == nullptr) return 1.0f / sum;
    const float sink = options.sinks[query_head], most = std::max(largest, sink);
    const float keep = exponential(largest - most);
    return keep / (sum * keep + exponential(sink - most));
  }

  void load_queries(const AttentionTile& tile, int64_t head, AttentionScratch<KV>& scratch) const {
    const int64_t depth = padded_depth<KV>(options.head_dim);
    for (int64_t r = 0; r < tile.num_rows * group(); r++) {
      const int64_t first = (head * group() + r % group()) * options.head_dim;
      const KV* from = query + (tile.row + r / group()) * query_stride + first;
      Activation<KV>* to = scratch.query + r * depth;
      for (int64_t d = 0; d < options.head_dim; d += kWidth) store_exact(to + d, load_wide(from + d));
      for (int64_t d = options.head_dim; d < depth; d++) to[d] = Activation<KV>{};
    }
  }

  // Returns the KV head of the task that most likely comes next.
  int64_t head_after(int64_t head) const { return (head + 1) % options.num_kv_heads; }

  // Computes one span's result. The keys of `next_span` and `next_head` are prefetched, as they are probably next.
  void compute_span(const AttentionTile& tile, int64_t head, int64_t span, AttentionScratch<KV>& scratch,
                    const PartialResult& result, int64_t next_span, int64_t next_head) const {
    const int64_t depth = padded_depth<KV>(options.head_dim), width = value_width();
    const int64_t rows = tile.num_rows * group();
    const int64_t begin = span * kSpan;
    const int num_keys = static_cast<int>(std::min<int64_t>(kSpan, tile.position + tile.num_rows - begin));
    const int first_panel = first_key(tile.position, begin) / kPanel;
    const int num = (num_keys + kPanel - 1) / kPanel - first_panel;
    // Panels of keys, then of values, then the next keys. Each is prefetched before its turn.
    const KV* panels[2 * kPanelsOfSpan + kPanelsAhead];
    const KV** values = panels + num;
    for (int i = 0; i < num; i++) {
      const int first = (first_panel + i) * kPanel;
      find_panel(tile, head, begin + first, std::min(kPanel, num_keys - first), i, scratch, panels[i], values[i]);
    }
    for (int i = 0; i < kPanelsAhead; i++) {
      const int64_t position = std::min(next_span * kSpan + i * kPanel, tile.position);
      values[num + i] = key_cache + panel_at(slot_of(tile, position), next_head, options.num_kv_heads, key_width());
    }

    for (int64_t row = 0, count; row < rows; row += count) {
      count = equal_part(rows - row, kRowsOfCall<KV>);
      // The number of panels that the last of these rows sees; later ones are for other rows.
      const int64_t last_position = tile.position + (row + count - 1) / group();
      const int64_t panels_seen = last_position / kPanel + 1 - begin / kPanel - first_panel;
      const int seen = static_cast<int>(std::min<int64_t>(num, panels_seen));
      float* to = result.values + row * width;
      if (seen <= 0) {
        std::fill_n(result.largest + row, count, kMaskedScore);
        std::fill_n(result.sums + row, count, 0.0f);
        std::fill_n(to, count * width, 0.0f);
        continue;
      }
      multiply_keys<KV>(static_cast<int>(count), scratch.query + row * depth, depth, panels, seen, scratch.scores);
      for (int64_t r = 0; r < count; r++) {
        const int64_t position = tile.position + (row + r) / group();
        const int base = first_panel * kPanel;
        weigh(scratch.scores + r * kSpan, scratch.weights + r * kSpan, seen * kPanel, first_key(position, begin) - base,
              static_cast<int>(std::min<int64_t>(position + 1 - begin, num_keys)) - base, &result.largest[row + r],
              &result.sums[row + r]);
      }
      multiply_values<KV>(static_cast<int>(count), scratch.weights, values, seen, width, to);
    }
  }

  // Returns the first key that a row at `position` sees of the span at `begin`, relative to `begin`.
  int first_key(int64_t position, int64_t begin) const {
    if (options.sliding_window == 0) return 0;
    return static_cast<int>(std::max<int64_t>(0, position - options.sliding_window + 1 - begin));
  }

  // Returns the slot of the key at a position, as seen by the last row of a tile.
  int64_t slot_of(const AttentionTile& tile, int64_t position) const {
    if (position >= tile.path_position) return tile.path[position - tile.path_position];
    const int32_t* blocks = batch.block_tables + batch.table_starts[tile.seq];
    return blocks[position / batch.block_size] * batch.block_size + position % batch.block_size;
  }

  // Finds the panels of the `num` keys from `position` on, a multiple of 16, and of their values: in the cache, or
  // gathered in panel `index` of the scratch memory. Values after the last one are zeros.
  void find_panel(const AttentionTile& tile, int64_t head, int64_t position, int num, int index,
                  AttentionScratch<KV>& scratch, const KV*& keys, const KV*& values) const {
    const int64_t depth = padded_depth<KV>(options.head_dim), latents = Latent ? options.latent_dim * kPanel : 0;
    const int64_t keys_size = key_width(), values_size = value_width();
    const auto keys_at = [&](int64_t at) { return key_cache + panel_at(at, head, options.num_kv_heads, keys_size); };
    const auto values_at = [&](int64_t at) {
      return value_cache + panel_at(at, head, options.num_kv_heads, values_size);
    };
    // Usually all keys are in place, which the slot of the first one tells.
    const int64_t slot = slot_of(tile, position);
    int in_place = slot % kPanel == 0 ? 1 : 0;
    if (in_place != 0 && batch.block_size % kPanel == 0)
      in_place = static_cast<int>(std::clamp<int64_t>(tile.path_position - position, 1, num));
    while (in_place > 0 && in_place < num && slot_of(tile, position + in_place) == slot + in_place) in_place++;
    keys = keys_at(slot);
    values = values_at(slot);
    if (in_place == num && num == kPanel && depth == keys_size) return;

    KV* own_keys = scratch.keys + index * depth * kPanel;
    KV* own_values = scratch.values + index * values_size * kPanel;
    if (in_place < num || depth != keys_size) {
      std::memcpy(own_keys + latents, keys, keys_size * kPanel * sizeof(KV));
      KV* const end = own_keys + options.head_dim * kPanel;
      std::memset(static_cast<void*>(end), 0, (depth - options.head_dim) * kPanel * sizeof(KV));
      keys = own_keys;
    }
    if (in_place < num || num < kPanel) {
      copy_values(values, values_size, in_place, own_values);
      values = own_values;
    }
    for (int i = in_place; i < num; i++) {
      const int64_t from = slot_of(tile, position + i);
      copy_slot(keys_at(from), values_at(from), from, own_keys + latents, own_values, i);
    }
    if constexpr (Latent) transpose_values(values, options.latent_dim, own_keys);
  }

  // Copies a key and its value from one slot of a panel to another.
  void copy_slot(const KV* keys, const KV* values, int64_t from, KV* to_keys, KV* to_values, int64_t to) const {
    constexpr int64_t word = kPerWord<KV>;
    for (int64_t d = 0; d < key_width() * kPanel; d += kPanel * word)
      std::memcpy(to_keys + d + to * word, keys + d + from % kPanel * word, 4);
    for (int64_t column = 0; column < value_width() * kPanel; column += kPanel * kPanel)
      for (int64_t n = 0; n < kPanel; n++)
        to_values[column + place_in_panel<KV>(to, n)] = values[column + place_in_panel<KV>(from % kPanel, n)];
  }

  // Computes the weights e^(score - largest) of scores [num], 0 for keys outside [first, last), and their sum.
  void weigh(float* scores, Activation<KV>* weights, int num, int first, int last, float* largest, float* sum) const {
    const auto is_seen = [&](int i) { return (kLanes + i >= first) & (kLanes + i < last); };
    const float scaling = options.scaling, softcap = options.softcap;
    Floats most = broadcast(kMaskedScore);
    for (int i = 0; i < num; i += kWidth) {
      Floats value = load(scores + i) * scaling;
      if (softcap > 0) value = hyperbolic_tangent(value / softcap) * softcap;
      if (i < first || i + kWidth > last) value = is_seen(i) ? value : broadcast(kMaskedScore);
      store(scores + i, value);
      most = larger(value, most);
    }
    const float most_of_all = largest_of_lanes(most);
    Floats total{};
    for (int i = 0; i < num; i += kWidth) {
      Floats weight = exponential(load(scores + i) - most_of_all);
      if (i < first || i + kWidth > last) weight = is_seen(i) ? weight : Floats{};
      total += store_weights(weights + i, weight);
    }
    *largest = most_of_all;
    *sum = sum_of_lanes(total);
  }

  // Stores a weight and returns it as stored, rounded to the type of the values. A weight is at least 0, or a NaN. A
  // NaN of bfloat16 keys has a lower half of zeros, so that rounding carries nothing into its exponent.
  static Floats store_weights(Activation<KV>* to, Floats weight) {
    if constexpr (sizeof(KV) == 4) {
      store(to, weight);
      return weight;
    } else {
      const Words bits = reinterpret_cast<Words>(weight);
      const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
      if constexpr (sizeof *to == 2) store_upper_halves(to, rounded);
      else store(to, reinterpret_cast<Floats>(rounded));
      return reinterpret_cast<Floats>(rounded);
    }
  }
};

}  // namespace outrider
