// A team of threads that computes one step together, on cores that it may share with others.
//
// A barrier waits for every thread, so a thread that lost its core to another process would
// delay all others, hundreds of times per step. Here a phase of a job ends when its UNITS are
// done, whichever threads did them. A thread without a core delays the others only if it lost
// the core within a unit; when it continues, it skips the finished phases and joins the
// current one. On cores of its own, a team is as fast as with barriers.
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

// About ten microseconds: members with a core each finish a phase closer together than that.
constexpr int kSpins = 500;
// After spinning, a thread yields its core a few times before it sleeps, since waking up is slow.
constexpr int kYields = 20;

static inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits for `is_over()` by spinning and yielding. Returns false if that took too long.
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

// One of the threads that work on a job.
struct Member {
  int index;  // 0: the caller
  int num;    // number of members
};

// Units 0 to total - 1 of work. Each member begins with its own range of consecutive units, so that it reads
// contiguous memory, and then takes units from other ranges. Used once.
class Phase {
 public:
  // Does units until none is left, then waits for the units of other members, calling `while_waiting()` repeatedly.
  // All members must pass the same total. The result of `unit(index)` must not depend on the member.
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

  // Returns the first unit of a range. Member m begins with range m % num_ranges.
  static int64_t begin_of(int range, int num_ranges, int64_t total) { return total * range / num_ranges; }

  // Returns the end of the range that a member begins with.
  static int64_t end_of(Member member, int64_t total) {
    const int num = num_ranges(member);
    return begin_of(member.index % num + 1, num, total);
  }

 private:
  static constexpr int kRanges = 16;  // with more members, several begin with the same range

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

// The work of a team: phases that every member goes through in the same order.
class Job {
 public:
  virtual ~Job() = default;
  // A late member may still go through the phases after all of them are done, so code outside
  // of units may only use memory that lives as long as the job.
  virtual void work(Member member) = 0;
};

class Team {
 public:
  // Throws std::system_error if the process may not have so many threads.
  explicit Team(int num_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs `job` with all workers that are free. The calling thread is member 0. Returns when all
  // phases are done. Only one thread at a time may call it.
  void run(const std::shared_ptr<Job>& job);

  // Runs a job of one phase.
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
      Unit& unit;  // belongs to the caller, which waits until all units are done
      Phase phase;
    };
    run(std::make_shared<OnePhase>(total, unit));
  }

 private:
  void work(int index, int num_members);  // `size` grows while the team is created, so it is passed
  void stop();

  std::vector<std::thread> workers_;
  std::mutex job_lock_;
  std::shared_ptr<Job> job_;  // the newest
  std::atomic<bool> stops_{false};
  alignas(64) std::atomic<uint32_t> started_{0};  // number of jobs started; workers sleep on it
};

}  // namespace outrider
