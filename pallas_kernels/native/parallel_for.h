// Fans chunks of work out to a thread pool, and waits for the chunks: never for the threads.
//
// A handler already occupies a thread of XLA's pool. Were it to wait until its helper tasks have
// run, two handlers on a pool of two threads would wait for each other for ever. Here the caller
// works through all chunks by itself if nobody comes; a helper that comes late finds none left.
//
// A pool's thread takes 5 to 50 us to wake, as long as a small product runs. A helper that has found
// no more chunks therefore stays awake for a moment and takes the next call's work within 0.2 us.
#ifndef PALLAS_KERNELS_NATIVE_PARALLEL_FOR_H_
#define PALLAS_KERNELS_NATIVE_PARALLEL_FOR_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "pallas_kernels/native/read_ahead.h"

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

using Clock = std::chrono::steady_clock;
// Longer than what lies between two products of a small model; a thread that sleeps costs more.
constexpr std::chrono::microseconds kAwake{50};

// Calls `is_over` until it returns true, for kAwake at most; tells whether it did.
template <typename Condition>
bool SpinUntil(const Condition& is_over) {
  const Clock::time_point end = Clock::now() + kAwake;
  do {
    for (int spin = 0; spin < 32; ++spin) {
      if (is_over()) return true;
      SpinPause();
    }
  } while (Clock::now() < end);
  return false;
}

// Outlives the call: late helpers read the counters. `run` and `body` are only touched by whoever
// holds an unfinished chunk, and until every chunk is finished the caller stays.
struct Fan {
  std::atomic<int64_t> taken{0}, from_end{0}, done{0}, owners{1};
  int64_t num_chunks = 0;
  void (*run)(const void* body, int64_t chunk) = nullptr;
  const void* body = nullptr;
  std::mutex mutex;
  std::condition_variable finished;

  // The caller goes up from the first chunk and helpers down from the last, where they have read
  // ahead; as many as are taken from both ends together, the two never meet.
  void Work(bool is_caller) {
    int64_t worked = 0;
    while (taken.fetch_add(1, std::memory_order_relaxed) < num_chunks) {
      const int64_t end = num_chunks - 1;
      run(body, is_caller ? worked : end - from_end.fetch_add(1, std::memory_order_relaxed));
      ++worked;
    }
    if (worked && done.fetch_add(worked, std::memory_order_acq_rel) + worked == num_chunks) {
      std::lock_guard<std::mutex> lock(mutex);
      finished.notify_all();
    }
  }

  bool IsDone() const { return done.load(std::memory_order_acquire) == num_chunks; }

  void Wait() {
    if (SpinUntil([this] { return IsDone(); })) return;
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [this] { return IsDone(); });
  }

  Fan* Share() {
    owners.fetch_add(1, std::memory_order_relaxed);
    return this;
  }
  void Release() {
    if (owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
};

// Where a helper waits, awake: null while nobody sits here, Waiting(), or the work that it was given.
struct alignas(64) Seat {
  std::atomic<Fan*> fan{nullptr};
};
constexpr int kNumSeats = 64;
inline Seat seats[kNumSeats];

inline Fan* Waiting() {
  static Fan waiting;  // never run
  return &waiting;
}

inline bool Exchange(Seat& seat, Fan* from, Fan* to) {
  return seat.fan.load(std::memory_order_relaxed) == from &&
         seat.fan.compare_exchange_strong(from, to, std::memory_order_acq_rel);
}

// Gives a share of the work to a helper that is awake, if there is one.
inline bool HandOver(Fan* fan) {
  for (Seat& seat : seats) {
    if (Exchange(seat, Waiting(), fan)) return true;
  }
  return false;
}

// Returns the next call's work, or null when none came in time or all seats are taken.
inline Fan* AwaitWork() {
  Fan* const waiting = Waiting();
  for (Seat& seat : seats) {
    if (!Exchange(seat, nullptr, waiting)) continue;
    ReadAhead ahead;
    const auto has_work = [&] { return seat.fan.load(std::memory_order_relaxed) != waiting; };
    while (!has_work() && ahead.Next()) continue;
    SpinUntil(has_work);
    Fan* const given = seat.fan.exchange(nullptr, std::memory_order_acq_rel);
    return given == waiting ? nullptr : given;
  }
  return nullptr;
}

// What a helper task runs: this call's chunks, then those of calls that come while it is awake.
inline void Help(Fan* fan) {
  for (; fan; fan = AwaitWork()) {
    fan->Work(false);
    fan->Release();
  }
}

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
  auto* const fan = new internal::Fan;
  fan->num_chunks = num_chunks;
  fan->body = &body;
  fan->run = [](const void* untyped, int64_t chunk) {
    (*static_cast<const Body*>(untyped))(chunk);
  };
  for (int64_t i = 0; i < helpers; ++i) {
    internal::Fan* const share = fan->Share();
    if (!internal::HandOver(share)) pool.Schedule([share] { internal::Help(share); });
  }
  fan->Work(true);
  fan->Wait();
  fan->Release();
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
