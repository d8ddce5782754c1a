// The loop of the probe: sums 32-bit words as fast as a thread can read them.
#include "pallas_kernels/native/simd.h"

namespace pk {
namespace PK_VARIANT {

uint32_t SumWords(const uint32_t* words, int64_t count) {
  // Several streams side by side: one alone leaves the prefetchers idle.
  constexpr int kStreams = 4;
  const int64_t lines = count / (kStreams * kLanes), stride = lines * kLanes;
  IVec sums[kStreams];
  for (int s = 0; s < kStreams; ++s) sums[s] = BroadcastWord(0);
  for (int64_t at = 0; at < stride; at += kLanes) {
    for (int s = 0; s < kStreams; ++s) {
      sums[s] = AddWords(sums[s], LoadWords(words + s * stride + at));
      __builtin_prefetch(words + s * stride + at + 512);
    }
  }
  uint32_t parts[kStreams * kLanes], sum = 0;
  memcpy(parts, sums, sizeof(parts));
  for (const uint32_t part : parts) sum += part;
  for (int64_t at = kStreams * stride; at < count; ++at) sum += words[at];
  return sum;
}

}  // namespace PK_VARIANT
}  // namespace pk
