// Fans chunks of work out to a thread pool, and waits for the chunks: never for the threads.
//
// A handler already occupies a thread of XLA's pool. Were it to wait until its helper tasks have
// run, two handlers on a pool of two threads would wait for each other for ever. Here the caller
// works through all chunks by itself if nobody comes; a helper that comes late finds none left.
#ifndef PALLAS_KERNELS_NATIVE_PARALLEL_FOR_H_
#define PALLAS_KERNELS_NATIVE_PARALLEL_FOR_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pk {

inline void SpinPause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

namespace internal {

// Outlives the call: late helpers read the counters. `run` and `body` are only touched by whoever
// holds an unfinished chunk, and until every chunk is finished the caller stays.
struct Fan {
  std::atomic<int64_t> next{0}, done{0};
  int64_t num_chunks = 0;
  void (*run)(const void* body, int64_t chunk) = nullptr;
  const void* body = nullptr;
  std::mutex mutex;
  std::condition_variable finished;

  void Work() {
    int64_t worked = 0;
    for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < num_chunks;) {
      run(body, chunk);
      ++worked;
    }
    if (worked && done.fetch_add(worked, std::memory_order_acq_rel) + worked == num_chunks) {
      std::lock_guard<std::mutex> lock(mutex);
      finished.notify_all();
    }
  }

  bool IsDone() const { return done.load(std::memory_order_acquire) == num_chunks; }

  void Wait() {
    // Chunks end at about the same time: a short spin (some 10 us) saves a sleep and a wake-up.
    for (int spin = 0; spin < 400; ++spin) {
      if (IsDone()) return;
      SpinPause();
    }
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [this] { return IsDone(); });
  }
};

}  // namespace internal

// Runs body(chunk) for chunk in [0, num_chunks), on at most `max_threads` threads (0: all of them).
// The pool needs Schedule(callable) and num_threads(). `body` must not throw. Which thread runs a
// chunk is open; what a chunk computes must depend on its index alone.
template <typename Pool, typename Body>
void ParallelFor(Pool& pool, int64_t num_chunks, const Body& body, int64_t max_threads = 0) {
  int64_t threads = num_chunks > 1 && max_threads != 1 ? pool.num_threads() : 1;
  if (max_threads > 0) threads = std::min(threads, max_threads);
  const int64_t helpers = std::min(threads, num_chunks) - 1;
  if (helpers < 1) {
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) body(chunk);
    return;
  }
  auto fan = std::make_shared<internal::Fan>();
  fan->num_chunks = num_chunks;
  fan->body = &body;
  fan->run = [](const void* untyped, int64_t chunk) {
    (*static_cast<const Body*>(untyped))(chunk);
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([fan] { fan->Work(); });
  fan->Work();
  fan->Wait();
}

// Splits [0, size) into `num_chunks` ranges of nearly equal length and runs body(begin, end) on each.
template <typename Pool, typename Body>
void ParallelRanges(Pool& pool, int64_t size, int64_t num_chunks, const Body& body,
                    int64_t max_threads = 0) {
  const int64_t chunks = std::min(size, num_chunks);
  const auto run = [&](int64_t chunk) {
    body(size * chunk / chunks, size * (chunk + 1) / chunks);
  };
  ParallelFor(pool, chunks, run, max_threads);
}

}  // namespace pk

#endif  // PALLAS_KERNELS_NATIVE_PARALLEL_FOR_H_
