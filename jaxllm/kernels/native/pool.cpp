#include "pool.h"

#include <stdint.h>
#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace jaxllm {
namespace {

// How long a thread that has nothing to do looks for work before it sleeps: longer than the gaps between the
// kernels of a step (waking takes as long as reading a megabyte), short enough to leave the core to XLA's own
// threads and to other processes.
constexpr std::chrono::microseconds kPatience{100};

// Whether a thread that looks for work may go on; asks the clock now and then.
class Patience {
 public:
  bool left() {
    if (++looks_ % 32) return true;
    const auto now = std::chrono::steady_clock::now();
    if (looks_ == 32) until_ = now + kPatience;
    return now < until_;
  }

 private:
  unsigned looks_ = 0;
  std::chrono::steady_clock::time_point until_;
};

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Asks memory for what a thread will read next, a little at a time.
class Prefetch {
 public:
  Prefetch() = default;
  Prefetch(const Upcoming& next, size_t thread, size_t threads)
      : next_(next), run_(thread), threads_(threads) {}

  // False when all has been asked for.
  bool some() {
    if (run_ >= next_.runs || total_ >= kMostBytes) return false;
    ask(next_.data);
    if (next_.other) ask(next_.other);
    at_ += kStep;
    if (at_ >= next_.bytes) {
      at_ = 0;
      run_ += threads_;
    }
    return true;
  }

 private:
  static constexpr size_t kStep = 512;
  // A part of a core's own cache: what is underway must not be driven out.
  static constexpr size_t kMostBytes = 256 << 10;

  void ask(const void* data) {
    const char* from = static_cast<const char*>(data) + run_ * next_.stride + at_;
    for (size_t i = 0; i < kStep; i += 64) __builtin_prefetch(from + i, 0, 2);
    total_ += kStep;
  }

  Upcoming next_;
  size_t run_ = 0, threads_ = 1, at_ = 0, total_ = 0;
};

class Pool {
 public:
  explicit Pool(int count) : count_(count) {
    for (int i = 1; i < count; i++) workers_.emplace_back([this, i] { serve(i); });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(sleep_);
      ending_ = true;
      round_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int count() const { return count_; }

  void run(size_t count, void (*work)(void*, size_t), void* context, const Upcoming& next) {
    if (count_ == 1 || count == 1) {
      for (size_t i = 0; i < count; i++) work(context, i);
      return;
    }
    std::lock_guard<std::mutex> one(running_);
    work_ = work;
    context_ = context;
    total_ = count;
    upcoming_ = next;
    next_.store(0, std::memory_order_relaxed);
    inside_.store(kOpen, std::memory_order_release);
    round_.fetch_add(1);  // sequentially consistent: either a sleeper sees it, or we see the sleeper
    if (sleepers_.load() > 0) {
      {
        std::lock_guard<std::mutex> lock(sleep_);
      }
      wake_.notify_all();
    }
    take();
    // Workers that have not come yet are not waited for: another process may have their core. Those that are
    // inside may still be in their last task.
    inside_.fetch_and(~kOpen, std::memory_order_acq_rel);
    Prefetch prefetch(next, 0, static_cast<size_t>(count_));
    Patience patience;
    while (inside_.load(std::memory_order_acquire) != 0) {
      if (prefetch.some()) continue;
      if (patience.left()) {
        relax();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  void take() {
    for (;;) {
      const size_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= total_) return;
      work_(context_, i);
    }
  }

  void serve(int thread) {
    uint64_t seen = 0;
    Prefetch prefetch;
    for (;;) {
      Patience patience;
      while (round_.load(std::memory_order_acquire) == seen) {
        if (prefetch.some()) continue;
        if (patience.left()) {
          relax();
          continue;
        }
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return round_.load() != seen; });
        sleepers_.fetch_sub(1);
      }
      seen = round_.load(std::memory_order_acquire);
      if (ending_) return;
      if (!enter()) continue;
      take();
      prefetch = Prefetch(upcoming_, static_cast<size_t>(thread), static_cast<size_t>(count_));
      inside_.fetch_sub(kWorker, std::memory_order_release);
    }
  }

  // Joins the round that is open, whichever that is by now: what it is stays until the worker has left. False
  // when there is none.
  bool enter() {
    unsigned inside = inside_.load(std::memory_order_acquire);
    while (inside & kOpen) {
      if (inside_.compare_exchange_weak(inside, inside + kWorker, std::memory_order_acq_rel)) return true;
    }
    return false;
  }

  static constexpr unsigned kOpen = 1, kWorker = 2;

  const int count_;
  std::vector<std::thread> workers_;
  std::mutex running_, sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> round_{0};
  // Whether a round may be entered, and how many workers are inside.
  std::atomic<unsigned> inside_{0};
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<size_t> next_{0};
  void (*work_)(void*, size_t) = nullptr;
  void* context_ = nullptr;
  size_t total_ = 0;
  Upcoming upcoming_;
  // Read by workers that come to a round late, without the lock.
  std::atomic<bool> ending_{false};
};

std::mutex replacing;
// Never destroyed: threads may not be joined while the process unloads its libraries.
std::shared_ptr<Pool>& current() {
  static auto* pool = new std::shared_ptr<Pool>(std::make_shared<Pool>(1));
  return *pool;
}

struct Scratch {
  void* data[kSlots] = {};
  size_t bytes[kSlots] = {};
  ~Scratch() {
    for (void* each : data) free(each);
  }
};

}  // namespace

void set_threads(int count) {
  if (count < 1) count = 1;
  if (count > kMaxThreads) count = kMaxThreads;
  std::lock_guard<std::mutex> lock(replacing);
  if (current()->count() != count) current() = std::make_shared<Pool>(count);
}

int threads() {
  std::lock_guard<std::mutex> lock(replacing);
  return current()->count();
}

void parallel(size_t count, void (*work)(void*, size_t), void* context, const Upcoming& next) {
  std::shared_ptr<Pool> pool;
  {
    std::lock_guard<std::mutex> lock(replacing);
    pool = current();
  }
  pool->run(count, work, context, next);
}

void* thread_scratch(Slot slot, size_t bytes) {
  thread_local Scratch scratch;
  if (scratch.bytes[slot] < bytes) {
    free(scratch.data[slot]);
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    scratch.data[slot] = aligned_alloc(64, rounded);
    scratch.bytes[slot] = scratch.data[slot] ? rounded : 0;
  }
  return scratch.data[slot];
}

}  // namespace jaxllm
