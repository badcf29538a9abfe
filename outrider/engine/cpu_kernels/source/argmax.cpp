#include "argmax.h"

#include "logit_row.h"

namespace outrider {

int64_t first_nan(const float* logits, int64_t num_ids) {
  return std::find_if(logits, logits + num_ids, [](float value) { return value != value; }) - logits;
}

// Blocks are compared lane by lane, which finds the first block with the largest value. The
// place within that block is looked up once, at the end.
int64_t first_argmax(const float* logits, int64_t num_ids) {
  const int64_t num_whole = num_ids / kBlock;
  int64_t best_block = 0;
  float largest = -kInfinity;
  Ints is_nan{};
  for (int64_t b = 0; b < num_whole; b++) {
    const Floats candidates = largest_of_block(logits + b * kBlock, is_nan);
    if (is_any(candidates > largest)) {
      largest = largest_of_lanes(candidates);
      best_block = b;
    }
  }
  if (is_any(is_nan)) return first_nan(logits, num_ids);
  for (int64_t id = num_whole * kBlock; id < num_ids; id++) {
    if (logits[id] != logits[id]) return id;
    if (logits[id] > largest) {
      largest = logits[id];
      best_block = num_whole;
    }
  }
  if (largest == -kInfinity) return 0;
  return std::find(logits + best_block * kBlock, logits + num_ids, largest) - logits;
}

}  // namespace outrider
