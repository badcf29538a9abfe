// Turns of processes that compute on the same processors (ADR 17).
//
// A turn is a lease in memory that the processes share: its holder renews it while it computes, and if the
// holder dies or hangs, it expires. Turns affect timing only: a process that has lost its turn without knowing
// it yet computes the same numbers, at the same time as the new holder.
//
// Waiters queue by ticket (FIFO). Releasing a turn hands it to the longest waiter, so that a process that
// wants another turn at once does not overtake the others.
#pragma once

#include <atomic>
#include <cstdint>

namespace outrider {

// The memory that the processes map, initially zeros. It may outlive any of them.
class Turns {
 public:
  static constexpr int32_t kSlots = 256;
  enum class Taken { kNo, kYes, kFromAnother };

  // Queues for the turn, for at most `timeout` ns, and leases it for `lease` ns. kNo: still in the queue.
  // kFromAnother: the last holder's lease had expired.
  Taken take(int32_t slot, int64_t lease, int64_t timeout);

  // Renews the lease: `lease` ns from now. False: the turn was lost.
  bool keep(int32_t slot, int64_t lease);

  // Returns whether others are in the queue.
  bool is_wanted(int32_t slot) const;

  // Releases the turn to the longest waiter, if any, and leaves the queue. The waiter has `lease` ns to wake up
  // and renew the lease.
  void give(int32_t slot, int64_t lease);

 private:
  static constexpr int64_t kMaxLease = 10'000'000'000;
  static constexpr int64_t kMaxSleep = 500'000'000;  // in case the releaser died before it woke the waiter

  // Returns the holder's slot; -1 if nobody holds the turn, or if the value is no slot, as in a foreign file.
  static int32_t slot_of(uint64_t holder) {
    const auto slot = static_cast<int32_t>(holder & 0xffff) - 1;
    return slot < kSlots ? slot : -1;
  }
  static uint64_t successor(uint64_t holder, int32_t slot) {
    return ((holder >> 16) + 1) << 16 | static_cast<uint64_t>(slot + 1);
  }
  void lease(int32_t slot, int64_t now, int64_t nanoseconds);
  bool has_run_out(uint64_t holder) const;
  void enqueue(int32_t slot);
  int32_t longest_waiter() const;
  void announce();
  void wait(uint32_t seen, int64_t nanoseconds) const;

  std::atomic<uint64_t> holder_;   // number of changes, then 16 bits of the holder's slot + 1; 0: nobody
  std::atomic<uint32_t> changes_;  // counts changes of the holder; waiters sleep on it
  std::atomic<uint32_t> last_ticket_;
  std::atomic<int64_t> lease_ends_[kSlots];  // when each slot's turn ends: CLOCK_MONOTONIC, ns
  std::atomic<uint32_t> tickets_[kSlots];    // 0: not in the queue
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free &&
                  std::atomic<uint32_t>::is_always_lock_free,
              "a lock would be a process's own");

}  // namespace outrider
