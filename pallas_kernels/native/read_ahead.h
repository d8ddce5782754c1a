// What a helper reads while it waits for work: the weights of the product that is likely to be next.
//
// Between two products of a step XLA runs its small operations on one thread, and memory would idle:
// at batch 1 for a third of the step. Products follow each other in the same order in every step, so
// a table remembers what came after each of them. A wrong guess costs bandwidth and never a result,
// and asking for memory that was freed meanwhile does nothing: prefetches do not fault.
#ifndef PALLAS_KERNELS_NATIVE_READ_AHEAD_H_
#define PALLAS_KERNELS_NATIVE_READ_AHEAD_H_

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <unistd.h>
#endif

namespace pk {

// Values, scales and minimums; empty ones have no bytes.
constexpr int kNumStreams = 3;
struct Stream {
  const void* begin = nullptr;
  int64_t bytes = 0;
};

namespace internal {

// Of a core's second cache; the rest is for what the step itself touches. A size that is not known
// counts as 1 MiB, and a larger one as 2: it may be that of several cores.
inline int64_t MostAhead() {
  static const int64_t most = [] {
    int64_t bytes = 0;
#if defined(_SC_LEVEL2_CACHE_SIZE)
    bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    if (bytes <= 0) bytes = int64_t{1} << 20;
    return std::min(bytes, int64_t{2} << 20) * 5 / 8;
  }();
  return most;
}
constexpr int64_t kPiece = 2 << 10;  // between two looks at whether work has come

// The streams that were read after those of the product `key`. Fields of two writers may mix.
struct Follower {
  std::atomic<uintptr_t> key{0};
  std::atomic<uintptr_t> begin[kNumStreams] = {};
  std::atomic<int64_t> bytes[kNumStreams] = {};
};
constexpr uintptr_t kNumFollowers = 2048;
inline Follower followers[kNumFollowers];
inline std::atomic<uintptr_t> running{0};  // the product that was announced last

inline Follower& FollowerOf(uintptr_t key) {
  return followers[(key >> 6) * 0x9e3779b1u % kNumFollowers];
}

// Goes through the streams of what follows the running product, from the end: that is where helpers
// will begin.
class ReadAhead {
 public:
  ReadAhead() {
    const uintptr_t key = running.load(std::memory_order_relaxed);
    const Follower& follower = FollowerOf(key);
    if (key == 0 || follower.key.load(std::memory_order_relaxed) != key) return;
    for (int i = 0; i < kNumStreams; ++i) {
      begin_[i] = follower.begin[i].load(std::memory_order_relaxed);
      left_[i] = follower.bytes[i].load(std::memory_order_relaxed);
    }
  }

  // Asks for one more piece of every stream. Returns false when there is none left.
  bool Next() {
    bool asked = false;
    for (int i = 0; i < kNumStreams; ++i) {
      const int64_t bytes = std::min(left_[i], kPiece);
      if (bytes <= 0 || asked_ > MostAhead()) continue;
      left_[i] -= bytes;
      asked_ += bytes;
      asked = true;
      for (int64_t at = 0; at < bytes; at += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(begin_[i] + left_[i] + at), 0, 2);
      }
    }
    return asked;
  }

 private:
  uintptr_t begin_[kNumStreams] = {};
  int64_t left_[kNumStreams] = {};
  int64_t asked_ = 0;
};

}  // namespace internal

// Says that a product reads these streams now, the first of which names it; none: nothing to learn.
inline void Announce(const Stream (&streams)[kNumStreams]) {
  using namespace internal;
  const uintptr_t key = reinterpret_cast<uintptr_t>(streams[0].begin);
  const uintptr_t before = running.exchange(key, std::memory_order_relaxed);
  if (before == 0 || key == 0) return;
  Follower& follower = FollowerOf(before);
  follower.key.store(before, std::memory_order_relaxed);
  for (int i = 0; i < kNumStreams; ++i) {
    follower.begin[i].store(reinterpret_cast<uintptr_t>(streams[i].begin), std::memory_order_relaxed);
    follower.bytes[i].store(streams[i].bytes, std::memory_order_relaxed);
  }
}

}  // namespace pk

#endif  // PALLAS_KERNELS_NATIVE_READ_AHEAD_H_
