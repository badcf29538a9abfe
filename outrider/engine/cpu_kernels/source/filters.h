// min_p, top_k and top_p without sorting the vocabulary; ../../sampler/filters.py tells how.
#pragma once

#include "logit_row.h"
#include "sampler_api.h"

namespace outrider {

// What min_p and top_k keep. `scratch` has room for the values of all blocks.
Limit first_limit(const LogitRow& row, const OutriderSampling& sampling, float* scratch);

// Whether top_p keeps a token: the mass before it is below top_p of the whole. Masses are
// integers, 2^44 for the row's largest value: their sums do not depend on an order.
class TopP {
 public:
  // `kept` is what min_p and top_k keep.
  TopP(const LogitRow& row, const OutriderSampling& sampling, const Limit& kept)
      : row_(row), top_p_(sampling.top_p), kept_(kept) {}

  // Whether a token that comes after all of `before` is kept.
  bool keeps_after(const Limit& before);

 private:
  bool is_below_share(int64_t mass, int64_t whole) const;

  const LogitRow& row_;
  const double top_p_;
  const Limit kept_;
  int64_t total_ = -1;  // of `kept_`, once somebody had to know
};

}  // namespace outrider
