// Scratch memory of one runner: grows to its largest step and stays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace outrider {

class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr; }
  ~Buffer() { std::free(data_); }

  // At least `count` values, contents lost when it grows. Aligned to cache lines.
  template <class T>
  T* of(int64_t count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64 + 64;
    if (bytes > size_) {
      std::free(data_);
      data_ = std::aligned_alloc(64, bytes);
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
  outrider::Buffer partials;  // of attention that is split over the keys
};
