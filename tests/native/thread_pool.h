// A pool of plain threads with the interface that the kernels use of XLA's.
#ifndef TESTS_NATIVE_THREAD_POOL_H_
#define TESTS_NATIVE_THREAD_POOL_H_

#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "pallas_kernels/native/cpu_features.h"

class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Serve(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  template <typename Task>
  void Schedule(Task task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.emplace_back(std::move(task));
    }
    changed_.notify_one();
  }
  int64_t num_threads() const { return static_cast<int64_t>(threads_.size()); }

 private:
  void Serve() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

// Runs and checks cases as XLA does: the calls themselves are tasks of the pool that they fan out to.
template <class Case>
void RunFromInside(Pool& pool, const std::deque<Case>& cases, int variant) {
  std::mutex mutex;
  std::condition_variable finished;
  size_t left = cases.size();
  for (const Case& one : cases) {
    pool.Schedule([&] {
      one.Check(one.Run(pool, variant, 0));
      std::lock_guard<std::mutex> lock(mutex);
      if (--left == 0) finished.notify_all();
    });
  }
  std::unique_lock<std::mutex> lock(mutex);
  finished.wait(lock, [&] { return left == 0; });
}

// Runs and checks cases in every variant that this processor has: alone, on several threads, whose
// number must not change a bit, and from inside.
template <class Case>
void RunInEveryVariant(const std::deque<Case>& cases) {
  for (int variant = 0; variant < pk::kNumVariants; ++variant) {
    if (!pk::CanRun(variant)) continue;
    Pool two(2), eight(8);
    for (const Case& one : cases) {
      const auto alone = one.Run(two, variant, 1);
      one.Check(alone);
      if (one.Run(two, variant, 0) != alone || one.Run(eight, variant, 8) != alone) {
        std::fprintf(stderr, "the number of threads changed a bit\n");
        std::exit(1);
      }
    }
    RunFromInside(two, cases, variant);
    RunFromInside(eight, cases, variant);
    std::printf("%s\n", pk::kVariantNames[variant]);
  }
}

#endif  // TESTS_NATIVE_THREAD_POOL_H_
