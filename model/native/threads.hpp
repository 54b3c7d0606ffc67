// threads: a few threads that run one job together and meet at barriers inside it.
//
// Waiting is short spinning, then sleeping: a barrier between operators costs well under a microsecond while all threads
// run, and a thread whose partner was put aside by the system does not burn the core that the partner needs.
//
// Trap: threads that take turns at sleeping look to the system like one thread's worth of work, so it can leave two of
// them on one core for seconds, beside an idle one. Who waits in vain for a partner on its own core goes elsewhere.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <sched.h>
#endif

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A number that rises, and those who wait for it.
class Signal {
 public:
  uint32_t now() const { return value_.load(std::memory_order_acquire); }

  void raise() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) value_.notify_all();
  }

  // Returns once the number is no longer `old`; calls `before_sleep` if that takes long.
  template <class Call>
  void wait(uint32_t old, const Call& before_sleep) {
    for (int spin = 0; spin < SPINS; spin++) {
      if (now() != old) return;
      relax();
    }
    before_sleep();
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (value_.load(std::memory_order_seq_cst) == old) value_.wait(old);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  static constexpr int SPINS = 1000;  // 10 to 40 us
  alignas(64) std::atomic<uint32_t> value_{0};
  std::atomic<int> sleepers_{0};
};

class Threads {
 public:
  Threads() { members_.push_back(std::make_unique<Member>()); }
  Threads(const Threads&) = delete;

  ~Threads() {
    job_ = nullptr;
    for (size_t i = 1; i < members_.size(); i++) {
      members_[i]->call.raise();
      members_[i]->thread.join();
    }
  }

  // Runs job(number) in `count` threads, the caller's being number 0. Returns when all have ended.
  void run(int count, const std::function<void(int)>& job) {
    while (static_cast<int>(members_.size()) < count) {
      int number = static_cast<int>(members_.size());
      Member& member = *members_.emplace_back(std::make_unique<Member>());
      member.thread = std::thread([this, &member, number] { work(member, number); });
    }
    count_ = count;
    job_ = &job;
    left_.store(count);
    for (int i = 1; i < count; i++) members_[i]->call.raise();
    job(0);
    barrier(0, [] {});
  }

  // All threads of the job wait for each other; the last one calls `alone` before they go on.
  template <class Alone>
  void barrier(int number, const Alone& alone) {
    uint32_t phase = phase_.now();
#if defined(__linux__)
    members_[number]->core.store(sched_getcpu(), std::memory_order_relaxed);
#endif
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      alone();
      left_.store(count_, std::memory_order_relaxed);
      phase_.raise();
    } else {
      phase_.wait(phase, [&] { leave_shared_core(number); });
    }
  }

 private:
  struct Member {
    Signal call;
    alignas(64) std::atomic<int> core{-1};  // where it was last
    std::thread thread;
  };

  void work(Member& member, int number) {
    for (uint32_t calls = 0;; calls++) {
      member.call.wait(calls, [] {});
      if (job_ == nullptr) return;
      (*job_)(number);
      barrier(number, [] {});
    }
  }

  // If another thread of the job is on this thread's core, move to a core that none is on.
  void leave_shared_core(int number) {
#if defined(__linux__)
    cpu_set_t allowed, free;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    free = allowed;
    int here = sched_getcpu();
    bool is_shared = false;
    for (int i = 0; i < count_; i++) {
      int core = members_[i]->core.load(std::memory_order_relaxed);
      if (i == number || core < 0) continue;
      is_shared |= core == here;
      CPU_CLR(core, &free);
    }
    if (!is_shared || CPU_COUNT(&free) == 0) return;
    if (sched_setaffinity(0, sizeof free, &free) == 0) sched_setaffinity(0, sizeof allowed, &allowed);
#else
    (void)number;
#endif
  }

  std::vector<std::unique_ptr<Member>> members_;    // number 0 is the caller
  const std::function<void(int)>* job_ = nullptr;  // written before the members are called
  int count_ = 1;                                  // the same
  Signal phase_;
  alignas(64) std::atomic<int> left_{0};
};
