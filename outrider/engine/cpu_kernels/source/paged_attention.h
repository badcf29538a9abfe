// Attention of a step's rows over the paged cache, in tasks that members of a team share.
//
// The keys of a sequence are taken in spans of kSpan at absolute positions. Within a span a
// row's weights are a plain softmax; spans are merged with rising position (online softmax,
// Milakov and Gimelshein, 2018). Where a span begins and in which order its products are
// added depends on positions alone, so a row's output has the same bits whatever rows are
// computed beside it, and whether or not members share its spans (as flash-decoding does,
// Dao et al., 2023).
//
// The query rows of one KV head, for some rows of one sequence, share one read of its keys.
//
// In a tree of drafts the last keys of a row do not lie at the slots of their positions. Rows
// that follow each other there share a read too; others read their keys by themselves, each in
// the order of positions.
#pragma once

#include <algorithm>

#include "api.h"
#include "attention_plan.h"
#include "panels.h"
#include "team.h"
#include "workspace.h"

namespace outrider {

constexpr int kRowsWithoutPanel = 3;  // query rows whose sums, of four vectors of columns, fit the registers
constexpr int kKeysAhead = 32;  // how early a key or value is asked for: they lie apart, which no processor foresees
constexpr float kNothing = -1e30f;  // the largest score of a row that has seen no key

// Scratch of one member for one task.
template <class KV>
struct AttentionScratch {
  Activation<KV>* query;  // [query_rows, depth]
  float* scores;          // [query_rows, kSpan]
  KV* key_panel;          // [depth][16], as packed weights
  float* value_panel;     // [kSpan][16]
  float* running;         // a partial result: see PartialResult

  static int64_t bytes(int64_t query_rows, int64_t head_dim) {
    const int64_t depth = padded_depth<KV>(head_dim);
    return query_rows * depth * 4 + query_rows * kSpan * 4 + depth * kPanel * 4 + kSpan * kPanel * 4 +
           2 * query_rows * (head_dim + 2) * 4 + 6 * 64;
  }
  AttentionScratch(char* at, int64_t query_rows, int64_t head_dim) {
    const int64_t depth = padded_depth<KV>(head_dim);
    const auto take = [&](int64_t bytes) {
      char* taken = at;
      at += (bytes + 63) / 64 * 64;
      return taken;
    };
    query = reinterpret_cast<Activation<KV>*>(take(query_rows * depth * 4));
    scores = reinterpret_cast<float*>(take(query_rows * kSpan * 4));
    key_panel = reinterpret_cast<KV*>(take(depth * kPanel * 4));
    value_panel = reinterpret_cast<float*>(take(kSpan * kPanel * 4));
    running = reinterpret_cast<float*>(take(2 * query_rows * (head_dim + 2) * 4));
  }
};

// What a row has seen in some spans: largest score, sum of weights, weighted values. Of
// `num` query rows, one array after the other.
struct PartialResult {
  float* largest;   // [num]
  float* sums;      // [num]
  float* values;    // [num, head_dim]

  static int64_t size(int64_t num, int64_t head_dim) { return num * (head_dim + 2); }
  PartialResult(float* at, int64_t num) : largest(at), sums(at + num), values(at + 2 * num) {}
};

// Adds `later`, of the span that follows, to `earlier`.
static inline void merge(const PartialResult& earlier, const PartialResult& later, int64_t num, int64_t head_dim) {
  for (int64_t r = 0; r < num; r++) {
    const float largest = std::max(earlier.largest[r], later.largest[r]);
    const float keep = exponential(earlier.largest[r] - largest), add = exponential(later.largest[r] - largest);
    earlier.largest[r] = largest;
    earlier.sums[r] = earlier.sums[r] * keep + later.sums[r] * add;
    float* to = earlier.values + r * head_dim;
    const float* from = later.values + r * head_dim;
    for (int64_t d = 0; d < head_dim; d += kWidth) store(to + d, load(to + d) * keep + load(from + d) * add);
  }
}

// A finished row's values. A sum that is zero may be either zero: keys that a row does not see
// are added with weight 0 where they are computed for the rows beside it, which makes +0 of
// -0. Adding 0 leaves one of them.
static inline Floats finished_values(const float* values, float factor) { return load(values) * factor + 0.0f; }

// Sixteen keys as packed weights [depth][16]: words (one float, or a pair of bfloat16) are
// transposed.
template <class KV>
static inline void pack_keys(const KV* const* keys, int64_t head_dim, KV* panel) {
  constexpr int64_t per_word = 4 / sizeof(KV);
  const int64_t words = head_dim / per_word;
  auto* to = reinterpret_cast<char*>(panel);
#if defined(__AVX2__)
  for (int half = 0; half < 2; half++) {
    for (int64_t w = 0; w < words; w += 8) {
      __m256 rows[8];
      for (int i = 0; i < 8; i++) {
        rows[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(keys[half * 8 + i] + w * per_word));
      }
      __m256 pairs[8], quads[8];
      for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
      }
      for (int i = 0; i < 8; i += 4) {
        quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
        quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
        quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
        quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
      }
      for (int i = 0; i < 4; i++) {
        const __m256 low = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
        const __m256 high = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
        _mm256_storeu_ps(reinterpret_cast<float*>(to + (w + i) * 64 + half * 32), low);
        _mm256_storeu_ps(reinterpret_cast<float*>(to + (w + i + 4) * 64 + half * 32), high);
      }
    }
  }
#else
  for (int key = 0; key < kPanel; key++)
    for (int64_t w = 0; w < words; w++) {
      std::memcpy(to + w * 64 + key * 4, reinterpret_cast<const char*>(keys[key]) + w * 4, 4);
    }
#endif
  const int64_t depth_words = padded_depth<KV>(head_dim) / per_word;
  if (depth_words > words) std::memset(to + words * 64, 0, (depth_words - words) * 64);
}

// The cache lines in which `num` values of one row lie, if the first begins one.
template <class KV>
static inline void prefetch_row(const KV* row, int64_t num) {
  for (int64_t d = 0; d < num; d += 64 / static_cast<int64_t>(sizeof(KV))) __builtin_prefetch(row + d, 0, 3);
}

// One layer's attention.
template <class KV>
struct PagedAttention {
  const OutriderAttention& options;
  const OutriderBatch& batch;
  const AttentionPlan& plan;
  const KV* query;  // rows at query_stride, rotated
  int64_t query_stride;
  const KV* key_cache;
  const KV* value_cache;
  float* partials;  // [num_partials, kv heads] partial results of query_rows rows, if the plan is split

  int64_t group() const { return options.num_heads / options.num_kv_heads; }

  PartialResult partial(int64_t index, int64_t head, int64_t num) const {
    const int64_t size = PartialResult::size(plan.query_rows, options.head_dim);
    return PartialResult(partials + (index * options.num_kv_heads + head) * size, num);
  }

  int64_t num_tasks() const {
    return static_cast<int64_t>(plan.is_split ? plan.spans.size() : plan.tiles.size()) * options.num_kv_heads;
  }

  // One task. `store_row(row, head, values, factor)` receives finished rows, for it to apply
  // `finished_values` to; those of a split
  // plan are finished by the tasks of `finish_split`, once all of these are done.
  template <class Store>
  void run(int64_t task, AttentionScratch<KV>& scratch, Store&& store_row) const {
    const int64_t index = task / options.num_kv_heads, head = task % options.num_kv_heads;
    if (plan.is_split) {
      const auto [tile_index, span] = plan.spans[index];
      const AttentionTile& tile = plan.tiles[tile_index];
      load_queries(tile, head, scratch);
      compute_span(tile, head, span, scratch,
                   partial(tile.partial + span - tile.first_span, head, tile.num_rows * group()));
      return;
    }
    const AttentionTile& tile = plan.tiles[index];
    const int64_t num = tile.num_rows * group();
    const PartialResult running(scratch.running, num);
    const PartialResult next(scratch.running + PartialResult::size(num, options.head_dim), num);
    load_queries(tile, head, scratch);
    for (int64_t span = tile.first_span; span < tile.last_span; span++) {
      compute_span(tile, head, span, scratch, span == tile.first_span ? running : next);
      if (span > tile.first_span) merge(running, next, num, options.head_dim);
    }
    store_tile(tile, head, running, store_row);
  }

  // The rest of a split plan's work, a task for each tile and KV head: merges its spans.
  int64_t num_merges() const { return static_cast<int64_t>(plan.tiles.size()) * options.num_kv_heads; }

  template <class Store>
  void finish_split(int64_t task, Store&& store_row) const {
    const AttentionTile& tile = plan.tiles[task / options.num_kv_heads];
    const int64_t head = task % options.num_kv_heads, num = tile.num_rows * group();
    const PartialResult running = partial(tile.partial, head, num);
    for (int64_t i = 1; i < tile.last_span - tile.first_span; i++)
      merge(running, partial(tile.partial + i, head, num), num, options.head_dim);
    store_tile(tile, head, running, store_row);
  }

 private:
  template <class Store>
  void store_tile(const AttentionTile& tile, int64_t head, const PartialResult& result, Store&& store_row) const {
    for (int64_t r = 0; r < tile.num_rows * group(); r++)
      store_row(tile.row + r / group(), head * group() + r % group(), result.values + r * options.head_dim,
                1.0f / result.sums[r]);
  }

  void load_queries(const AttentionTile& tile, int64_t head, AttentionScratch<KV>& scratch) const {
    const int64_t depth = padded_depth<KV>(options.head_dim);
    for (int64_t r = 0; r < tile.num_rows * group(); r++) {
      const KV* from = query + (tile.row + r / group()) * query_stride + (head * group() + r % group()) * options.head_dim;
      Activation<KV>* to = scratch.query + r * depth;
      for (int64_t d = 0; d < options.head_dim; d += kWidth) store_activation(to + d, load_wide(from + d));
      for (int64_t d = options.head_dim; d < depth; d++) to[d] = Activation<KV>{};
    }
  }

  void compute_span(const AttentionTile& tile, int64_t head, int64_t span, AttentionScratch<KV>& scratch,
                    const PartialResult& result) const {
    const int64_t head_dim = options.head_dim, depth = padded_depth<KV>(head_dim), rows = tile.num_rows * group();
    const int64_t begin = span * kSpan;
    const int64_t end = std::min<int64_t>(begin + kSpan, tile.position + tile.num_rows);
    const int num_keys = static_cast<int>(end - begin);
    const int padded_keys = (num_keys + kPanel - 1) / kPanel * kPanel;
    const int32_t* blocks = batch.block_tables + tile.seq * batch.max_blocks;
    const int64_t token = options.num_kv_heads * head_dim;
    int64_t places[kSpan];  // of each key, in elements
    int64_t block = begin / batch.block_size, slot = begin % batch.block_size;
    const int num_in_table = static_cast<int>(std::clamp<int64_t>(tile.path_position - begin, 0, num_keys));
    for (int i = 0; i < num_in_table; i++) {
      places[i] = (blocks[block] * batch.block_size + slot) * token + head * head_dim;
      if (++slot == batch.block_size) {
        block++;
        slot = 0;
      }
    }
    for (int i = num_in_table; i < num_keys; i++)
      places[i] = tile.path[begin + i - tile.path_position] * token + head * head_dim;

    // Keys, then the values that are wanted when all scores are there.
    const auto ask_for = [&](int i) {
      if (i < num_keys) {
        prefetch_row(key_cache + places[i], head_dim);
      } else if (i < 2 * num_keys) {
        prefetch_row(value_cache + places[i - num_keys], head_dim);
      }
    };
    for (int i = 0; i < kKeysAhead; i++) ask_for(i);
    alignas(64) float tile_scores[MostRows<KV>::value * kTileColumns];
    for (int first = 0; first < padded_keys; first += kPanel) {
      const int num = std::min(kPanel, num_keys - first);
      const KV* keys[kPanel];
      // Where there are no more, the last one again: `weigh` takes the scores of real keys only.
      for (int i = 0; i < kPanel; i++) keys[i] = key_cache + places[first + std::min(i, num - 1)];
      for (int i = first; i < first + kPanel; i++) ask_for(i + kKeysAhead);
      pack_keys(keys, head_dim, scratch.key_panel);
      for (int64_t row = 0; row < rows;) {
        const int count = rows_of_next_call<KV>(rows - row);
        multiply_tile<KV, PanelsIn::kCache>(count, scratch.query + row * depth, depth, scratch.key_panel, 1, depth,
                                            tile_scores);
        for (int r = 0; r < count; r++)
          for (int v = 0; v < kVectorsPerPanel; v++)
            store(scratch.scores + (row + r) * kSpan + first + v * kWidth,
                  load(tile_scores + r * kTileColumns + v * kWidth) * options.scaling);
        row += count;
      }
    }
    for (int64_t r = 0; r < rows; r++) {
      const int64_t position = tile.position + r / group();
      const int last = static_cast<int>(std::min<int64_t>(position + 1 - begin, num_keys));
      int first = 0;
      if (options.sliding_window > 0)
        first = static_cast<int>(std::max<int64_t>(0, position - options.sliding_window + 1 - begin));
      weigh(scratch.scores + r * kSpan, padded_keys, first, last, &result.largest[r], &result.sums[r]);
    }

    if (rows <= kRowsWithoutPanel) {
      add_values_of(static_cast<int>(rows), value_cache, places, num_keys, scratch.scores, result.values);
    } else {
      add_values_by_panels(value_cache, places, num_keys, rows, scratch, result.values);
    }
  }

  // values [rows, head_dim] = scores [rows, num_keys at kSpan] times the cached rows at `places`, keys rising.
  // Few rows take the values straight from the cache, into registers.
  void add_values_of(int rows, const KV* cache, const int64_t* places, int num_keys, const float* scores,
                     float* values) const {
    for (int64_t column = 0; column < options.head_dim;) {
      const bool is_wide = options.head_dim - column >= 4 * kWidth;
      const auto add = [&]<int Rows, int Vectors>() {
        add_columns<Rows, Vectors>(cache + column, places, num_keys, scores, values + column);
      };
      if (rows == 1) is_wide ? add.template operator()<1, 4>() : add.template operator()<1, kVectorsPerPanel>();
      if (rows == 2) is_wide ? add.template operator()<2, 4>() : add.template operator()<2, kVectorsPerPanel>();
      if (rows == 3) is_wide ? add.template operator()<3, 4>() : add.template operator()<3, kVectorsPerPanel>();
      column += is_wide ? 4 * kWidth : kPanel;
    }
  }

  template <int Rows, int Vectors>
  void add_columns(const KV* cache, const int64_t* places, int num_keys, const float* scores, float* values) const {
    Floats sums[Rows][Vectors] = {};
    for (int i = 0; i < num_keys; i++) {
      prefetch_row(cache + places[std::min(i + kKeysAhead, num_keys - 1)], Vectors * kWidth);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) {
        const Floats value = load_wide(cache + places[i] + v * kWidth);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; r++)
          sums[r][v] = multiply_add(value, broadcast(scores[r * kSpan + i]), sums[r][v]);
      }
    }
    for (int r = 0; r < Rows; r++)
      for (int v = 0; v < Vectors; v++) store(values + r * options.head_dim + v * kWidth, sums[r][v]);
  }

  // The same for many rows: 16 columns of all keys are widened once.
  void add_values_by_panels(const KV* cache, const int64_t* places, int num_keys, int64_t rows,
                            AttentionScratch<KV>& scratch, float* values) const {
    alignas(64) float tile_values[MostRows<float>::value * kTileColumns];
    for (int64_t column = 0; column < options.head_dim; column += kPanel) {
      for (int i = 0; i < num_keys; i++) {
        prefetch_row(cache + places[std::min(i + kKeysAhead, num_keys - 1)] + column, kPanel);
        for (int v = 0; v < kPanel; v += kWidth)
          store(scratch.value_panel + i * kPanel + v, load_wide(cache + places[i] + column + v));
      }
      for (int64_t row = 0; row < rows;) {
        const int count = rows_of_next_call<float>(rows - row);
        multiply_tile<float, PanelsIn::kCache>(count, scratch.scores + row * kSpan, kSpan, scratch.value_panel, 1,
                                               num_keys, tile_values);
        for (int r = 0; r < count; r++)
          std::memcpy(values + (row + r) * options.head_dim + column, tile_values + r * kTileColumns, kPanel * 4);
        row += count;
      }
    }
  }

  // scores [num] → weights e^(score - largest), 0 for keys outside [first, last).
  void weigh(float* scores, int num, int first, int last, float* largest, float* sum) const {
    Floats most = broadcast(kNothing);
    for (int i = 0; i < num; i += kWidth) {
      Floats value = load(scores + i);
      if (options.softcap > 0) value = hyperbolic_tangent(value / options.softcap) * options.softcap;
      if (i < first || i + kWidth > last)
        for (int lane = 0; lane < kWidth; lane++)
          if (i + lane < first || i + lane >= last) value[lane] = kNothing;
      store(scores + i, value);
      most = larger(value, most);
    }
    *largest = largest_of_lanes(most);
    Floats total{};
    for (int i = 0; i < num; i += kWidth) {
      Floats weight = exponential(load(scores + i) - *largest);
      if (i < first || i + kWidth > last)
        for (int lane = 0; lane < kWidth; lane++)
          if (i + lane < first || i + lane >= last) weight[lane] = 0.0f;
      store(scores + i, weight);
      total += weight;
    }
    *sum = sum_of_lanes(total);
  }
};

}  // namespace outrider
