// Scratch memory of one runner: grows to its largest step and stays.
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

  // At least `count` values, contents lost when it grows. Aligned to cache lines. Throws
  // std::bad_alloc, and is empty then.
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

// Where the time of steps goes, as the calling thread sees it, waiting included.
class StepTimes {
 public:
  bool is_on = false;

  void begin() {
    if (is_on) last_ = now();
  }
  // What passed since the last call belongs to `kind`, an OutriderPhase.
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

// One member's own part, and what all share.
struct OutriderWorkspace {
  struct Own {
    outrider::Buffer attention;
  };
  std::vector<Own> own;
  outrider::Buffer residual;     // [rows, hidden] float
  outrider::Buffer activations;  // normalised rows, or rows in the form that a product wants
  outrider::Buffer projected;    // query, key and value of all rows
  outrider::Buffer attended;
  outrider::Buffer gated;
  outrider::Buffer quantised;  // rows of which int8 weights are multiplied
  outrider::Buffer taps;  // [rows, taps, hidden] of features
  outrider::StepTimes times;
  outrider::Buffer partials;  // of attention that is split over the keys
};
