// Exercises team.h from C++, where members can be delayed on purpose. A run executes one case,
// given by name. It exits with 0, or reports the failure; the caller must set a timeout.
#include "team.h"

#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <system_error>

using outrider::Job;
using outrider::Phase;
using outrider::Team;

namespace {

void require(bool is_right, const char* what) {
  if (is_right) return;
  std::fprintf(stderr, "team: %s\n", what);
  std::_Exit(1);
}

class Flag {
 public:
  void set() {
    is_set_ = true;
    is_set_.notify_all();
  }
  void wait() const { is_set_.wait(false); }
  bool is_set() const { return is_set_; }

 private:
  std::atomic<bool> is_set_{false};
};

// Phases of units. Each unit is done once and reads the results of the previous phase.
struct Chain final : Job {
  Chain(int num_phases, int64_t num_units) : phases(num_phases), values(num_phases + 1) {
    for (auto& of_phase : values) of_phase.assign(num_units, 0);
    values[0].assign(num_units, 1);
  }

  void work(outrider::Member member) override {
    for (size_t phase = 0; phase < phases.size(); phase++) {
      if (before_phase) before_phase(member.index, static_cast<int>(phase));
      const int64_t num = static_cast<int64_t>(values[phase].size());
      phases[phase].share(member, num, [&](int64_t unit) {
        if (in_unit) in_unit(member.index, static_cast<int>(phase), unit);
        // Sums the whole previous phase: a unit that ran too early would get a smaller sum.
        int64_t sum = 0;
        for (const int64_t value : values[phase]) sum += value;
        values[phase + 1][unit] += sum / num + 1;
      });
    }
  }

  void check() const {
    for (size_t phase = 0; phase < values.size(); phase++)
      for (const int64_t value : values[phase])
        require(value == static_cast<int64_t>(phase) + 1, "a unit was lost, done twice, or done too early");
  }

  std::vector<Phase> phases;
  std::vector<std::vector<int64_t>> values;  // not atomic, since phases order the units
  std::function<void(int, int)> before_phase;
  std::function<void(int, int, int64_t)> in_unit;
};

void more_threads_than_cores() {
  Team team(static_cast<int>(3 * std::thread::hardware_concurrency() + 5));
  for (int i = 0; i < 20; i++) {
    const auto job = std::make_shared<Chain>(30, 17);
    team.run(job);
    job->check();
  }
}

// Workers that lose their core between two units: here they wait, outside of any unit, for an
// event after the whole job. With a barrier of threads the job would never end.
void late_workers_hold_up_no_phase() {
  Team team(3);
  for (int late_phase = 0; late_phase < 4; late_phase++) {
    const auto is_over = std::make_shared<Flag>();
    const auto job = std::make_shared<Chain>(4, 8);
    job->before_phase = [is_over, late_phase](int member, int phase) {
      if (member != 0 && phase == late_phase) is_over->wait();
    };
    team.run(job);
    job->check();
    // Later jobs are done without them, too, and the memory of these jobs may be freed.
    for (int i = 0; i < 50; i++) {
      const auto next = std::make_shared<Chain>(3, 5);
      team.run(next);
      next->check();
    }
    is_over->set();
    // They continue: in this job member 0 waits in a unit until another member has done one.
    Flag has_helped;
    const auto shared = std::make_shared<Chain>(1, 2);
    shared->in_unit = [&](int member, int, int64_t) { member == 0 ? has_helped.wait() : has_helped.set(); };
    team.run(shared);
    shared->check();
    job->check();
  }
}

// A phase does not end while a member is in a unit.
void a_unit_that_takes_long_is_waited_for() {
  Team team(2);
  for (int i = 0; i < 20; i++) {
    Flag is_in_unit, may_end;
    std::atomic<bool> has_ended{false};
    const auto job = std::make_shared<Chain>(2, 2);
    job->in_unit = [&](int member, int phase, int64_t) {
      if (phase == 1) return require(has_ended, "a phase began before the one before it was over");
      if (member == 0) return is_in_unit.wait();  // so that the worker has the other unit
      is_in_unit.set();
      may_end.wait();
      has_ended = true;
    };
    std::thread other([&] {
      is_in_unit.wait();
      may_end.set();
    });
    team.run(job);
    require(has_ended, "a job was over before its units");
    other.join();
    job->check();
  }
}

// All members enter their first unit before any of them continues.
void a_member_begins_with_units_of_its_own() {
  constexpr int kMembers = 3;
  constexpr int64_t kUnits = 10;
  Team team(kMembers);
  for (int i = 0; i < 200; i++) {
    std::atomic<int> num_in_units{0};
    std::vector<std::vector<int64_t>> done(kMembers);
    const auto job = std::make_shared<Chain>(1, kUnits);
    job->in_unit = [&](int member, int, int64_t unit) {
      done[member].push_back(unit);
      if (done[member].size() > 1) return;
      if (++num_in_units == kMembers) num_in_units.notify_all();
      for (int seen; (seen = num_in_units) < kMembers;) num_in_units.wait(seen);
    };
    team.run(job);
    job->check();
    for (int member = 0; member < kMembers; member++)
      require(done[member].front() == Phase::begin_of(member, kMembers, kUnits), "a member began with another's unit");
  }
}

void thousands_of_tiny_jobs() {
  Team team(4);
  std::vector<int64_t> counts(7, 0);
  for (int i = 0; i < 20000; i++) team.share(i % 8, [&](int64_t unit, int) { counts[unit]++; });
  for (int unit = 0; unit < 7; unit++) {
    int64_t expected = 0;
    for (int i = 0; i < 20000; i++) expected += i % 8 > unit;
    require(counts[unit] == expected, "a unit of a tiny job was lost or done twice");
  }
}

void members_are_told_apart() {
  Team team(4);
  for (int i = 0; i < 2000; i++) {
    std::atomic<int> in_use[4] = {};
    team.share(16, [&](int64_t, int member) {
      require(member >= 0 && member < team.size(), "a member that there is not");
      require(in_use[member]++ == 0, "two threads are one member");
      in_use[member]--;
    });
  }
}

void destroyed_while_idle() {
  for (int i = 0; i < 200; i++) {
    Team team(1 + i % 5);
    if (i % 3 != 0) team.share(i % 7, [](int64_t, int) {});
  }
}

void no_more_threads_is_an_error_and_leaves_nothing_behind() {
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  rlimit low = limit;
  low.rlim_cur = rlim_t{256} << 20;  // a thread's stack needs 8 MiB
  require(setrlimit(RLIMIT_AS, &low) == 0, "the limit could not be set");
  bool is_refused = false;
  try {
    Team team(1000);
  } catch (const std::system_error&) {
    is_refused = true;
  }
  require(is_refused, "a thousand threads in 256 MiB");
  setrlimit(RLIMIT_AS, &limit);
  Team team(3);
  const auto job = std::make_shared<Chain>(5, 5);
  team.run(job);
  job->check();
}

}  // namespace

#define CASE(name) {#name, name}

int main(int argc, char** argv) {
  const struct {
    const char* name;
    void (*run)();
  } cases[] = {CASE(more_threads_than_cores),
               CASE(late_workers_hold_up_no_phase),
               CASE(a_unit_that_takes_long_is_waited_for),
               CASE(a_member_begins_with_units_of_its_own),
               CASE(thousands_of_tiny_jobs),
               CASE(members_are_told_apart),
               CASE(destroyed_while_idle),
               CASE(no_more_threads_is_an_error_and_leaves_nothing_behind)};
  for (const auto& one : cases)
    if (argc == 2 && std::strcmp(argv[1], one.name) == 0) {
      one.run();
      return 0;
    }
  std::fprintf(stderr, "team: no such case\n");
  return 2;
}
