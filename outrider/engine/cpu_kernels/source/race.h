// The race, argmax(logits - log a), which reads only blocks that can win.
#pragma once

#include "logit_row.h"

namespace outrider {

// Returns the token with the greatest value - log a among those that `limit` keeps, the lowest
// id among equals. The result is the same as if every token were evaluated. The row must have a
// value above -infinity and no NaN.
int64_t run_race(const LogitRow& row, const RaceKey& key, const BlockArrivals& arrivals, const Limit& limit);

// The same for a row that has the logits of some ids only, `ids` [row.num_blocks * 64], ascending, with zeros as padding.
// Returns the winner's place in the row. `bounds` has room for a number per id.
int64_t run_race_of_ids(const LogitRow& row, const int32_t* ids, const RaceKey& key, const BlockArrivals& arrivals,
                        const Limit& limit, float* bounds);

}  // namespace outrider
