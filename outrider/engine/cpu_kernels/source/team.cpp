#include "team.h"

#include <pthread.h>
#include <sched.h>

namespace outrider {

namespace {

// A few microseconds: longer than members usually come apart when each has a core.
constexpr int kSpinsAtBarrier = 2000;

// Between two steps: the next one mostly follows at once, and waking a sleeper costs more.
constexpr int kSpinsForJob = 2000;
constexpr int kYieldsForJob = 50;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Team::Team(int num_threads, const std::vector<int>& cpus) {
  for (int index = 1; index < num_threads; index++) {
    workers_.emplace_back([this, index] { work(index); });
#if defined(__linux__)
    if (index - 1 < static_cast<int>(cpus.size())) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(cpus[index - 1], &set);
      pthread_setaffinity_np(workers_.back().native_handle(), sizeof set, &set);  // advice: failing costs only speed
    }
#endif
  }
}

Team::~Team() {
  stops_ = true;
  started_.fetch_add(1, std::memory_order_release);
  started_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Team::run(const std::function<void(Member&)>& job) {
  job_ = &job;
  started_.fetch_add(1, std::memory_order_release);
  started_.notify_all();
  Member caller(*this, 0);
  job(caller);
  barrier();  // `job` lives until all have left it
}

void Team::work(int index) {
  Member member(*this, index);
  for (uint32_t seen = 0;; seen++) {
    for (int i = 0; i < kSpinsForJob && started_.load(std::memory_order_acquire) == seen; i++) pause();
    for (int i = 0; i < kYieldsForJob && started_.load(std::memory_order_acquire) == seen; i++) sched_yield();
    started_.wait(seen, std::memory_order_acquire);
    if (stops_) return;
    (*job_)(member);
    barrier();
  }
}

void Team::barrier() {
  const uint32_t generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; spins++) {
    if (spins < kSpinsAtBarrier) {
      pause();
    } else {
      sched_yield();
    }
  }
}

}  // namespace outrider
