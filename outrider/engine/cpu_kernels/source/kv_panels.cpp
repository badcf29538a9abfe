#include "kv_panels.h"

#include "api.h"
#include "call.h"

using namespace outrider;

namespace {

// Copies between the cache and `rows` [num_layers, num_slots, num_heads, head_dim]; to the cache if `rows` is const.
template <class KV, class Row>
void copy_rows(const OutriderPanels& cache, int64_t first_head, int64_t num_heads, const int64_t* slots,
               int64_t num_slots, Row* rows) {
  const auto copy = cache.are_values != 0 ? copy_value<KV, Row> : copy_key<KV, Row>;
  for (int64_t layer = 0; layer < cache.num_layers; layer++) {
    KV* panels = static_cast<KV*>(cache.panels) + layer * cache.layer_size;
    for (int64_t i = 0; i < num_slots; i++)
      for (int64_t head = first_head; head < first_head + num_heads; head++) {
        copy(panels + panel_at(slots[i], head, cache.num_kv_heads, cache.head_dim), cache.head_dim, slots[i], rows);
        rows += cache.head_dim * sizeof(KV);
      }
  }
}

}  // namespace

void outrider_write_rows(const OutriderPanels* cache, int64_t first_head, int64_t num_heads, const int64_t* slots,
                         int64_t num_slots, const void* rows) {
  const auto copy = cache->type == OUTRIDER_BFLOAT16 ? copy_rows<BFloat16, const char> : copy_rows<float, const char>;
  copy(*cache, first_head, num_heads, slots, num_slots, static_cast<const char*>(rows));
}

void outrider_read_rows(const OutriderPanels* cache, int64_t first_head, int64_t num_heads, const int64_t* slots,
                        int64_t num_slots, void* rows) {
  const auto copy = cache->type == OUTRIDER_BFLOAT16 ? copy_rows<BFloat16, char> : copy_rows<float, char>;
  copy(*cache, first_head, num_heads, slots, num_slots, static_cast<char*>(rows));
}
