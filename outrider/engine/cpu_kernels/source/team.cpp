#include "team.h"

#include "call.h"
#include "default_arithmetic.h"

namespace outrider {

Team::Team(int num_threads) {
  workers_.reserve(num_threads > 1 ? num_threads - 1 : 0);
  for (int index = 1; index < num_threads; index++) {
    try {
      workers_.emplace_back([this, index, num_threads] { work(index, num_threads); });
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
  job->work(Member{0, size()});
}

void Team::work(int index, int num_members) {
  const DefaultArithmetic arithmetic;
  for (uint32_t seen = 0;;) {
    spin_until([&] { return started_.load(std::memory_order_acquire) != seen; });
    started_.wait(seen, std::memory_order_acquire);
    seen = started_.load(std::memory_order_acquire);  // any skipped jobs are done
    if (stops_) return;
    std::shared_ptr<Job> job;
    {
      const std::lock_guard lock(job_lock_);
      job = job_;
    }
    const TileUse tiles;
    job->work(Member{index, num_members});
  }
}

}  // namespace outrider
