#include "filters.h"

#include <array>
#include <functional>

#include "call.h"

namespace outrider {

namespace {

constexpr double kMassOne = 0x1p44;
constexpr int kHalfWidth = kWidth / 2;

typedef double Doubles __attribute__((vector_size(kHalfWidth * 8)));

// Returns the weights if the largest value is infinite (a bias beyond float32): only its equals have any.
Floats infinite_weights(Floats values, float largest) {
  return values == largest ? broadcast(static_cast<float>(kMassOne)) : Floats{};
}

// Returns float32 weights in units of 2^-44 of the largest, not yet rounded to integers.
Floats weights(Floats values, float largest) {
  return std::isinf(largest) ? infinite_weights(values, largest) : scaled_exponential(values - largest);
}

// Converts the lower or the upper half of the lanes to float64.
template <bool kUpper>
Doubles widen_half(Floats values) {
#if defined(__AVX512F__)
  const __m512d all = reinterpret_cast<__m512d>(values);
  const __m256d half = kUpper ? _mm512_extractf64x4_pd(all, 1) : _mm512_castpd512_pd256(all);
  return _mm512_cvtps_pd(reinterpret_cast<__m256>(half));
#elif defined(__AVX2__)
  return _mm256_cvtps_pd(kUpper ? _mm256_extractf128_ps(values, 1) : _mm256_castps256_ps128(values));
#else
  Doubles wide;
  for (int i = 0; i < kHalfWidth; i++) wide[i] = values[i + kUpper * kHalfWidth];
  return wide;
#endif
}

// Rounds values below 2^51 to the nearest integer: from 2^52 on, float64 has no fraction.
Doubles rounded(Doubles values) { return (values + 0x1p52) - 0x1p52; }

// Adds weights, each rounded to an integer. Sums are exact below 2^53, which is 512 times the largest.
void add_masses(Floats weights, Doubles& sums) {
  sums += rounded(widen_half<false>(weights)) + rounded(widen_half<true>(weights));
}

int64_t total(Doubles sums) {
  int64_t sum = 0;
  for (int i = 0; i < kHalfWidth; i++) sum += static_cast<int64_t>(sums[i]);
  return sum;
}

Limit earlier(const Limit& one, const Limit& other) {
  if (one.value != other.value) return one.value > other.value ? one : other;
  return one.last_id < other.last_id ? one : other;
}

// Returns the k-th greatest of some values, which it reorders.
float kth_greatest(float* values, int64_t num, int64_t k) {
  std::nth_element(values, values + k - 1, values + num, std::greater<float>());
  return values[k - 1];
}

// Returns a value that at least k tokens reach, from the maxima of blocks or of their lanes.
float reached_by(const LogitRow& row, int64_t k, float* scratch) {
  if (k <= row.num_blocks) {
    std::copy(row.maxima, row.maxima + row.num_blocks, scratch);
    return kth_greatest(scratch, row.num_blocks, k);
  }
  if (k <= row.num_blocks * kWidth) {
    Ints is_nan{};
    for (int64_t b = 0; b < row.num_blocks; b++)
      store(scratch + b * kWidth, largest_of_block(row.block(b), is_nan) / row.temperature);
    return kth_greatest(scratch, row.num_blocks * kWidth, k);
  }
  return -kInfinity;
}

// Copies the values that are at least `least` to `to`. Returns their number.
int64_t collect(const LogitRow& row, float least, float* to) {
  int64_t num = 0;
  for (int64_t b = 0; b < row.num_blocks; b++) {
    if (row.maxima[b] < least) continue;
    for (int64_t i = 0; i < kBlock; i += kWidth) {
      const Floats values = load(row.block(b) + i) / row.temperature;
      if (!is_any(values >= least)) continue;
      for (int64_t lane = 0; lane < kWidth; lane++)
        if (values[lane] >= least) to[num++] = values[lane];
    }
  }
  return num;
}

// Returns the id of the n-th token with this value. There must be at least n of them.
int64_t nth_equal(const LogitRow& row, float value, int64_t n) {
  for (int64_t b = 0;; b++) {
    if (row.maxima[b] < value) continue;
    for (int64_t i = 0; i < kBlock; i += kWidth) {
      const Floats values = load(row.block(b) + i) / row.temperature;
      if (!is_any(values == value)) continue;
      for (int64_t lane = 0; lane < kWidth; lane++)
        if (values[lane] == value && --n == 0) return b * kBlock + i + lane;
    }
  }
}

// Returns the k-th token of the order. The padding of the last block comes after all tokens.
Limit kth(const LogitRow& row, int64_t k, float* scratch) {
  const int64_t num = collect(row, reached_by(row, k, scratch), scratch);
  const float value = kth_greatest(scratch, num, k);
  const auto num_greater = std::count_if(scratch, scratch + k, [value](float other) { return other > value; });
  return {value, nth_equal(row, value, k - num_greater)};
}

// Returns the masses of the tokens within each limit. The first limit must be the widest.
template <int kNum>
std::array<int64_t, kNum> masses_within(const LogitRow& row, const std::array<Limit, kNum>& limits) {
  std::array<int64_t, kNum> masses{};
  for (int64_t b = 0; b < row.num_blocks; b++) {
    if (row.maxima[b] < limits[0].value) continue;
    const float* const logits = row.block(b);
    Doubles sums[kNum]{};
    Ints offsets = reinterpret_cast<Ints>(lane_indices()), last_offsets[kNum];
    for (int n = 0; n < kNum; n++)
      last_offsets[n] = Ints{} + static_cast<int32_t>(std::clamp<int64_t>(limits[n].last_id - b * kBlock, -1, kBlock));
    for (int64_t i = 0; i < kBlock; i += kWidth, offsets += kWidth) {
      const Floats values = load(logits + i) / row.temperature;
      const Floats weight = weights(values, row.largest);
      for (int n = 0; n < kNum; n++) {
        const Ints is_kept =
            (values > limits[n].value) | ((values == limits[n].value) & (offsets <= last_offsets[n]));
        add_masses(is_kept ? weight : Floats{}, sums[n]);
      }
    }
    for (int n = 0; n < kNum; n++) masses[n] += total(sums[n]);
  }
  return masses;
}

// Returns a lower bound of the mass within a limit, from the blocks' largest values only.
int64_t least_mass_within(const LogitRow& row, const Limit& limit) {
  int64_t mass = 0;
  for (int64_t b = 0; b < row.num_blocks; b += kWidth) {
    float maxima[kWidth];
    for (int64_t i = 0; i < kWidth; i++) maxima[i] = b + i < row.num_blocks ? row.maxima[b + i] : -kInfinity;
    const Floats values = load(maxima);
    Doubles sums{};
    add_masses(values > limit.value ? weights(values, row.largest) : Floats{}, sums);
    mass += total(sums);
  }
  return mass;
}

// Returns whether so many blocks reach a value that reading all of them costs little more.
bool is_flat(const LogitRow& row, float value) {
  return std::count_if(row.maxima, row.maxima + row.num_blocks, [value](float largest) { return largest >= value; }) >
         row.num_blocks / 4;
}

}  // namespace

Limit first_limit(const LogitRow& row, const OutriderSampling& sampling, float* scratch) {
  Limit limit = kNoLimit;
  // p >= min_p * p_max, as values: v >= v_max + log(min_p).
  if (sampling.log_min_p > -kInfinity) limit.value = row.largest + sampling.log_min_p;
  if (sampling.top_k > 0 && sampling.top_k < row.num_ids) limit = earlier(limit, kth(row, sampling.top_k, scratch));
  return limit;
}

bool TopP::is_below_share(int64_t mass, int64_t whole) const {
  // Compared as integers: not every int64 is a double.
  return mass < static_cast<int64_t>(std::ceil(top_p_ * static_cast<double>(whole)));
}

bool TopP::keeps_after(const Limit& before) {
  int64_t mass;
  if (total_ < 0 && is_flat(row_, before.value)) {
    const auto masses = masses_within<2>(row_, {kept_, before});
    total_ = masses[0];
    mass = masses[1];
  } else {
    mass = masses_within<1>(row_, {before})[0];
  }
  if (mass == 0 || (total_ < 0 && is_below_share(mass, least_mass_within(row_, kept_)))) return true;
  if (total_ < 0) total_ = masses_within<1>(row_, {kept_})[0];
  return is_below_share(mass, total_);
}

}  // namespace outrider

OutriderStatus outrider_masses(const float* values, int64_t num, float largest, int64_t* masses) {
  using namespace outrider;
  return call([&] {
    for (int64_t i = 0; i < num; i++) {
      const Floats weight = weights(broadcast(values[i]), largest);
      Doubles sums{};
      add_masses(weight, sums);
      masses[i] = total(sums) / kWidth;  // all lanes have the same weight
    }
  });
}
