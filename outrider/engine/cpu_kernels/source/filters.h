// min_p, top_k and top_p without sorting the vocabulary. ../../sampler/filters.py defines the result.
#pragma once

#include "logit_row.h"
#include "sampler_api.h"

namespace outrider {

// Returns the limit of the tokens that min_p and top_k keep. `scratch` has room for the values of all blocks.
Limit first_limit(const LogitRow& row, const OutriderSampling& sampling, float* scratch);

// Decides whether top_p keeps a token, whose preceding mass must be below top_p of the total.
// Masses are integers, 2^44 for the row's largest value, so that sums do not depend on an order.
class TopP {
 public:
  // `kept`: the limit of min_p and top_k.
  TopP(const LogitRow& row, const OutriderSampling& sampling, const Limit& kept)
      : row_(row), top_p_(sampling.top_p), kept_(kept) {}

  // Returns whether a token is kept that comes right after the tokens within `before`.
  bool keeps_after(const Limit& before);

 private:
  bool is_below_share(int64_t mass, int64_t whole) const;

  const LogitRow& row_;
  const double top_p_;
  const Limit kept_;
  int64_t total_ = -1;  // mass within `kept_`, computed when it is first needed
};

}  // namespace outrider
