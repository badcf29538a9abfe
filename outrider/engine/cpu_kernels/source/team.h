// A team of threads that computes one step together.
//
// OpenMP's barriers either spin for long, which starves other processes on the same cores,
// or sleep at once, which costs more than the work between two barriers of a decode step.
// A team spins briefly, then gives its core to whoever wants it, and comes back.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace outrider {

class Team;

// One thread's part in a job.
class Member {
 public:
  Member(Team& team, int index) : team_(team), index_(index) {}
  int index() const { return index_; }
  int count() const;
  void barrier();  // nobody passes before all have come

 private:
  Team& team_;
  const int index_;
};

// Numbers 0 … limit - 1, each given out once, to whichever member asks first.
class Claims {
 public:
  void reset() { next_.store(0, std::memory_order_relaxed); }
  int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<int64_t> next_{0};
};

class Team {
 public:
  // `cpus[i]` is the processor of worker i, or empty for wherever the system puts them.
  Team(int num_threads, const std::vector<int>& cpus);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs `job` in every member at once; the calling thread is member 0. One job at a time.
  void run(const std::function<void(Member&)>& job);

 private:
  friend class Member;
  void work(int index);
  void barrier();

  std::vector<std::thread> workers_;
  const std::function<void(Member&)>* job_ = nullptr;
  bool stops_ = false;
  alignas(64) std::atomic<uint32_t> started_{0};  // jobs, counted; workers sleep on it
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
};

inline int Member::count() const { return team_.size(); }
inline void Member::barrier() { team_.barrier(); }

}  // namespace outrider
