#include "linear.h"

#include "call.h"
#include "workspace.h"

namespace outrider {
namespace {

template <class Weight>
void pack(Team& team, const Weight* from, int64_t first, int64_t num, int64_t out_features, int64_t in_features,
          bool interleave, Weight* packed) {
  const int64_t depth = padded_depth<Weight>(in_features);
  constexpr int64_t together = Step<Weight>::kDepth;  // consecutive k of one column
  const int64_t half = out_features / 2;
  constexpr int64_t at_once = 64;
  team.share((num + at_once - 1) / at_once, [&](int64_t unit, int) {
    for (int64_t i = unit * at_once; i < std::min(num, (unit + 1) * at_once); i++) {
      int64_t panel = (first + i) / kPanel, column = (first + i) % kPanel;
      if (interleave) {
        const int64_t n = (first + i) % half;
        panel = n / kPanel * 2 + (first + i) / half;
        column = n % kPanel;
      }
      Weight* to = packed + panel * depth * kPanel;
      const Weight* row = from + i * in_features;
      for (int64_t k = 0; k < in_features; k++)
        to[k / together * together * kPanel + column * together + k % together] = row[k];
    }
  });
}

template <class Weight>
void unpack_plain_row(const Matrix<Weight>& matrix, int64_t row, float* to) {
  constexpr int64_t together = Step<Weight>::kDepth;
  const Weight* from = matrix.packed + row / kPanel * matrix.panel_size;
  for (int64_t k = 0; k < matrix.in_features; k++)
    to[k] = widen(from[k / together * together * kPanel + row % kPanel * together + k % together]);
}

template <class Weight>
void unpack_quantised_row(const Matrix<Weight>& matrix, int64_t row, float* to) {
  const int64_t column = row % kPanel, vector = column / kWidth, lane = column % kWidth;
  CodePanel<Weight> panel(matrix.packed + row / kPanel * matrix.panel_size, matrix.unit_size);
  for (int64_t first = 0; first < matrix.in_features; first += kDepthOfGroup) {
    panel.next_block([](int) {});
    for (int64_t k = 0; k < std::min(kDepthOfGroup, matrix.in_features - first); k++) {
      panel.load_factors(static_cast<int>(k / Weight::kGroup));
      const int64_t at = (k / kQuad * kPanel + column) * kQuad + k % kQuad;  // as if codes had 8 bits
      int code = panel.codes()[Weight::kBits == 8 ? at : at / 128 * 64 + at % 64];
      if constexpr (Weight::kBits == 4) code = code >> at / 64 % 2 * 4 & 15;
      else if constexpr (kHasSignedCodes) code += Weight::kOffset;
      else code &= 255;
      to[first + k] = panel.weight_of(code - Weight::kOffset, vector, lane);
      if constexpr (Weight::kKind == Factors::kOfFeature) to[first + k] *= matrix.scales[row];
    }
  }
}

// Converts rows for a product: to its activation type, padded with zeros.
template <class Weight, class T>
const Activation<Weight>* as_activations(OutriderWorkspace& workspace, const T* x, int64_t num_rows, int64_t width,
                                         int64_t depth) {
  using To = Activation<Weight>;
  if constexpr (sizeof(T) == sizeof(To)) {
    if (width == depth) return reinterpret_cast<const To*>(x);
  }
  To* to = workspace.activations.of<To>(num_rows * depth);
  for (int64_t row = 0; row < num_rows; row++) convert_row(x + row * width, width, depth, to + row * depth);
  return to;
}

template <class T>
const QuantisedGroup* as_groups(OutriderWorkspace& workspace, const T* x, int64_t num_rows, int64_t width) {
  QuantisedGroup* to = workspace.quantised.of<QuantisedGroup>(groups_in_memory(num_rows, width));
  for (int64_t row = 0; row < num_rows; row++) quantise_row(x + row * width, width, to + row, group_stride(num_rows));
  return to;
}

template <class Weight, class T>
void linear(Team& team, OutriderWorkspace& workspace, const T* x, int64_t num_rows, const Matrix<Weight>& matrix,
            T* y) {
  const auto* rows = [&] {
    if constexpr (kIsQuantised<Weight>) return as_groups(workspace, x, num_rows, matrix.in_features);
    else return as_activations<Weight>(workspace, x, num_rows, matrix.in_features, matrix.depth);
  }();
  const StoreTo<T> store{y, matrix.out_features};
  team.share(num_units(matrix),
             [&](int64_t unit, int) { multiply_unit<Weight>(unit, rows, num_rows, matrix, store); });
}

// Calls f with the matrix.
template <class F>
void with_matrix(const OutriderMatrix& matrix, F&& f) {
  with_weights(matrix.type, [&](auto* weight) { f(Matrix<std::remove_pointer_t<decltype(weight)>>(matrix)); });
}

}  // namespace

void unpack_row(const OutriderMatrix& matrix, int64_t row, float* to) {
  with_matrix(matrix, [&]<class Weight>(const Matrix<Weight>& typed) {
    if constexpr (kIsQuantised<Weight>) unpack_quantised_row(typed, row, to);
    else unpack_plain_row(typed, row, to);
  });
}

}  // namespace outrider

using namespace outrider;

int64_t outrider_packed_size(int32_t type, int64_t out_features, int64_t in_features) {
  int64_t bytes = 0;
  with_plain(type, [&](auto* weight) {
    using Weight = std::remove_pointer_t<decltype(weight)>;
    const int64_t panels = (out_features + kPanel - 1) / kPanel;
    bytes = panels * kPanel * padded_depth<Weight>(in_features) * static_cast<int64_t>(sizeof(Weight));
  });
  return bytes;
}

OutriderStatus outrider_pack(OutriderTeam* team, int32_t type, const void* from, int64_t first, int64_t num,
                             int64_t out_features, int64_t in_features, int32_t interleave, void* packed) {
  return call([&] {
    with_plain(type, [&](auto* weight) {
      using Weight = std::remove_pointer_t<decltype(weight)>;
      pack(*reinterpret_cast<Team*>(team), static_cast<const Weight*>(from), first, num, out_features, in_features,
           interleave != 0, static_cast<Weight*>(packed));
    });
  });
}

OutriderStatus outrider_unpack_row(const OutriderMatrix* matrix, int64_t row, float* to) {
  return call([&] { unpack_row(*matrix, row, to); });
}

OutriderStatus outrider_linear(OutriderTeam* team, OutriderWorkspace* workspace, int32_t activation_type, const void* x,
                               int64_t num_rows, const OutriderMatrix* matrix, void* y) {
  return call([&] {
    with_matrix(*matrix, [&]<class Weight>(const Matrix<Weight>& typed) {
      Team& threads = *reinterpret_cast<Team*>(team);
      if (activation_type == OUTRIDER_BFLOAT16) {
        const auto* rows = static_cast<const BFloat16*>(x);
        linear<Weight>(threads, *workspace, rows, num_rows, typed, static_cast<BFloat16*>(y));
      } else {
        linear<Weight>(threads, *workspace, static_cast<const float*>(x), num_rows, typed, static_cast<float*>(y));
      }
    });
  });
}

int32_t outrider_code_offset(void) { return kHasSignedCodes ? 0 : 128; }
