// The division of a step's attention into tasks (see paged_attention.h).
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "api.h"

namespace outrider {

constexpr int kSpan = 256;
constexpr int kRowsTogether = 30;  // maximum number of query rows that share one read of keys
constexpr int64_t kMaxPartialBytes = 64 << 20;  // limit of partial results; beyond it tiles are not split

// Consecutive rows of one sequence, at consecutive positions. Each sees the keys that the row
// before it sees, and its own.
struct AttentionTile {
  int64_t seq;
  int64_t row;       // first, in the batch
  int64_t num_rows;
  int64_t position;  // of the first row
  int64_t first_span, last_span;  // [first, last): spans with keys that any of the rows sees
  int64_t partial;   // index of the first span's partial result, for one KV head
  const int64_t* path;    // in a tree, the slots of the keys from path_position on
  int64_t path_position;  // earlier keys are found through the block table
};

// Returns the batch with the slots, paths and block tables of this group of layers.
static inline OutriderBatch batch_of_group(const OutriderBatch& batch, int64_t group) {
  OutriderBatch own = batch;
  own.slots += group * batch.num_rows;
  own.block_tables += group * batch.table_starts[batch.num_seqs];
  if (batch.path_starts != nullptr) own.path_slots += group * batch.path_starts[batch.num_rows];
  return own;
}

// Returns whether a row sees the keys that the row before it sees, and its own; always true outside of trees.
static inline bool follows_row_before(const OutriderBatch& batch, int64_t row) {
  if (batch.path_starts == nullptr) return true;
  const int64_t end = batch.path_starts[row + 1], depth = end - batch.path_starts[row];
  if (depth == 0) return true;
  if (batch.positions[row] != batch.positions[row - 1] + 1) return false;
  return depth == 1 || batch.path_slots[end - 2] == batch.slots[row - 1];
}

// The tasks of one forward's attention, which are the same for all layers with equal windows.
struct AttentionPlan {
  std::vector<AttentionTile> tiles;
  std::vector<std::pair<int32_t, int32_t>> spans;  // (tile, span) of every task, if split
  bool is_split = false;  // whether each span of a tile is a task of its own
  int64_t num_partials = 0;
  int64_t query_rows = 0;  // of the largest tile: rows times query heads per KV head

  // Plans the rows with these indices [num_rows], ascending; null: all rows.
  void make(const OutriderAttention& options, const OutriderBatch& batch, int num_members,
            const int64_t* rows = nullptr, int64_t num_rows = 0) {
    const auto is_wanted = [&](int64_t row) {
      return rows == nullptr || std::binary_search(rows, rows + num_rows, row);
    };
    tiles.clear();
    spans.clear();
    num_partials = 0;
    query_rows = 0;
    const int64_t group = options.num_heads / options.num_kv_heads;
    const int64_t together = std::max<int64_t>(1, kRowsTogether / group);
    for (int64_t seq = 0; seq < batch.num_seqs; seq++) {
      const int64_t begin = batch.query_start_loc[seq], end = batch.query_start_loc[seq + 1];
      for (int64_t row = begin, num; row < end; row += num) {
        num = 1;
        if (!is_wanted(row)) continue;
        while (num < together && row + num < end && is_wanted(row + num) && follows_row_before(batch, row + num)) num++;
        AttentionTile tile{seq, row, num, batch.positions[row], 0, 0, num_partials, nullptr, 0};
        const int64_t last = tile.position + tile.num_rows - 1;
        tile.path_position = last + 1;
        if (batch.path_starts != nullptr) {
          tile.path = batch.path_slots + batch.path_starts[row + num - 1];
          tile.path_position -= batch.path_starts[row + num] - batch.path_starts[row + num - 1];
        }
        const int64_t first = options.sliding_window > 0 ? tile.position - options.sliding_window + 1 : 0;
        tile.first_span = std::max<int64_t>(0, first) / kSpan;
        tile.last_span = last / kSpan + 1;
        num_partials += tile.last_span - tile.first_span;
        query_rows = std::max(query_rows, tile.num_rows * group);
        tiles.push_back(tile);
      }
    }
    // With few tiles some members would be idle at the end, so each span becomes a task.
    const int64_t num_tasks = static_cast<int64_t>(tiles.size()) * options.num_kv_heads;
    is_split = num_members > 1 && num_tasks < 8 * num_members && num_partials > static_cast<int64_t>(tiles.size()) &&
               partial_bytes(options) <= kMaxPartialBytes;
    if (is_split)
      for (size_t tile = 0; tile < tiles.size(); tile++)
        for (int64_t span = tiles[tile].first_span; span < tiles[tile].last_span; span++)
          spans.emplace_back(static_cast<int32_t>(tile), static_cast<int32_t>(span));
  }

  // Returns the size of the partial results of a split plan.
  int64_t partial_bytes(const OutriderAttention& options) const {
    const int64_t floats = options.num_kv_heads * query_rows * (options.head_dim + 2);
    return num_partials * floats * static_cast<int64_t>(sizeof(float));
  }
};

}  // namespace outrider
