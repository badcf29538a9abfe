#include "turns.h"

#include <time.h>

#include <algorithm>
#include <climits>

#include "api.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace outrider {

namespace {

int64_t monotonic() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

}  // namespace

Turns::Taken Turns::take(int32_t slot, int64_t length, int64_t timeout) {
  const int64_t deadline = monotonic() + timeout;
  for (;;) {
    // `changes_` is read before `holder_`: if the holder changes afterwards, `wait` returns at once.
    const uint32_t seen = changes_;
    uint64_t holder = holder_;
    const int64_t now = monotonic();
    if (slot_of(holder) == slot) {  // another process has released the turn to this one
      lease(slot, now, length);
      if (holder_ != holder) continue;  // too late: a third process has taken it
      tickets_[slot] = 0;
      return Taken::kYes;
    }
    const bool is_free = slot_of(holder) < 0;
    if (is_free || has_run_out(holder)) {
      lease(slot, now, length);  // before taking the turn: with an expired lease it could be lost at once
      if (!holder_.compare_exchange_strong(holder, successor(holder, slot))) continue;
      tickets_[slot] = 0;
      announce();  // other waiters must sleep until the end of the new lease
      return is_free ? Taken::kYes : Taken::kFromAnother;
    }
    if (tickets_[slot] == 0) {
      enqueue(slot);
      continue;  // a turn that was released before the enqueuing is free now
    }
    if (now >= deadline) return Taken::kNo;
    wait(seen, std::min({deadline, lease_ends_[slot_of(holder)].load(), now + kMaxSleep}) - now);
  }
}

bool Turns::keep(int32_t slot, int64_t length) {
  const uint64_t holder = holder_;
  if (slot_of(holder) != slot) return false;
  lease(slot, monotonic(), length);
  return holder_ == holder;
}

bool Turns::is_wanted(int32_t slot) const {
  for (int32_t other = 0; other < kSlots; other++) {
    if (other != slot && tickets_[other] != 0) return true;
  }
  return false;
}

void Turns::give(int32_t slot, int64_t length) {
  // If another process is releasing the turn to this slot right now, nobody has it until that lease ends.
  tickets_[slot] = 0;
  uint64_t holder = holder_;
  if (slot_of(holder) != slot) return;
  int32_t next;
  for (;;) {
    next = longest_waiter();
    if (next < 0) break;
    uint32_t ticket = tickets_[next];
    // The releaser dequeues the waiter, so that a killed one receives the turn only once.
    if (ticket != 0 && tickets_[next].compare_exchange_strong(ticket, 0)) break;
  }
  if (next >= 0) lease(next, monotonic(), length);
  holder_.compare_exchange_strong(holder, successor(holder, next));  // fails if another process has taken the turn
  announce();
}

void Turns::lease(int32_t slot, int64_t now, int64_t nanoseconds) {
  lease_ends_[slot] = now + std::min(nanoseconds, kMaxLease);
}

bool Turns::has_run_out(uint64_t holder) const {
  const int64_t end = lease_ends_[slot_of(holder)];
  const int64_t now = monotonic();  // read after the end: with an earlier time a new lease would seem too long
  return end <= now || end - now > kMaxLease;  // the latter was written before a reboot, when the clock was ahead
}

void Turns::enqueue(int32_t slot) {
  uint32_t ticket;
  do {
    ticket = last_ticket_.fetch_add(1) + 1;
  } while (ticket == 0);
  tickets_[slot] = ticket;
}

int32_t Turns::longest_waiter() const {
  int32_t first = -1;
  uint32_t lowest = 0;
  for (int32_t slot = 0; slot < kSlots; slot++) {
    const uint32_t ticket = tickets_[slot];
    if (ticket == 0 || (first >= 0 && static_cast<int32_t>(ticket - lowest) >= 0)) continue;
    first = slot;
    lowest = ticket;
  }
  return first;
}

void Turns::announce() {
  changes_.fetch_add(1);
#if defined(__linux__)
  // std::atomic::notify_all would wake threads of this process only.
  syscall(SYS_futex, &changes_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

void Turns::wait(uint32_t seen, int64_t nanoseconds) const {
#if defined(__linux__)
  const int64_t seconds = nanoseconds / 1'000'000'000, rest = nanoseconds % 1'000'000'000;
  const timespec limit{static_cast<time_t>(seconds), static_cast<long>(rest)};
  if (nanoseconds > 0) syscall(SYS_futex, &changes_, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
  constexpr int64_t kLook = 200'000;  // ns between looks: without futexes there is nothing to sleep on
  const timespec limit{0, static_cast<long>(std::clamp(nanoseconds, int64_t{0}, kLook))};
  if (changes_ == seen) nanosleep(&limit, nullptr);
#endif
}

}  // namespace outrider

namespace {

outrider::Turns& turns_at(void* memory) { return *static_cast<outrider::Turns*>(memory); }

}  // namespace

int64_t outrider_turns_size(void) { return sizeof(outrider::Turns); }

int32_t outrider_turns_slots(void) { return outrider::Turns::kSlots; }

int32_t outrider_turns_take(void* turns, int32_t slot, int64_t lease, int64_t timeout) {
  return static_cast<int32_t>(turns_at(turns).take(slot, lease, timeout));
}

int32_t outrider_turns_keep(void* turns, int32_t slot, int64_t lease) { return turns_at(turns).keep(slot, lease); }

int32_t outrider_turns_is_wanted(void* turns, int32_t slot) { return turns_at(turns).is_wanted(slot); }

void outrider_turns_give(void* turns, int32_t slot, int64_t lease) { turns_at(turns).give(slot, lease); }
