// Scratch memory of one runner, which grows to its largest step and is kept.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#include "api.h"

namespace outrider {

class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  ~Buffer() { std::free(data_); }

  // Returns memory for at least `count` values, aligned to cache lines. Growing loses the
  // content. Throws std::bad_alloc, after which the buffer is empty.
  template <class T>
  T* of(int64_t count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64 + 64;
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = std::aligned_alloc(64, bytes);
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = bytes;
    }
    return static_cast<T*>(data_);
  }

  template <class T>
  T* get() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// The time of steps by phase, measured in the calling thread, including its waits.
class StepTimes {
 public:
  bool is_on = false;

  void begin() {
    if (is_on) last_ = now();
  }
  // Adds the time since the last call to `kind`, an OutriderPhase.
  void note(int kind) {
    if (!is_on) return;
    const int64_t at = now();
    spent_[kind] += at - last_;
    last_ = at;
  }
  void take(int64_t* spent) {
    for (int kind = 0; kind < OUTRIDER_NUM_PHASES; kind++) {
      spent[kind] = spent_[kind];
      spent_[kind] = 0;
    }
  }

 private:
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  int64_t last_ = 0;
  int64_t spent_[OUTRIDER_NUM_PHASES] = {};
};

}  // namespace outrider

// Each member's own scratch memory, and the shared memory.
struct OutriderWorkspace {
  struct Own {
    outrider::Buffer attention;
  };
  std::vector<Own> own;
  outrider::Buffer residual;     // [rows, hidden] float
  outrider::Buffer activations;  // normalised rows, or rows that were converted for a product
  outrider::Buffer projected;    // query, key and value of all rows
  outrider::Buffer attended;
  outrider::Buffer gated;
  outrider::Buffer outputs;    // [rows, hidden] float, of products that are normalised before they are added
  outrider::Buffer quantised;  // rows for int8 weights
  outrider::Buffer reduced;    // [rows, rank], for adapters
  outrider::Buffer taps;  // [rows, taps, hidden], for features
  outrider::StepTimes times;
  outrider::Buffer partials;  // partial results of split attention
  outrider::Buffer logits;    // [paths, logits of a head] float, for drafts
  outrider::Buffer states;    // [paths, hidden], a head's own states, for drafts
};
