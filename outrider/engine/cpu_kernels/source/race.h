// The race: argmax(logits - log a), looking only into blocks that can win.
#pragma once

#include "logit_row.h"

namespace outrider {

// The token with the greatest value - log a among those that `limit` keeps, the lowest id
// among equals: exactly what evaluating every token gives. The row must hold a value above
// -infinity and no NaN.
int64_t run_race(const LogitRow& row, const RaceKey& key, const BlockArrivals& arrivals, const Limit& limit);

}  // namespace outrider
