// A team of threads that computes one step together, on cores that it may not have to itself.
//
// A barrier waits for every thread, so one that another process has pushed off its core
// holds up all the others, hundreds of times a step. Here a phase of a job is over when its
// UNITS are done, whoever did them: a thread that is not running holds up nobody unless it
// lost its core in the middle of a unit, and when it comes back it finds the phases behind
// it finished and joins the present one. Alone on its cores a team loses nothing by this.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace outrider {

// Some ten microseconds: members that each have a core come apart by less.
constexpr int kSpins = 500;
// Then the core is offered to others a few times before sleeping, which costs a wake-up.
constexpr int kYields = 20;

static inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns as soon as `is_over()`; false when it has not come true in the time worth spinning.
template <class IsOver>
static inline bool spin_until(IsOver&& is_over) {
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

// One of the threads that do a job.
struct Member {
  int index;  // 0: the caller's
  int num;    // of them all
};

// Units 0 … total - 1 of work. Each member has a range of consecutive ones, so that it reads memory that lies
// together; whoever has done its own takes units of the others. Used once.
class Phase {
 public:
  // Does units until none is left, then waits for those that others still do, and calls `while_waiting()` again and
  // again. All members call it with the same total. `unit(index)` must not depend on who does it.
  template <class Unit, class Waiting>
  void share(Member member, int64_t total, Unit&& unit, Waiting&& while_waiting) {
    if (done_.load(std::memory_order_acquire) == total) return;
    const int num_ranges = Phase::num_ranges(member);
    int32_t mine = 0;
    for (int i = 0; i < num_ranges; i++) {
      const int range = (member.index + i) % num_ranges;
      const int64_t begin = begin_of(range, num_ranges, total), end = begin_of(range + 1, num_ranges, total);
      if (taken_[range].load(std::memory_order_relaxed) >= end - begin) continue;
      for (int64_t index; (index = begin + taken_[range].fetch_add(1, std::memory_order_relaxed)) < end; mine++)
        unit(index);
    }
    if (mine > 0 && done_.fetch_add(mine, std::memory_order_acq_rel) + mine == total) return done_.notify_all();
    wait(static_cast<int32_t>(total), while_waiting);
  }

  template <class Unit>
  void share(Member member, int64_t total, Unit&& unit) {
    share(member, total, unit, [] {});
  }

  static int num_ranges(Member member) { return std::min(member.num, kRanges); }

  // The first unit of a range. Member m begins with range m % num_ranges.
  static int64_t begin_of(int range, int num_ranges, int64_t total) { return total * range / num_ranges; }

  // What is behind the last unit of the range that a member begins with.
  static int64_t end_of(Member member, int64_t total) {
    const int num = num_ranges(member);
    return begin_of(member.index % num + 1, num, total);
  }

 private:
  static constexpr int kRanges = 16;  // more members share ranges

  template <class Waiting>
  void wait(int32_t total, Waiting&& while_waiting) const {
    if (spin_until([&] {
          if (done_.load(std::memory_order_acquire) == total) return true;
          while_waiting();
          return false;
        }))
      return;
    for (int32_t done; (done = done_.load(std::memory_order_acquire)) != total;)
      done_.wait(done, std::memory_order_acquire);
  }

  alignas(64) std::atomic<int32_t> taken_[kRanges] = {};
  alignas(64) std::atomic<int32_t> done_{0};
};

// What a team does: phases, one after the other, in the same order by every member.
class Job {
 public:
  virtual ~Job() = default;
  // After all phases are done a late member may still walk through them: nothing outside of
  // phases may be touched that does not live as long as the job.
  virtual void work(Member member) = 0;
};

class Team {
 public:
  // Throws std::system_error when the process may not have so many threads.
  explicit Team(int num_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Does `job` together with the workers that are free; the calling thread is member 0.
  // Returns when all its phases are done. Called by one thread at a time.
  void run(const std::shared_ptr<Job>& job);

  // A job of one phase.
  template <class Unit>
  void share(int64_t total, Unit&& unit) {
    if (total <= 1 || workers_.empty()) {
      for (int64_t index = 0; index < total; index++) unit(index, 0);
      return;
    }
    struct OnePhase final : Job {
      OnePhase(int64_t count, Unit& what) : total(count), unit(what) {}
      void work(Member member) override {
        phase.share(member, total, [&](int64_t index) { unit(index, member.index); });
      }
      int64_t total;
      Unit& unit;  // of the caller, who stays until all units are done
      Phase phase;
    };
    run(std::make_shared<OnePhase>(total, unit));
  }

 private:
  void work(int index, int num_members);  // `num_members`: while it is made, `size` still grows
  void stop();

  std::vector<std::thread> workers_;
  std::mutex job_lock_;
  std::shared_ptr<Job> job_;  // the newest
  std::atomic<bool> stops_{false};
  alignas(64) std::atomic<uint32_t> started_{0};  // jobs, counted; workers sleep on it
};

}  // namespace outrider
