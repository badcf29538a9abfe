// Turns of processes that compute on the same processors.
//
// Two processes with a thread on every core each run at half speed, and which of them gets
// on is the system's to say. In turns each has all cores for a while, in an order that they
// choose. A turn is a lease in memory that the processes share: who holds it renews it while
// it computes, and one that was killed or stopped loses it when it runs out. Nothing depends
// on a turn but time: a process that has lost its own, and does not know yet, computes the
// same, beside another.
//
// Those who want a turn stand in line by ticket, and whoever gives one hands it to the head of
// the line: a process that takes another turn right away does not overtake those who wait.
#pragma once

#include <atomic>
#include <cstdint>

namespace outrider {

// What the processes map. Zeros are its beginning; it may outlive any of them.
class Turns {
 public:
  static constexpr int32_t kSeats = 256;
  enum class Taken { kNo, kYes, kFromAnother };

  // Stands in line until the turn is `seat`'s, for at most `timeout` ns; kNo: it still stands
  // there. The turn is leased for `lease` ns. kFromAnother: its holder's lease had run out.
  Taken take(int32_t seat, int64_t lease, int64_t timeout);

  // Leases the turn for `lease` ns from now on. False: it is not this seat's any more.
  bool keep(int32_t seat, int64_t lease);

  // Whether others stand in line.
  bool is_wanted(int32_t seat) const;

  // Hands the turn to who stands first, or to nobody, and leaves the line. The next one has
  // `lease` ns to wake up and lease it himself.
  void give(int32_t seat, int64_t lease);

 private:
  static constexpr int64_t kLongestLease = 10'000'000'000;
  static constexpr int64_t kLongestSleep = 500'000'000;  // should whoever gave the turn have died before waking us

  // Or -1: nobody's. No seat at all, in a file that is not ours, is nobody's too.
  static int32_t seat_of(uint64_t holder) {
    const auto seat = static_cast<int32_t>(holder & 0xffff) - 1;
    return seat < kSeats ? seat : -1;
  }
  static uint64_t successor(uint64_t holder, int32_t seat) {
    return ((holder >> 16) + 1) << 16 | static_cast<uint64_t>(seat + 1);
  }
  void lease(int32_t seat, int64_t now, int64_t nanoseconds);
  bool has_run_out(uint64_t holder) const;
  void stand_in_line(int32_t seat);
  int32_t first_in_line() const;
  void announce();
  void wait(uint32_t seen, int64_t nanoseconds) const;

  std::atomic<uint64_t> holder_;   // how often it changed, then the holder's seat + 1, 16 bits; 0: nobody
  std::atomic<uint32_t> changes_;  // of the holder; those in line sleep on it
  std::atomic<uint32_t> last_ticket_;
  std::atomic<int64_t> lease_ends_[kSeats];  // of the turns of each: CLOCK_MONOTONIC, ns
  std::atomic<uint32_t> tickets_[kSeats];    // 0: not in line
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free &&
                  std::atomic<uint32_t>::is_always_lock_free,
              "a lock would be a process's own");

}  // namespace outrider
