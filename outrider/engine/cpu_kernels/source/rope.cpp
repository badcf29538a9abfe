#include "rope.h"

#include "api.h"
#include "call.h"
#include "team.h"

using namespace outrider;

namespace {

template <class T>
void rope(T* x, int64_t num_rows, int64_t row_stride, int64_t num_heads, int64_t head_dim, const int64_t* positions,
          const float* cosines, const float* sines) {
  for (int64_t row = 0; row < num_rows; row++) {
    const int64_t angle = positions[row] * (head_dim / 2);
    for (int64_t head = 0; head < num_heads; head++) {
      T* at = x + row * row_stride + head * head_dim;
      rotate_head<T>(at, head_dim, cosines + angle, sines + angle, at);
    }
  }
}

void copy_row(const void* from, int64_t row, int64_t stride, void* to, int64_t slot, int64_t size, int64_t item) {
  std::memcpy(static_cast<char*>(to) + slot * size * item, static_cast<const char*>(from) + row * stride * item,
              size * item);
}

}  // namespace

int32_t outrider_rope(OutriderTeam*, int32_t type, void* x, int64_t num_rows, int64_t row_stride, int64_t num_heads,
                      int64_t head_dim, const int64_t* positions, const float* cosines, const float* sines) {
  return call([&] {
    if (type == OUTRIDER_BFLOAT16) {
      rope(static_cast<BFloat16*>(x), num_rows, row_stride, num_heads, head_dim, positions, cosines, sines);
    } else {
      rope(static_cast<float*>(x), num_rows, row_stride, num_heads, head_dim, positions, cosines, sines);
    }
  });
}

int32_t outrider_write_cache(OutriderTeam*, int32_t type, const void* keys, int64_t key_stride, const void* values,
                             int64_t value_stride, int64_t num_rows, const int64_t* slots, int64_t num_kv_heads,
                             int64_t head_dim, void* key_cache, void* value_cache) {
  return call([&] {
    const int64_t item = type == OUTRIDER_BFLOAT16 ? 2 : 4, size = num_kv_heads * head_dim;
    for (int64_t row = 0; row < num_rows; row++) {
      copy_row(keys, row, key_stride, key_cache, slots[row], size, item);
      copy_row(values, row, value_stride, value_cache, slots[row], size, item);
    }
  });
}
