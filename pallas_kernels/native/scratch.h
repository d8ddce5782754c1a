// Memory that threads keep from call to call.
#ifndef PALLAS_KERNELS_NATIVE_SCRATCH_H_
#define PALLAS_KERNELS_NATIVE_SCRATCH_H_

#include <cstdint>
#include <vector>

namespace pk {

// One piece of memory a thread, at a multiple of 64 bytes, which grows to the largest call.
inline float* ThreadScratch(int64_t floats) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats + 16) memory.resize(floats + 16);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<float*>((address + 63) / 64 * 64);
}

}  // namespace pk

#endif  // PALLAS_KERNELS_NATIVE_SCRATCH_H_
