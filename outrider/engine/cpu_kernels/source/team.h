// A team of threads that computes one step together, on cores that it may not have to itself.
//
// A barrier waits for every thread, so one that another process has pushed off its core
// holds up all the others, hundreds of times a step. Here a phase of a job is over when its
// UNITS are done, whoever did them: a thread that is not running holds up nobody unless it
// lost its core in the middle of a unit, and when it comes back it finds the phases behind
// it finished and joins the present one. Alone on its cores a team loses nothing by this.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace outrider {

// Units 0 … total - 1 of work, each done by whoever asks first. Used once.
class Phase {
 public:
  // Does units until none is left, then waits for those that others still do. All members
  // call it with the same total. `unit(index)` must not depend on who does it.
  template <class Unit>
  void share(int64_t total, Unit&& unit) {
    if (done_.load(std::memory_order_acquire) == total) return;
    int32_t mine = 0;
    for (int64_t index; (index = next_.fetch_add(1, std::memory_order_relaxed)) < total; mine++) unit(index);
    if (mine > 0 && done_.fetch_add(mine, std::memory_order_acq_rel) + mine == total) return done_.notify_all();
    wait(static_cast<int32_t>(total));
  }

 private:
  void wait(int32_t total) const;

  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int32_t> done_{0};
};

// What a team does: phases, one after the other, in the same order by every member.
class Job {
 public:
  virtual ~Job() = default;
  // After all phases are done a late member may still walk through them: nothing outside of
  // phases may be touched that does not live as long as the job.
  virtual void work(int member) = 0;
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
      void work(int member) override {
        phase.share(total, [&](int64_t index) { unit(index, member); });
      }
      int64_t total;
      Unit& unit;  // of the caller, who stays until all units are done
      Phase phase;
    };
    run(std::make_shared<OnePhase>(total, unit));
  }

 private:
  void work(int index);
  void stop();

  std::vector<std::thread> workers_;
  std::mutex job_lock_;
  std::shared_ptr<Job> job_;  // the newest
  std::atomic<bool> stops_{false};
  alignas(64) std::atomic<uint32_t> started_{0};  // jobs, counted; workers sleep on it
};

}  // namespace outrider
