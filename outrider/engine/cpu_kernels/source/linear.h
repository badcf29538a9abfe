// Linear layers with packed weights, in units that members of a team share.
#pragma once

#include <algorithm>

#include "api.h"
#include "panels.h"
#include "team.h"

namespace outrider {

constexpr int64_t kBytesAhead = 4096;  // distance of the prefetch if weights are read in order
constexpr int64_t kMaxBytesOfUnit = 256 << 10;  // size up to which two units' weights fit into a core's cache together

// One row of a tile, scaled and with bias: `num` columns from `column` on. Further values are padding.
struct TileRow {
  int64_t row;
  int64_t column;
  int num;
  float* values;  // [kTileColumns], may be overwritten
};

// Returns the number of units of a product, which are tiles of columns.
template <class Weight>
static inline int64_t num_units(const Matrix<Weight>& matrix) {
  return (matrix.out_features + kTileColumns - 1) / kTileColumns;
}

// Returns the size of the weights of one unit.
template <class Weight>
static inline int64_t unit_bytes(const Matrix<Weight>& matrix) {
  return 2 * matrix.panel_bytes();
}

// Returns whether a unit prefetches the weights of the next unit; otherwise it prefetches its own, just ahead.
template <class Weight>
static inline bool prefetches_next_unit(int64_t num_rows, const Matrix<Weight>& matrix) {
  const bool takes_one_call = num_rows <= kMaxRows<Weight>;
  return unit_bytes(matrix) <= kMaxBytesOfUnit && !(kReadsInOrder<Weight> && takes_one_call);
}

// Computes one unit of x W^T + b, which is 32 columns of all rows, and calls finish(TileRow) for each row.
// x [num_rows, depth], each row padded (see RowPlaces). `next`: weights to prefetch; null: the next unit's.
template <class Weight, class Finish>
static inline void multiply_unit(int64_t unit, const Activation<Weight>* x, int64_t num_rows,
                                 const Matrix<Weight>& matrix, Finish&& finish, const void* next = nullptr) {
  alignas(64) float tile[kMaxRows<Weight> * kTileColumns];
  const RowPlaces<Weight> places(num_rows, matrix.depth);
  const int64_t column = unit * kTileColumns;
  const int columns = static_cast<int>(std::min<int64_t>(kTileColumns, matrix.out_features - column));
  const int panels = columns > kPanel ? 2 : 1;
  const Weight* packed = matrix.packed + 2 * unit * matrix.panel_size;
  const bool prefetches_next = prefetches_next_unit(num_rows, matrix);
  if (!prefetches_next) next = reinterpret_cast<const char*>(packed) + kBytesAhead;
  else if (next == nullptr) next = packed + 2 * matrix.panel_size;
  Prefetch prefetch(next, prefetches_next ? (num_rows + kMaxRows<Weight> - 1) / kMaxRows<Weight> : 1);
  for (int64_t row = 0; row < num_rows;) {
    const int rows = static_cast<int>(equal_part(num_rows - row, kMaxRows<Weight>));
    multiply_tile<Weight>(rows, x + row * places.row, places.depth, packed, panels, matrix, tile, prefetch);
    if (prefetches_next) prefetch.skip(panels * matrix.panel_bytes());
    else prefetch.stop();
    for (int r = 0; r < rows; r++) {
      float* values = tile + r * kTileColumns;
      if (matrix.scales != nullptr)
        for (int c = 0; c < columns; c++) values[c] *= matrix.scales[column + c];
      if (matrix.bias != nullptr)
        for (int c = 0; c < columns; c++) values[c] += matrix.bias[column + c];
      finish(TileRow{row + r, column, columns, values});
    }
    row += rows;
  }
}

// Prefetches the weights that a member multiplies first in the next product: during its last unit of the current one,
// and some with each call while it waits for other members, when memory would be idle otherwise.
class NextWeights {
 public:
  NextWeights() = default;

  template <class Weight>
  NextWeights(const Matrix<Weight>& matrix, Member member) {
    const int num_ranges = Phase::num_ranges(member), range = member.index % num_ranges;
    const auto address_of = [&](int64_t unit) {
      return reinterpret_cast<const char*>(matrix.packed) + unit * unit_bytes(matrix);
    };
    const int64_t units = num_units(matrix);
    next_ = address_of(Phase::begin_of(range, num_ranges, units));
    end_ = std::min(next_ + kMaxBytes, address_of(Phase::begin_of(range + 1, num_ranges, units)));
  }

  // Returns the start of the next `bytes`, which the caller prefetches; null: there is no next product.
  const void* take(int64_t bytes) {
    const char* const taken = next_;
    if (taken != nullptr) next_ = std::min(next_ + bytes, end_);
    return taken;
  }

  void operator()() {
    for (int line = 0; line < kLinesAtOnce && next_ < end_; line++, next_ += 64) __builtin_prefetch(next_, 0, 2);
  }

 private:
  static constexpr int64_t kMaxBytes = 256 << 10;  // share of a core's cache
  static constexpr int kLinesAtOnce = 8;

  const char* next_ = nullptr;
  const char* end_ = nullptr;
};

// Converts a row for a product: to the product's activation type, padded with zeros to `depth`.
template <class T, class To>
static inline void convert_row(const T* row, int64_t width, int64_t depth, To* to) {
  int64_t k = 0;
  for (; k + kWidth <= width; k += kWidth) store_rounded(to + k, load_wide(row + k));
  for (; k < depth; k++) store_one(to + k, k < width ? widen(row[k]) : 0.0f);
}

// Calls f with a null pointer whose type is that of plain weights.
template <class F>
static inline void with_plain(int32_t type, F&& f) {
  if (type == OUTRIDER_BFLOAT16) return f(static_cast<BFloat16*>(nullptr));
  f(static_cast<float*>(nullptr));
}

// Does the same for any type of weights.
template <class F>
static inline void with_weights(int32_t type, F&& f) {
  if (type >= OUTRIDER_INT8) return with_codes(type, f);
  with_plain(type, f);
}

// Unpacks row `row` of W to `to` [in_features] (linear.cpp).
void unpack_row(const OutriderMatrix& matrix, int64_t row, float* to);

// ---- functions that finish a tile's row

// Stores it as T in [num_rows, width].
template <class T>
struct StoreTo {
  T* y;
  int64_t width;

  void operator()(const TileRow& tile) const {
    T* to = y + tile.row * width + tile.column;
    int c = 0;
    for (; c + kWidth <= tile.num; c += kWidth) store_rounded(to + c, load(tile.values + c));
    for (; c < tile.num; c++) store_one(to + c, tile.values[c]);
  }
};

// Adds it to the values in y, the residual stream.
template <class T>
struct AddTo {
  T* y;
  int64_t width;

  void operator()(const TileRow& tile) const {
    T* to = y + tile.row * width + tile.column;
    for (int c = 0; c < tile.num; c++) store_one(to + c, widen(to[c]) + tile.values[c]);
  }
};

// An MLP's activation: silu(gate) * up, or gelu(gate) * up.
struct PlainGate {
  bool is_gelu;

  Floats operator()(Floats gate, Floats up) const { return (is_gelu ? gelu(gate) : gate * sigmoid(gate)) * up; }
};

// Stores gate(gate, up) in rows of `stride`, of which it fills `width`. A tile has a panel of gates and the panel of the
// same ups. Gate and up are rounded to T first, as two separate layers would round them.
template <class T, class To, class Gate>
struct ActivateMultiplyTo {
  To* y;
  int64_t width;
  int64_t stride;
  Gate gate;

  void operator()(const TileRow& tile) const {
    To* to = y + tile.row * stride + tile.column / 2;
    const int64_t left = width - tile.column / 2;
    for (int c = 0; c < kPanel; c += kWidth) {
      const T* type = nullptr;
      const Floats gates = rounded_to(load(tile.values + c), type);
      const Floats ups = rounded_to(load(tile.values + kPanel + c), type);
      const Floats value = rounded_to(gate(gates, ups), type);
      if (c + kWidth <= left) {
        store_exact(to + c, value);
      } else {
        for (int i = 0; c + i < left; i++) store_one(to + c + i, value[i]);
      }
    }
  }
};

}  // namespace outrider
