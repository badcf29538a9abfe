#include "kv_panels.h"

#include "api.h"
#include "call.h"

using namespace outrider;

namespace {

// Calls f(panel, slot, row) for every layer, slot and head: what lies where in the cache and in `rows`
// [num_layers, num_slots, num_heads, head_dim].
template <class KV, class Row, class F>
void for_each_row(const OutriderPanels& cache, int64_t first_head, int64_t num_heads, const int64_t* slots,
                  int64_t num_slots, Row* rows, F&& f) {
  for (int64_t layer = 0; layer < cache.num_layers; layer++) {
    KV* panels = static_cast<KV*>(cache.panels) + layer * cache.layer_size;
    for (int64_t i = 0; i < num_slots; i++)
      for (int64_t head = first_head; head < first_head + num_heads; head++) {
        f(panels + panel_at(slots[i], head, cache.num_kv_heads, cache.head_dim), slots[i], rows);
        rows += cache.head_dim * sizeof(KV);
      }
  }
}

template <class KV>
void write_rows(const OutriderPanels& cache, int64_t first_head, int64_t num_heads, const int64_t* slots,
                int64_t num_slots, const char* rows) {
  const auto write = cache.are_values != 0 ? write_value<KV> : write_key<KV>;
  for_each_row<KV>(cache, first_head, num_heads, slots, num_slots, rows,
                   [&](KV* panel, int64_t slot, const char* row) { write(row, cache.head_dim, slot, panel); });
}

template <class KV>
void read_rows(const OutriderPanels& cache, int64_t first_head, int64_t num_heads, const int64_t* slots,
               int64_t num_slots, char* rows) {
  const auto read = cache.are_values != 0 ? read_value<KV> : read_key<KV>;
  for_each_row<KV>(cache, first_head, num_heads, slots, num_slots, rows,
                   [&](const KV* panel, int64_t slot, char* row) { read(panel, cache.head_dim, slot, row); });
}

}  // namespace

void outrider_write_rows(const OutriderPanels* cache, int64_t first_head, int64_t num_heads, const int64_t* slots,
                         int64_t num_slots, const void* rows) {
  const auto write = cache->type == OUTRIDER_BFLOAT16 ? write_rows<BFloat16> : write_rows<float>;
  write(*cache, first_head, num_heads, slots, num_slots, static_cast<const char*>(rows));
}

void outrider_read_rows(const OutriderPanels* cache, int64_t first_head, int64_t num_heads, const int64_t* slots,
                        int64_t num_slots, void* rows) {
  const auto read = cache->type == OUTRIDER_BFLOAT16 ? read_rows<BFloat16> : read_rows<float>;
  read(*cache, first_head, num_heads, slots, num_slots, static_cast<char*>(rows));
}
