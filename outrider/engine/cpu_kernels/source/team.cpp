#include "team.h"

#include <sched.h>

#include "default_arithmetic.h"

namespace outrider {

namespace {

// Some ten microseconds: members that each have a core come apart by less.
constexpr int kSpins = 500;
// Then the core is offered to others a few times before sleeping, which costs a wake-up.
constexpr int kYields = 20;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns as soon as `is_over()`; false when it has not come true in the time worth spinning.
template <class IsOver>
bool spin_until(IsOver&& is_over) {
  for (int i = 0; i < kSpins; i++) {
    if (is_over()) return true;
    pause();
  }
  for (int i = 0; i < kYields; i++) {
    if (is_over()) return true;
    sched_yield();
  }
  return false;
}

}  // namespace

void Phase::wait(int32_t total) const {
  if (spin_until([&] { return done_.load(std::memory_order_acquire) == total; })) return;
  for (int32_t done; (done = done_.load(std::memory_order_acquire)) != total;) done_.wait(done, std::memory_order_acquire);
}

Team::Team(int num_threads) {
  workers_.reserve(num_threads > 1 ? num_threads - 1 : 0);
  for (int index = 1; index < num_threads; index++) {
    try {
      workers_.emplace_back([this, index] { work(index); });
    } catch (...) {
      stop();
      throw;
    }
  }
}

Team::~Team() { stop(); }

void Team::stop() {
  stops_ = true;
  started_.fetch_add(1, std::memory_order_release);
  started_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Team::run(const std::shared_ptr<Job>& job) {
  {
    const std::lock_guard lock(job_lock_);
    job_ = job;
  }
  started_.fetch_add(1, std::memory_order_release);
  started_.notify_all();
  job->work(0);
}

void Team::work(int index) {
  const DefaultArithmetic arithmetic;
  for (uint32_t seen = 0;;) {
    spin_until([&] { return started_.load(std::memory_order_acquire) != seen; });
    started_.wait(seen, std::memory_order_acquire);
    seen = started_.load(std::memory_order_acquire);  // jobs that were missed are done
    if (stops_) return;
    std::shared_ptr<Job> job;
    {
      const std::lock_guard lock(job_lock_);
      job = job_;
    }
    job->work(index);
  }
}

}  // namespace outrider
